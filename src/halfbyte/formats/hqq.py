"""hqq: 8, 6, 5, 4, 3 or 2 bits in affine groups. Half-quadratic splitting fits the zeros, without calibration data.

Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". A value is scale · (code − zero)
with a real-valued zero. The scale is the group's range over its steps; the zero minimises ‖W − Wr‖_p^p with p = 0.7,
which is robust to outliers. The error is split into a sparse part E, found by shrinkage, and a rest; the best zero for
the rest is a mean. Without the fit the zero is −low/scale, as in plain affine quantization.

Codes are stored in the bit planes of `formats.bitplane`, so 3 bits pack without waste. Scales are bf16 (fp32's range)
and zeros fp16 (within the range of the codes); the fit uses both as stored. It runs in fp64, so that the bytes do not
depend on the machine. A weight takes bits + 32/group bits if the row length is a multiple of the group size.

Codes, scales and zeros of other tools' affine integers are loaded into this layout (`formats.integers`): GPTQ in 2, 3
and 8 bits, compressed-tensors' W8A16, HQQ's own checkpoints, torchao's int8. Their scales may be fp16 or fp32, their
zeros fp32. With act-order (GPTQ's `desc_act`) the inputs are sorted by group, as in `formats.int4`: `order` int32
[2, K] holds the input of each column of codes, and the inverse of this permutation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import CheckpointError, ModelError
from .base import (
    DAMAGED,
    Format,
    Parts,
    PartSpecs,
    Shards,
    check_weight_finite,
    cut,
    register_format,
    rows_and_columns,
    split_parts,
)
from .bitplane import BLOCK, pack_planes, unpack_planes
from .linear import PackedProduct, linear_rows

NORM = 0.7  # p of the norm
BETA = 10.0  # initial weight of the splitting's penalty
BETA_GROWTH = 1.01  # its factor in each of ROUNDS iterations
ROUNDS = 20
CHUNK = 1 << 22  # weights fitted at a time: about 200 MB of fp64


def quantize_hqq(
    groups: Tensor, bits: int, fit: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of weights to packed codes, scales and zeros, a chunk of groups at a time.

    Args:
        groups: [n, group], group a multiple of 32; fp32, fp16 or bf16, finite.
        bits: per code; 8, 6, 5, 4, 3 or 2.
        fit: fit the zeros; otherwise they follow from the ranges, in fp32.
        scale_dtype: bf16 or fp16; scales outside fp16's range become infinite or 0.

    Returns:
        packed int32 [n · group/32 · bits], scales `scale_dtype` [n], zeros fp16 [n].
    """
    chunks = groups.split(max(CHUNK // groups.shape[1], 1))
    packed, scales, zeros = zip(*(_quantize_chunk(chunk, bits, fit, scale_dtype) for chunk in chunks), strict=True)
    return torch.cat(packed), torch.cat(scales), torch.cat(zeros)


def _quantize_chunk(groups: Tensor, bits: int, fit: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    top = 2**bits - 1
    groups = groups.double() if fit else groups.float()
    low, high = groups.aminmax(dim=1)
    low, high = low.clamp(max=0), high.clamp(min=0)  # a range that contains zero has its zero point among the codes
    scales = ((high - low) / top).to(scale_dtype)
    step = scales.to(groups.dtype).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / step).masked_fill(scales == 0, 0).half()
    if fit:
        zeros = _fit_zeros(groups, step, zeros, top)
    codes = _codes(groups, step.unsqueeze(1), zeros.unsqueeze(1), top)
    return pack_planes(codes.int().view(-1, BLOCK), bits), scales, zeros


def _codes(groups: Tensor, step: Tensor, zeros: Tensor, top: int) -> Tensor:
    return (groups / step + zeros).round_().clamp_(0, top)


def _fit_zeros(groups: Tensor, step: Tensor, zeros: Tensor, top: int) -> Tensor:
    """Zeros, fp16 [n], with the least mean absolute error of at most 20 iterations.

    A group leaves the iteration when its error stops falling, so its result does not depend on other groups.

    Args:
        groups: fp64 [n, group].
        step: fp64 [n].
        zeros: fp16 [n], initial values.
    """
    best_zeros = zeros.clone()
    smallest_error = torch.full_like(step, torch.inf)
    active = torch.arange(step.shape[0], device=step.device)
    beta = BETA
    for _ in range(ROUNDS):
        codes = _codes(groups, step.unsqueeze(1), zeros.double().unsqueeze(1), top)
        error = groups - (codes - zeros.double().unsqueeze(1)).mul_(step.unsqueeze(1))
        mean_error = error.abs().mean(1)
        falling = mean_error < smallest_error
        active, groups = active[falling], groups[falling]
        step, smallest_error = step[falling], mean_error[falling]
        best_zeros[active] = zeros[falling]
        if not len(active):
            break
        codes, error = codes[falling], error[falling]
        magnitude = error.abs()
        sparse = error.sign().mul_((magnitude - magnitude.pow(NORM - 1) / beta).clamp_(min=0))
        zeros = (codes - (groups - sparse).div_(step.unsqueeze(1))).mean(1).half()
        beta *= BETA_GROWTH
    return best_zeros


@op("triton.dequantize", "native.bitplane")
def dequantize_hqq(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize: scale · (code − zero) in fp32, rounded once.

    Args:
        packed, scales, zeros: as `quantize_hqq` returns them.
        bits: per code.
        group: weights per scale, a multiple of 32.
        rows, width: shape of the result; a row has ⌈width/group⌉ groups.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [rows, width].
    """
    codes = unpack_planes(packed, bits).view(-1, group)
    values = (codes - zeros.float().unsqueeze(1)).mul_(scales.float().unsqueeze(1))
    return values.to(dtype).view(rows, -(-width // group) * group)[:, :width].contiguous()


@op("cuda.linear_planes", "cuda.few_rows", "triton.few_rows", "native.few_rows")
def linear_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with an HQQ weight; no gradient.

    Kernels may sum in another order, and round scale · zero and the weight to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, zeros, bits, group: as in `dequantize_hqq`.
        rows: N.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_hqq(packed, scales, zeros, bits, group, rows, x.shape[1], x.dtype), bias)


BITS, GROUPS = (8, 6, 5, 4, 3, 2), (32, 64, 128, 256)
NAMED_BITS = (8, 4, 3, 2)


@register_format
@dataclass(frozen=True)
class HQQ(Format):
    """Half-quadratic quantization.

    Args:
        bits: bits of a code; 8, 6, 5, 4, 3 or 2.
        group: weights of a row that share a scale and a zero; 32, 64, 128 or 256.
        fitted: fit the zeros in 20 iterations; otherwise compute them from each group's range in one pass.
        scale_dtype: dtype of the stored scales: "bfloat16", or "float16" and "float32" of other tools' files.
        zero_dtype: dtype of the stored zeros: "float16", or "float32" of other tools' files.
        ordered: whether inputs are sorted by group, and `order` is stored.
    """

    bits: int = 4
    group: int = 64
    fitted: bool = True
    scale_dtype: str = "bfloat16"
    zero_dtype: str = "float16"
    ordered: bool = False

    name: ClassVar[str] = "hqq"
    names: ClassVar[dict[str, str]] = {f"hqq{bits}": f"hqq:{bits}:64" for bits in NAMED_BITS} | {
        "int4": "hqq:4:64:range"
    }
    parts_of_checkpoints: ClassVar[tuple[str, ...]] = ("order",)

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ModelError(f"hqq has no {self.bits}-bit codes", f"use one of {BITS}")
        if self.group not in GROUPS:
            raise ModelError(f"hqq has no groups of {self.group}", f"use one of {GROUPS}")

    @property
    def spec(self) -> str:
        flags = {
            "range": not self.fitted,
            self.scale_dtype: self.scale_dtype != "bfloat16",
            "zeros32": self.zero_dtype == "float32",
            "ordered": self.ordered,
        }
        return ":".join(
            [self.name, str(self.bits), str(self.group), *(flag for flag, is_set in flags.items() if is_set)]
        )

    @classmethod
    def parse(cls, options: str) -> HQQ:
        bits, group, *flags = options.split(":")
        scale_dtype = next((flag for flag in ("float16", "float32") if flag in flags), "bfloat16")
        zero_dtype = "float32" if "zeros32" in flags else "float16"
        format_ = cls(int(bits), int(group), "range" not in flags, scale_dtype, zero_dtype, "ordered" in flags)
        if format_.spec.split(":")[3:] != flags:
            options = "range, float16 or float32, zeros32, ordered"
            raise ModelError(
                f"hqq has no option {':'.join(flags)}", f"write some of {options}, in this order, or nothing"
            )
        return format_

    @classmethod
    def examples(cls) -> list[Format]:
        return [
            cls(8, 128), cls(4, 64), cls(3, 32), cls(4, 64, False), cls(8, 32, False, "float16"),
            cls(6, 64, False, "float32", "float32"),
        ]  # fmt: skip

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, width = rows_and_columns(shape)
        groups = rows * -(-width // self.group)
        specs: PartSpecs = {
            "packed": ((groups * self.group // BLOCK * self.bits,), torch.int32),
            "scales": ((groups,), getattr(torch, self.scale_dtype)),
            "zeros": ((groups,), getattr(torch, self.zero_dtype)),
        }
        return specs | {"order": ((2, width), torch.int32)} if self.ordered else specs

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        if self.ordered:
            raise ModelError(f"{self.spec} is only read from checkpoints", "leave out `ordered`")
        rows, width = rows_and_columns(tuple(weight.shape))
        if not weight.numel():
            specs = self.part_specs(tuple(weight.shape))
            return {name: torch.empty(size, dtype=dtype, device=weight.device) for name, (size, dtype) in specs.items()}
        check_weight_finite(torch.linalg.vector_norm(weight, torch.inf), "a group with one would hold only NaN")
        table = weight.reshape(rows, width)
        missing = -width % self.group
        if missing:  # pad with the row's last value, which does not widen the group's range
            table = torch.cat([table, table[:, -1:].expand(rows, missing)], dim=1)
        scale_dtype = getattr(torch, self.scale_dtype)
        packed, scales, zeros = quantize_hqq(table.view(-1, self.group), self.bits, self.fitted, scale_dtype)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{self.spec}: the weight has groups whose scale does not fit float16", "use hqq8")
        return {"packed": packed, "scales": scales, "zeros": zeros.to(getattr(torch, self.zero_dtype))}

    def rows_concatenate(self, rows: int) -> bool:
        return not self.ordered

    def concat_rows(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        if not self.ordered:
            return super().concat_rows(pieces, shape)
        order = pieces[0]["order"]
        if any(not piece["order"].is_meta and not torch.equal(piece["order"], order) for piece in pieces):
            raise ModelError(
                f"{self.spec}: matrices with the same input have different group orders (desc_act)",
                "use a checkpoint quantized without desc_act",
            )
        names = ("packed", "scales", "zeros")
        return self, {name: torch.cat([piece[name] for piece in pieces]) for name in names} | {"order": order}

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows, width = rows_and_columns(shape)
        values = dequantize_hqq(
            parts["packed"], parts["scales"], parts["zeros"], self.bits, self.group, rows, width, dtype
        )
        return (values[:, parts["order"][1]] if self.ordered else values).view(shape)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        if shape[1] % self.group:  # kernels read full groups
            return None
        stored = parts["packed"], parts["scales"], parts["zeros"], self.bits, self.group
        return PackedProduct(linear_hqq, (*stored, shape[0]), parts["order"] if self.ordered else None)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        by_row = {name: tensor.view(shape[0], -1)[rows].view(-1) for name, tensor in parts.items() if name != "order"}
        return self.dequantize({**parts, **by_row}, (rows.numel(), shape[1]), dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        if self.ordered and dim:
            raise ModelError(
                f"{self.spec}: columns in act-order are not split: each shard would need scales of every group",
                "use parallel: {data: N} or {shard: N}, or a checkpoint quantized without desc_act",
            )
        size = max((size for size in GROUPS if self.group % size == 0 == (shape[1] // n) % size), default=0)
        size = size if dim else self.group
        if not size:
            return GROUPS[0]
        fine = {
            name: parts[name].view(shape[0], -1).repeat_interleave(self.group // size, 1)
            for name in ("scales", "zeros")
        }
        rows = {"packed": parts["packed"].view(shape[0], -1), **fine}
        used = {"packed": shape[1] // BLOCK * self.bits, "scales": shape[1] // size, "zeros": shape[1] // size}
        cuts = {
            name: [shard.view(-1) for shard in cut(tensor[:, : used[name]] if dim else tensor, n, dim)]
            for name, tensor in rows.items()
        }
        return replace(self, group=size), split_parts(n, cuts, {"order": parts["order"]} if self.ordered else {})

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return super().state_suffixes().union(cls.parts_of_checkpoints)

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        super().check_values(parts, labels)  # scales of other tools' files may be negative
        if self.ordered and not parts["order"].is_meta:
            sorted_order = parts["order"].sort().values
            if bool((sorted_order != torch.arange(sorted_order.shape[-1], device=sorted_order.device)).any()):
                raise CheckpointError(f"{labels['order']} is not a permutation of the inputs", DAMAGED)
