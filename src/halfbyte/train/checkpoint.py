"""Checkpoints that are whole or absent, and resuming that continues the same run.

A checkpoint is written beside its place and renamed, with `halfbyte.json` in it (the configuration, the size of the
data and the open metrics window) and, last, a manifest of all its files. What is not as the manifest says is damaged:
it is named, and the newest whole checkpoint is taken. A folder's name says nothing about what is in it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.config import RunConfig
from halfbyte.config.run_config import PATHS, expand_home
from halfbyte.reading import read_json, why
from halfbyte.reading.boundary import answered
from halfbyte.reading.tensors import ADAPTER, read_header, read_tensors, safetensors_files
from halfbyte.utils.errors import CheckpointError, ConfigError
from halfbyte.utils.files import clear_leftovers, remove, write_json
from halfbyte.utils.notices import notice

from ..runs.layout import (
    CHECKPOINT,
    CHECKPOINTS,
    METRICS,
    MODEL,
    OPTIMIZER_STATE,
    RANDOM_STATE,
    SCHEDULER_STATE,
    TRAINER_STATE,
    WEIGHTS,
)
from ..runs.layout import CHECKPOINT_STATE as STATE
from ..runs.layout import FP8_SCALING as SCALING
from ..runs.layout import RESOLVED_CONFIG as RESOLVED
from ..runs.manifest import FORMAT, damage_by_manifest, read_manifest
from .metrics import MetricsFile, Window

if TYPE_CHECKING:
    from torch import Tensor

    from halfbyte.ops.fp8_scaling import DelayedScaling

PICKLED = (OPTIMIZER_STATE, SCHEDULER_STATE, RANDOM_STATE)  # torch writes them as zip files
EARLIER = "resume from an earlier checkpoint, or start a new run in another output_dir"

# Keys that do not change what is learned: where things are written, how often, and on what.
FREE_KEYS = frozenset(
    [
        *("output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
        *("logging_steps", "eval_steps", "per_device_eval_batch_size", "report_to"),
        *("sample_prompts", "sample_max_new_tokens", "activation_checkpointing", "memory_limit_gib"),
        *("device", "dataset_num_proc", "trust_remote_code", "reward_timeout_s", "num_generations_eval"),
        *("vllm_server_base_url", "vllm_server_timeout"),
        # how a step's rows are divided: see `same_steps`
        *("parallel", "gradient_accumulation_steps", "max_restarts", "pipeline_schedule"),
    ]
)


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint's state is after, whatever its folder is called; -1 where nothing says."""
    try:
        if (checkpoint / STATE).is_file() and "format" in read_state(checkpoint):
            return read_manifest(checkpoint)["step"]
        return int(read_json(checkpoint / TRAINER_STATE, CheckpointError, EARLIER)["global_step"])
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return -1


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoints in `output_dir` with all their files, oldest first."""
    return sorted((path for path in _named(output_dir) if damage(path) is None), key=_order)


def _named(output_dir: Path) -> list[Path]:
    """The folders that are named as checkpoints."""
    return [path for path in output_dir.glob(CHECKPOINTS) if CHECKPOINT.fullmatch(path.name) and path.is_dir()]


def _order(checkpoint: Path) -> tuple[int, int]:
    """By step; the name counts where the state does not say."""
    step, name = step_of(checkpoint), int(checkpoint.name.removeprefix("checkpoint-"))
    return (name if step < 0 else step), name


def damage(checkpoint: Path, *, contents: bool = False) -> str | None:
    """What keeps a folder from being resumed from, in words; None for a whole checkpoint.

    Args:
        contents: read every file, too, and not only their sizes.
    """
    try:
        if not checkpoint.is_dir():
            return "there is no such folder"
        if not (checkpoint / STATE).is_file():
            return f"{STATE} is missing"
        state = read_state(checkpoint)
        if missing := {"config", "data", "window"} - state.keys():
            return f"{STATE} lacks {min(missing)!r}"
        if "format" in state:
            return damage_by_manifest(checkpoint, read_manifest(checkpoint), contents)
        return _damage_without_manifest(checkpoint, contents)
    except CheckpointError as error:
        return error.message
    except OSError as error:
        return why(error)
    except (ValueError, zipfile.BadZipFile) as error:
        return str(error)


def _damage_without_manifest(checkpoint: Path, contents: bool) -> str | None:
    """The same of a checkpoint from before there were manifests: by the files that resuming reads."""
    for name in (TRAINER_STATE, *PICKLED):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    single = checkpoint / ADAPTER
    weights = [single] if single.is_file() else safetensors_files(checkpoint)
    if not weights:
        return f"{ADAPTER} is missing"
    if contents:
        if step_of(checkpoint) < 0:
            return f"{TRAINER_STATE} is truncated or names no step"
        for file in weights:
            read_header(file)
        for name in PICKLED:
            if not zipfile.is_zipfile(checkpoint / name):
                return f"{name} is truncated"
            with zipfile.ZipFile(checkpoint / name) as archive:
                if archive.testzip():
                    return f"{name} is damaged"
    return None


def write_state(
    folder: Path,
    config: RunConfig,
    data: dict[str, int],
    window: Window,
    owes_evaluation: bool = False,
    ways: int = 1,
) -> None:
    """Put beside the weights what resuming has to check and to continue.

    Args:
        owes_evaluation: whether the evaluation after this step is still to be done.
        ways: processes that the rows of a step were dealt to.
    """
    state: dict[str, Any] = {"config": config.model_dump(), "data": data, "window": window.as_dict(), "ways": ways}
    if owes_evaluation:
        state["owes_evaluation"] = True
    write_json(folder / STATE, {"format": FORMAT, **state})


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The contents of `halfbyte.json`.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = read_json(checkpoint / STATE, CheckpointError, EARLIER)
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / STATE} is not what halfbyte wrote", EARLIER)
    return state


def reading(checkpoint: Path) -> AbstractContextManager[None]:
    """Around loading the state of a whole checkpoint: what does not fit this run is an error that names the folder.

    Raises:
        CheckpointError: in place of torch's errors, which name no file.
    """
    return answered(f"cannot load the state in {checkpoint}", EARLIER)


def save_scaling(folder: Path, state: Mapping[str, Tensor] | None) -> None:
    """The amax histories and scales of recipe fp8-hybrid, whole; None: the run has none."""
    if state is not None:
        from safetensors.torch import save_file

        save_file(dict(state), folder / SCALING)


def load_scaling(
    checkpoint: Path,
    scaling: DelayedScaling | None,
    own_part: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> None:
    """What `save_scaling` wrote.

    Args:
        own_part: of the whole state, what this process takes; default: all.

    Raises:
        CheckpointError: they cannot be read, or are another model's.
    """
    if scaling is not None:
        with reading(checkpoint):
            scaling.load_state_dict(own_part(read_tensors(checkpoint / SCALING, EARLIER)))


def keep_newest(output_dir: Path, limit: int | None) -> None:
    """Remove all but the newest `limit` checkpoints, and the best; each is renamed first, so that none is ever half
    there."""
    kept = best(output_dir) if limit else None
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        if path != kept:
            remove(path)


def best(output_dir: Path) -> Path | None:
    """The checkpoint whose answers to held-out prompts had the highest mean reward, the earliest of several; None where
    there are no such evaluations of checkpoints."""
    records = MetricsFile(output_dir / METRICS).records()
    evaluated = (record for record in records if record["kind"] == "eval" and isinstance(record.get("reward"), float))
    rewards = {record["step"]: record["reward"] for record in evaluated}
    found = [path for path in checkpoints(output_dir) if step_of(path) in rewards]
    return max(found, key=lambda path: rewards[step_of(path)], default=None)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed run, on whatever machine, left of a checkpoint: this one alone may write any here now."""
    clear_leftovers(output_dir)
    for path in output_dir.glob(f".{CHECKPOINTS}"):
        remove(path)


def set_aside_newer(output_dir: Path, chosen: Path) -> None:
    """Rename the checkpoints of steps that a run resumed from `chosen` has yet to make, damaged ones too.

    Rotation would take them for newer than what the run saves, and a later --resume would continue them.
    """
    step = step_of(chosen)
    for path in _named(output_dir):
        if _order(path)[0] > step and path.resolve() != chosen.resolve():
            aside, number = path.with_name(f"{path.name}.set-aside"), 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.set-aside-{number}")
            path.rename(aside)
            what = f"{path} is newer and is now called {aside.name}, out of the way; remove it when you do not need it"
            notice(f"set-aside {path}", f"the run continues from {chosen}: {what}")


# --- may this run start here? ----------------------------------------------------------------------------------------


def starting_point(config: RunConfig, resume: str | bool | None, *, contents: bool = True) -> Path | None:
    """The checkpoint to continue from; None for a start at step 0.

    Args:
        contents: read every file of it, too, and not only their sizes.

    Raises:
        ConfigError: `output_dir` holds another run and `resume` is not set, or a finished one without a checkpoint; or
            the run to resume was started with other settings.
        CheckpointError: the checkpoint named is not a whole one, or none in `output_dir` is.
    """
    output = config.output_path
    if not resume:
        if held := results_in(output):
            if held == [MODEL] and not (output / RESOLVED).exists():  # a base, most likely
                raise ConfigError(
                    f"output_dir: {output} holds {held[0]}/, where a run writes what it has trained",
                    "name a folder for the run alone",
                )
            raise ConfigError(
                f"output_dir: {output} already holds a run ({', '.join(held)})",
                "continue it with --resume, or choose another output_dir",
            )
        return None
    if resume is True:
        checkpoint = _newest_whole(output, contents)
        if checkpoint is None:  # scripts of jobs always say --resume
            if held := [name for name in WEIGHTS if (output / name).exists()]:
                raise ConfigError(
                    f"output_dir: {output} holds {held[0]}/ and no checkpoint to resume from",
                    "choose another output_dir, or remove this one",
                )
            notice("resume_from_start", f"{output} holds no checkpoint yet, so the run starts at step 0")
            return None
    else:
        checkpoint = Path(resume)
        if (wrong := damage(checkpoint, contents=contents)) is not None:
            inside = sorted(_named(checkpoint), key=_order)
            fix = f"name a checkpoint in it: {inside[-1]}" if inside else EARLIER
            raise CheckpointError(
                f"resume_from_checkpoint: {checkpoint} is not a whole checkpoint of halfbyte: {wrong}", fix
            )
    check_same_run(config, checkpoint)
    return checkpoint


def _newest_whole(output: Path, contents: bool) -> Path | None:
    """The newest checkpoint that is whole, saying why a newer one is not taken; None where there is not one folder.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    damaged = []
    for path in sorted(_named(output), key=_order, reverse=True):
        if (wrong := damage(path, contents=contents)) is not None:
            damaged.append(f"{path}: {wrong}")
            continue
        if damaged:
            notice("damaged_checkpoint", f"the run continues from {path}, because {'; '.join(damaged)}")
        if (step := step_of(path)) != _order(path)[1]:
            notice("renamed_checkpoint", f"{path} holds step {step}, which its name does not say; it continues there")
        return path
    if damaged:
        raise CheckpointError(
            f"output_dir: no checkpoint in {output} is whole: {'; '.join(damaged)}",
            "copy the missing or damaged files there again, or start a new run in another output_dir",
        )
    return None


def results_in(output: Path) -> list[str]:
    """What would be lost or mixed up by a second run in `output`."""
    held = [path.name for path in sorted(_named(output), key=_order)[-1:]]
    held += [name for name in WEIGHTS if (output / name).exists()]
    if any(record["kind"] == "train" for record in MetricsFile(output / METRICS).records()):
        held.append(METRICS)
    return held


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Settings that decide what is learned must be those of the checkpoint, or the losses would not be the same run's.

    Raises:
        ConfigError: naming each differing key with both values.
    """
    known = {key: field.default for key, field in RunConfig.model_fields.items()}  # of keys that came later
    before, now = known | read_state(checkpoint)["config"], config.model_dump(mode="json")
    before |= {key: expand_home(before[key]) for key in PATHS}  # which were once kept as they were written
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


def same_steps(config: RunConfig, checkpoint: Path, ways: int) -> RunConfig:
    """The configuration with which steps have as many micro-batches as when `checkpoint` was made, on `ways` processes.

    Where their number has changed, `gradient_accumulation_steps` follows.

    Raises:
        ConfigError: it cannot, or was changed.
    """
    state = read_state(checkpoint)
    key, now = "gradient_accumulation_steps", config.gradient_accumulation_steps
    before, ways_before = state["config"][key], state.get("ways", 1)
    step = before * ways_before
    if now * ways == step:
        return config
    if ways == ways_before or now != before:
        raise ConfigError(
            f"{checkpoint} was made with other settings ({key}: {before} then, {now} now)",
            f"resume with {key}: {before}, or start a new run in another output_dir (adapter_path continues weights)",
        )
    if step % ways:
        fitting = ", ".join(str(n) for n in range(1, step + 1) if step % n == 0)
        raise ConfigError(
            f"a step of {checkpoint} has {step} micro-batches, which cannot be dealt evenly to {ways} processes",
            f"resume on as many as divide them: {fitting}",
        )
    notice(key, f"{key}: {step // ways} instead of {before}, so that a step keeps its rows on {ways} processes")
    return config.model_copy(update={key: step // ways})


def check_same_data(data: dict[str, Any], checkpoint: Path) -> None:
    """The prepared data, and the adapter that the run began with, must be those of the checkpoint's run.

    Args:
        data: rows, tokens and trained tokens, and the digests of all columns and of the adapter.

    Raises:
        ConfigError: they are others; names the key.
    """
    before = read_state(checkpoint)["data"]
    if missing := data.keys() - before.keys():
        notice("no-digest", f"{checkpoint} keeps no {', '.join(sorted(missing))}, so a change of these is not noticed")
    if before.get("adapter_path", data.get("adapter_path")) != data.get("adapter_path"):
        raise ConfigError(
            f"adapter_path: the adapter has changed since {checkpoint} was made, which it continues from and may be"
            " compared with",
            "restore it, or start a new run in another output_dir",
        )
    if any(before[name] != data[name] for name in before.keys() & data.keys()):
        then, now = ({name: known[name] for name in data if name in known} for known in (before, data))
        raise ConfigError(
            f"dataset: it has changed since {checkpoint} was made ({then} then, {now} now)",
            "restore the data, or start a new run in another output_dir",
        )
