"""Where a model's files are and what its config says: looked up once, before any weight is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Origin
from ..gguf.cache import checkpoint_folder, gguf_file
from ..modeling.families import FAMILIES
from ..reading import look
from ..reading.boundary import answered
from ..reading.model_config import CONFIG, read_config
from ..reading.tensors import ADAPTER_CONFIG, check_checkpoint
from ..utils import hub
from ..utils.errors import CheckpointError, ModelError
from ..utils.text import brief
from ..utils.transformers_logging import quiet


@dataclass(frozen=True)
class ModelFiles:
    """A model that was found, its files whole.

    Attributes:
        name: what it was asked for by.
        place: its folder or hub id; of a GGUF file, the folder that it is unpacked in.
        config: transformers' config of it.
    """

    name: str
    place: Origin
    config: Any


def find_model(origin: Origin) -> ModelFiles:
    """Unpack a GGUF file, read the config, look over the files.

    Raises:
        ModelError: no such model, or none that can be trained.
        CheckpointError: a file is missing or damaged.
        ConfigError: there is nothing to keep, or a library is missing.
    """
    from .completeness import check_whole

    place = place_of(origin)
    check_checkpoint(Path(place.name))
    config = load_model_config(place)
    check_whole(place, config)
    return ModelFiles(origin.name, place, config)


def look_over(origin: Origin) -> None:
    """What can be said of a model before anything is imported to read it.

    Raises:
        ModelError: there is no such folder or file, or no config in it; or the hub cannot be asked for it; or it is an
            address.
        CheckpointError: a file is missing or damaged.
        ConfigError: there is nothing to keep.
    """
    if "://" in origin.name:
        there = hub.id_in(origin.name)
        fix = f"write {there}" if there else "download it, and name its folder or file"
        raise ModelError(f"{origin.name}: models are not read from addresses", fix)
    if gguf_file(origin.name, origin.keep) is None:
        _check_folder(origin.name)
        if not Path(origin.name).is_dir():
            hub.look_for_model(origin.name, origin.revision)
        check_checkpoint(Path(origin.name))


def place_of(model: str | Origin) -> Origin:
    """Where the files of a model are: a folder or a hub id; a GGUF file is unpacked, which may take minutes once.

    Raises:
        ModelError: there is no such folder or file, or no config in it.
    """
    origin = Origin(model) if isinstance(model, str) else model
    place = replace(origin, name=checkpoint_folder(origin.name, origin.keep), keep=False)
    _check_folder(place.name)
    return place


def read_model_config(model: str | Origin) -> Any:
    """The transformers config of a model of any kind. That of a GGUF file whose types are kept says what they are.

    Raises:
        ModelError: there is no such model.
    """
    from transformers import AutoConfig

    place = place_of(model)
    name = place.name
    local = Path(name).is_dir()
    if local:
        _check_known(Path(name))
    said = f"cannot read {Path(name) / CONFIG}" if local else f"cannot read the model config of {name!r}"
    fix = "correct it, or re-download it" if local else "give a folder with config.json, or a hub id you can reach"
    with trusted_only(name), answered(said, fix, CheckpointError if local else ModelError), quiet():
        config = AutoConfig.from_pretrained(name, revision=place.revision, trust_remote_code=place.trust_remote_code)
    if getattr(config, "quantization_config", {}) is None:  # "quantization_config": null, as merging tools leave it
        del config.quantization_config
    return config


def _check_known(folder: Path) -> None:
    """Whether transformers has the model of a config, where that brings no code of its own."""
    from transformers import CONFIG_MAPPING, __version__

    found = read_config(folder)
    kind = found.get("model_type")
    if kind is not None and kind not in CONFIG_MAPPING and "auto_map" not in found:
        raise ModelError(
            f"{folder / CONFIG}: transformers {__version__} knows no model_type {brief(kind)}",
            "correct it, or update transformers where the model is newer",
        )


@contextlib.contextmanager
def trusted_only(name: str) -> Iterator[None]:
    """Around what transformers loads from `name`: where it will not run the Python code that lies there, that is said.

    Raises:
        ModelError: it does not.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" not in f"{error} {error.__cause__}":
            raise
        raise ModelError(
            f"{name} brings Python code of its own, which is run only where you say so",
            "read that code, then set trust_remote_code: true to train; afterwards add --trust-remote-code to the"
            " command (trust_remote_code=True in Python)",
        ) from error


def load_model_config(model: str | Origin) -> Any:
    """The transformers config of a model.

    Raises:
        ModelError: there is no such model, or it is neither a causal language model nor one that takes images and
            whose text part is of a family in `families`.
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
    known = [family.package for family in FAMILIES if family.tower]
    if config.model_type not in known:
        raise ModelError(
            f"{name} is a {config.model_type} model; of models that take images, halfbyte knows the text parts"
            f" of {' and '.join(known)}",
            "give one of those, or a decoder-only language model",
        )
    return config


def _check_folder(name_or_path: str) -> None:
    """A path that does not exist is told apart from a hub id, with the nearest existing folder."""
    path, fix = Path(name_or_path), "give a folder with a Hugging Face checkpoint"
    kind = look(path, ModelError, fix)
    if kind == "file":
        there = (path.parent / "config.json").exists()
        raise ModelError(f"{path} is a file, not a model's folder", f"did you mean {path.parent}?" if there else fix)
    if kind == "folder":
        if not (path / CONFIG).exists():
            if adapter := next((at for at in (path, path / "adapter") if (at / ADAPTER_CONFIG).exists()), None):
                how = (
                    f"name the model it was trained on, and adapter_path={adapter} to go on from it; or merge it first"
                )
                raise ModelError(f"{path} holds an adapter, and no whole model", how)
            inside = sorted([*path.glob(f"*/{CONFIG}"), *path.glob(f"snapshots/*/{CONFIG}")], key=os.path.getmtime)
            raise ModelError(f"{path} has no {CONFIG}", f"did you mean {inside[-1].parent}?" if inside else fix)
    elif hub.is_local(name_or_path):
        near = hub.nearest(path)
        raise ModelError(f"there is no folder {path}", f"did you mean {near}?" if near else fix)
