"""Forwards that isolate packed documents in models that would mix them: with document bounds, masks, or unpacking.

A forward is bound to the instance of a backbone or causal LM, over a forward of `patch`, and can be removed again. It
acts on packed batches only: `position_ids` restart, and there is neither a mask nor a key-value cache.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from ..batch import entry_counts, is_per_token
from ..utils.errors import ModelError
from .attention import document_bounds
from .transformers_versions import given_cache

WRAPPED = "_halfbyte_own_forward"  # attribute of a wrapped module: the forward it had in its __dict__, or None
MIN_LENGTH_RATIO = 0.75  # documents share a forward if each has at least this share of the longest one's length
PACKED_KEYWORDS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

Forward = Callable[..., Any]

# Layer type in transformers' configs → function that makes its mask; recurrent layers read a padding mask only.
MASKS: dict[str, Forward | None] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "linear_attention": None,
    "mamba": None,
    "conv": None,
}


def wrap(module: nn.Module, forward: Forward) -> None:
    """Bind one of this file's forwards to `module`, until `unwrap`."""
    setattr(module, WRAPPED, module.__dict__.get("forward"))
    module.forward = MethodType(forward, module)


def unwrap(module: nn.Module) -> None:
    """Undo `wrap`; does nothing on a module that is not wrapped."""
    if is_wrapped(module):
        bound_forward = module.__dict__.pop(WRAPPED)
        del module.__dict__["forward"]
        if bound_forward is not None:
            module.forward = bound_forward


def is_wrapped(module: nn.Module) -> bool:
    return WRAPPED in module.__dict__


def forward_with_bounds(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own forward with document bounds: cu_seq_lens_q and _k, max_length_q and _k, seq_idx."""
    forward, kwargs = wrapped_forward(self, args, kwargs)
    positions = _packed_positions(kwargs)
    bounds = None if positions is None else document_bounds(positions)
    if positions is None or bounds is None:
        return forward(**kwargs)
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    return forward(**kwargs | bounds, seq_idx=begins.cumsum(-1).to(torch.int32))


def forward_with_masks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Like `forward_with_bounds`, for a backbone that takes a mask per layer type but makes none from positions, or a
    wrong one where images see themselves: transformers 5.24 looks up the images of Gemma 3's sliding layers at each
    token's position in its document instead of the row.

    Raises:
        ValueError: the backbone has layer types without a known mask.
    """
    forward, kwargs = wrapped_forward(self, args, kwargs)
    positions = _packed_positions(kwargs)
    if positions is None or (bounds := document_bounds(positions)) is None:
        return forward(**kwargs)
    config = self.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types or layer_types - MASKS.keys():
        raise ValueError(f"no masks are known for layers of {', '.join(sorted(layer_types)) or 'no kind'}")
    weight = self.get_input_embeddings().weight
    like = torch.empty(*positions.shape, 1, dtype=weight.dtype, device=weight.device)  # only its shape is read
    # the cache is the argument before the positions; its name differs between versions of transformers
    arguments = (config, like, None, None)
    if kwargs.get("token_type_ids") is not None:
        masks = _image_masks(arguments, layer_types, positions, kwargs["token_type_ids"])
        return forward(**kwargs | {"attention_mask": masks})  # without bounds, which would also reach the vision tower
    makers = {layer_type: MASKS[layer_type] for layer_type in layer_types}
    masks = {layer_type: make and make(*arguments, position_ids=positions) for layer_type, make in makers.items()}
    return forward(**kwargs | bounds | {"attention_mask": masks})


def _image_masks(arguments: tuple, layer_types: set[str], positions: Tensor, types: Tensor) -> dict[str, Tensor | None]:
    """Return the mask of each layer type of packed rows in which the tokens of an image see each other.

    Args:
        arguments: config, embeddings and two absent arguments of transformers' mask functions.
        positions: int [B, T], restarting with every document.
        types: int [B, T], 1 for tokens of images.
    """
    is_image = types == 1
    images = (is_image & ~F.pad(is_image, (1, 0))[:, :-1]).cumsum(-1).where(is_image, -1)
    documents = F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    own_image, own_document = blockwise_overlay(images), packed_sequence_mask_function(documents)
    window = getattr(arguments[0], "sliding_window", None)

    def mask(layer_type: str) -> Tensor | None:
        limits = [own_document]
        if layer_type == "sliding_attention":
            limits.append(sliding_window_overlay(window))
        # without positions, which would turn the indices of tokens in their row into those in their document
        return create_causal_mask(*arguments, None, or_mask_function=own_image, and_mask_function=and_masks(*limits))

    return {layer_type: MASKS[layer_type] and mask(layer_type) for layer_type in layer_types}


def unpacked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own forward on rows of one document each; outputs have the packed batch's layout.

    Documents of similar length share a forward, padded on the right: causal layers never attend to the right. The
    padding repeats the batch's first token, so a probe that replaces this token detects a model that does.

    Raises:
        ModelError: the model adds a loss of its own, computed over the full batch.
    """
    forward, kwargs = wrapped_forward(self, args, kwargs)
    positions = _packed_positions(kwargs)
    bounds = None if positions is None else document_bounds(positions)
    if positions is None or bounds is None:
        return forward(**kwargs)
    shape = tuple(positions.shape)
    plain = {key: value for key, value in kwargs.items() if key not in PACKED_KEYWORDS}
    if "pixel_values" in plain:
        raise ValueError("documents are unpacked in another order than the images that the batch has for them")
    if any(entry_counts(plain)):
        wrong = "documents are unpacked in another order than the arrays that the batch has for them"
        raise ModelError(wrong, "set packing: false and padding_free: false")
    outputs, token_indices = [], []
    for index, real in length_groups(bounds["cu_seq_lens_q"].tolist()):
        index, real = index.to(positions.device), real.to(positions.device)
        rows = {
            key: value.flatten(0, 1)[index] if is_per_token(key, value, *shape) else value
            for key, value in plain.items()
        }
        outputs.append((forward(**rows), real))
        token_indices.append(index[real])
    return _join_outputs(outputs, torch.cat(token_indices).argsort(), shape)


def wrapped_forward(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Forward, dict[str, Any]]:
    """Return the forward that a wrapped `module` had, and all arguments by name."""
    forward = getattr(module, WRAPPED) or functools.partial(type(module).forward, module)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return forward, dict(zip(names, args, strict=False)) | kwargs


def _packed_positions(kwargs: dict[str, Any]) -> Tensor | None:
    """Return the positions [B, T] of a batch that may be packed, or None."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return None
    if given_cache(kwargs) or kwargs.get("use_cache"):
        return None
    tokens = kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    positions = positions[0] if positions.dim() == 3 else positions  # M-RoPE: text positions, see `head`
    return positions.expand(tokens.shape[0], -1)


def length_groups(bounds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (index int64 [D, L] into the flattened batch, mask bool [D, L]) for documents of similar length."""
    pieces = sorted(((end - begin, begin) for begin, end in itertools.pairwise(bounds)), reverse=True)
    while pieces:
        longest = pieces[0][0]
        group = [piece for piece in pieces if piece[0] >= MIN_LENGTH_RATIO * longest]
        pieces = pieces[len(group) :]
        lengths, begins = torch.tensor(group).T
        steps = torch.arange(longest)
        real = steps < lengths[:, None]
        yield (begins[:, None] + steps).where(real, 0), real


def _join_outputs(outputs: list[tuple[Any, Tensor]], order: Tensor, shape: tuple[int, ...]) -> Any:
    """Merge the groups' outputs into one in the packed layout; values that are not per token are dropped."""
    first = outputs[0][0]
    reals = [real for _, real in outputs]
    if isinstance(first, tuple):
        return (_join_values([output[0] for output, _ in outputs], reals, order, shape),)
    for name in ("loss", "aux_loss"):
        if getattr(first, name, None) is not None:
            wrong = f"{type(first).__name__}.{name} is computed over full batches, and documents are unpacked"
            raise ModelError(wrong, "set packing: false and padding_free: false")
    return type(first)(
        **{key: _join_values([output[key] for output, _ in outputs], reals, order, shape) for key in first}
    )


def _join_values(values: list[Any], reals: list[Tensor], order: Tensor, shape: tuple[int, ...]) -> Any:
    """Merge `values` [D, L, ...] to [*shape, ...], or [D·L, ...] (a router's) to [B·T, ...]; None for other values."""
    if all(isinstance(value, tuple | list) and value for value in values):
        return tuple(_join_values(list(columns), reals, order, shape) for columns in zip(*values, strict=True))
    if not all(isinstance(value, Tensor) and value.dim() > 1 for value in values):
        return None
    if all(value.shape[:2] == real.shape for value, real in zip(values, reals, strict=True)):
        return torch.cat([value[real] for value, real in zip(values, reals, strict=True)])[order].unflatten(0, shape)
    if all(value.shape[0] == real.numel() for value, real in zip(values, reals, strict=True)):
        return torch.cat([value[real.flatten()] for value, real in zip(values, reals, strict=True)])[order]
    return None
