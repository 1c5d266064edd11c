"""Digests of a run's inputs, by the configuration key that names them: a resumed run must read the same.

Checkpoints store them. They depend on contents and not on paths, so a moved file is the same input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..auxiliary.model import adapter_digest, find_teacher
from ..config import RunConfig
from ..config.policy import DISTILLING
from ..data.prepare import PreparedData
from ..data.tables import digest_of_rows
from ..loading.find import ModelFiles
from ..reading.files import open_bytes
from ..rewards.reward_models import find_reward_models
from ..rewards.specs import MODEL, read_specs
from ..utils.waiting import waiting

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def data_identity(config: RunConfig, data: PreparedData, files: ModelFiles) -> dict[str, Any]:
    """Return digests of a run's data, adapter and tokenizer, and the size of the training set.

    Args:
        files: of the trained model.

    Returns:
        Rows, tokens and trained tokens of the training set, the digest of all its prepared columns (including the
        columns of reward functions), and the digests of other inputs by the key that names them; None: no such input.
    """
    sizes = {name: data.report["train"][name] for name in ("rows", "tokens", "trained_tokens")}
    return {
        **sizes,
        "digest": digest_of_rows(data.train),
        "eval_dataset": None if data.eval is None else digest_of_rows(data.eval),
        "adapter_path": adapter_digest(Path(config.adapter_path)) if config.adapter_path else None,
        "chat_template_path": _tokenizer_digest(files, config.chat_template_path),
    }


def model_reader(config: RunConfig, files: ModelFiles) -> Callable[[], dict[str, Any]]:
    """Find the models and reward functions of a run; return a function that reads them and returns their digests.

    The function reads all weights. It can run in a thread: finding models changes torch's settings, hashing does not.

    Args:
        files: of the trained model.
    """
    specs = read_specs(config.reward_funcs or [], None)
    models = find_reward_models(config, specs)
    teacher = find_teacher(config) if config.method in DISTILLING else None

    @waiting("hashing the files of the models")
    def read() -> dict[str, Any]:
        """Raises CheckpointError if a file is missing or damaged."""
        digests = iter([model.digest() for model in models])
        return {
            "model_name_or_path": files.digest(),
            "teacher_model_name_or_path": None if teacher is None else teacher.digest(),
            "reward_funcs": [next(digests) if spec.function_name == MODEL else spec.sha256 for spec in specs],
        }

    return read


def _tokenizer_digest(files: ModelFiles, template: str | None) -> str:
    """Return the SHA-256 of a tokenizer's files and of the chat template that is used instead of its own."""
    digest = hashlib.sha256()
    folder = files.folder()
    for path in [folder / name for name in TOKENIZER_FILES] + ([] if template is None else [Path(template)]):
        if path.is_file():
            with open_bytes(path) as stream:
                content = hashlib.file_digest(stream, "sha256")
            digest.update(f"{path.name if path.parent == folder else ''} {content.hexdigest()}".encode())
    return digest.hexdigest()
