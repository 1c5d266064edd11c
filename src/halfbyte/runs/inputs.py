"""Preflight checks of a run's input and output paths, made before torch is imported, so that errors appear at once.

Hub ids are checked when they are fetched. Each check is also made where its input is read.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from ..auxiliary.model import check_teacher_files
from ..config import RunConfig
from ..config.datasets import entries_of
from ..config.layouts import unsupported_sizes
from ..config.methods import SCORES
from ..config.run_config import PATHS
from ..config.schema import RunKeys
from ..config.several import adapter_runs
from ..data.sources import files_of
from ..loading.find import preflight_model
from ..methods import METHODS, Method, method_of
from ..reading import look
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, ADAPTER_CONFIG, read_adapter_config, read_header
from ..rewards.reward_models import check_reward_models
from ..rewards.specs import read_specs
from ..utils import hub
from ..utils.errors import CheckpointError, ConfigError, HalfbyteError, attribute_to_key, explain_os_error
from ..utils.text import brief
from .checkpoints import starting_point
from .lock import check_free

SUFFIXES = (".html", ".json", ".jsonl", ".md", ".yaml")  # of the files that a run writes
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
LONGEST_BELOW = "x" * 160  # as long as the longest path that a run writes below output_dir


def check_paths(config: RunConfig) -> None:
    """Check that the model, adapter and data of a run exist; its output folder is not looked at.

    Raises:
        HalfbyteError: a check fails; with the fix.
    """
    for run in adapter_runs(config).values():
        check_paths(run)
    method = method_of(config)
    check_path_spelling(config)
    check_inputs(config)
    _check_output_outside_data(config)
    check_tensor_sizes(config)
    if config.adapter_path:
        _check_adapter_head(config, method)


def check_output(config: RunConfig, resume: str | bool | None = None) -> None:
    """Check that a run may write into its folder.

    Args:
        resume: as in `prepare_run`.

    Raises:
        HalfbyteError: a check fails; with the fix.
    """
    check_path_spelling(config)
    check_output_dir(config.output_dir)
    _check_output_outside_data(config)
    check_free(config.output_path)
    resume = config.resume_from_checkpoint if resume is None else resume
    starting_point(config, None if config.trains_several else resume, contents=False)
    for run in adapter_runs(config).values():
        check_output(run, resume)


def free_output_dir(config: RunConfig) -> str:
    """Return the first of `output_dir`, its name with -2, with -3, ... that a new run may write into.

    A folder that is read as data is left first. If no name is possible, `output_dir` itself, which `train` explains.
    """
    folders = [Path(name).resolve() for name in _names(config.dataset, config.eval_dataset) if os.path.isdir(name)]
    path = config.output_path
    if any(path.resolve().is_relative_to(folder) for folder in folders):
        outside = (parent for parent in path.resolve().parents if not any(map(parent.is_relative_to, folders)))
        path = Path(os.path.relpath(next(outside, path.resolve().parent) / path.name))
    for name in (str(path), *(f"{path}-{number}" for number in range(2, 100))):
        with contextlib.suppress(HalfbyteError):
            check_output(config.model_copy(update={"output_dir": name}), resume=False)
            return name
    return config.output_dir


def _check_adapter_head(config: RunConfig, method: Method) -> None:
    """Check that the adapter to continue from has the score head that the method trains, or none if it trains none."""
    task_type = read_adapter_config(Path(str(config.adapter_path))).get("task_type")
    if task_type != method.scores and (method.scores or task_type in SCORES):
        head = f"a score head ({task_type})" if task_type in SCORES else "no score head"
        fitting = next(
            (name for name, entry in METHODS.items() if entry.scores == task_type and task_type in SCORES), "sft"
        )
        raise CheckpointError(
            f"adapter_path: {config.adapter_path} has {head}, and method: {config.method} trains"
            f" {'another' if task_type in SCORES and method.scores else 'one' if method.scores else 'none'}",
            f"set method: {fitting}, as it was trained, or continue from another adapter",
        )


def check_path_spelling(config: RunConfig) -> None:
    """Check that the paths of a run have no environment variables, which only a shell expands.

    Raises:
        ConfigError: one has.
    """
    for key in PATHS:
        value = getattr(config, key)
        for path in (entry.path for entry in entries_of(value)):
            if not isinstance(path, str) or not (variable := VARIABLE.search(path)) or os.path.lexists(path):
                continue
            name = variable[1] or variable[2]
            expanded = os.environ.get(name)
            fix = f"write {VARIABLE.sub(expanded, path, count=1)}" if expanded else "write the path itself"
            unset = "" if expanded else ", and is not set"
            raise ConfigError(f"{key}: {path}: {name} is not expanded, as a shell would{unset}", fix)


def check_inputs(config: RunConfig) -> None:
    """Check that model, adapter, teacher, template, images' folder, reward models and datasets exist and are sound.

    Raises:
        HalfbyteError: the first that is not, with the fix.
    """
    preflight_model(config.origin)
    if config.adapter_path:
        with attribute_to_key("adapter_path"):
            read_adapter_config(Path(config.adapter_path))
            read_header(Path(config.adapter_path) / ADAPTER, ADAPTER_AGAIN)
    if config.teacher_model_name_or_path is not None:
        with attribute_to_key("teacher_model_name_or_path"):
            check_teacher_files(config)
    if config.chat_template_path is not None:
        with attribute_to_key("chat_template_path"):
            fix = "give the path of a Jinja file"
            file_type = look(config.chat_template_path, ConfigError, fix)
            if file_type != "file":
                path = config.chat_template_path
                raise ConfigError(f"{path} is a folder" if file_type else f"there is no file {path}", fix)
    if config.media_dir is not None:
        with attribute_to_key("media_dir"):
            folder, fix = os.path.expanduser(config.media_dir), "give the folder of the rows' images"
            if (file_type := look(folder, ConfigError, fix)) != "folder":
                raise ConfigError(f"{folder} is a file" if file_type else f"there is no folder {folder}", fix)
    check_reward_models(config, read_specs(config.reward_funcs or [], None))
    check_datasets([entry.path for entry in config.datasets], config.eval_dataset)


def _check_output_outside_data(config: RunKeys) -> None:
    """Check that output_dir is not inside a folder that is read as data."""
    for name in _names(config.dataset, config.eval_dataset):
        if os.path.isdir(name) and config.output_path.resolve().is_relative_to(Path(name).resolve()):
            problem = f"output_dir: {config.output_dir} is inside the dataset's folder {name}, which is read"
            raise ConfigError(problem, "name a folder outside of it")


def check_tensor_sizes(config: RunKeys) -> None:
    """Check that tensor parallelism divides the heads and channels of a local model, before processes start.

    Raises:
        CheckpointError: its config.json cannot be read.
        ConfigError: it does not.
    """
    layout, folder = config.layout, Path(config.origin.name)
    if layout is None or layout.tensor == 1 or not folder.is_dir():
        return
    model_config = read_config(folder)
    text = model_config.get("text_config")
    sizes = text if isinstance(text, dict) else model_config
    heads, key_heads, channels = (
        sizes.get(name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    heads = heads if isinstance(heads, int) else 0  # sizes that differ by layer are checked after loading
    key_heads = key_heads if isinstance(key_heads, int) else heads
    channels = channels if isinstance(channels, int) else 0
    if reason := unsupported_sizes(layout.tensor, heads, key_heads, channels):
        raise ConfigError(reason.problem, reason.fix)


def check_datasets(*names: str | list[str] | None) -> None:
    """Check that the files of datasets exist, and that the hub is reachable for the others.

    Raises:
        DataError: a missing file, with the nearest name.
    """
    for name in _names(*names):
        if files_of(name) is None:
            hub.unreachable_reason()
            hub.notice_offline()


def _names(*keys: Any) -> list[str]:
    """Return the names of all datasets in the values of keys."""
    return [entry.path for value in keys for entry in entries_of(value)]


def check_output_dir(output_dir: str) -> None:
    """Check that a run can write into `output_dir`, which need not exist, without creating anything.

    Raises:
        ConfigError: the reason why it cannot.
    """
    fix = "name a folder that you may write to"
    if not output_dir.strip():
        raise ConfigError("output_dir is empty", fix)
    path = Path(output_dir)
    try:
        existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        for below in (*path.relative_to(existing).parts, LONGEST_BELOW):
            _exists(existing / below)  # limits of the file system: for names, and for the full path
        _exists(path / LONGEST_BELOW)
        problem = "" if existing.is_dir() else "is a file" if existing.exists() else "is a link to nothing"
        if existing.resolve().is_relative_to("/proc") or existing.resolve().is_relative_to("/sys"):
            problem = "belongs to the operating system and holds no user files"
        if not problem and not os.access(existing, os.W_OK | os.X_OK):
            problem = "is not writable for you"
    except (OSError, ValueError) as error:  # ValueError: a NUL
        reason = explain_os_error(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"output_dir: cannot write into {brief(output_dir)}: {reason}", fix) from error
    if problem:
        raise ConfigError(f"output_dir: cannot write into {path}: {existing} {problem}", fix)
    for name in (CONFIG, ADAPTER_CONFIG):
        if (path / name).exists():
            raise ConfigError(f"output_dir: {path} holds a model ({name})", "name a folder for the run alone")
    for held in path.iterdir() if path.is_dir() else ():
        if held.suffix in SUFFIXES and held.is_dir():
            raise ConfigError(f"output_dir: {held} is a folder, where a run writes a file", "move it elsewhere")


def _exists(path: Path) -> bool:
    """Return whether a path exists, as `os.path.lexists`, but raise errors about the name itself."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True
