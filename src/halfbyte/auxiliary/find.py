"""Models beside the one that trains, such as its teacher: found, and compared with it, before any weight is read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Origin, RunConfig
from ..config.methods import SCORES
from ..loading.find import ModelFiles, find_model, preflight_model
from ..reading.files import same_place
from ..reading.tensors import (
    ADAPTER,
    ADAPTER_AGAIN,
    ADAPTER_CONFIG,
    checkpoint_digest,
    read_adapter_config,
    read_header,
)
from ..utils.errors import CheckpointError, ConfigError, attribute_to_key

KEY = "teacher_model_name_or_path"


@dataclass(frozen=True)
class TeacherFiles:
    """A teacher that was found.

    Attributes:
        adapter: the folder of its adapter; None where it has none.
        files: its model, or what its adapter is on; None where that is the model which trains: one set of weights.
    """

    adapter: Path | None
    files: ModelFiles | None


def adapter_in(name: str) -> Path | None:
    """The adapter in a folder, which may be that of a run; None where there is none."""
    folders = (Path(name) / "adapter", Path(name))
    return next((folder for folder in folders if (folder / ADAPTER_CONFIG).is_file()), None)


def look_over_teacher(config: RunConfig) -> None:
    """What can be said of a teacher before anything is imported to read it.

    Raises:
        HalfbyteError: it is not there, or damaged.
    """
    adapter = adapter_in(_name(config))
    if adapter is not None:
        read_header(adapter / ADAPTER, ADAPTER_AGAIN)
        if read_adapter_config(adapter).get("task_type") in SCORES:
            raise ConfigError(
                f"{adapter} is a reward model's: it scores texts, and writes none", "name one that answers"
            )
    look_over_origin(_origin(config, adapter), adapter)


def look_over_origin(origin: Origin | None, adapter: Path | None) -> None:
    """What can be said of the model that `origin_of` found, before anything is imported to read it.

    Raises:
        HalfbyteError: it is not there, or damaged; with the file that names it, where an adapter does.
    """
    if origin is not None:
        with attribute_to_key(f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path") if adapter else nullcontext():
            preflight_model(origin)


def find_teacher(config: RunConfig) -> TeacherFiles:
    """The teacher of a run.

    Raises:
        HalfbyteError: it is not there, or damaged; or it is the very model that trains.
    """
    adapter = adapter_in(_name(config))
    origin = _origin(config, adapter)
    if origin is None and adapter is None and not config.adapter_path:
        raise ConfigError(
            f"{KEY}: {_name(config)} is the model that trains, so there is nothing to learn from it",
            "name a better model, or an adapter",
        )
    return TeacherFiles(adapter, None if origin is None else find_model(origin))


def digest_of_model(files: ModelFiles) -> dict[str, str]:
    """By a model's path or hub id, what its weights are known again by (`reading.tensors.checkpoint_digest`).

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    from ..loading.checkpoint import base_folder

    path = Path(files.name)
    name = str(path.resolve()) if path.exists() else files.name
    return {name: checkpoint_digest(path if path.is_file() else base_folder(files.place))}


def check_vocabulary(
    said: str, files: ModelFiles, own: Any, tokens: dict[str, int], theirs: dict[str, int] | None
) -> None:
    """Whether another model speaks of the same tokens as the one that trains.

    Args:
        said: the key that names it, and what for.
        own: transformers' config of the model that trains.
        tokens, theirs: token → id of the two tokenizers, None where the other model has none.

    Raises:
        ConfigError: it does not.
    """
    fix = "name one that shares the vocabulary of the model"
    size, its = (config.get_text_config().vocab_size for config in (own, files.config))
    if size != its:
        raise ConfigError(f"{said}: {files.name} has a vocabulary of {its:,}, and the model one of {size:,}", fix)
    if theirs is None:
        return
    if differing := next((token for token, at in tokens.items() if theirs.get(token) != at), None):
        wrong = f"token {tokens[differing]} is {differing!r:.40} to the model, and another to {files.name}"
        raise ConfigError(f"{said}: {wrong}", fix)


def _name(config: RunConfig) -> str:
    assert config.teacher_model_name_or_path is not None
    return config.teacher_model_name_or_path


def _origin(config: RunConfig, adapter: Path | None) -> Origin | None:
    """The model that a teacher is, or that its adapter is on; None where it is the one that trains."""
    revision = None if config.teacher_model_revision == "main" else config.teacher_model_revision
    return origin_of(config, _name(config), adapter, revision)


def origin_of(config: RunConfig, name: str, adapter: Path | None, revision: str | None = None) -> Origin | None:
    """The model of this name, or that the adapter there is on; None where it is the one that trains, and stays as it
    is under an adapter.

    Raises:
        CheckpointError: an adapter does not say what it is on.
    """
    if adapter is not None:
        base = read_adapter_config(adapter).get("base_model_name_or_path")
        if not base:
            raise CheckpointError(
                f"{adapter / ADAPTER_CONFIG} has no base_model_name_or_path", "write there which model it is for"
            )
        name, revision = str(base), None
    if same_place(name, config.model_name_or_path) and config.use_peft and config.qat_scheme is None:
        return None
    return Origin(name, revision, config.trust_remote_code, config.storage.keep and name.endswith(".gguf"))
