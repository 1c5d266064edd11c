"""Products of one input with frozen weights in FP8: E4M3 forward, E5M2 for gradients (the recipe "fp8-hybrid";
Micikevicius et al. 2022, arXiv:2209.05433).

    yᵢ = cast(x)·W8ᵢᵀ · (1/s_x)·s_Wᵢ                          x in E4M3, cast once for all i
    dx = cast([dy₁, dy₂, …])·[W8₁; W8₂; …] · (1/s_g)·s_W      the dy side by side in E5M2: one product, one scale

W8 is in E4M3 with one scale for the tensor, or one a row where it is stored so. FP8 weights are multiplied as they are
stored, 4-bit ones go to E4M3 in one pass, anything else is dequantized to 16 bits and cast. Weights of one input that
are cast share a scale, that of their largest magnitude. Where scales differ along the sum of dx, they cannot leave it,
and are multiplied into the columns of dy before those are cast. W is frozen: it has no gradient, and its scale is found
once. dx wants W8 transposed, which the pass that makes W8 does on the way.

On NVIDIA GPUs with FP8 units the products are cuBLAS's (`ops.fp8_product`). Elsewhere the same codes are multiplied in
16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..formats import Blockwise4, Float8
from ..ops.float8 import E4M3, FP8_MAX, TINY, cast_float8, float8_of_blockwise4, fp8_product, transpose_float8
from ..ops.fp8_scaling import Codes, Slot
from ..utils.notices import notice
from .lora import dense

if TYPE_CHECKING:
    from .lora import Weight


@dataclass(frozen=True)
class _Scales:
    """Of the weights of one input.

    each: fp32 [] or [Nᵢ], what weight i's codes stand for; its inverse is what values are cast with.
    factors: fp32 [ΣNᵢ], multiplied into the columns of dy; None where all codes have the scale `shared`.
    shared: fp32 [].
    """

    weights: tuple[Weight, ...]
    each: tuple[Tensor, ...]
    inverses: tuple[Tensor, ...]
    factors: Tensor | None
    shared: Tensor

    @classmethod
    def of(cls, weights: tuple[Weight, ...], dtype: torch.dtype) -> _Scales:
        stored = [_stored_scale(weight) for weight in weights]
        own = [_magnitude(weight, dtype) for weight, scale in zip(weights, stored, strict=True) if scale is None]
        if own:
            common = torch.stack(own).amax().div(FP8_MAX[E4M3]).clamp(min=TINY)
            stored = [common if scale is None else scale for scale in stored]
        each = tuple(scale for scale in stored if scale is not None)
        inverses = tuple(torch.reciprocal(scale) for scale in each)
        if all(scale is each[0] and not scale.dim() for scale in each):
            return cls(weights, each, inverses, None, each[0])
        spread = [scale.expand(weight.shape[0]) for scale, weight in zip(each, weights, strict=True)]
        return cls(weights, each, inverses, torch.cat(spread), torch.ones_like(spread[0][0]))


_Identity = tuple[int, int, int, torch.dtype]


def _identity(x: Tensor) -> _Identity:
    """What two tensors of equal values have in common, as long as one of them is alive."""
    return x.data_ptr(), x.numel(), x._version, x.dtype


class Fp8Products:
    """The products of one input in FP8; `autograd.lora.Products` says what for.

    Args:
        x: history of the input, in E4M3.
        grad: history of the outputs' gradients (times their weights' scales, where those differ), in E5M2.
    """

    name: ClassVar[str] = "fp8-hybrid"

    def __init__(self, x: Slot, grad: Slot):
        self.x, self.grad = x, grad
        self._scales: _Scales | None = None
        self._handed: tuple[Tensor, _Identity, Codes] | None = None  # the tensor: while it lives, nothing has its place

    def hand_over(self, x: Tensor, values: Tensor) -> None:
        """x [..., K] is here in FP8 as well, cast with the scale of the slot; for the next product, if that is of x."""
        self._handed = x.detach(), _identity(x), self.x.of(values.view(-1, values.shape[-1]))

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """None too where x was handed over; what else was is forgotten."""
        if self._handed is not None and self._handed[1] == _identity(x):
            return None
        self._handed = None
        return self.x if self.x.settled else None

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """With the weights' scales, where those differ."""
        return (self.grad, self.scales(weights, dtype).factors) if self.grad.settled else (None, None)

    def _cast(self, x: Tensor) -> Codes:
        handed, self._handed = self._handed, None
        return handed[2] if handed is not None and handed[1] == _identity(x) else self.x.cast(x)

    def products(self, x: Tensor | Codes, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ into `outs` [M, Nᵢ]; x [M, K], cast already or not."""
        if not outs[0].numel():
            return
        codes, inverse = x if isinstance(x, Codes) else self._cast(x)
        scales = self.scales(weights, outs[0].dtype)
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            values = weight_codes(weight, scales.inverses[i], out.dtype)
            fp8_product(codes, values, inverse, scales.each[i], out, True)

    def input_gradient(self, grads: Sequence[Tensor] | Codes, weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K]; dy [M, Nᵢ] each, or already cast side by side."""
        sizes, width = [weight.shape[0] for weight in weights], weights[0].shape[1]
        dx = torch.empty(grads[0].shape[0], width, dtype=dtype, device=grads[0].device)
        if not dx.numel():
            return dx
        scales = self.scales(weights, dtype)
        codes = grads if isinstance(grads, Codes) else self.grad.cast(*grads, factors=scales.factors)
        turned = torch.empty(width, sum(sizes), dtype=E4M3, device=dx.device)
        for weight, inverse, out in zip(weights, scales.inverses, turned.split(sizes, dim=1), strict=True):
            weight_codes(weight, inverse, dtype, out)
        fp8_product(codes.values, turned, codes.inverse, scales.shared, dx, False)
        return dx

    def scales(self, weights: Sequence[Weight], dtype: torch.dtype) -> _Scales:
        """Found once, for as long as the weights are the same tensors."""
        found, weights = self._scales, tuple(weights)
        if found is None or any(a is not b for a, b in zip(found.weights, weights, strict=True)):
            self._scales = found = _Scales.of(weights, dtype)
        return found


def _stored_scale(weight: Weight) -> Tensor | None:
    """fp32 [] or [N] of a weight that is stored as a product takes it."""
    format_ = getattr(weight, "format", None)
    return weight.parts["scale"] if isinstance(format_, Float8) and format_.scaling != "tile" else None  # type: ignore[union-attr]


def _magnitude(weight: Weight, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(dense(weight, dtype), torch.inf, dtype=torch.float32)


def weight_codes(weight: Weight, inverse: Tensor, dtype: torch.dtype, turned: Tensor | None = None) -> Tensor:
    """E4M3 codes [N, K] of a weight, or their transpose [K, N] written into `turned`.

    Args:
        inverse: fp32 [], what values are multiplied with; not looked at where the weight is stored in E4M3.
        dtype: of the values in between, where a format goes to E4M3 by way of 16 or 32 bits.
        turned: float8_e4m3fn [K, N]; its rows may be apart.
    """
    format_, shape = getattr(weight, "format", None), tuple(weight.shape)
    if isinstance(format_, Blockwise4) and shape[1] % 8 == 0:
        parts = weight.parts  # type: ignore[union-attr]
        options = (format_.nested_parts(parts), format_.blocksize, format_.quant_type, shape, inverse)
        return float8_of_blockwise4(parts["packed"], parts["absmax"], *options, turned is not None, turned)
    if _stored_scale(weight) is not None:
        codes = weight.parts["codes"].view(E4M3)  # type: ignore[union-attr]
    else:
        name = "16-bit" if format_ is None else format_.name
        notice(f"fp8-of-{name}", f"fp8-hybrid: {name} weights are dequantized and then cast, which costs a pass more")
        codes, _ = cast_float8(inverse, (dense(weight, dtype),), None, inverse, inverse.new_zeros(()), E4M3, True)
    return codes if turned is None else transpose_float8(codes, turned)
