"""Checkpoints that are whole or absent, and resuming that continues the same run.

A checkpoint is written beside its place and renamed, with `halfbyte.json` in it: the configuration, the size of the
data and the open metrics window. A folder without that file was never finished and is not resumed from.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from halfbyte.config import RunConfig
from halfbyte.errors import CheckpointError, ConfigError
from halfbyte.files import write_json
from halfbyte.notices import notice
from halfbyte.ops.fp8_scaling import DelayedScaling

from .metrics import MetricsFile, Window

STATE = "halfbyte.json"
TRAINER_STATE = "trainer_state.json"
SCALING = "fp8_scaling.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")

# Keys that do not change what is learned: where things are written, how often, and on what.
FREE_KEYS = frozenset(
    [
        *("output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
        *("logging_steps", "eval_steps", "per_device_eval_batch_size", "report_to"),
        *("sample_prompts", "sample_max_new_tokens", "activation_checkpointing", "memory_limit_gib"),
        *("device", "dataset_num_proc", "trust_remote_code"),
    ]
)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name; -1 for any other path."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints(output_dir: Path) -> list[Path]:
    """Whole checkpoints in `output_dir`, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if step_of(path) >= 0 and is_whole(path)]
    return sorted(found, key=step_of)


def is_whole(checkpoint: Path) -> bool:
    return (checkpoint / STATE).is_file() and (checkpoint / TRAINER_STATE).is_file()


def write_state(folder: Path, config: RunConfig, data: dict[str, int], window: Window) -> None:
    """Put beside the weights what resuming has to check and to continue."""
    write_json(folder / STATE, {"config": config.model_dump(), "data": data, "window": window.as_dict()})


def read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {checkpoint / STATE}: {error}", "resume from an earlier one") from error


def load_scaling(checkpoint: Path, scaling: DelayedScaling) -> None:
    """The amax histories and scales of recipe fp8-hybrid.

    Raises:
        CheckpointError: they cannot be read, or are another model's.
    """
    try:
        scaling.load_state_dict(load_file(checkpoint / SCALING))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {checkpoint / SCALING}: {error}", "resume from an earlier one") from error


def keep_newest(output_dir: Path, limit: int | None) -> None:
    """Remove all but the newest `limit` checkpoints; each is renamed first, so that none is ever half there."""
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        doomed = path.rename(path.with_name(f".{path.name}.old"))
        shutil.rmtree(doomed)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed run left of a checkpoint that it was writing or removing."""
    for path in output_dir.glob(".checkpoint-*"):
        shutil.rmtree(path)


# --- may this run start here? ----------------------------------------------------------------------------------------


def starting_point(config: RunConfig, resume: str | bool | None) -> Path | None:
    """The checkpoint to continue from; None for a start at step 0.

    Raises:
        ConfigError: `output_dir` is a file, or holds another run and `resume` is not set; there is nothing to resume;
            or the run to resume was started with other settings.
        CheckpointError: the checkpoint named is not a whole one.
    """
    output = config.output_path
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output_dir: {output} is a file", "name a folder")
    if not resume:
        if held := _results_in(output):
            raise ConfigError(
                f"output_dir: {output} already holds a run ({', '.join(held)})",
                "continue it with --resume, or choose another output_dir",
            )
        return None
    if resume is True:
        if not (output / "config.resolved.yaml").is_file() and not checkpoints(output):
            raise ConfigError(f"output_dir: there is no run to resume in {output}", "leave out --resume to start one")
        if not (found := checkpoints(output)):
            notice("resume_from_start", f"{output} holds no checkpoint yet, so the run starts again at step 0")
            return None
        checkpoint = found[-1]
    else:
        checkpoint = Path(resume)
        if not is_whole(checkpoint):
            raise CheckpointError(f"resume_from_checkpoint: {checkpoint} is not a whole checkpoint of halfbyte")
    check_same_run(config, checkpoint)
    return checkpoint


def _results_in(output: Path) -> list[str]:
    """What would be lost or mixed up by a second run in `output`."""
    held = [path.name for path in checkpoints(output)[-1:]]
    held += [name for name in ("adapter", "model") if (output / name).exists()]
    if any(record["kind"] == "train" for record in MetricsFile(output / "metrics.jsonl").records()):
        held.append("metrics.jsonl")
    return held


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Settings that decide what is learned must be those of the checkpoint, or the losses would not be the same run's.

    Raises:
        ConfigError: naming each differing key with both values.
    """
    known = {key: field.default for key, field in RunConfig.model_fields.items()}  # of keys that came later
    before, now = known | read_state(checkpoint)["config"], json.loads(json.dumps(config.model_dump()))
    differing = [
        f"{key}: {before[key]!r} then, {now[key]!r} now"
        for key in now
        if key not in FREE_KEYS and before[key] != now[key]
    ]
    if differing:
        raise ConfigError(
            f"{checkpoint} was made with other settings ({'; '.join(differing)})",
            "resume with the same settings, or start a new run in another output_dir (adapter_path continues weights)",
        )


def check_same_data(data: dict[str, int], checkpoint: Path) -> None:
    """The prepared data must have the checkpoint's size; else its order, and so the run, would be another.

    Args:
        data: rows, tokens and trained tokens.
    """
    before = read_state(checkpoint)["data"]
    if before != data:
        raise ConfigError(
            f"dataset: it has changed since {checkpoint} was made ({before} then, {data} now)",
            "restore the data, or start a new run in another output_dir",
        )
