"""FP8 weights: E4M3 codes with fp32 scales per tensor, per row, or per tile of 128×128.

    scale = amax / 448 over its values (1 for a group of zeros)
    code  = E4M3(clamp(v / scale, ±448)), nearest, halves to even        v ≈ code · scale

(Micikevicius et al. 2022, arXiv:2209.05433.) Tiles at the edges are smaller; tiles do not cross the matrices of a
stack. Per-tile weights use the checkpoint layout of Hugging Face's block-FP8 models (DeepSeek-V3, Qwen3-FP8), which
load without requantization. For the parameter `weight` of a module, the module has the entries:

    weight            float8_e4m3fn [..., N, K]
    weight_scale_inv  fp32 [..., ⌈N/128⌉, ⌈K/128⌉]; bf16 and E8M0 are read too

The "float-quantized" layout of compressed-tensors stores `weight_scale` in its place, bf16 or fp32: [], [1] or [1, 1]
per tensor, [N] or [N, 1] per row, or one per tile. These layouts do not record the dtype of the values; they load as
bfloat16. Per-tensor and per-row weights are saved in halfbyte's own layout (`Format.to_state`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import CheckpointError, ModelError
from .base import (
    DAMAGED,
    Format,
    Loaded,
    Parts,
    PartSpecs,
    Shards,
    check_parts,
    check_weight_finite,
    cut,
    entry_name,
    register_format,
    split_parts,
)
from .compressed_tensors import FLOAT as FLOAT_QUANTIZED
from .compressed_tensors import scheme_of
from .linear import PackedProduct, linear_rows

Scaling = Literal["tensor", "row", "tile"]
TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
TINY = torch.finfo(torch.float32).tiny  # a smaller scale would lose precision
SCALINGS = ("tensor", "row", "tile")
SCALE_INV = "../weight_scale_inv"
SCALE = "../weight_scale"
INPUT_SCALE = "../input_scale"  # not used
TENSOR_SIZES = ((), (1,), (1, 1))  # shapes of the one scale of a tensor
STRATEGIES: dict[str, Scaling] = {"tensor": "tensor", "channel": "row", "block": "tile"}  # of compressed-tensors
EXACT_IN_FP32 = (torch.bfloat16, torch.float8_e8m0fnu)


def scale_shape(shape: tuple[int, ...], scaling: Scaling) -> tuple[int, ...]:
    """Shape of the scales of a tensor: [], [rows] over all but the last dimension, or [..., ⌈N/128⌉, ⌈K/128⌉]."""
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return (torch.Size(shape[:-1]).numel(),)
    return (*shape[:-2], *(-(-size // TILE) for size in shape[-2:]))


def spread_scales(scale: Tensor, shape: tuple[int, ...], scaling: Scaling) -> Tensor:
    """fp32 scales, repeated to broadcast with a tensor of `shape`."""
    if scaling == "tensor":
        return scale
    if scaling == "row":
        return scale.view(*shape[:-1], 1)
    for dim in range(-min(len(shape), 2), 0):
        scale = scale.repeat_interleave(TILE, dim).narrow(dim, 0, shape[dim])
    return scale


def _amax(weight: Tensor, scaling: Scaling) -> Tensor:
    """Largest magnitudes, fp32 in the shape of the scales; NaN where a value is NaN."""
    shape = scale_shape(tuple(weight.shape), scaling)
    if scaling == "tensor":
        return torch.linalg.vector_norm(weight, torch.inf, dtype=torch.float32)
    if scaling == "row":
        return torch.linalg.vector_norm(weight.reshape(-1, weight.shape[-1]), torch.inf, dim=1, dtype=torch.float32)
    matrices = weight.reshape(-1, *weight.shape[-2:]) if weight.dim() > 1 else weight.view(1, 1, -1)
    stack, rows, columns = matrices.shape
    tiles = torch.nn.functional.pad(matrices, (0, -columns % TILE, 0, -rows % TILE))
    tiles = tiles.view(stack, -(-rows // TILE), TILE, -1, TILE)
    return torch.linalg.vector_norm(tiles, torch.inf, dim=(2, 4), dtype=torch.float32).view(shape)


def quantize_float8(weight: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Quantize `weight` (fp32, fp16 or bf16) to E4M3 codes of its shape and fp32 scales of `scale_shape`."""
    amax = _amax(weight, scaling)
    # Divide by a tensor: for a Python number CUDA multiplies by the reciprocal, so its bits differ from a CPU's.
    scale = torch.where(amax == 0, 1.0, amax / amax.new_full((), FP8_MAX[E4M3])).clamp(min=TINY)
    spread = spread_scales(scale, tuple(weight.shape), scaling)
    return to_float8(weight.float() / spread, E4M3), scale


def to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast fp32 `values` to an FP8 type: nearest, halves to even, saturating. NaN is preserved."""
    return values.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


@op("triton.float8")
def dequantize_float8(codes: Tensor, scale: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Dequantize E4M3 `codes` (none NaN) to `dtype`, rounded once from fp32."""
    return codes.float().mul_(spread_scales(scale, tuple(codes.shape), scaling)).to(dtype)


@op("triton.gemv8", "triton.few_rows", "native.few_rows")
def linear_float8(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    """`F.linear` of rows with an E4M3 weight; no gradient.

    Kernels may sum in another order, and do not round the weights, which the reference rounds to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes: uint8 [N, K], the bits of E4M3.
        scale, scaling: as in `dequantize_float8`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_float8(codes.view(E4M3), scale, scaling, x.dtype), bias)


@register_format
@dataclass(frozen=True)
class Float8(Format):
    """E4M3 weights.

    Args:
        scaling: granularity of the scales: "tensor", "row", or "tile" (128×128).
    """

    scaling: Scaling = "row"

    name: ClassVar[str] = "fp8"
    names: ClassVar[dict[str, str]] = {"fp8": "fp8:row", "fp8-tensor": "fp8:tensor", "fp8-tile": "fp8:tile"}

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ModelError(f"fp8 has no scales per {self.scaling!r}", f"use one of {', '.join(SCALINGS)}")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.scaling}"

    @classmethod
    def parse(cls, options: str) -> Float8:
        return cls(options)  # type: ignore[arg-type]

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(scaling) for scaling in SCALINGS]  # type: ignore[arg-type]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        # uint8 instead of float8: pickle, all-gathers and counts of full-precision weights handle bytes.
        return {"codes": (tuple(shape), torch.uint8), "scale": (scale_shape(shape, self.scaling), torch.float32)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        codes, scale = quantize_float8(weight, self.scaling)
        check_weight_finite(scale, "a group with one would be lost")
        return {"codes": codes.contiguous().view(torch.uint8), "scale": scale}

    def rows_concatenate(self, rows: int) -> bool:
        return self.scaling == "row" or (self.scaling == "tile" and rows % TILE == 0)

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        if self.scaling != "tensor" or len(pieces) == 1:
            return super().concat_rows(pieces, shape)
        rows = [{**piece, "scale": piece["scale"].expand(shape[0])} for piece in pieces]  # the scale of each tensor
        return Float8("row").concat_rows(rows, shape)

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return dequantize_float8(parts["codes"].view(E4M3), parts["scale"], self.scaling, dtype)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        return PackedProduct(linear_float8, (parts["codes"], parts["scale"], self.scaling))

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scale = parts["codes"][rows].view(E4M3), parts["scale"]
        if self.scaling == "tile":  # selected rows do not form tiles: expand the scales over the columns
            scale = scale[rows // TILE].repeat_interleave(TILE, 1)[:, : shape[1]]
        elif self.scaling == "row":
            scale = scale[rows].unsqueeze(1)
        return (codes.float() * scale).to(dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        codes, scale = {"codes": cut(parts["codes"], n, dim)}, parts["scale"]
        if self.scaling == "tensor" or (self.scaling == "row" and dim):
            return self, split_parts(n, codes, {"scale": scale})
        if self.scaling == "tile" and shape[dim] // n % TILE:
            return TILE
        return self, split_parts(n, codes | {"scale": cut(scale, n, dim)}, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        if self.scaling != "tile":
            return super().to_state(parts, shape, dtype)
        return {"": parts["codes"].view(E4M3), SCALE_INV: parts["scale"]}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        if SCALE_INV not in state and any("quant_state" in suffix for suffix in state):
            return super().from_state(state, name)
        suffixes = {"codes": "", "scale": SCALE if SCALE in state and SCALE_INV not in state else SCALE_INV}
        label = entry_name(name, suffixes["scale"])
        parts = {part_name: state[key] for part_name, key in suffixes.items() if key in state}
        if "scale" in parts and parts["scale"].dtype in EXACT_IN_FP32:
            parts["scale"] = parts["scale"].float()
        if "codes" in parts and parts["codes"].dtype == E4M3:
            parts["codes"] = parts["codes"].view(torch.uint8)
        shape = tuple(parts["codes"].shape) if "codes" in parts else ()
        scale_size = tuple(parts["scale"].shape) if "scale" in parts else ()
        scaling: Scaling = "tile"
        if suffixes["scale"] == SCALE and scale_size in TENSOR_SIZES:
            scaling = "tensor"
        elif suffixes["scale"] == SCALE and scale_size in (shape[:1], (*shape[:1], 1)):
            scaling = "row"
        if scaling != "tile":
            parts["scale"] = parts["scale"].reshape(scale_shape(shape, scaling))
        elif len(parts) == 2 and scale_size != scale_shape(shape, "tile"):
            raise CheckpointError(
                f"{name} is {shape} and its scales {label} are {scale_size}, not one per 128×128 tile",
                "load a checkpoint with weight_block_size [128, 128]",
            )
        format_ = cls(scaling)
        check_parts(parts, format_.part_specs(shape), suffixes, name)
        format_.check_values(parts, {"codes": name, "scale": label})
        return format_, parts, shape, torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        codes, scale = parts["codes"], parts["scale"]
        if not scale.is_meta and not bool((scale.isfinite() & (scale >= 0)).all()):
            raise CheckpointError(f"{labels['scale']} has scales that are negative, NaN or Inf", DAMAGED)
        if not codes.is_meta and bool((codes & 127 == 127).any()):
            raise CheckpointError(f"{labels['codes']} has NaN", DAMAGED)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return super().state_suffixes() | {SCALE, INPUT_SCALE}

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        """See `Format`: quant_method "fp8" (Hugging Face's block-FP8), and compressed-tensors' "float-quantized".

        Raises for tiles other than 128×128.
        """
        if (scheme := scheme_of(entry)) and scheme.layout == FLOAT_QUANTIZED:
            return cls(STRATEGIES[scheme.strategy])
        if entry.get("quant_method") != "fp8":
            return None
        size = entry.get("weight_block_size")
        if size is None or list(size) != [TILE, TILE]:
            raise CheckpointError(
                f"config.json: quantization_config.weight_block_size is {size}; fp8 loads with [128, 128] only",
                "load the 16-bit checkpoint with quantization: fp8",
            )
        return cls("tile")
