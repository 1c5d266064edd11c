"""Find a model's files and read its transformers config, before any weight is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Origin, RunConfig
from ..gguf.cache import checkpoint_folder, gguf_file
from ..modeling.rope_scaling import resolve_rope, scale_rope
from ..reading import look
from ..reading.boundary import answered
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER_CONFIG, check_checkpoint, checkpoint_digest
from ..utils import hub
from ..utils.errors import CheckpointError, ModelError
from ..utils.streams import quiet_transformers
from ..utils.text import brief
from ..utils.waiting import drawing_waits, waiting


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found, with complete files.

    Attributes:
        name: name by which it was requested.
        origin: its folder or hub id; for a GGUF file, the folder that it is unpacked in.
        config: its transformers config.
    """

    name: str
    origin: Origin
    config: Any

    def folder(self) -> Path:
        """Return the local folder; for a hub id the cache's, downloading missing files."""
        from .checkpoint import base_folder

        return base_folder(self.origin)

    def digest(self) -> str:
        """Return the digest of a GGUF file, or of the folder's config, code and weights.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        path = Path(self.name)
        return checkpoint_digest(path if path.is_file() else self.folder())


def find_model(origin: Origin) -> ModelFiles:
    """Find a model: unpack a GGUF file, read the config, check the files.

    Raises:
        ModelError: no such model, or none that can be trained.
        CheckpointError: a file is missing or damaged.
        ConfigError: `keep` is set but there are no GGUF types to keep, or a library is missing.
    """
    from .completeness import check_complete

    downloads = not os.path.exists(origin.name)  # with bars of its own
    with waiting("reading the model's files"), drawing_waits() if downloads else contextlib.nullcontext():
        local = local_origin(origin)
        check_checkpoint(Path(local.name))
        config = load_model_config(local)
        check_complete(local, config)
    return ModelFiles(origin.name, local, config)


def preflight_model(origin: Origin) -> None:
    """Check a model's name and files before importing the libraries that read it.

    Raises:
        ModelError: the folder, file or config does not exist; the hub is unreachable; or the name is a URL.
        CheckpointError: a file is missing or damaged.
        ConfigError: `keep` is set but there are no GGUF types to keep.
    """
    if "://" in origin.name:
        hub_id = hub.id_of_url(origin.name)
        fix = f"write {hub_id}" if hub_id else "download it, and name its folder or file"
        raise ModelError(f"{origin.name}: halfbyte does not read models from URLs", fix)
    if gguf_file(origin.name, origin.keep) is None:
        _check_folder(origin.name)
        if not Path(origin.name).is_dir():
            hub.check_model_available(origin.name, origin.revision)
        check_checkpoint(Path(origin.name))


def local_origin(model: str | Origin) -> Origin:
    """Return the folder or hub id of a model; a GGUF file is unpacked first, which may take minutes.

    Raises:
        ModelError: the folder or file does not exist, or has no config.
    """
    origin = Origin(model) if isinstance(model, str) else model
    local = replace(origin, name=checkpoint_folder(origin.name, origin.keep), keep=False)
    _check_folder(local.name)
    return local


def read_model_config(model: str | Origin) -> Any:
    """Return the transformers config of a model of any kind, its RoPE scaled as `model` says.

    A GGUF file with kept types lists them in its config.

    Raises:
        ModelError: there is no such model, or its RoPE cannot be scaled.
        ConfigError: an option of the scaling is missing.
    """
    from transformers import AutoConfig

    origin = local_origin(model)
    name = origin.name
    local = Path(name).is_dir()
    if local:
        _check_model_type(Path(name))
    message = f"cannot read {Path(name) / CONFIG}" if local else f"cannot read the model config of {name!r}"
    fix = "correct it, or re-download it" if local else "give a folder with config.json, or a hub id you can reach"
    with (
        explain_remote_code(name),
        answered(message, fix, CheckpointError if local else ModelError),
        quiet_transformers(),
    ):
        config = AutoConfig.from_pretrained(name, revision=origin.revision, trust_remote_code=origin.trust_remote_code)
    if getattr(config, "quantization_config", {}) is None:  # merging tools write "quantization_config": null
        del config.quantization_config
    if origin.rope_scaling is not None:
        scale_rope(config, origin.rope_scaling)
    return config


def with_rope_factor(config: RunConfig) -> RunConfig:
    """Return `config` with the options of `rope_scaling` that follow from the model and max_length.

    Raises:
        ConfigError, ModelError: the model cannot be scaled in this way.
    """
    scaling = config.origin.rope_scaling
    if scaling is None:
        return config
    unscaled = read_model_config(replace(config.origin, rope_scaling=None))
    return config.model_copy(update={"rope_scaling": resolve_rope(unscaled, scaling)})


def _check_model_type(folder: Path) -> None:
    """Check that transformers knows the config's model_type, unless the checkpoint has its own code."""
    from transformers import CONFIG_MAPPING, __version__

    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type is not None and model_type not in CONFIG_MAPPING and "auto_map" not in config:
        raise ModelError(
            f"{folder / CONFIG}: transformers {__version__} knows no model_type {brief(model_type)}",
            "correct it, or update transformers where the model is newer",
        )


@contextlib.contextmanager
def explain_remote_code(name: str) -> Iterator[None]:
    """Explain the error if transformers refuses to run Python code that comes with `name`.

    Raises:
        ModelError: transformers refused.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" not in f"{error} {error.__cause__}":
            raise
        raise ModelError(
            f"{name} comes with its own Python code, which runs only with your consent",
            "read that code, then set trust_remote_code: true to train; afterwards add --trust-remote-code to the"
            " command (trust_remote_code=True in Python)",
        ) from error


def load_model_config(model: str | Origin) -> Any:
    """Return the transformers config of a model that can be trained.

    Raises:
        ModelError: there is no such model; or it is no causal language model, and none that takes images and writes
            text.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config, name = read_model_config(model), model if isinstance(model, str) else model.name
    own_code = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or own_code:
        return config
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ModelError(
            f"{name} is a {config.model_type} model, which is not a causal language model",
            "give a decoder-only language model",
        )
    from ..data.image_processor import OTHER, refusal_of  # imports torch

    if refusal := refusal_of(config):
        raise ModelError(f"{name} is a {config.model_type} model, which is not trained: {refusal}", OTHER)
    return config


def _check_folder(name_or_path: str) -> None:
    """Raise on a path that does not exist or holds no model, naming a similar folder; hub ids pass."""
    path, fix = Path(name_or_path), "give a folder with a Hugging Face checkpoint"
    path_type = look(path, ModelError, fix)
    if path_type == "file":
        has_config = (path.parent / "config.json").exists()
        fix = f"did you mean {path.parent}?" if has_config else fix
        raise ModelError(f"{path} is a file, not a model's folder", fix)
    if path_type == "folder":
        if not (path / CONFIG).exists():
            if adapter := next((at for at in (path, path / "adapter") if (at / ADAPTER_CONFIG).exists()), None):
                advice = (
                    f"name the model it was trained on, and adapter_path={adapter} to go on from it; or merge it first"
                )
                raise ModelError(f"{path} holds an adapter, but no model", advice)
            inside = sorted([*path.glob(f"*/{CONFIG}"), *path.glob(f"snapshots/*/{CONFIG}")], key=os.path.getmtime)
            raise ModelError(f"{path} has no {CONFIG}", f"did you mean {inside[-1].parent}?" if inside else fix)
    elif hub.is_local(name_or_path):
        near = hub.nearest_path(path)
        raise ModelError(f"there is no folder {path}", f"did you mean {near}?" if near else fix)
