"""Delayed scaling (Micikevicius et al. 2022, arXiv:2209.05433, section 3.2): FP8 scales from past steps' magnitudes.

Casting a tensor to FP8 with its own scale needs two passes, the first for its amax. Delayed scaling casts with a scale
from past optimizer steps and records the amax in the same pass:

    scale = fp8_max · 2^-margin / max(amax history)        code = FP8(clamp(v · scale))        v ≈ code / scale

The state of all tensors of a model is three buffers, so advancing it takes a few operations on one device and one
all-reduce. Nothing here synchronises with the device: a CUDA graph can capture a training step with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..formats.float8 import FP8_MAX
from ..utils.errors import ConfigError
from .float8 import cast_float8, scale_of

LOOKS = 4  # first optimizer steps after which the host checks which scales are set
Algorithm = Literal["max", "most_recent"]


@dataclass(frozen=True)
class ScalingOptions:
    """How scales follow from amax histories.

    Args:
        margin: powers of two of headroom.
        amax_history_len: optimizer steps in the history, the current one included.
        amax_compute_algo: scale by the history's maximum ("max"), or by its newest entry ("most_recent").
        reduce_amax: take the maximum over all ranks with other tokens, so that all ranks cast with the same scale.

    Raises:
        ConfigError: an invalid value, by key.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Algorithm = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len is {self.amax_history_len}", "use 1 or more optimizer steps")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ConfigError(f"amax_compute_algo is {self.amax_compute_algo!r}", "use max or most_recent")


class DelayedScaling(nn.Module):
    """Amax histories and scales of `len(dtypes)` tensors.

    A step casts tensor i with `scale_for(i, amax)` and calls `observe(i, amax)`; `roll()` ends an optimizer step.

    Args:
        dtypes: FP8 type of each tensor: torch.float8_e4m3fn or torch.float8_e5m2.
        options: see `ScalingOptions`.

    Attributes (tensors; the first two are saved):
        history: fp32 [tensors, amax_history_len], newest first; the first column is the current step's.
        scale: fp32 [tensors], the factor of the values; 0 until an amax has been recorded.
        target: fp32 [tensors], fp8_max · 2^-margin.
        inverse: fp32 [tensors], 1 / scale where that is not 0.
        unseen: fp32 [], receives amaxes that are not recorded; never read.

    `settled` lists on the host which scales are known not to be 0. Their tensors need no pass for the amax, and kernels
    can cast them as they write them. The host checks after each of the first `LOOKS` steps, never inside a graph.
    Tensors that were all zeros or unused until then stay unsettled and always need the extra pass.
    """

    history: Tensor
    scale: Tensor
    target: Tensor
    unseen: Tensor
    _inverse: Tensor

    def __init__(self, dtypes: Sequence[torch.dtype], options: ScalingOptions, *, device: Any = None):
        super().__init__()
        self.options, self.dtypes = options, tuple(dtypes)
        target = torch.tensor([FP8_MAX[dtype] for dtype in dtypes], device=device) * 2.0**-options.margin
        self.register_buffer("history", target.new_zeros(len(dtypes), options.amax_history_len))
        self.register_buffer("scale", torch.zeros_like(target))
        self.register_buffer("target", target, persistent=False)
        # Stride of 16 bytes: cuBLAS refuses a scale that is not so aligned (seen on an H200).
        self.register_buffer("_inverse", torch.ones_like(target).unsqueeze(1).repeat(1, 4), persistent=False)
        self.register_buffer("unseen", target.new_zeros(()), persistent=False)
        self.settled, self._looks = [False] * len(dtypes), LOOKS
        self.register_load_state_dict_post_hook(lambda state, _: state._settle())

    @property
    def inverse(self) -> Tensor:
        return self._inverse[:, 0]

    def _apply(self, function: Any, recurse: bool = True) -> DelayedScaling:
        """Move buffers for `.to(device)`; keep them in fp32 for `.to(dtype)`, since 16 bits would change the scales."""

        def moved(tensor: Tensor) -> Tensor:
            result = function(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)

    def scale_for(self, index: int, amax: Tensor) -> Tensor:
        """Scale of past steps, fp32 []; without one the scale of `amax` (1 if amax is 0 or not finite)."""
        return torch.where(self.scale[index] > 0, self.scale[index], scale_of(amax, self.target[index]))

    def observe(self, index: int, amax: Tensor) -> None:
        """Record the maximum of `amax` (fp32 []) and this step's earlier micro-batches; NaN is preserved."""
        newest = self.history[index, 0]
        newest.copy_(torch.maximum(newest, amax))

    def roll(self, largest: Callable[[Tensor], Tensor] | None = None) -> None:
        """Compute new scales and start a new history entry; call it once per optimizer step.

        Args:
            largest: element-wise maximum of fp32 [tensors] over all ranks with other tokens; used with `reduce_amax`.
                None: a single process.

        A newest entry of zero does not change the scale of an empty history. If it is NaN or Inf on any rank, the scale
        does not change and the entry becomes 0, so that it does not affect later scales.
        """
        newest = self.history[:, 0]
        if self.options.reduce_amax and largest is not None:
            # A maximum over ranks drops NaN on some backends, but never Inf.
            newest.copy_(largest(newest.nan_to_num(nan=torch.inf, posinf=torch.inf)))
        finite = newest.isfinite()
        newest.masked_fill_(~finite, 0)
        amax = self.history.amax(1) if self.options.amax_compute_algo == "max" else newest
        self.scale.copy_(torch.where(finite & (amax > 0), scale_of(amax, self.target), self.scale))
        self.history.copy_(self.history.roll(1, 1))
        self.history[:, 0] = 0
        self.inverse.copy_(torch.where(self.scale > 0, 1 / self.scale, 1.0))
        in_graph = self.scale.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._looks and not all(self.settled) and not in_graph:
            self._looks -= 1
            self.settled = (self.scale > 0).tolist()

    def _settle(self) -> None:
        """Recompute `inverse` and `settled` from loaded scales."""
        self.inverse.copy_(torch.where(self.scale > 0, 1 / self.scale, 1.0))
        self.settled = (self.scale > 0).tolist()


class Codes(NamedTuple):
    """FP8 tensor: codes [M, K] and the inverse of their scale, fp32 []."""

    values: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Slot:
    """Entry `index` of a `DelayedScaling`: casts one operand of a GEMM.

    Args:
        recorded: record amaxes in the history; true in training.
    """

    state: DelayedScaling
    index: int
    recorded: bool = True

    @property
    def settled(self) -> bool:
        """Whether the scale is known not to be 0."""
        return self.state.settled[self.index]

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtypes[self.index]

    @property
    def scale(self) -> Tensor:
        return self.state.scale[self.index]

    @property
    def inverse(self) -> Tensor:
        return self.state.inverse[self.index]

    @property
    def newest(self) -> Tensor:
        """Destination of a cast's amax, fp32 []."""
        return self.state.history[self.index, 0] if self.recorded else self.state.unseen

    def of(self, values: Tensor) -> Codes:
        """Wrap codes that a kernel cast with this slot's settled scale."""
        return Codes(values, self.inverse)

    def cast(self, *tensors: Tensor, factors: Tensor | None = None) -> Codes:
        """Cast tensors [M, Kᵢ] to FP8, concatenated, with one scale, and record their amax. See `cast_float8`."""
        target = self.state.target[self.index]
        return Codes(*cast_float8(self.scale, tensors, factors, target, self.newest, self.dtype, self.settled))
