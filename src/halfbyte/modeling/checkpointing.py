"""What each decoder layer keeps between forward and backward: the levels of `memory.activations`, carried out.

A layer's level stands in its record (`patched`). Without one, a layer does as transformers' own gradient checkpointing
says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..autograd.checkpointing import OnDevice, Store, recompute
from ..config import Level
from ..dispatch import on_compiler
from ..memory.activations import LEVELS, OFFLOADED, TILE_ROWS
from ..memory.offload import Offload
from ..parallel.tensor.layers import stream_in_slices
from ..utils.errors import ModelError
from ..utils.notices import notice
from .blocks import attention_half, mixer_of, mlp_half, runs_parallel
from .cast_cache import run_again
from .keywords import cache_of
from .patch_record import record

# transformers 5.17 checkpoints a layer in __call__, 5.23 around the class's forward, which a bound one replaces.
CHECKPOINTS_FORWARD = "__call__" not in GradientCheckpointingLayer.__dict__


def recompute_as_transformers(model: Any) -> None:
    """Turn transformers' own checkpointing of all layers on, non-reentrant.

    Gradients then reach adapters although the embeddings are frozen. The hook that transformers puts on the embeddings
    all the same goes: it would have a gradient computed for nobody, and generation run transformers' own forward.
    """
    # transformers 5.23 renamed it; 5.17 knows only the old name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.disable_input_require_grads()


# Numbers of modules that draw in training unless they are 0, beside nn.Dropout.
DRAWN = ("attention_dropout", "residual_dropout", "jitter_noise", "input_jitter_noise", "router_jitter_noise")


@dataclass(frozen=True)
class Activations:
    """A layer's level, and what carries its tensors to the host, where that is the level."""

    level: Level
    offload: Offload | None = None


def set_activations(layers: Sequence[Any], levels: str | Sequence[str]) -> None:
    """Give each decoder layer its level: one for all, or one each.

    Raises:
        ModelError: an unknown level, not one for each layer, or transformers' checkpointing is on as well.
    """
    named = [levels] * len(layers) if isinstance(levels, str) else list(levels)
    unknown = set(named) - set(LEVELS)
    if unknown:
        raise ModelError(f"activations: {sorted(unknown)[0]!r} is no level", f"use {', '.join(LEVELS)}")
    if len(named) != len(layers):
        raise ModelError(f"activations: {len(named)} levels for {len(layers)} layers", "give one, or one a layer")
    if any(layer.gradient_checkpointing for layer in layers):
        raise ModelError(
            "activations: transformers' gradient checkpointing is on in this model",
            "call model.gradient_checkpointing_disable(), or leave `activations` out",
        )
    device = next(layers[0].parameters()).device
    offload = None
    if set(OFFLOADED) & set(named):
        if device.type == "cuda":
            offload = Offload(device)
        else:
            notice("offload", f"nothing is offloaded from {device}: what layers save stays there")
    for layer, level in zip(layers, named, strict=True):
        own = offload if level in OFFLOADED else None
        record(layer).activations = Activations(cast(Level, level), own)


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer, as its level says."""
    if args or cache_of(kwargs):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    activations = record(self).activations
    if activations is not None and self.training and not on_compiler():  # a compiler decides what it keeps
        return _with_level(self, activations, hidden_states, kwargs)
    if CHECKPOINTS_FORWARD and self.gradient_checkpointing and self.training:
        return self._gradient_checkpointing_func(run_again(self, partial(_block, self, **kwargs)), hidden_states)
    return _block(self, hidden_states, **kwargs)


def _block(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return _total(_halves(self, hidden_states, None, **kwargs))


def _halves(self: Any, x: Tensor, store: Store | None, output: bool = True, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Two tensors whose sum a layer returns; `store` and `output` as in `blocks`."""
    attended, stream = attention_half(self, x, store, **kwargs)
    if not runs_parallel(self):
        return mlp_half(self, attended, stream, store, output)
    # Its norm is taken again, one pass over the stream; the sum is that of `_then_mlp`, to the bit.
    return _total(mlp_half(self, stream, None, store, output)), attended


def _total(parts: tuple[Tensor, Tensor]) -> Tensor:
    return parts[0] + parts[1]


def _with_level(self: Any, activations: Activations, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
    level, host = activations.level, activations.offload
    with contextlib.nullcontext() if host is None else host.hooks():
        if level == "keep":
            return _block(self, hidden_states, **kwargs)
        kept = OFFLOADED.get(level, level)
        if kept == "checkpoint":
            with stream_in_slices(mixer_of(self), host or OnDevice()):
                return _recomputed(self, hidden_states, level == "tiled", kwargs)
        store = host or OnDevice()
        if kept == "recompute":
            return _total(_halves(self, hidden_states, store, **kwargs))
        return _then_mlp(self, *attention_half(self, hidden_states, store, **kwargs))


def _recomputed(self: Any, hidden_states: Tensor, tiled: bool, kwargs: dict[str, Any]) -> Tensor:
    """A layer of which only its input is kept."""

    def block(x: Tensor, output: bool) -> tuple[Tensor, ...]:
        if tiled:
            return (_then_mlp(self, *attention_half(self, x, None, **kwargs), TILE_ROWS, output),)
        return _halves(self, x, None, output, **kwargs)

    return recompute(run_again(self, block), hidden_states, _trained(self), random=_draws(self))


def _then_mlp(self: Any, attended: Tensor, stream: Tensor, rows: int | None = None, output: bool = True) -> Tensor:
    """What a layer returns behind its attention, with its MLP as in `_mlp_recomputed`."""
    if runs_parallel(self):
        return _mlp_recomputed(self, stream, rows, output) + attended
    return _mlp_recomputed(self, attended + stream, rows, output)


def _mlp_recomputed(self: Any, stream: Tensor, rows: int | None = None, output: bool = True) -> Tensor:
    """`stream` and what the MLP adds to it, of which only `stream` is kept."""

    def half(x: Tensor, needed: bool) -> tuple[Tensor, Tensor]:
        return mlp_half(self, x, None, output=needed)

    return recompute(run_again(self, half), stream, _trained(self), rows=rows, random=_draws(self), output=output)


def _trained(layer: nn.Module) -> list[Tensor]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _draws(layer: Any) -> bool:
    """Whether a layer draws random numbers."""
    drawn = (getattr(module, name, 0) for module in layer.modules() for name in DRAWN)
    dropouts = (module for module in layer.modules() if isinstance(module, nn.Dropout))
    return any(drawn) or any(module.p > 0 and module.training for module in dropouts)
