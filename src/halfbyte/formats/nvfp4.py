"""NVFP4: E2M1 codes, an E4M3 scale per 16 values or per 16×16 tile, one fp32 factor per tensor.

With amax the largest magnitude of the tensor and of a block:

    factor = amax / (6 · 448)                         so that the largest block scale is E4M3's largest
    scale  = e4m3(block amax / (6 · factor))
    code   = e2m1(value / (scale · factor))

*Four over six* (arXiv:2512.02010): 6 has no neighbour but 4, so values near a block's amax have the largest errors.
Each block is also tried with its amax at 4, whose neighbours are 3 and 6, and the smaller error wins; ties choose 6.
The factor is then amax / (6 · 256), because a scale that maps to 4 is 1.5 times as large and must stay below 448.

*Random Hadamard transform*: 16 neighbours are multiplied by diag(±1)·H/4, orthonormal, which spreads an outlier over
its block. Applied to both operands of a GEMM along the reduced dimension it cancels.

*Stochastic rounding* is exactly unbiased while no value saturates. Block scales are therefore rounded up, and the
choice between 4 and 6 uses the errors of the nearest codes, a function of the values alone.

A stored matrix is padded with zero columns to a multiple of 16; leading dimensions count as rows; a vector is one row.
The entries of NVIDIA's ModelOpt for a parameter `weight`, low nibble first:

    weight          uint8 [N, K/2]
    weight_scale    float8_e4m3fn [N, K/16]
    weight_scale_2  fp32 []
    input_scale     fp32 []: a calibrated activation scale. halfbyte ignores it: activations are 16-bit or, in the
                    `nvfp4` recipe, scaled by their own amax

compressed-tensors stores the codes as `weight_packed`, and for the factor its reciprocal `weight_global_scale`, fp32
[1], by which it divides scales. Here scales are multiplied by the fp32 reciprocal, as vLLM does. In bf16 the values are
equal, except that a value in the middle between two numbers may be rounded to the other one: the weights of 2 of the
128 mantissas of a bf16 amax have such values. `input_global_scale` is ignored, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice
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
    rows_and_columns,
    split_parts,
)
from .codebooks import constant
from .compressed_tensors import NVFP4, scheme_of
from .e2m1 import (
    E4M3_NAN,
    codebook_e2m1,
    decode_scales,
    dequantize_e2m1,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e4m3,
    linear_e2m1,
    pack_e2m1,
)
from .linear import PackedProduct

BLOCK = 16
Metric = Literal["MSE", "L1", "AbsMax"]
ERRORS = {
    "MSE": lambda error: error.square().sum((1, 3)),
    "L1": lambda error: error.abs().sum((1, 3)),
    "AbsMax": lambda error: error.abs().amax((1, 3)),
}


class Nvfp4Codes(NamedTuple):
    """A quantized matrix [rows, columns]; columns are padded with zeros to a multiple of 16.

    Attributes:
        codes: uint8 [rows, padded], one code each; `pack_e2m1` packs them.
        scales: uint8 [⌈rows/tile rows⌉, padded/16] E4M3 bytes.
        factor: fp32 [].
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor


def quantize_nvfp4(
    values: Tensor,
    tile_rows: int,
    metric: Metric | None = None,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> Nvfp4Codes:
    """Codes and scales of a matrix.

    Args:
        values: [rows, columns], any float. NaN or Inf anywhere makes `factor` not finite.
        tile_rows: 1, a scale per 16 values of a row; or 16, a scale per 16×16 tile.
        metric: four over six with this error; None for plain NVFP4.
        stochastic: round codes stochastically, scales up.
        generator: of the random numbers; torch's own by default.
    """
    rows, columns = values.shape
    blocks = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % tile_rows)).contiguous()
    blocks = blocks.view(-(-rows // tile_rows), tile_rows, -(-columns // BLOCK), BLOCK)
    amax = blocks.abs().amax((1, 3))
    largest = amax.amax() if amax.numel() else amax.sum()
    factor = (largest / (6 * (448 if metric is None else 256))).clamp(min=torch.finfo(torch.float32).tiny)
    scales = encode_e4m3(amax / (6 * factor), up=stochastic)
    if metric is not None:
        at_four = encode_e4m3(amax / (4 * factor), up=stochastic)
        # Errors in units of the factor, whose squares neither underflow nor overflow.
        six, four = (ERRORS[metric]((blocks - _nearest(blocks, at, factor)) / factor) for at in (scales, at_four))
        scales = torch.where(four < six, at_four, scales)
    normal = _normalized(blocks, scales, factor)
    codes = encode_e2m1_stochastic(normal, generator) if stochastic else encode_e2m1(normal)
    return Nvfp4Codes(codes.view(-1, blocks.shape[2] * BLOCK)[:rows], scales, factor)


def packed_nvfp4(values: Tensor, tile_rows: int, metric: Metric | None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes uint8 [rows, padded/2], scales and factor of `quantize_nvfp4`."""
    codes, scales, factor = quantize_nvfp4(values, tile_rows, metric)
    return pack_e2m1(codes), scales, factor


def _normalized(blocks: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Divide blocks [R, rows, C, 16] by their scale; zero if the scale is 0, since such a block is below all codes."""
    step = decode_scales(scales, factor)[:, None, :, None]
    return torch.where(step > 0, blocks / step, 0.0)


def _nearest(blocks: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Round blocks to the nearest codes of these scales, and return their values."""
    codes = encode_e2m1(_normalized(blocks, scales, factor))
    return codebook_e2m1(blocks.device)[codes.int()] * decode_scales(scales, factor)[:, None, :, None]


@constant
def hadamard(seed: int, device: torch.device) -> Tensor:
    """Randomised Hadamard matrix, fp32 [16, 16]: diag(signs) · H / 4, with signs from the seed on every device."""
    ones = torch.ones(1, 1)
    for _ in range(4):
        ones = torch.cat([torch.cat([ones, ones], 1), torch.cat([ones, -ones], 1)])
    signs = torch.randint(0, 2, (BLOCK, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs * ones / 4).to(device)


def rotate(values: Tensor, seed: int) -> Tensor:
    """Multiply every 16 neighbours of a row by `hadamard(seed)`: fp32 [rows, padded], columns padded with zeros."""
    values = F.pad(values.float(), (0, -values.shape[1] % BLOCK))
    return (values.reshape(-1, BLOCK) @ hadamard(seed, values.device)).view(values.shape)


CHOICES: dict[str, Metric | None] = {"plain": None, "46mse": "MSE", "46l1": "L1", "46absmax": "AbsMax"}
SCALE = "../weight_scale"
FACTOR = "../weight_scale_2"
INPUT_SCALE = "../input_scale"
PACKED = "../weight_packed"
GLOBAL_SCALE = "../weight_global_scale"
INPUT_GLOBAL_SCALE = "../input_global_scale"


@register_format
@dataclass(frozen=True)
class Nvfp4(Format):
    """E2M1 codes with an E4M3 scale per block and one fp32 factor.

    Args:
        tiles: one scale per 16×16 tile (4.03 bits per weight), so that a weight and its transpose have equal values;
            otherwise one scale per 16 values of a row (4.5 bits).
        metric: error measure of a block that chooses between the scales of four-over-six; None: plain NVFP4.
    """

    tiles: bool = True
    metric: Metric | None = None

    name: ClassVar[str] = "nvfp4"
    names: ClassVar[dict[str, str]] = {
        "nvfp4": "nvfp4:2d:plain",
        "nvfp4-46": "nvfp4:2d:46mse",
        "nvfp4-1d": "nvfp4:1d:plain",
        "nvfp4-1d-46": "nvfp4:1d:46mse",
    }

    def __post_init__(self) -> None:
        if self.metric not in CHOICES.values():
            raise ModelError(f"four_over_six_metric {self.metric!r} is not a metric", "use 'MSE', 'L1' or 'AbsMax'")

    @property
    def spec(self) -> str:
        choice = next(word for word, metric in CHOICES.items() if metric == self.metric)
        return f"{self.name}:{'2d' if self.tiles else '1d'}:{choice}"

    @classmethod
    def parse(cls, options: str) -> Nvfp4:
        tiles, choice = options.split(":")
        return cls({"2d": True, "1d": False}[tiles], CHOICES[choice])

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(True), cls(False), cls(False, "MSE")]

    @property
    def tile(self) -> tuple[int, int]:
        return (BLOCK if self.tiles else 1), BLOCK

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, columns = rows_and_columns(shape)
        blocks = -(-columns // BLOCK)
        return {
            "packed": ((rows, blocks * BLOCK // 2), torch.uint8),
            "scale": ((-(-rows // self.tile[0]), blocks), torch.uint8),
            "factor": ((), torch.float32),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        packed, scale, factor = packed_nvfp4(
            weight.reshape(rows_and_columns(tuple(weight.shape))), self.tile[0], self.metric
        )
        check_weight_finite(factor, "all scales would be lost")
        return {"packed": packed, "scale": scale, "factor": factor}

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = rows_and_columns(shape)[1]
        values = dequantize_e2m1(parts["packed"], parts["scale"], parts["factor"], self.tile, width, dtype)
        return values.view(shape)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        return PackedProduct(linear_e2m1, (parts["packed"], parts["scale"], parts["factor"], self.tile))

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        factor = pieces[0]["factor"]
        equal = factor.is_meta or all(torch.equal(piece["factor"], factor) for piece in pieces)
        if len(pieces) == 1 or self.tiles or not equal:
            return super().concat_rows(pieces, shape)
        return self, {name: torch.cat([piece[name] for piece in pieces]) for name in ("packed", "scale")} | {
            "factor": factor
        }

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
        if shape[1] % self.tile[0]:  # the last tile of each matrix is partial
            return None
        flat = {name: parts[name].flatten(0, 1) for name in ("packed", "scale")}
        return self.dequantize(flat | {"factor": parts["factor"]}, shape, dtype)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scale = parts["packed"][rows], parts["scale"][rows // self.tile[0]]
        return dequantize_e2m1(packed, scale, parts["factor"], (1, BLOCK), shape[1], dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        if dim and (shape[1] // n) % BLOCK:
            return BLOCK
        format_, scale = self, parts["scale"]
        if not dim and (shape[0] // n) % self.tile[0]:  # a shard boundary falls inside a tile
            format_, scale = replace(self, tiles=False), scale.repeat_interleave(self.tile[0], 0)[: shape[0]]
        cuts = {"packed": cut(parts["packed"], n, dim), "scale": cut(scale, n, dim)}
        return format_, split_parts(n, cuts, {"factor": parts["factor"]})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """ModelOpt's entries for plain 1-d NVFP4 in bf16 without padding; halfbyte's own layout for anything else."""
        if self != Nvfp4(tiles=False) or len(shape) != 2 or shape[1] % BLOCK or dtype != torch.bfloat16:
            return super().to_state(parts, shape, dtype)
        return {"": parts["packed"], SCALE: parts["scale"].view(torch.float8_e4m3fn), FACTOR: parts["factor"]}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        if not {SCALE, FACTOR} & state.keys():
            return super().from_state(state, name)
        if INPUT_SCALE in state:
            notice("nvfp4-input-scale", "NVFP4: input_scale is not used; activations are scaled by their own amax")
        compressed = PACKED in state
        keys = {"packed": "", "scale": SCALE, "factor": FACTOR}
        keys = {"packed": PACKED, "scale": SCALE, "factor": GLOBAL_SCALE} if compressed else keys
        parts = {name: state[key] for name, key in keys.items() if key in state}
        packed = parts.get("packed")
        if packed is None or packed.dim() != 2:
            problem = "missing" if packed is None else f"{tuple(packed.shape)}, not a matrix"
            raise CheckpointError(f"{entry_name(name, keys['packed'])} is {problem}", DAMAGED)
        if "factor" in parts and parts["factor"].numel() == 1:  # some exports write [1]
            parts["factor"] = parts["factor"].reshape(())
        format_, shape = cls(tiles=False), (packed.shape[0], 2 * packed.shape[1])
        specs = format_.part_specs(shape) | {"scale": ((shape[0], shape[1] // BLOCK), torch.float8_e4m3fn)}
        check_parts(parts, specs, keys, name)
        parts["scale"] = parts["scale"].view(torch.uint8)
        if compressed:
            parts["factor"] = parts["factor"].reciprocal()
        format_.check_values(parts, {part_name: entry_name(name, key) for part_name, key in keys.items()})
        return format_, parts, shape, torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        scale, factor = parts["scale"], parts["factor"]
        if scale.is_meta:
            return
        wrong = int((scale >= E4M3_NAN).sum())  # 0x7F is NaN, the sign bit is 0x80
        if wrong:
            raise CheckpointError(f"{labels['scale']} has {wrong} scales that are NaN or negative", DAMAGED)
        unusable = factor[~(factor.isfinite() & (factor >= 0))]
        if unusable.numel():
            raise CheckpointError(f"{labels['factor']} is {float(unusable[0])}, not a positive number", DAMAGED)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        compressed = {PACKED, GLOBAL_SCALE, INPUT_GLOBAL_SCALE}
        return super().state_suffixes() | {SCALE, FACTOR, INPUT_SCALE} | compressed

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        modelopt = entry.get("quant_method") == "modelopt" and entry.get("quant_algo") == "NVFP4"
        scheme = scheme_of(entry)
        return cls(tiles=False) if modelopt or (scheme and scheme.layout == NVFP4) else None
