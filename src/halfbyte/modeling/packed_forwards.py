"""Forwards for models in which packed documents see each other: told where documents begin, or given one a row.

Bound to the instance of a backbone or a causal LM, over what `patch` may have bound there, and taken off again. They do
something where a batch is packed: `position_ids` restart, and there is neither a mask nor a key-value cache.
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
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..utils.errors import ModelError
from .attention import documents
from .keywords import cache_of

OWN = "_halfbyte_own_forward"  # the attribute of a module that is wrapped: its own forward
LIKE = 0.75  # documents of at least this share of the longest's length are rows of one forward
OF_PACKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

Forward = Callable[..., Any]

# A kind of layer in transformers' configs → what makes its mask; those with a state read one over padding alone.
MASKS: dict[str, Forward | None] = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "linear_attention": None,
    "mamba": None,
    "conv": None,
}


def wrap(module: nn.Module, forward: Forward) -> None:
    """Have `module` run `forward`, one of this file's, until `unwrap`."""
    setattr(module, OWN, module.__dict__.get("forward"))
    module.forward = MethodType(forward, module)


def unwrap(module: nn.Module) -> None:
    """Undo `wrap`; harmless on a module that is not wrapped."""
    if is_wrapped(module):
        before = module.__dict__.pop(OWN)
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before


def is_wrapped(module: nn.Module) -> bool:
    return OWN in module.__dict__


def with_bounds(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, told where documents begin: cu_seq_lens_q and _k, max_length_q and _k, seq_idx."""
    own, kwargs = own_forward(self, args, kwargs)
    positions = _packed(kwargs)
    found = None if positions is None else documents(positions)
    if positions is None or found is None:
        return own(**kwargs)
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    return own(**kwargs | found, seq_idx=begins.cumsum(-1).to(torch.int32))


def with_masks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`with_bounds`, of a backbone that takes a mask for each kind of layer: made of positions here, which it forgets.

    Raises:
        ValueError: its layers are of other kinds.
    """
    own, kwargs = own_forward(self, args, kwargs)
    positions = _packed(kwargs)
    if positions is None or (found := documents(positions)) is None:
        return own(**kwargs)
    kinds = set(getattr(self.config, "layer_types", None) or ())
    if not kinds or kinds - MASKS.keys():
        raise ValueError(f"no masks are known for layers of {', '.join(sorted(kinds)) or 'no kind'}")
    weight = self.get_input_embeddings().weight
    like = torch.empty(*positions.shape, 1, dtype=weight.dtype, device=weight.device)  # whose shape is looked at
    # the cache stands before the positions, under a name that differs between versions of transformers
    given = (self.config, like, None, None)
    makers = {kind: MASKS[kind] for kind in kinds}
    masks = {kind: make and make(*given, position_ids=positions) for kind, make in makers.items()}
    return own(**kwargs | found | {"attention_mask": masks})


def unpacked(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward on rows of one document each; what it returns has the packed batch's layout.

    Documents of like length share a forward, padded on the right, which causal layers never look at from the left. The
    padding repeats the batch's first token, so that a probe which replaces it notices a model that does look.

    Raises:
        ModelError: the model adds a loss of its own, which is one of whole batches.
    """
    own, kwargs = own_forward(self, args, kwargs)
    positions = _packed(kwargs)
    found = None if positions is None else documents(positions)
    if positions is None or found is None:
        return own(**kwargs)
    shape = tuple(positions.shape)
    plain = {key: value for key, value in kwargs.items() if key not in OF_PACKED}
    outputs, places = [], []
    for index, real in groups(found["cu_seq_lens_q"].tolist()):
        index, real = index.to(positions.device), real.to(positions.device)
        rows = {key: value.flatten(0, 1)[index] if _of_tokens(value, shape) else value for key, value in plain.items()}
        outputs.append((own(**rows), real))
        places.append(index[real])
    return _joined(outputs, torch.cat(places).argsort(), shape)


def own_forward(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Forward, dict[str, Any]]:
    """The forward that a wrapped `module` had, and all arguments by name."""
    own = getattr(module, OWN) or functools.partial(type(module).forward, module)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return own, dict(zip(names, args, strict=False)) | kwargs


def _packed(kwargs: dict[str, Any]) -> Tensor | None:
    """The positions [B, T] of a batch that may be packed; None of one that is not."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return None
    if cache_of(kwargs) or kwargs.get("use_cache"):
        return None
    tokens = kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    positions = positions[0] if positions.dim() == 3 else positions  # M-RoPE: the text's first, see modeling.head
    return positions.expand(tokens.shape[0], -1)


def groups(bounds: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(index int64 [D, L] into the flattened batch, bool [D, L] of the real tokens) of documents of like length."""
    pieces = sorted(((end - begin, begin) for begin, end in itertools.pairwise(bounds)), reverse=True)
    while pieces:
        longest = pieces[0][0]
        group = [piece for piece in pieces if piece[0] >= LIKE * longest]
        pieces = pieces[len(group) :]
        lengths, begins = torch.tensor(group).T
        steps = torch.arange(longest)
        real = steps < lengths[:, None]
        yield (begins[:, None] + steps).where(real, 0), real


def _of_tokens(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape[:2]) == shape


def _joined(outputs: list[tuple[Any, Tensor]], order: Tensor, shape: tuple[int, ...]) -> Any:
    """One output of the groups' outputs: what there is for each token, in the packed layout; the rest is left out."""
    first = outputs[0][0]
    reals = [real for _, real in outputs]
    if isinstance(first, tuple):
        return (_join([output[0] for output, _ in outputs], reals, order, shape),)
    for name in ("loss", "aux_loss"):
        if getattr(first, name, None) is not None:
            wrong = f"{type(first).__name__}.{name} is of whole batches, which unpacked documents are not"
            raise ModelError(wrong, "set packing: false and padding_free: false")
    return type(first)(**{key: _join([output[key] for output, _ in outputs], reals, order, shape) for key in first})


def _join(values: list[Any], reals: list[Tensor], order: Tensor, shape: tuple[int, ...]) -> Any:
    """The groups' `values` [D, L, ...] or [D·L, ...] (a router's) as [*shape, ...] or [B·T, ...]; None if neither."""
    if all(isinstance(value, tuple | list) and value for value in values):
        return tuple(_join(list(each), reals, order, shape) for each in zip(*values, strict=True))
    if not all(isinstance(value, Tensor) and value.dim() > 1 for value in values):
        return None
    if all(value.shape[:2] == real.shape for value, real in zip(values, reals, strict=True)):
        return torch.cat([value[real] for value, real in zip(values, reals, strict=True)])[order].unflatten(0, shape)
    if all(value.shape[0] == real.numel() for value, real in zip(values, reals, strict=True)):
        return torch.cat([value[real.flatten()] for value, real in zip(values, reals, strict=True)])[order]
    return None
