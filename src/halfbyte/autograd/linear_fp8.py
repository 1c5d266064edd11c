"""The recipe "fp8-hybrid": GEMMs of one input with frozen weights in FP8, E4M3 forward and E5M2 for gradients.

    yᵢ = cast(x)·W8ᵢᵀ · (1/s_x)·s_Wᵢ                          x in E4M3, cast once for all i
    dx = cast([dy₁, dy₂, …])·[W8₁; W8₂; …] · (1/s_g)·s_W      dy concatenated in E5M2: one GEMM, one scale

W8 is E4M3 with one scale per tensor, or per row if it is stored that way. FP8 weights are used as stored; 4-bit weights
convert to E4M3 in one pass; other weights are dequantized to 16 bits and cast. Cast weights of one input share a scale,
given by their largest magnitude. If scales differ along the contraction of dx, they cannot be factored out, so they are
multiplied into the columns of dy before the cast. W is frozen: it has no gradient and its scale is computed once. dx
needs W8 transposed; the pass that computes W8 writes it transposed.

On NVIDIA GPUs with FP8 units cuBLAS computes the GEMMs (`ops.float8.fp8_product`). On other devices the same codes are
multiplied in 16 or 32 bits.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..formats import Blockwise4, Float8
from ..formats.base import Weight, is_quantized
from ..formats.float8 import E4M3, FP8_MAX, TINY
from ..ops.float8 import cast_float8, float8_of_blockwise4, fp8_product, transpose_float8
from ..ops.fp8_scaling import Codes, Slot
from ..utils.notices import notice
from .gemms import dense


@dataclass(frozen=True)
class _Scales:
    """Scales of the weights of one input.

    Attributes:
        scales: fp32 [] or [Nᵢ], dequantization scale of weight i.
        inverses: reciprocals of `scales`, which values are multiplied by before the cast.
        factors: fp32 [ΣNᵢ], multiplied into the columns of dy; None if all weights have the scale `shared`.
        shared: fp32 [], the scale that is applied to dx.
    """

    weights: tuple[Weight, ...]
    scales: tuple[Tensor, ...]
    inverses: tuple[Tensor, ...]
    factors: Tensor | None
    shared: Tensor

    @classmethod
    def of(cls, weights: tuple[Weight, ...], dtype: torch.dtype) -> _Scales:
        stored = [_stored_scale(weight) for weight in weights]
        magnitudes = [
            torch.linalg.vector_norm(dense(weight, dtype), torch.inf, dtype=torch.float32)
            for weight, scale in zip(weights, stored, strict=True)
            if scale is None
        ]
        if magnitudes:
            common = torch.stack(magnitudes).amax().div(FP8_MAX[E4M3]).clamp(min=TINY)
            stored = [common if scale is None else scale for scale in stored]
        scales = tuple(scale for scale in stored if scale is not None)
        inverses = tuple(torch.reciprocal(scale) for scale in scales)
        if all(scale is scales[0] and not scale.dim() for scale in scales):
            return cls(weights, scales, inverses, None, scales[0])
        spread = [scale.expand(weight.shape[0]) for scale, weight in zip(scales, weights, strict=True)]
        return cls(weights, scales, inverses, torch.cat(spread), torch.ones_like(spread[0][0]))


_Identity = tuple[int, int, int, torch.dtype]


def _identity(x: Tensor) -> _Identity:
    """Key of a tensor's values: equal keys mean equal values while the first tensor is alive."""
    return x.data_ptr(), x.numel(), x._version, x.dtype


class Fp8Gemms:
    """GEMMs of one input in FP8; implements `autograd.lora.GemmRecipe`.

    Args:
        x: amax history of the input, in E4M3.
        grad: amax history of the outputs' gradients (times their weights' scales, if those differ), in E5M2.
    """

    name: ClassVar[str] = "fp8-hybrid"

    def __init__(self, x: Slot, grad: Slot):
        self.x, self.grad = x, grad
        self._scales: _Scales | None = None
        # The tensor is held so that its memory, and with it the key, is not reused.
        self._handed: tuple[Tensor, _Identity, Codes] | None = None

    def hand_over(self, x: Tensor, values: Tensor) -> None:
        """Store `values`, x [..., K] cast to FP8 with the slot's scale, for the next GEMM if its input is x."""
        self._handed = x.detach(), _identity(x), self.x.of(values.view(-1, values.shape[-1]))

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """See `GemmRecipe`. None also if x was handed over; another tensor that was handed over is dropped."""
        if self._handed is not None and self._handed[1] == _identity(x):
            return None
        self._handed = None
        return self.x if self.x.settled else None

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """See `GemmRecipe`; the factors are the weights' scales, if those differ."""
        return (self.grad, self.scales(weights, dtype).factors) if self.grad.settled else (None, None)

    def _cast(self, x: Tensor) -> Codes:
        handed, self._handed = self._handed, None
        return handed[2] if handed is not None and handed[1] == _identity(x) else self.x.cast(x)

    def outputs(self, x: Tensor | Codes, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ into `outs` [M, Nᵢ]; x [M, K] is a tensor, or codes."""
        if not outs[0].numel():
            return
        codes, inverse = x if isinstance(x, Codes) else self._cast(x)
        scales = self.scales(weights, outs[0].dtype)
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            values = weight_codes(weight, scales.inverses[i], out.dtype)
            fp8_product(codes, values, inverse, scales.scales[i], out, True)

    def input_gradient(self, grads: Sequence[Tensor] | Codes, weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K]; `grads` are dyᵢ [M, Nᵢ], or the codes of their concatenation."""
        sizes, width = [weight.shape[0] for weight in weights], weights[0].shape[1]
        dx = torch.empty(grads[0].shape[0], width, dtype=dtype, device=grads[0].device)
        if not dx.numel():
            return dx
        scales = self.scales(weights, dtype)
        codes = grads if isinstance(grads, Codes) else self.grad.cast(*grads, factors=scales.factors)
        transposed = torch.empty(width, sum(sizes), dtype=E4M3, device=dx.device)
        for weight, inverse, out in zip(weights, scales.inverses, transposed.split(sizes, dim=1), strict=True):
            weight_codes(weight, inverse, dtype, out)
        fp8_product(codes.values, transposed, codes.inverse, scales.shared, dx, False)
        return dx

    def scales(self, weights: Sequence[Weight], dtype: torch.dtype) -> _Scales:
        """Scales of the weights, cached while the weights are the same tensors."""
        scales, weights = self._scales, tuple(weights)
        if scales is None or any(a is not b for a, b in zip(scales.weights, weights, strict=True)):
            self._scales = scales = _Scales.of(weights, dtype)
        return scales


def _stored_scale(weight: Weight) -> Tensor | None:
    """fp32 [] or [N]: the scale of a weight that is stored in FP8 per tensor or row; None for other weights."""
    if not is_quantized(weight) or not isinstance(weight.format, Float8) or weight.format.scaling == "tile":
        return None
    return weight.parts["scale"]


def weight_codes(weight: Weight, inverse: Tensor, dtype: torch.dtype, transposed: Tensor | None = None) -> Tensor:
    """E4M3 codes [N, K] of a weight, or their transpose [K, N] written into `transposed`.

    Args:
        inverse: fp32 [], factor of the values before the cast; ignored if the weight is stored in E4M3.
        dtype: dtype of the dequantized values, for formats without a direct conversion to E4M3.
        transposed: float8_e4m3fn [K, N]; its rows may be strided.
    """
    format_, shape = weight.format if is_quantized(weight) else None, tuple(weight.shape)
    if is_quantized(weight) and isinstance(format_, Blockwise4) and shape[1] % 8 == 0:
        tensors = weight.parts
        options = (format_.nested_parts(tensors), format_.blocksize, format_.quant_type, shape, inverse)
        return float8_of_blockwise4(tensors["packed"], tensors["absmax"], *options, transposed is not None, transposed)
    if is_quantized(weight) and _stored_scale(weight) is not None:
        codes = weight.parts["codes"].view(E4M3)
    else:
        name = "16-bit" if format_ is None else format_.name
        notice(f"fp8-of-{name}", f"fp8-hybrid: {name} weights are dequantized and then cast, which takes an extra pass")
        codes, _ = cast_float8(inverse, (dense(weight, dtype),), None, inverse, inverse.new_zeros(()), E4M3, True)
    return codes if transposed is None else transpose_float8(codes, transposed)
