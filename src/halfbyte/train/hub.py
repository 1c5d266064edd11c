"""Upload a run's weights and checkpoints to the Hugging Face hub (`push_to_hub`).

The repository is created before the model is loaded, so that a missing token or permission ends the run at once. Later
errors of the hub are logged, and do not end the run. Only the main rank uploads.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import TrainerCallback

from ..config.reporting import ReportingSection
from ..config.schema import RunKeys
from ..runs.layout import (
    CHECKPOINT_STATE,
    FP8_SCALING,
    GENERATION_STATE,
    MANIFEST,
    OPTIMIZER_STATE,
    SCALER_STATE,
    SCHEDULER_STATE,
    TRAINER_STATE,
    checkpoint_folder,
)
from ..utils.errors import ConfigError
from ..utils.hub import unreachable_reason
from ..utils.notices import notice
from ..utils.text import one_line

LAST_CHECKPOINT = "last-checkpoint"  # transformers' name of the folder of `hub_strategy: checkpoint`
STATES = (  # files of a checkpoint besides the weights
    CHECKPOINT_STATE, FP8_SCALING, GENERATION_STATE, MANIFEST, OPTIMIZER_STATE, SCALER_STATE, SCHEDULER_STATE,
    TRAINER_STATE, "rng_state*.pth",
)  # fmt: skip


def check_hub_token(config: ReportingSection) -> None:
    """Check that there is a token, without the network.

    Raises:
        ConfigError: there is none.
    """
    if not config.push_to_hub:
        return
    from huggingface_hub import get_token

    if not (config.hub_token or get_token()):
        wrong = "push_to_hub: there is no access token of the Hugging Face hub"
        raise ConfigError(wrong, "run `hf auth login`, set HF_TOKEN in the environment, or set push_to_hub: false")


class HubRepository(TrainerCallback):
    """The repository of a run on the Hugging Face hub, which is created unless it exists; a callback that uploads.

    Raises:
        ConfigError: the hub cannot be reached, or does not let the token write.
    """

    def __init__(self, config: RunKeys):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        self.output, self.strategy = config.output_path, config.hub_strategy
        self._pending: list[Future[Any]] = []
        self.api = HfApi(token=config.hub_token, library_name="halfbyte")
        name = config.hub_model_id or config.output_path.resolve().name
        if why := unreachable_reason():
            wrong = f"push_to_hub: the hub cannot be reached: {why}"
            raise ConfigError(wrong, "set push_to_hub: false; the trained weights can be uploaded later")
        try:
            self.id: str = self.api.create_repo(name, private=config.hub_private_repo, exist_ok=True).repo_id
        except Exception as error:  # depends on the version of its HTTP client
            wrong = f"push_to_hub: the hub does not create the repository {name}: {_reason(error)}"
            fix = "set hub_model_id: USER/NAME, or a token that may write (`hf auth login`)"
            raise ConfigError(wrong, fix) from error

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start to upload the new checkpoint as `hub_strategy` says.

        It is left out if the one before is still being uploaded, except with `all_checkpoints`.
        """
        checkpoint, complete = self.output / checkpoint_folder(state.global_step), self.strategy == "all_checkpoints"
        if self.strategy == "end" or (not complete and self._pending and not self._pending[-1].done()):
            return
        # Hard links, or copies where there are none: rotation may remove the checkpoint before it is uploaded.
        folder = Path(mkdtemp(prefix=f".{checkpoint.name}-hub-", dir=checkpoint.parent))
        for file in checkpoint.iterdir():
            try:
                os.link(file, folder / file.name)
            except OSError:
                shutil.copy2(file, folder / file.name)
        self._pending.append(self.api.run_as_future(self._upload_checkpoint, folder, checkpoint.name))

    def _upload_checkpoint(self, folder: Path, name: str) -> None:
        try:
            self._upload(folder, name, ignored=STATES)
            if self.strategy != "every_save":
                self._upload(folder, name, LAST_CHECKPOINT if self.strategy == "checkpoint" else name)
        except Exception as error:  # depends on the version of its HTTP client
            notice(f"hub {name}", f"{name} was not uploaded to {self.id}: {_reason(error)}. Training continues")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def finish(self, weights: Path) -> str:
        """Upload the trained weights with their model card; return a line for the terminal."""
        try:
            for upload in self._pending:
                upload.result()
            self._upload(weights, "trained weights")
        except Exception as error:  # depends on the version of its HTTP client
            later = shlex.join(["hf", "upload", self.id, str(weights), "."])
            notice("hub", f"{weights} was not uploaded to {self.id}: {_reason(error)}. Upload it with `{later}`")
            return f"not uploaded to the hub; do so with `{later}`"
        return f"uploaded to {self.api.endpoint}/{self.id}"

    def _upload(self, folder: Path, message: str, path: str | None = None, ignored: Sequence[str] = ()) -> None:
        self.api.upload_folder(
            repo_id=self.id, folder_path=folder, path_in_repo=path, commit_message=message, ignore_patterns=[*ignored]
        )


def _reason(error: Exception) -> str:
    return one_line(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)
