"""kbit: 2 to 5 bits per weight in bit planes, with one scale byte per 32 weights; and the planes that hqq shares.

A weight takes k + 0.25 bits; in the affine variant, 2.5 bits.

Rows are split into blocks of 32 values; a row's last block is padded with zeros. A block's k-bit codes are k words:
bit j of word b is bit b of code j, so every k packs without waste. A block's scale is one byte of E4M4 times one fp32
factor per tensor. A value is codebook[code] · scale. In the affine variant (codebook 0, 85, 170, 255 and a byte `zero`
per block) it is (codebook[code] − zero) · scale. Codes are nearest with respect to the scale as stored.

E4M4 has 4 exponent bits with bias 11 and 4 mantissa bits: 2^(e−11) · (1 + m/16), and 2^−10 · m/16 at e = 0. The
largest value is 31. Its bits are those of fp32 after the sign, with three exponent bits fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .base import (
    Format,
    Parts,
    PartSpecs,
    Shards,
    check_not_negative,
    check_weight_finite,
    cut,
    register_format,
    rows_and_columns,
    split_parts,
)
from .codebooks import constant
from .linear import PackedProduct, linear_rows

BLOCK = 32
E4M4_LARGEST, E4M4_NORMAL = 31.0, 2.0**-10  # the largest value, and the least with a full mantissa
AFFINE_TOP = 255  # steps of an affine block's range: its zero is one byte
TINY = 2.0**-126  # the least normal fp32, to avoid a division by a zero scale
_REBIAS = (127 - 11) << 4  # from E4M4's exponent to fp32's, in units of E4M4's last bit
_BINS, _ZERO_BIN = 1 << 14, 1 << 13  # cells of the histogram a codebook is fitted to, and the one around zero
_PER_UNIT = _ZERO_BIN * 16 / 17  # cells per scale: with a scale rounded to E4M4, values reach 33/32 of it
_SHRINKS = (1.0, 0.9, 0.8, 0.7)  # tried factors of an affine block's range: clipping rare ends makes steps finer
# k → second scale that `quantize_searched` tries, relative to the largest magnitude of its block. The better of both
# scales has the least squared error with "bof" on Gaussian blocks (of values in steps of 0.05; from 4 bits, of 0.01).
SEARCHED = {2: 0.6, 3: 0.85, 4: 0.94, 5: 0.97}
_CHUNK = 1 << 14  # blocks whose errors are computed at a time, in a CPU's caches

# Quantiles of a normal distribution at (i + ½)/2^k, divided by the largest; the positive half.
NF = {
    2: (0.276993573, 1.0),
    3: (0.102541275, 0.318603665, 0.578276932, 1.0),
    4: (0.0420953855, 0.127340987, 0.215946302, 0.310904741, 0.416818887, 0.542209148, 0.707568824, 1.0),
    5: (
        0.0181886554, 0.0546781458, 0.0915090814, 0.128925994, 0.167200953, 0.206649229, 0.247651234, 0.290684968,
        0.336377233, 0.385589212, 0.43957144, 0.500268459, 0.570998311, 0.658254206, 0.778104544, 1.0,
    ),
}  # fmt: skip

# Lloyd-Max on Gaussian values divided by the largest of their block of 32; the positive half.
BNF = {
    2: (0.1964, 0.6642),
    3: (0.1018, 0.3141, 0.5583, 0.8827),
    4: (0.0499, 0.1509, 0.2551, 0.3652, 0.4846, 0.6179, 0.7739, 0.9686),
    5: (
        0.0239, 0.0718, 0.1201, 0.1692, 0.2193, 0.2707, 0.3239, 0.3791,
        0.4369, 0.4977, 0.5625, 0.6321, 0.7078, 0.7913, 0.8850, 0.9920,
    ),
}  # fmt: skip

# Lloyd-Max on Gaussian values divided by the largest of their block of 32, with levels −1, 0 and 1 fixed (BOF4's
# construction, Blumenberg et al. 2025, arXiv:2505.06653, for other numbers of bits).
BOF = {
    2: (-1.0, 0.0, 0.4029, 1.0),
    3: (-1.0, -0.5619, -0.2605, 0.0, 0.1933, 0.4024, 0.6516, 1.0),
    4: (
        -1.0, -0.7822, -0.6117, -0.4676, -0.3396, -0.2215, -0.1094, 0.0,
        0.0956, 0.1930, 0.2944, 0.4020, 0.5193, 0.6512, 0.8061, 1.0,
    ),
    5: (
        -1.0, -0.8897, -0.7938, -0.7085, -0.6311, -0.5598, -0.4933, -0.4306,
        -0.3710, -0.3139, -0.2588, -0.2052, -0.1529, -0.1014, -0.0506, 0.0,
        0.0473, 0.0948, 0.1429, 0.1917, 0.2416, 0.2927, 0.3455, 0.4002,
        0.4574, 0.5175, 0.5813, 0.6496, 0.7237, 0.8050, 0.8960, 1.0,
    ),
}  # fmt: skip


@constant
def kbit_codebook(name: str, k: int, device: torch.device) -> Tensor:
    """fp32 [2^k], ascending: "nf", "bnf", "bof", or the levels of "affine" (k = 2)."""
    if name == "bof":
        return torch.tensor(BOF[k], dtype=torch.float32, device="cpu").to(device)
    if name == "affine":
        return torch.linspace(0, AFFINE_TOP, 1 << k, dtype=torch.float32, device="cpu").to(device)
    half = torch.tensor((NF if name == "nf" else BNF)[k], dtype=torch.float32)
    return torch.cat([-half.flip(0), half]).to(device)


def e4m4_encode(values: Tensor) -> Tensor:
    """Encode non-negative fp32 values as uint8 E4M4: nearest, ties to even, saturating at 31."""
    bits = values.view(torch.int32)
    normal = ((bits + 0x3FFFF + ((bits >> 19) & 1)) >> 19) - _REBIAS  # a mantissa that overflows carries
    subnormal = (values * 2.0**14).round().int()
    return torch.where(values < E4M4_NORMAL, subnormal, normal).clamp(0, 255).to(torch.uint8)


def e4m4_decode(codes: Tensor) -> Tensor:
    """Decode uint8 E4M4 codes to fp32, exactly."""
    wide = codes.int()
    return torch.where(wide < 16, wide * 2.0**-14, ((wide + _REBIAS) << 19).view(torch.float32))


def fit_factor(scales: Tensor) -> Tensor:
    """Tensor factor, fp32 []: 1 if all non-zero scales are normal in E4M4, else the power of two that maps the largest
    scale to 16–32.

    Scales below 2^−14 of the largest then lose bits; below 2^−24 they become 0, and so does their block.
    """
    largest, smallest = scales.max(), scales.masked_fill(scales == 0, torch.inf).min()
    exponent = torch.frexp(largest).exponent.clamp(min=-121) - 5
    fits = (largest <= E4M4_LARGEST) & (smallest >= E4M4_NORMAL)
    return ((exponent.masked_fill(fits, 0) + 127) << 23).int().view(torch.float32)


def fit_scales(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Scales uint8 E4M4 [n] and factor fp32 [] for blocks whose largest magnitudes are fp32 [n]."""
    factor = fit_factor(absmax)
    return e4m4_encode(absmax / factor), factor


def fit_affine(blocks: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales uint8 E4M4 [n], zeros uint8 [n] and factor fp32 [] for blocks [n, 32].

    A block's range is extended to contain zero, then shrunk by the candidate factor with the least squared error. On
    normally distributed weights this gains 2 dB.
    """
    low, high = (bound.float() for bound in blocks.aminmax(dim=1))
    low, high = low.clamp(max=0), high.clamp(min=0)
    factor = fit_factor(high - low)
    best = torch.full_like(low, torch.inf, dtype=torch.float64)
    scales, zeros = torch.zeros_like(low, dtype=torch.uint8), torch.zeros_like(low, dtype=torch.uint8)
    unit = factor / AFFINE_TOP
    for shrink in _SHRINKS:
        scale = e4m4_encode((high - low) * shrink / factor)
        step = e4m4_decode(scale) * unit
        zero = (-low * shrink / step.clamp(min=TINY)).round().clamp(0, AFFINE_TOP).to(torch.uint8)
        values = codebook[_nearest(blocks, step, zero, codebook)].sub_(zero.unsqueeze(1)).mul_(step.unsqueeze(1))
        error = (values - blocks).double().square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return scales, zeros, unit


def fit_codebook(blocks: Tensor, scales: Tensor, factor: Tensor, k: int, padding: int) -> Tensor:
    """Codebook, fp32 [2^k], with the least mean squared error on the blocks divided by their scales.

    Runs Lloyd's algorithm (Lloyd 1982; Max 1960) from "nf" until no cell changes, on a histogram. Counts and sums are
    integers, so the codebook does not depend on the machine.

    Args:
        blocks: [n, 32], float.
        scales, factor: scales of the blocks, as stored.
        padding: number of padding zeros at the ends of rows, which are not counted.
    """
    step = (e4m4_decode(scales) * factor).clamp(min=TINY)
    counts = torch.zeros(_BINS, dtype=torch.int64, device=blocks.device)
    for chunk, chunk_step in zip(blocks.split(1 << 17), step.split(1 << 17), strict=True):
        bins = (chunk.float() / chunk_step.unsqueeze(1) * _PER_UNIT).round() + _ZERO_BIN
        counts += torch.bincount(bins.clamp(0, _BINS - 1).int().view(-1), minlength=_BINS)
    counts[_ZERO_BIN] -= padding
    counts = counts.cpu()
    bin_numbers = torch.arange(_BINS)
    ends = torch.nn.functional.pad(torch.stack([counts, counts * bin_numbers]).cumsum(1), (1, 0))
    levels = kbit_codebook("nf", k, bin_numbers.device).double() * _PER_UNIT + _ZERO_BIN
    edges = torch.empty(0, dtype=torch.int64)
    while True:
        middles = ((levels[:-1] + levels[1:]) / 2).floor().long() + 1
        new_edges = torch.cat([torch.tensor([0]), middles, torch.tensor([_BINS])])
        if torch.equal(new_edges, edges):
            return ((levels - _ZERO_BIN) / _PER_UNIT).float().to(blocks.device)
        edges = new_edges
        count, total = ends[:, edges[1:]] - ends[:, edges[:-1]]
        levels = torch.where(count > 0, total.double() / count.clamp(min=1), levels)


def _nearest(blocks: Tensor, step: Tensor, zeros: Tensor | None, codebook: Tensor) -> Tensor:
    """Index of the nearest codebook entry, int32 [n, 32]; the lower one at a tie."""
    scaled = blocks.float() / step.clamp(min=TINY).unsqueeze(1)
    if zeros is not None:
        scaled += zeros.unsqueeze(1)
    return torch.bucketize(scaled, (codebook[:-1] + codebook[1:]) / 2, out_int32=True)


def quantize_searched(blocks: Tensor, absmax: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize blocks with the better of two scales each: their largest magnitude, or `SEARCHED` of it.

    The first represents an outlier exactly, the second has finer steps for the other weights of a block. Errors are
    compared in fp64, so that the bytes do not depend on the machine.

    Args:
        blocks: [n, 32]; fp32, fp16 or bf16.
        absmax: fp32 [n], largest magnitudes.
        codebook: fp32 [2^k], ascending, from −1 to 1.

    Returns:
        packed int32 [n·k], scales uint8 E4M4 [n] and factor fp32 [].
    """
    k = codebook.numel().bit_length() - 1
    scales, factor = fit_scales(absmax)
    smaller_scales = e4m4_encode(absmax * SEARCHED[k] / factor)
    packed = quantize_bitplane(blocks, scales, None, factor, codebook)
    smaller_packed = quantize_bitplane(blocks, smaller_scales, None, factor, codebook)
    errors = _squared_errors(blocks, packed, scales, factor, codebook)
    better = _squared_errors(blocks, smaller_packed, smaller_scales, factor, codebook) < errors
    packed = torch.where(better.unsqueeze(1), smaller_packed.view(-1, k), packed.view(-1, k)).view(-1)
    return packed, torch.where(better, smaller_scales, scales), factor


def _squared_errors(blocks: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor) -> Tensor:
    """Sum of squared errors of each quantized block, fp64 [n]."""
    words = packed.view(len(blocks), -1)
    errors = []
    for rows, row_words, row_scales in zip(
        blocks.split(_CHUNK), words.split(_CHUNK), scales.split(_CHUNK), strict=True
    ):
        shape = len(rows), BLOCK, torch.float32
        values = dequantize_bitplane(row_words.reshape(-1), row_scales, None, factor, codebook, *shape)
        errors.append(values.sub_(rows).square_().sum(1, dtype=torch.float64))
    return torch.cat(errors)


def pack_planes(codes: Tensor, k: int) -> Tensor:
    """Bit planes, int32 [n·k], of integer codes [n, 32] below 2^k."""
    lane = torch.arange(BLOCK, dtype=torch.int32, device=codes.device)
    planes = [(((codes >> b) & 1).int() << lane).sum(1, dtype=torch.int32) for b in range(k)]
    return torch.stack(planes, dim=1).view(-1)


def unpack_planes(packed: Tensor, k: int) -> Tensor:
    """Codes, int32 [n, 32], from the bit planes of `pack_planes`."""
    lane = torch.arange(BLOCK, dtype=torch.int32, device=packed.device)
    words = packed.view(-1, k)
    codes = words.new_zeros(words.shape[0], BLOCK)
    for b in range(k):
        codes |= ((words[:, b : b + 1] >> lane) & 1) << b
    return codes


def padded_blocks(rows: Tensor, size: int) -> Tensor:
    """Blocks of each row [rows, width], padded with zeros: [rows · ⌈width/size⌉, size]."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % size)).reshape(-1, size)


@op("triton.bitplane", "native.bitplane")
def quantize_bitplane(blocks: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor) -> Tensor:
    """Quantize blocks of weights to the nearest codes, as bit planes.

    Args:
        blocks: [n, 32]; fp32, fp16 or bf16.
        scales: uint8 [n], E4M4.
        zeros: uint8 [n] in the affine variant, else None.
        factor: fp32 [], factor of the scales.
        codebook: fp32 [2^k], ascending.

    Returns:
        int32 [n·k].
    """
    k = codebook.numel().bit_length() - 1
    return pack_planes(_nearest(blocks, e4m4_decode(scales) * factor, zeros, codebook), k)


def steps_of(scales: Tensor, factor: Tensor) -> Tensor:
    """Decoded scales, fp32 [n]: E4M4 [n] times the factor, [] or [E] for E matrices of n/E scales each."""
    return (e4m4_decode(scales).view(max(factor.numel(), 1), -1) * factor.view(-1, 1)).view(-1)


@op("triton.dequantize", "native.bitplane")
def dequantize_bitplane(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor,
    codebook: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize bit planes; values are rounded once from fp32.

    Args:
        packed: int32 [rows · ⌈width/32⌉ · k].
        scales, zeros, factor, codebook: as in `quantize_bitplane`. For E stacked matrices, factor is [E] and codebook
            [E, 2^k] or [2^k].
        rows, width: shape of the result.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [rows, width].
    """
    levels, runs = codebook.shape[-1], max(factor.numel(), 1)
    codes = unpack_planes(packed, levels.bit_length() - 1).view(runs, -1)
    if codebook.dim() > 1:
        codes = codes + levels * torch.arange(runs, dtype=torch.int32, device=codes.device)[:, None]
    values = codebook.reshape(-1)[codes].view(-1, BLOCK)
    if zeros is not None:
        values -= zeros.unsqueeze(1)
    values *= steps_of(scales, factor).unsqueeze(1)
    return values.to(dtype).view(rows, -(-width // BLOCK) * BLOCK)[:, :width].contiguous()


@op("cuda.linear_planes", "cuda.few_rows", "triton.few_rows", "native.few_rows")
def linear_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with a k-bit weight; no gradient.

    Kernels may sum in another order, and round the codebook and the scaled product to x's dtype instead of the weight.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, factor, codebook: as in `dequantize_bitplane`, without zeros.
        rows: N.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    weight = dequantize_bitplane(packed, scales, None, factor, codebook, rows, x.shape[1], x.dtype)
    return linear_rows(x, weight, bias)


CODEBOOKS = ("nf", "bnf", "bof", "fitted", "affine")


@register_format
@dataclass(frozen=True)
class KBit(Format):
    """k-bit codes with one E4M4 scale per 32 weights of a row.

    Args:
        k: bits of a code, 2 to 5.
        codebook: "nf" (normal quantiles), "bnf" (Lloyd-Max on normalised Gaussian blocks), "bof" (the same with levels
            −1, 0 and 1), "fitted" (Lloyd-Max on the tensor, stored as a part), or "affine" (k = 2: four equal steps and
            a zero per block).
        searched: choose each block's scale by its squared error (`quantize_searched`), with "nf" and "bof". The stored
            bytes have the same layout and meaning.
    """

    k: int = 4
    codebook: Literal["nf", "bnf", "bof", "fitted", "affine"] = "bnf"
    searched: bool = False

    name: ClassVar[str] = "kbit"
    # Chosen by the loss (docs/formats.md): only at 3 bits exact zeros and exact largest weights lower it.
    names: ClassVar[dict[str, str]] = {f"kbit{k}": f"kbit:{k}:bnf" for k in (2, 4, 5)} | {
        "kbit3": "kbit:3:bof:searched"
    }

    def __post_init__(self) -> None:
        if self.k not in (2, 3, 4, 5):
            raise ModelError(f"kbit has no {self.k}-bit codes", "use 2, 3, 4 or 5")
        if self.codebook not in CODEBOOKS:
            raise ModelError(f"codebook {self.codebook!r} is not one of kbit's", f"use one of {CODEBOOKS}")
        if self.codebook == "affine" and self.k != 2:
            raise ModelError(f"kbit has no affine variant at {self.k} bits", "use k = 2, or hqq")
        if self.searched and self.codebook not in ("nf", "bof"):
            raise ModelError(f"kbit searches no scales for codebook {self.codebook!r}", "use bof or nf")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.k}:{self.codebook}{':searched' if self.searched else ''}"

    @classmethod
    def parse(cls, options: str) -> KBit:
        k, codebook, *flags = options.split(":")
        if flags not in ([], ["searched"]):
            raise ModelError(f"kbit has no option {':'.join(flags)}", "write searched, or nothing")
        return cls(int(k), codebook, bool(flags))  # type: ignore[arg-type]

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(2, "affine"), cls(3, "bnf"), cls(4, "fitted"), cls(5, "nf"), cls(3, "bof", searched=True)]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, width = rows_and_columns(shape)
        blocks = rows * -(-width // BLOCK)
        specs: PartSpecs = {"packed": ((blocks * self.k,), torch.int32), "scales": ((blocks,), torch.uint8)}
        if self.codebook == "affine":
            specs["zeros"] = ((blocks,), torch.uint8)
        specs["factor"] = ((), torch.float32)
        if self.codebook == "fitted":
            specs["codebook"] = ((1 << self.k,), torch.float32)
        return specs

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        shape = tuple(weight.shape)
        if not weight.numel():
            specs = self.part_specs(shape)
            return {name: torch.ones(size, dtype=dtype, device=weight.device) for name, (size, dtype) in specs.items()}
        rows, width = rows_and_columns(shape)
        blocks = padded_blocks(weight.reshape(rows, width), BLOCK)
        absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1).float()
        check_weight_finite(absmax, "a block with one would hold only NaN")
        if self.codebook == "affine":
            codebook = kbit_codebook("affine", self.k, weight.device)
            scales, zeros, factor = fit_affine(blocks, codebook)
            packed = quantize_bitplane(blocks, scales, zeros, factor, codebook)
            return {"packed": packed, "scales": scales, "zeros": zeros, "factor": factor}
        if self.searched:
            codebook = kbit_codebook(self.codebook, self.k, weight.device)
            packed, scales, factor = quantize_searched(blocks, absmax, codebook)
            return {"packed": packed, "scales": scales, "factor": factor}
        scales, factor = fit_scales(absmax)
        if self.codebook == "fitted":
            codebook = fit_codebook(blocks, scales, factor, self.k, blocks.numel() - weight.numel())
        else:
            codebook = kbit_codebook(self.codebook, self.k, weight.device)
        packed = quantize_bitplane(blocks, scales, None, factor, codebook)
        parts = {"packed": packed, "scales": scales, "factor": factor}
        return parts | {"codebook": codebook} if self.codebook == "fitted" else parts

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows, width = rows_and_columns(shape)
        return dequantize_bitplane(
            parts["packed"],
            parts["scales"],
            parts.get("zeros"),
            parts["factor"],
            self.levels(parts),
            rows,
            width,
            dtype,
        ).view(shape)

    def dequantize_stack(self, parts: Parts, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        per_matrix = ("factor", "codebook")
        flat = {name: tensor if name in per_matrix else tensor.reshape(-1) for name, tensor in parts.items()}
        return self.dequantize(flat, shape, dtype)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        if self.codebook == "affine" or shape[1] % BLOCK:
            return None
        stored = parts["packed"], parts["scales"], parts["factor"], self.levels(parts)
        return PackedProduct(linear_bitplane, (*stored, shape[0]))

    def levels(self, parts: Parts) -> Tensor:
        """fp32 [2^k], ascending: the value of each code, in units of its scale."""
        if self.codebook == "fitted":
            return parts["codebook"]
        return kbit_codebook(self.codebook, self.k, parts["packed"].device)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        chosen = {
            name: tensor.view(shape[0], -1)[rows].view(-1) if name in ("packed", "scales", "zeros") else tensor
            for name, tensor in parts.items()
        }
        return self.dequantize(chosen, (rows.numel(), shape[1]), dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        if dim and (shape[1] // n) % BLOCK:
            return BLOCK
        rows = {name: parts[name].view(shape[0], -1) for name in ("packed", "scales", "zeros") if name in parts}
        cuts = {name: [shard.view(-1) for shard in cut(tensor, n, dim)] for name, tensor in rows.items()}
        return self, split_parts(n, cuts, {name: tensor for name, tensor in parts.items() if name not in rows})

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        super().check_values(parts, labels)
        check_not_negative(parts["factor"], labels["factor"])
