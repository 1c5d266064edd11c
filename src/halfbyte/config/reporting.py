"""Keys of experiment trackers and of the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import Section


class ReportingSection(Section):
    """Trackers and the Hugging Face hub"""

    report_to: list[str] = Field(
        default_factory=list, description="experiment trackers, as in transformers: wandb, tensorboard, ..."
    )
    run_name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="name of the run in the trackers of report_to; default: the tracker's own"
    )
    project: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="project of wandb, trackio and swanlab, and MLflow's experiment; default: as the environment has"
        " it, else the tracker's own",
    )
    push_to_hub: bool = Field(False, description="upload the trained weights to the Hugging Face hub")
    hub_model_id: str | None = Field(
        None, description="repository to upload to, as in user/name; default: the name of output_dir"
    )
    hub_private_repo: bool | None = Field(
        None, description="whether a new repository is private; default: as the organization has it"
    )
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = Field(
        "every_save",
        description="what to upload: end: the trained weights; every_save: also the weights of each checkpoint when it"
        " is saved; checkpoint: also the newest checkpoint, as last-checkpoint; all_checkpoints: all checkpoints",
    )
    hub_token: str | None = Field(
        None,
        exclude=True,
        repr=False,
        description="access token of the hub, which no file of the run contains; default: HF_TOKEN, or the one of"
        " `hf auth login`",
    )
