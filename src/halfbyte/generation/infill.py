"""Filling in the middle: prompts that say what stands before and what behind.

Source: Bavarian et al. 2022, arXiv:2207.14255, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..utils.errors import DataError

# What tokenizers of models that were trained for it call their marks: before the prefix, the suffix and the middle.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, SmolLM
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)


def infilled(tokenizer: Any, prefixes: Sequence[str], suffix: str) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Prompts whose answers stand between each prefix and `suffix` (prefix, suffix, middle).

    Returns:
        token ids of each prompt, and the first and the end of the prefix among them.

    Raises:
        DataError: the tokenizer has no marks.
    """
    known = tokenizer.get_vocab()
    marks = next((names for names in MARKS if all(name in known for name in names)), None)
    if marks is None:
        raise DataError("this model's tokenizer has no marks for filling in the middle", "leave it out")
    before, behind, middle = (known[name] for name in marks)
    bos = [token for token in tokenizer("", verbose=False)["input_ids"] if token == tokenizer.bos_token_id]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    prompts, own = [], []
    for prefix in prefixes:
        head = [*bos, before, *ids(prefix)]
        prompts.append([*head, behind, *ids(suffix), middle])
        own.append((len(bos) + 1, len(head)))
    return prompts, own
