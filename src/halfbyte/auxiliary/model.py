"""A model that a run uses in addition to the one that it trains, such as its teacher: find it, check it, load it.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Origin
from ..config.methods import SCORES
from ..config.schema import DistillationSection, ModelSection, RunKeys
from ..loading.find import ModelFiles, find_model, preflight_model
from ..modeling.rope_scaling import check_adapter_rope, saved_rope
from ..reading.files import open_bytes, same_place
from ..reading.tensors import (
    ADAPTER,
    ADAPTER_AGAIN,
    ADAPTER_CONFIG,
    read_adapter_config,
    read_header,
)
from ..utils.errors import CheckpointError, ConfigError, attribute_to_key

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

KEY = "teacher_model_name_or_path"


@dataclass(frozen=True)
class AuxiliaryModel:
    """The files of a teacher or a reward model.

    Attributes:
        adapter: folder of its adapter; None if it has none.
        files: the model, or the adapter's base model; None if that is the trained model: one set of weights.
    """

    adapter: Path | None
    files: ModelFiles | None

    def check(
        self, key: str, config: RunKeys, model_config: Any, tokenizer: PreTrainedTokenizerBase, *, stored: bool = True
    ) -> None:
        """Check that its files are complete and that it has the vocabulary of the trained model.

        Args:
            key: names the model in errors.
            model_config: transformers' config of the trained model.
            tokenizer: tokenizer of the trained model.
            stored: whether its weights are stored as the run's `Storage` says.

        Raises:
            HalfbyteError: a check fails.
        """
        from ..adapters.lora import check_adapter_files
        from ..loading.load import check_stored

        if self.adapter is not None:
            check_adapter_files(self.adapter)
            check_adapter_rope(self.adapter, model_config if self.files is None else self.files.config)
        if self.files is not None:
            if stored:
                check_stored(self.files, config.storage)
            _check_vocabulary(key, self.files, model_config, tokenizer.get_vocab())

    def digest(self) -> str:
        """Return digests of its adapter and of its model; empty for each that it does not have.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        adapter = "" if self.adapter is None else adapter_digest(self.adapter)
        return f"{adapter} {'' if self.files is None else self.files.digest()}"

    def load(self, config: RunKeys, device: torch.device, dtype: torch.dtype) -> Any:
        """Load its model, which is not the trained one, with its adapter.

        Args:
            dtype: dtype of weights that are not quantized.
        """
        from ..adapters.lora import load_adapter
        from ..loading.load import load_model

        assert self.files is not None
        model = load_model(
            self.files, config.storage, dtype=dtype, device=device, attn_implementation=config.attn_implementation
        )
        return model if self.adapter is None else load_adapter(model, self.adapter, self.files.name)


@contextlib.contextmanager
def additional_adapter(config: ModelSection, model: Any, folder: Path, name: str) -> Iterator[None]:
    """Load a frozen adapter as `name` onto the trained model, in addition to its own, and delete it afterwards."""
    from ..adapters.lora import load_adapter

    load_adapter(model, folder, config.model_name_or_path, name)
    try:
        yield
    finally:
        model.delete_adapter(name)


def adapter_digest(adapter: Path) -> str:
    """Return the SHA-256 of a saved adapter: its weights, and its config without the name of the base."""
    config = read_adapter_config(adapter)
    described = {key: value for key, value in config.items() if key not in ("base_model_name_or_path", "revision")}
    with open_bytes(adapter / ADAPTER, CheckpointError, ADAPTER_AGAIN) as opened:
        digest = hashlib.file_digest(opened, "sha256")
    digest.update(json.dumps(described, sort_keys=True).encode())
    return digest.hexdigest()


def adapter_in(name: str) -> Path | None:
    """Return the adapter in a folder, which may be a run's folder; None if it has none."""
    folders = (Path(name) / "adapter", Path(name))
    return next((folder for folder in folders if (folder / ADAPTER_CONFIG).is_file()), None)


def check_teacher_files(config: RunKeys) -> None:
    """Check the teacher of a run as far as possible without importing libraries that read it.

    Raises:
        HalfbyteError: it is missing or damaged.
    """
    adapter = adapter_in(_teacher_name(config))
    if adapter is not None:
        read_header(adapter / ADAPTER, ADAPTER_AGAIN)
        if read_adapter_config(adapter).get("task_type") in SCORES:
            raise ConfigError(
                f"{adapter} is a reward model's adapter: it scores texts and generates none",
                "name a model that generates text",
            )
    check_origin(_teacher_origin(config, adapter), adapter)


def check_origin(origin: Origin | None, adapter: Path | None) -> None:
    """Check the model that `origin_of` returned without importing libraries that read it.

    Raises:
        HalfbyteError: it is missing or damaged; names the adapter's file that refers to it.
    """
    if origin is not None:
        with (
            attribute_to_key(f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path")
            if adapter
            else contextlib.nullcontext()
        ):
            preflight_model(origin)


def find_teacher(config: RunKeys) -> AuxiliaryModel:
    """Return the teacher of a run.

    Raises:
        HalfbyteError: it is missing or damaged, or it is the trained model itself.
    """
    adapter = adapter_in(_teacher_name(config))
    origin = _teacher_origin(config, adapter)
    if origin is None and adapter is None and not config.adapter_path:
        raise ConfigError(
            f"{KEY}: {_teacher_name(config)} is the model that trains, so there is nothing to learn from it",
            "name a better model, or an adapter",
        )
    return AuxiliaryModel(adapter, None if origin is None else find_model(origin))


def _check_vocabulary(key: str, files: ModelFiles, model_config: Any, tokens: dict[str, int]) -> None:
    """Check that another model has the tokens of the trained one, whose token → id is `tokens`."""
    from ..loading.load import load_tokenizer

    fix = "name a model that shares the vocabulary of the trained model"
    size, other_size = (config.get_text_config().vocab_size for config in (model_config, files.config))
    if size != other_size:
        wrong = f"{files.name} has a vocabulary of {other_size:,}, and the model one of {size:,}"
        raise ConfigError(f"{key}: {wrong}", fix)
    folder = Path(files.origin.name)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        return
    vocabulary = load_tokenizer(files.origin).get_vocab()
    if differing := next((token for token, at in tokens.items() if vocabulary.get(token) != at), None):
        wrong = f"token {tokens[differing]} is {differing!r:.40} in the model, and another one in {files.name}"
        raise ConfigError(f"{key}: {wrong}", fix)


def _teacher_name(config: DistillationSection) -> str:
    assert config.teacher_model_name_or_path is not None
    return config.teacher_model_name_or_path


def _teacher_origin(config: RunKeys, adapter: Path | None) -> Origin | None:
    """Return the teacher's model, or its adapter's base; None if that is the trained model."""
    revision = None if config.teacher_model_revision == "main" else config.teacher_model_revision
    return origin_of(config, _teacher_name(config), adapter, revision)


def origin_of(config: RunKeys, name: str, adapter: Path | None, revision: str | None = None) -> Origin | None:
    """Return the model `name`, or the base of the adapter; None if that is the trained model with frozen weights.

    Raises:
        CheckpointError: an adapter does not name its base.
    """
    rope = None
    if adapter is not None:
        base = read_adapter_config(adapter).get("base_model_name_or_path")
        if not base:
            raise CheckpointError(
                f"{adapter / ADAPTER_CONFIG} has no base_model_name_or_path", "write there which model it is for"
            )
        name = str(base)
        revision = None
        rope = saved_rope(adapter)
    if same_place(name, config.model_name_or_path) and config.use_peft and not config.storage.rounds:
        return None
    return Origin(name, revision, config.trust_remote_code, config.storage.keep and name.endswith(".gguf"), rope)
