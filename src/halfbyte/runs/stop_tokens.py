"""Stop tokens of a saved model: the ones it was trained with, and the ones that its files declare.

Generation stops at all of them, and exports (merged models, GGUF files, Modelfiles, adapters for servers) list all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import look, read_json
from ..reading.model_config import CONFIG, TOKEN_IDS, declared_stop_tokens, read_config, read_generation_config
from ..utils.errors import CheckpointError, DataError
from ..utils.notices import notice
from .layout import DATA_REPORT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def data_report(run_dir: Path | None) -> dict[str, Any]:
    """Read a run's data_report.json; empty for a model without a run.

    Raises:
        CheckpointError: the file is damaged.
    """
    path, fix = run_dir / DATA_REPORT if run_dir else None, "remove it, or repair it"
    if path is None or look(path, CheckpointError) != "file":
        return {}
    report = read_json(path, CheckpointError, fix)
    sources = report.get("sources", []) if isinstance(report, dict) else None
    if not isinstance(sources, list) or not all(isinstance(source, dict) and "format" in source for source in sources):
        raise CheckpointError(f"{path}: it is not a run's data report", fix)
    return report


def trained_stop_tokens(report: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end trained turns, from a run's `data_report`, else from the chat template.

    Raises:
        DataError: the chat template refuses a plain conversation.
    """
    names = report.get("stop_tokens") or []
    formats = {source["format"] for source in report.get("sources", ())}
    if not names and tokenizer.chat_template and formats != {"text"}:
        from ..generation.sampling import turn_end

        names = turn_end(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(list(names))
    return [index for index, name in zip(ids, names, strict=True) if tokenizer.convert_ids_to_tokens(index) == name]


def known_stop_tokens(report: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return `trained_stop_tokens`, or none with a notice if the chat template fails."""
    try:
        return trained_stop_tokens(report, tokenizer)
    except DataError as error:
        notice("template-ends", f"the chat template does not show which token ends an answer: {error.message}")
        return []


def joined_stop_tokens(*ends: Iterable[int | None]) -> list[int]:
    """Concatenate stop tokens without duplicates, in order."""
    return list(dict.fromkeys(index for tokens in ends for index in tokens if index is not None))


def generation_keys(folder: Path, tokenizer: PreTrainedTokenizerBase, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a trained model's generation_config.json: those in `folder`, with all stop tokens.

    Args:
        tokenizer: the tokenizer used in training.
        report: `data_report` of the run.
    """
    keys = read_generation_config(folder)
    if not keys and look(folder / CONFIG, CheckpointError):
        config = read_config(folder)
        keys = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    learned = known_stop_tokens(report, tokenizer)
    ends = joined_stop_tokens(declared_stop_tokens(folder), [tokenizer.eos_token_id], learned)
    return {**keys, "eos_token_id": ends[0] if len(ends) == 1 else ends}
