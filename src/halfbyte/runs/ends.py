"""The tokens that end an answer of a saved model: those it was trained to end with, and those that its files declare.

Generation here stops at all of them, and what is written for other programs (merged models, GGUF files, Modelfiles,
adapters for servers) names them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import look, read_json
from ..reading.model_config import CONFIG, ENDS, declared_ends, read_config, read_generation_config
from ..utils.errors import CheckpointError, DataError
from ..utils.notices import notice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def data_report(run_dir: Path | None) -> dict[str, Any]:
    """Read what a run says about its rows; empty for a model that no run of ours left.

    Raises:
        CheckpointError: the file is damaged.
    """
    path, fix = run_dir / "data_report.json" if run_dir else None, "take it away, or repair it"
    if path is None or look(path, CheckpointError) != "file":
        return {}
    report = read_json(path, CheckpointError, fix)
    sources = report.get("sources", []) if isinstance(report, dict) else None
    if not isinstance(sources, list) or not all(isinstance(each, dict) and "format" in each for each in sources):
        raise CheckpointError(f"{path}: not a run's report about its data", fix)
    return report


def learned_ends(report: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that trained turns end with, by a run's `data_report`; without a record that of the chat template.

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


def known_ends(report: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """As `learned_ends`, but none where the chat template refuses, for a model that may be asked without it."""
    try:
        return learned_ends(report, tokenizer)
    except DataError as error:
        notice("template-ends", f"which token ends an answer is not known from the chat template: {error.message}")
        return []


def all_ends(*ends: Iterable[int | None]) -> list[int]:
    """Each token once, in this order."""
    return list(dict.fromkeys(index for some in ends for index in some if index is not None))


def generation_keys(
    folder: Path, tokenizer: PreTrainedTokenizerBase, report: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of generation_config.json for the model in `folder` once it is trained: its own, with all ends.

    Args:
        tokenizer: the one trained with.
        report: `data_report` of the run.
    """
    found = read_generation_config(folder)
    if not found and look(folder / CONFIG, CheckpointError):
        config = read_config(folder)
        found = {key: config[key] for key in ENDS if config.get(key) is not None}
    ends = all_ends(declared_ends(folder), [tokenizer.eos_token_id], known_ends(report, tokenizer))
    return {**found, "eos_token_id": ends[0] if len(ends) == 1 else ends}
