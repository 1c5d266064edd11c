"""Activation checkpointing: run each decoder layer at its level.

A level determines which activations a decoder layer saves for the backward. `plan.policy` gives the cost of each. Each
level saves less and recomputes more than the one before:

    keep               save all tensors that the backward reads
    recompute          recompute the normalized inputs of attention and MLP in one elementwise pass each
    recompute_mlp      save only the input of the MLP; recompute gate and up as well
    checkpoint         save only the layer's input; recompute all but the last GEMM (`autograd.checkpointing`)

offload_kept, offload_attention and offload save the same tensors as recompute, recompute_mlp and checkpoint, in pinned
host memory (`memory.offload`). The copies take as long as the forward of three layers for offload_kept, and of one
layer for offload_attention, so layers of offload_kept alternate with other levels. The last level is

    tiled              offload, with the MLP running over `TILE_ROWS` tokens at a time to bound its inner tensors

A layer's level is in its `PatchRecord`. A layer without a level follows transformers' own gradient checkpointing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, cast, get_args

from torch import Tensor, nn

from ..autograd.checkpointing import OnDevice, Store, recompute
from ..config import Level
from ..dispatch import on_compiler
from ..memory.offload import Offload
from ..mesh.sharded_linears import sharded_saved_tensors
from ..utils.errors import ModelError
from ..utils.notices import notice
from .blocks import attention_half, mixer_of, mlp_half, runs_parallel
from .cast_cache import with_open_cache
from .patch_record import Activations, active_row_modules, record
from .transformers_versions import CHECKPOINTS_FORWARD, given_cache

LEVELS: tuple[Level, ...] = get_args(Level)
OFFLOADED: dict[str, Level] = {  # level → the level whose saved tensors it moves to the host
    "offload_kept": "recompute",
    "offload_attention": "recompute_mlp",
    "offload": "checkpoint",
    "tiled": "checkpoint",
}
TILE_ROWS = 8192  # tokens

# Attributes of modules that draw random numbers in training if nonzero, in addition to nn.Dropout.
RANDOM_ATTRIBUTES = (
    "attention_dropout",
    "residual_dropout",
    "jitter_noise",
    "input_jitter_noise",
    "router_jitter_noise",
)


def set_activations(layers: Sequence[Any], levels: str | Sequence[str]) -> None:
    """Set the activation level of each decoder layer: one for all, or one each.

    Raises:
        ModelError: an unknown level, not one level per layer, or transformers' checkpointing is enabled as well.
    """
    named = [levels] * len(layers) if isinstance(levels, str) else list(levels)
    unknown = set(named) - set(LEVELS)
    if unknown:
        raise ModelError(f"activations: unknown level {sorted(unknown)[0]!r}", f"use {', '.join(LEVELS)}")
    if len(named) != len(layers):
        raise ModelError(f"activations: {len(named)} levels for {len(layers)} layers", "give one, or one per layer")
    if any(layer.gradient_checkpointing for layer in layers):
        raise ModelError(
            "activations: transformers' gradient checkpointing is enabled in this model",
            "call model.gradient_checkpointing_disable(), or remove `activations`",
        )
    device = next(layers[0].parameters()).device
    offload = None
    if set(OFFLOADED) & set(named):
        if device.type == "cuda":
            offload = Offload(device)
        else:
            notice("offload", f"activation offload is disabled on {device}: saved activations stay on this device")
    for layer, level in zip(layers, named, strict=True):
        layer_offload = offload if level in OFFLOADED else None
        record(layer).activations = Activations(cast(Level, level), layer_offload)


def layer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a decoder layer at its activation level."""
    if args or given_cache(kwargs):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    activations = record(self).activations
    if activations is not None and self.training and not on_compiler():  # a compiler decides what is saved
        level, host = activations.level, activations.offload
        with contextlib.nullcontext() if host is None else host.hooks():
            if level == "keep":
                return _block(self, hidden_states, **kwargs)
            store, base = host or OnDevice(), OFFLOADED.get(level, level)
            if base == "checkpoint":
                with sharded_saved_tensors(mixer_of(self), store):
                    return _checkpointed(self, hidden_states, level == "tiled", kwargs)
            if base == "recompute":
                return _add_halves(_halves(self, hidden_states, store, **kwargs))
            return _add_mlp(self, *attention_half(self, hidden_states, store, **kwargs))
    if CHECKPOINTS_FORWARD and self.gradient_checkpointing and self.training:
        return self._gradient_checkpointing_func(with_open_cache(self, partial(_block, self, **kwargs)), hidden_states)
    return _block(self, hidden_states, **kwargs)


def _block(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    return _add_halves(_halves(self, hidden_states, None, **kwargs))


def _halves(self: Any, x: Tensor, store: Store | None, output: bool = True, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return one or two tensors whose sum is the layer's output; `store` and `output` as in `blocks`."""
    attended, stream = attention_half(self, x, store, **kwargs)
    if stream is None or not runs_parallel(self):
        return mlp_half(self, attended, stream, store, output)
    # Recomputes the norm, one pass over the stream; the sum is bit-equal to that of `_add_mlp`.
    return _add_halves(mlp_half(self, stream, None, store, output)), attended


def _add_halves(halves: tuple[Tensor, ...]) -> Tensor:
    return halves[0] if len(halves) == 1 else halves[0] + halves[1]


def _checkpointed(self: Any, hidden_states: Tensor, tiled: bool, kwargs: dict[str, Any]) -> Tensor:
    """Run a layer that saves only its input for backward."""

    def block(x: Tensor, output: bool) -> tuple[Tensor, ...]:
        if tiled:
            return (_add_mlp(self, *attention_half(self, x, None, **kwargs), TILE_ROWS, output),)
        return _halves(self, x, None, output, **kwargs)

    return recompute(with_open_cache(self, block), hidden_states, _trainable(self), random=_is_random(self))


def _add_mlp(
    self: Any, attended: Tensor, stream: Tensor | None, rows: int | None = None, output: bool = True
) -> Tensor:
    """Return a layer's output from its attention's, with the MLP as in `_mlp_recomputed`."""
    if stream is None:
        return _mlp_recomputed(self, attended, rows, output)
    if runs_parallel(self):
        return _mlp_recomputed(self, stream, rows, output) + attended
    return _mlp_recomputed(self, attended + stream, rows, output)


def _mlp_recomputed(self: Any, stream: Tensor, rows: int | None = None, output: bool = True) -> Tensor:
    """Return `stream` plus the MLP's output, saving only `stream` for backward."""

    def half(x: Tensor, needed: bool) -> tuple[Tensor, ...]:
        return mlp_half(self, x, None, output=needed)

    return recompute(
        with_open_cache(self, half), stream, _trainable(self), rows=rows, random=_is_random(self), output=output
    )


def _trainable(layer: nn.Module) -> list[Tensor]:
    layers = active_row_modules(layer) or [layer]
    return [parameter for module in layers for parameter in module.parameters() if parameter.requires_grad]


def _is_random(layer: Any) -> bool:
    """Return whether a layer draws random numbers."""
    modules = [module for part in [layer, *active_row_modules(layer)] for module in part.modules()]
    noise = (getattr(module, name, 0) for module in modules for name in RANDOM_ATTRIBUTES)
    dropouts = (module for module in modules if isinstance(module, nn.Dropout))
    return any(noise) or any(module.p > 0 and module.training for module in dropouts)
