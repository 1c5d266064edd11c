"""A few prompts answered before and after training, so that a person sees what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..data.chat import prompt_text
from ..data.collate_answers import documents_of
from ..generation import forget, generate
from ..generation.decoder import context_length
from ..ops import IGNORE_INDEX
from ..parallel.shard.model import sharded
from ..utils.hardware import free_cached_memory

TEXT_PROMPT_TOKENS = 32  # of a plain text, which has no prompt of its own
TOGETHER = {"cpu": 8}  # prompts; elsewhere a plan has room for the cache of one
LONGEST_PROMPT = 512  # longer ones are passed over while shorter ones are left


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, their text as the model gets it, special tokens included, and what the data says comes
    next (None for prompts from the config)."""

    ids: list[int]
    text: str
    reference: str | None = None


def pick_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, rows: Dataset, *, templated: bool
) -> list[Prompt]:
    """The prompts of `config.sample_prompts`: given ones, or the beginnings of the first so many `rows`.

    Args:
        rows: tokenized rows, held-out ones where there are any.
        templated: the data went through the chat template, so given prompts do too.
    """
    if isinstance(config.sample_prompts, list):
        return [_given(text, tokenizer, templated) for text in config.sample_prompts]
    wanted = config.sample_prompts
    candidates = [from_row(row, tokenizer) for row in rows.select(range(min(len(rows), 4 * wanted)))]
    return sorted(candidates, key=lambda prompt: len(prompt.ids) > LONGEST_PROMPT)[:wanted]


def _given(text: str, tokenizer: PreTrainedTokenizerBase, templated: bool) -> Prompt:
    if not templated:
        return Prompt(tokenizer(text)["input_ids"], text)
    turns = [{"role": "user", "content": text}]
    rendered = prompt_text(tokenizer, turns)
    return Prompt(tokenizer(rendered, add_special_tokens=False)["input_ids"], rendered)


def from_row(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The first document of a row, cut where training begins; the first trained part is the reference."""
    document = documents_of(row)[0] if row.get("seq_lengths") else row
    ids, labels = document["input_ids"], document["labels"]
    length = len(ids)
    trained = [position for position in range(1, length) if labels[position] != IGNORE_INDEX]
    begin = trained[0] if trained else length
    if begin <= 1:  # trained from the start: plain text
        begin = max(1, min(TEXT_PROMPT_TOKENS, length // 2))
    end = next((at for at in range(begin, length) if labels[at] == IGNORE_INDEX), length)
    return Prompt(list(ids[:begin]), str(tokenizer.decode(ids[:begin])), _text(tokenizer, ids[begin:end]))


def _text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_new_tokens: int, stops: list[int]
) -> list[str]:
    """Continue each prompt greedily, as far as the model's context has room; special tokens are left out of the text.

    Nothing of it stays in memory, and what other streams have left cached is given back first. Where each token gathers
    the model's slices, all prompts are continued together, and on a CPU several, in half the time of one by one.
    """
    model.eval()
    limit, device = context_length(model), next(model.parameters()).device
    room = [max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt.ids)) for prompt in prompts]
    asked = [at for at, new in enumerate(room) if new > 0]
    answers = [""] * len(prompts)
    free_cached_memory(device)
    try:
        together = len(asked) if sharded(model) else TOGETHER.get(device.type, 1)
        for first in range(0, len(asked), together or 1):
            some = asked[first : first + together]
            ids, lengths = [prompts[at].ids for at in some], [room[at] for at in some]
            found = generate(model, ids, max_new_tokens=lengths, stops=stops)
            for at, tokens in zip(some, found, strict=True):
                answers[at] = _text(tokenizer, tokens)
    finally:
        forget(model)
        free_cached_memory(device)  # the pools of graphs are nobody else's
    return answers
