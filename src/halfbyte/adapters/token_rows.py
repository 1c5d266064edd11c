"""Rows of the embedding and the head that are trained and saved one by one: new tokens and chosen ones.

PEFT's trainable tokens keep the rows in an adapter, and compute with them instead of the base's rows
(`modeling.token_rows`); a tied head uses the same rows. The adapter has every row by which the vocabulary has grown,
padding included, so a base with `resize_token_embeddings` called for their number gives plain PEFT all values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from ..utils.errors import ModelError

WHOLE = "train the whole embedding and head: modules_to_save, without new tokens"


def vocabulary_size(model: Any) -> int:
    """Return the rows of a model's input embedding."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return int(base.get_input_embeddings().weight.shape[0])


def largest_index(indices: Sequence[int] | Mapping[str, Sequence[int]] | None) -> int:
    """Return the largest of PEFT's `trainable_token_indices`, or -1."""
    lists = indices.values() if isinstance(indices, Mapping) else [indices or ()]
    return max((index for ids in lists for index in ids), default=-1)


def token_modules(model: Any, indices: Sequence[int]) -> dict[str, list[int]]:
    """Return PEFT's `trainable_token_indices` for a model: the names of embedding and untied head → the rows.

    Raises:
        ModelError: embedding or head cannot train single rows in PEFT, or an index is beyond the vocabulary.
    """
    if (largest := largest_index(indices)) >= (rows := vocabulary_size(model)):
        wrong = f"trainable_token_indices: {largest} is beyond the vocabulary of {rows} rows"
        raise ModelError(wrong, f"use indices below {rows}, or name new tokens in add_tokens")
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError("new tokens: the head has a bias, which PEFT's trainable tokens leave out", WHOLE)
    return {name: list(indices) for name in _ends(model)}


def _ends(model: Any) -> dict[str, Any]:
    """Return name → module: the embedding, and the head unless it shares the embedding's weight.

    Raises:
        ModelError: one is quantized, or has an adapter.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [(embedding, nn.Embedding), (head, nn.Linear)]
    if head is None or head.weight is embedding.weight:
        modules = modules[:1]
    for module, supported in modules:
        name = names[id(module)]
        if type(module.weight.data) is not Tensor or not module.weight.is_floating_point():
            raise ModelError(f"new tokens: {name} is stored quantized, and its rows cannot be trained",
                             f"exclude {name} from the quantization")  # fmt: skip
        if not isinstance(module, supported):
            raise ModelError(f"new tokens: {name} is a {type(module).__name__}, whose rows PEFT cannot train", WHOLE)
    return {names[id(module)]: module for module, _ in modules}


@torch.no_grad()
def grow_vocabulary(model: Any, rows: int) -> int:
    """Grow embedding and head to `rows`, each new row the mean of the earlier ones; return the number of new rows.

    Raises:
        ModelError: embedding or head is quantized, or has an adapter.
    """
    old_rows = vocabulary_size(model)
    if rows <= old_rows:
        return 0
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    _ends(model)
    model.resize_token_embeddings(rows, mean_resizing=False)
    for module in _ends(model).values():
        weight = module.weight.data
        weight[old_rows:] = weight[:old_rows].mean(0, dtype=torch.float32).to(weight.dtype)
    return rows - old_rows


@torch.no_grad()
def start_rows(model: Any, pieces: Mapping[int, Sequence[int]], vocabulary: int) -> None:
    """Set the rows of tokens to means of other tokens' rows, in the embedding and an untied head.

    Args:
        pieces: token → the tokens whose mean it starts from; without any, the mean of the first `vocabulary` rows.
    """
    if not pieces:
        return
    for module in _ends(model).values():
        weight = module.weight.data
        mean = weight[:vocabulary].mean(0, dtype=torch.float32)
        starts = [weight[list(ids)].mean(0, dtype=torch.float32) if ids else mean for ids in pieces.values()]
        weight[list(pieces)] = torch.stack(starts).to(weight.dtype)
