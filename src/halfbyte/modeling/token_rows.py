"""Forwards of PEFT's trainable tokens, single rows of an embedding or a head, without a copy of the weight.

PEFT writes the rows over a copy of the weight [V, H] in each forward, and its backward makes a gradient of this size.
Here an embedding looks up the base's rows and overwrites those of trained tokens, and the losses read the rows as a
term of the logits (`ops.linear_head`). Where PEFT still needs the full weight, its indices are on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

INDICES = "row_indices_"  # and the name of the adapter: a buffer, int64 [T]
POSITIONS = "row_positions_"  # a buffer, int32 [V]: the position of a token in the indices, or -1


def trained_rows(module: Any) -> TrainableTokensLayer | None:
    """Return PEFT's layer of trained rows around a head or an embedding, or None."""
    layer = getattr(module, "token_adapter", None)
    return layer if isinstance(layer, TrainableTokensLayer) else None


def active_rows(layer: Any) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the rows [T, H] of a layer's active adapters, and their tokens int64 [T]; None and None if it has none.

    PEFT refuses adapters with a token in common.
    """
    names = () if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.token_indices]
    if not names or layer.merged:
        return None, None
    rows = [layer.trainable_tokens_delta[name] for name in names]
    tokens = [_indices(layer, name) for name in names]
    return (rows[0], tokens[0]) if len(names) == 1 else (torch.cat(rows), torch.cat(tokens))


def _indices(layer: Any, name: str) -> Tensor:
    """Return the tokens of an adapter's rows, int64 [T], on the device of the weight.

    They are a buffer after `attach_row_forwards`: a copy from the host would synchronise, and cannot be captured.
    """
    held = getattr(layer, f"{INDICES}{name}", None)
    return torch.tensor(layer.token_indices[name], device=layer.base_layer.weight.device) if held is None else held


def attach_row_forwards(model: nn.Module) -> None:
    """Replace the forwards of trained rows, and keep their indices on the device, in buffers that are not saved."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, TrainableTokensLayer)]
    for layer in layers:
        weight = layer.base_layer.weight
        for name, indices in layer.token_indices.items():
            if hasattr(layer, f"{INDICES}{name}"):
                continue
            tokens = torch.tensor(indices)
            positions = torch.full((len(weight),), -1, dtype=torch.int32)
            positions[tokens] = torch.arange(len(tokens), dtype=torch.int32)
            layer.register_buffer(f"{INDICES}{name}", tokens.to(weight.device), persistent=False)
            layer.register_buffer(f"{POSITIONS}{name}", positions.to(weight.device), persistent=False)
        layer.get_merged_weights = MethodType(_merged_weights, layer)
        if isinstance(layer.base_layer, nn.Embedding) and layer.base_layer.max_norm is None:
            layer.forward_adapters = MethodType(_embed, layer)


def _merged_weights(layer: Any, active_adapters: Sequence[str]) -> Tensor:
    """Compute PEFT's `get_merged_weights`: the base's weight with the rows of the active adapters."""
    weight: Tensor = layer.base_layer.weight
    for name in active_adapters:
        weight = weight.index_copy(0, _indices(layer, name), layer.trainable_tokens_delta[name].to(weight))
    return weight


def _embed(layer: Any, tokens: Tensor, active_adapters: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Compute PEFT's `forward_adapters` of an embedding: tokens [...] → [..., H]."""
    attached = all(hasattr(layer, f"{POSITIONS}{name}") for name in active_adapters)
    if layer.disable_adapters or not active_adapters or layer.merged or not attached:
        return type(layer).forward_adapters(layer, tokens, active_adapters, *args, **kwargs)
    layer._check_overlapping_tokens(active_adapters)
    embedded: Tensor = layer.base_layer(tokens, *args, **kwargs)
    scale, padding = layer._get_embed_scale(), layer.base_layer.padding_idx
    for name in active_adapters:
        position = getattr(layer, f"{POSITIONS}{name}")[tokens]
        indices = layer.token_indices[name]
        rows = F.embedding(
            position.clamp(min=0).long(),
            layer.trainable_tokens_delta[name].to(embedded.dtype),
            padding_idx=indices.index(padding) if padding in indices else None,
        )
        rows = rows if scale is None else rows * scale.to(rows.dtype)
        embedded = torch.where((position >= 0).unsqueeze(-1), rows, embedded)
    return embedded
