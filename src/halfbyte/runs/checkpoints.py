"""Find, verify and rotate the checkpoints of a run, and check that resuming continues the same run. Imports no torch.

A checkpoint is written to a temporary folder and renamed, so it is complete or absent. It contains `halfbyte.json` (the
configuration, the size of the data and the open metrics window) and, written last, a manifest of all its files. A
checkpoint that differs from its manifest is damaged: a notice names the damage, and the newest complete checkpoint is
used. The step is read from the manifest, not from the folder's name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..config.run_config import PATHS, expand_home
from ..config.schema import RunKeys
from ..config.yaml import dump_value
from ..reading import read_json
from ..utils.errors import CheckpointError, ConfigError, HalfbyteError, explain_os_error
from ..utils.files import clear_leftovers, new_directory, remove, write_json
from ..utils.notices import notice, silent
from .layout import (
    CHECKPOINT,
    CHECKPOINTS,
    METRICS,
    MODEL,
    TRAINER_STATE,
    WEIGHTS,
    checkpoint_folder,
)
from .layout import CHECKPOINT_STATE as STATE
from .layout import RESOLVED_CONFIG as RESOLVED
from .manifest import FORMAT, damage_by_manifest, read_manifest
from .metrics import MetricsFile, Window

EARLIER = "resume from an earlier checkpoint, or start a new run in another output_dir"

LENGTH = ("num_train_epochs", "max_steps")  # they may grow, see `check_length`
# Keys that do not affect training: output paths, intervals and hardware.
FREE_KEYS = frozenset(
    [
        *("output_dir", "resume_from_checkpoint", "save_steps", "save_total_limit"),
        *("logging_steps", "eval_steps", "per_device_eval_batch_size"),
        *("report_to", "run_name", "project"),
        *("sample_prompts", "sample_max_new_tokens", "sample_steps", "row_losses"),
        *("activation_checkpointing", "memory_limit_gib"),
        *("optim_in_backward", "optim_offload"),
        *("load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold"),
        *LENGTH,
        *("push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "hub_token"),
        *("device", "dataset_num_proc", "trust_remote_code", "reward_timeout_s", "num_generations_eval"),
        *("vllm_server_base_url", "vllm_server_timeout"),
        # distribution of a step's rows: see `keep_step_size`
        *("parallel", "gradient_accumulation_steps", "max_restarts", "pipeline_schedule"),
    ]
)
# Keys that a run derives, if they are not set, from its data, whose digest is compared, or from other keys.
DERIVED = ("labels", "num_labels", "trainable_token_indices")

SIZES = {"rows": "rows", "tokens": "tokens", "trained_tokens": "trained tokens"}  # of the training set
# Keys whose input has a digest in the checkpoint, and the input in words.
MODELS = {
    "model_name_or_path": "the base model",
    "teacher_model_name_or_path": "the teacher",
    "reward_funcs": "a reward function or reward model",
}
INPUTS = MODELS | {
    "chat_template_path": "the tokenizer or its chat template",  # before the data, whose tokens depend on it
    "adapter_path": "the adapter that the run started from",
    "eval_dataset": "the held-out data",
    "image_processor": "the base model's preprocessor_config.json or processor_config.json",
}


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps before a checkpoint, from its manifest; -1 if that cannot be read."""
    try:
        return read_manifest(checkpoint)["step"]
    except (CheckpointError, OSError, ValueError):
        return -1


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints in `output_dir`, oldest first."""
    return sorted((path for path in _named(output_dir) if damage(path) is None), key=_order)


def _named(output_dir: Path) -> list[Path]:
    """Return the folders with a checkpoint's name."""
    return [path for path in output_dir.glob(CHECKPOINTS) if CHECKPOINT.fullmatch(path.name) and path.is_dir()]


def _order(checkpoint: Path) -> tuple[int, int]:
    """Return a sort key: the step from the state, else the step in the name."""
    step, name = step_of(checkpoint), int(checkpoint.name.removeprefix("checkpoint-"))
    return (name if step < 0 else step), name


def damage(checkpoint: Path, *, contents: bool = False) -> str | None:
    """Return why a folder cannot be resumed from; None for a complete checkpoint.

    Args:
        contents: read every file, not only its size.
    """
    try:
        if not checkpoint.is_dir():
            return "there is no such folder"
        if not (checkpoint / STATE).is_file():
            return f"{STATE} is missing"
        state = read_state(checkpoint)
        if missing := {"config", "data", "window"} - state.keys():
            return f"{STATE} has no {min(missing)!r}"
        return damage_by_manifest(checkpoint, read_manifest(checkpoint), contents)
    except CheckpointError as error:
        return error.message
    except OSError as error:
        return explain_os_error(error)
    except ValueError as error:
        return str(error)


def write_state(
    folder: Path,
    config: RunKeys,
    data: dict[str, int],
    window: Window,
    evaluation_pending: bool = False,
    row_ranks: int = 1,
    best: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
) -> None:
    """Write `halfbyte.json` of a checkpoint: what resuming compares, and the open metrics window.

    Args:
        evaluation_pending: whether the evaluation after this step was not done.
        row_ranks: number of ranks that the rows of a step were distributed to.
        best: the best evaluation so far, see `train.best_evaluation`.
        stream: position of the next step's rows, see `data.streaming`.
    """
    state: dict[str, Any] = {"config": config.model_dump(), "data": data, "window": window.as_dict(), "ways": row_ranks}
    if evaluation_pending:
        state["owes_evaluation"] = True
    if best is not None:
        state["best"] = best
    if stream is not None:
        state["stream"] = stream
    write_json(folder / STATE, {"format": FORMAT, **state})


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of `halfbyte.json`.

    Raises:
        CheckpointError: it cannot be read.
    """
    state = read_json(checkpoint / STATE, CheckpointError, EARLIER)
    if not isinstance(state, dict):
        raise CheckpointError(f"{checkpoint / STATE} was not written by halfbyte", EARLIER)
    return state


def keep_newest(output_dir: Path, limit: int | None) -> None:
    """Remove all checkpoints but the newest `limit` and the best. Each is renamed first, so that none is ever
    incomplete."""
    best_checkpoint = best(output_dir) if limit else None
    for path in checkpoints(output_dir)[: -limit if limit else 0]:
        if path != best_checkpoint:
            remove(path)


def best(output_dir: Path) -> Path | None:
    """Return the checkpoint of the best evaluation so far, as the newest checkpoint names it.

    If it names none, return the one with the highest mean reward on held-out prompts, the earliest in a tie. None if no
    checkpoint has such an evaluation.
    """
    paths = checkpoints(output_dir)
    named = read_state(paths[-1]).get("best") if paths else None
    if named is not None:
        return next((path for path in paths if step_of(path) == named["step"]), None)
    records = MetricsFile(output_dir / METRICS).records()
    evaluated = (record for record in records if record["kind"] == "eval" and isinstance(record.get("reward"), float))
    rewards = {record["step"]: record["reward"] for record in evaluated}
    rewarded = [path for path in paths if step_of(path) in rewards]
    return max(rewarded, key=lambda path: rewards[step_of(path)], default=None)


def copy_best(output_dir: Path, chosen: Path) -> None:
    """Copy the best checkpoint so far to `output_dir`, if a run continues there from `chosen` in another folder."""
    step = (read_state(chosen).get("best") or {}).get("step")
    if step is None or chosen.parent.resolve() == output_dir.resolve():
        return
    source, target = (folder / checkpoint_folder(step) for folder in (chosen.parent, output_dir))
    if damage(source) is None and damage(target) is not None:
        with new_directory(target) as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)


def planned_steps(checkpoint: Path) -> int:
    """Return the number of optimizer steps that the run of a checkpoint had in all."""
    return int(read_json(checkpoint / TRAINER_STATE, CheckpointError, EARLIER)["max_steps"])


def remove_leftovers(output_dir: Path) -> None:
    """Remove the temporary folders of a killed run, on any machine; the run lock excludes concurrent writers."""
    clear_leftovers(output_dir)
    for path in output_dir.glob(f".{CHECKPOINTS}"):
        remove(path)


def rename_newer(output_dir: Path, chosen: Path) -> None:
    """Rename the checkpoints after `chosen`, which a run resumes from, including damaged ones.

    Otherwise rotation would remove the run's own checkpoints first, and a later --resume would continue from these.
    """
    step = step_of(chosen)
    for path in _named(output_dir):
        if _order(path)[0] > step and path.resolve() != chosen.resolve():
            aside, number = path.with_name(f"{path.name}.set-aside"), 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.set-aside-{number}")
            path.rename(aside)
            problem = f"{path} is newer and was renamed to {aside.name}; remove it if you do not need it"
            notice(f"set-aside {path}", f"the run continues from {chosen}: {problem}")


# --- preflight checks ------------------------------------------------------------------------------------------------


def starting_point(config: RunConfig, resume: str | bool | None, *, contents: bool = True) -> Path | None:
    """Return the checkpoint to continue from; None for a start at step 0.

    Args:
        contents: read every file of it, not only its size.

    Raises:
        ConfigError: `output_dir` holds another run and `resume` is not set, or a finished run without a checkpoint; or
            the run to resume was started with other settings.
        CheckpointError: the named checkpoint is damaged, or all checkpoints in `output_dir` are.
    """
    output = config.output_path
    if not resume:
        if held := results_in(output):
            if held == [MODEL] and not (output / RESOLVED).exists():  # probably a base model
                raise ConfigError(
                    f"output_dir: {output} holds {held[0]}/, where a run writes the trained model",
                    "name a folder that only this run uses",
                )
            resume_hint = "continue it with --resume, or " if can_resume(config) else ""
            raise ConfigError(
                f"output_dir: {output} already holds a run ({', '.join(held)})",
                f"{resume_hint}choose another output_dir",
            )
        return None
    if resume is True:
        checkpoint = _newest_complete(output, contents)
        if checkpoint is None:  # job scripts always pass --resume
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
                f"resume_from_checkpoint: {checkpoint} is not a complete checkpoint of halfbyte: {wrong}", fix
            )
    check_same_run(config, checkpoint)
    return checkpoint


def can_resume(config: RunConfig) -> bool:
    """Return whether `--resume` would continue the run in `output_dir` with these settings. Its data is not read."""
    try:
        with silent():
            return starting_point(config, True, contents=False) is not None
    except HalfbyteError:
        return False


def _newest_complete(output: Path, contents: bool) -> Path | None:
    """Return the newest complete checkpoint, with a notice about newer damaged ones; None if there is no checkpoint.

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
            notice("renamed_checkpoint", f"{path} holds step {step}, unlike its name; the run continues at that step")
        return path
    if damaged:
        raise CheckpointError(
            f"output_dir: no checkpoint in {output} is complete: {'; '.join(damaged)}",
            "copy the missing or damaged files there again, or start a new run in another output_dir",
        )
    return None


def results_in(output: Path) -> list[str]:
    """Return the names of results in `output` that a second run would overwrite or mix with its own."""
    held = [path.name for path in sorted(_named(output), key=_order)[-1:]]
    held += [name for name in WEIGHTS if (output / name).exists()]
    if any(record["kind"] == "train" for record in MetricsFile(output / METRICS).records()):
        held.append(METRICS)
    return held


def check_same_run(config: RunConfig, checkpoint: Path) -> None:
    """Check that the settings that affect training are the same as in the checkpoint.

    Raises:
        ConfigError: some differ; names each key with both values.
    """
    # An older checkpoint may not have all keys.
    defaults = {key: field.default for key, field in RunConfig.model_fields.items()}
    state = read_state(checkpoint)
    saved = defaults | state["config"]
    current = config.model_dump(mode="json")
    saved |= {key: expand_home(saved[key]) for key in PATHS}  # earlier versions stored paths as they were given
    saved["reward_funcs"], current["reward_funcs"] = (
        _without_folders(keys["reward_funcs"]) for keys in (saved, current)
    )
    if saved["rope_scaling"] and current["rope_scaling"]:  # options that were not given follow from max_length
        saved["rope_scaling"] = current["rope_scaling"] | saved["rope_scaling"]
        current["rope_scaling"] = saved["rope_scaling"] | current["rope_scaling"]
    free = FREE_KEYS
    if MODELS.keys() <= state["data"].keys():  # digests of the inputs, which `check_same_inputs` compares
        free |= {*PATHS, "model_revision", "teacher_model_revision"}
    key = "num_train_epochs" if config.max_steps < 0 else "max_steps"
    if saved[key] > current[key] and (saved["max_steps"] > 0) == (config.max_steps > 0):
        wrong = f"{dump_value(key, current[key])} is less than the {saved[key]:g} that {checkpoint} was made with"
        raise ConfigError(wrong, f"set {key} to {saved[key]:g} or more, or start a new run in another output_dir")
    differing = [
        f"{dump_value(key, saved[key])} then, {dump_value(key, current[key]).removeprefix(f'{key}: ')} now"
        for key in current
        if key not in free and saved[key] != current[key] and not (key in DERIVED and current[key] is None)
    ]
    if differing:
        raise ConfigError(
            f"{checkpoint} was made with other settings ({'; '.join(differing)})",
            "resume with the same settings, or start a new run in another output_dir (adapter_path continues weights)",
        )


def check_length(config: RunKeys, checkpoint: Path, steps: int) -> None:
    """Check that a resumed run is at least as long as it was.

    Args:
        steps: optimizer steps of the run.

    Raises:
        ConfigError: `num_train_epochs` or `max_steps` became smaller.
    """
    saved, planned = read_state(checkpoint)["config"], planned_steps(checkpoint)
    if steps < planned and any(saved[key] != getattr(config, key) for key in LENGTH):
        key = "max_steps" if config.max_steps > 0 else "num_train_epochs"
        wrong = f"{config.written(key)}, which is {steps} steps: {checkpoint} was made in a run of {planned}"
        fix = f"give {key} that is at least as much, or start a new run in another output_dir"
        raise ConfigError(wrong, fix)


def _without_folders(entries: list[Any] | None) -> list[Any]:
    """Return `reward_funcs` with the names of files and models instead of their paths."""
    plain: list[Any] = []
    for entry in entries or []:
        match entry:
            case str():
                plain.append(os.path.basename(entry))
            case {"model": str(path)}:
                plain.append({"model": {"path": os.path.basename(path)}})
            case {"model": {"path": str(path), **options}}:
                plain.append({"model": {"path": os.path.basename(path), **options}})
            case _:
                plain.append(entry)
    return plain


def keep_step_size(config: RunConfig, checkpoint: Path, row_ranks: int) -> RunConfig:
    """Return the configuration whose steps on `row_ranks` ranks have the checkpoint's number of micro-batches.

    If the number of ranks changed, `gradient_accumulation_steps` changes inversely.

    Raises:
        ConfigError: the micro-batches do not divide evenly, or the key was changed.
    """
    state = read_state(checkpoint)
    key, accumulation = "gradient_accumulation_steps", config.gradient_accumulation_steps
    saved_accumulation, saved_ranks = state["config"][key], state.get("ways", 1)
    step = saved_accumulation * saved_ranks
    if accumulation * row_ranks == step:
        return config
    if row_ranks == saved_ranks or accumulation != saved_accumulation:
        raise ConfigError(
            f"{checkpoint} was made with other settings ({key}: {saved_accumulation} then, {accumulation} now)",
            f"resume with {key}: {saved_accumulation}, or start a new run in another output_dir (adapter_path continues"
            " weights)",
        )
    if step % row_ranks:
        fitting = ", ".join(str(n) for n in range(1, step + 1) if step % n == 0)
        raise ConfigError(
            f"a step of {checkpoint} has {step} micro-batches, which {row_ranks} processes cannot share evenly",
            f"resume on a number of processes that divides it: {fitting}",
        )
    notice(
        key,
        f"{key}: {step // row_ranks} instead of {saved_accumulation}, so that a step has the same rows on {row_ranks}"
        " processes",
    )
    return config.model_copy(update={key: step // row_ranks})


def check_same_inputs(inputs: dict[str, Any], checkpoint: Path) -> None:
    """Check that the inputs of a run are the same as when it saved the checkpoint.

    Args:
        inputs: sizes and digests, from `train.inputs`.

    Raises:
        ConfigError: an input differs; names its key.
    """
    saved = read_state(checkpoint)["data"]
    if missing := inputs.keys() - saved.keys():
        names = ", ".join(sorted(missing))
        notice(f"no-digest {names}", f"{checkpoint} has no digest of {names}, so a change of these is not detected")
    fix = "restore it, or start a new run in another output_dir (adapter_path continues weights)"
    differing = [key for key in inputs if key in saved and saved[key] != inputs[key]]
    for key in INPUTS:
        if key in differing:
            raise ConfigError(f"{key}: {INPUTS[key]} changed since {checkpoint} was made", fix)
    if differing:
        size = next((name for name in SIZES if name in differing), None)
        words = "it has as many rows and tokens, with other contents"
        if size is not None:
            words = f"{saved[size]:,} {SIZES[size]} then, {inputs[size]:,} now"
        raise ConfigError(f"dataset: the data changed since {checkpoint} was made: {words}", fix)
