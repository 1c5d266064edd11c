"""hqq: 8, 4, 3 or 2 bits in affine groups with fitted zero points (`halfbyte.ops.hqq`).

A weight takes bits + 32/group bits if the row length is a multiple of the group size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..ops.bitplane import BLOCK
from ..ops.hqq import dequantize_hqq, linear_hqq, quantize_hqq
from ..utils.errors import ModelError
from .base import Format, Parts, PartSpecs, check_not_negative, cut, register_format, split_parts
from .bitplane import rows_and_width

BITS, GROUPS = (8, 4, 3, 2), (32, 64, 128, 256)


@register_format
@dataclass(frozen=True)
class HQQ(Format):
    """Half-quadratic quantization.

    Args:
        bits: bits of a code; 8, 4, 3 or 2.
        group: weights of a row that share a scale and a zero; 32, 64, 128 or 256.
        fitted: fit the zeros in 20 iterations; otherwise compute them from each group's range in one pass.
        scale_dtype: dtype of the stored scales: "bfloat16", or "float16" for GGUF's Q8_0.
    """

    bits: int = 4
    group: int = 64
    fitted: bool = True
    scale_dtype: str = "bfloat16"

    name: ClassVar[str] = "hqq"
    names: ClassVar[dict[str, str]] = {f"hqq{bits}": f"hqq:{bits}:64" for bits in BITS} | {"int4": "hqq:4:64:range"}

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ModelError(f"hqq has no {self.bits}-bit codes", f"use one of {BITS}")
        if self.group not in GROUPS:
            raise ModelError(f"hqq has no groups of {self.group}", f"use one of {GROUPS}")

    @property
    def spec(self) -> str:
        options = "" if self.fitted else ":range"
        return f"{self.name}:{self.bits}:{self.group}{options}{'' if self.scale_dtype == 'bfloat16' else ':float16'}"

    @classmethod
    def parse(cls, options: str) -> HQQ:
        bits, group, *rest = options.split(":")
        if rest not in ([], ["range"], ["float16"], ["range", "float16"]):
            raise ModelError(
                f"hqq has no option {':'.join(rest)}", "write range, float16, range:float16, or nothing for neither"
            )
        return cls(int(bits), int(group), "range" not in rest, "float16" if "float16" in rest else "bfloat16")

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(8, 128), cls(4, 64), cls(3, 32), cls(4, 64, False), cls(8, 32, False, "float16")]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, width = rows_and_width(shape)
        groups = rows * -(-width // self.group)
        return {
            "packed": ((groups * self.group // BLOCK * self.bits,), torch.int32),
            "scales": ((groups,), getattr(torch, self.scale_dtype)),
            "zeros": ((groups,), torch.float16),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        rows, width = rows_and_width(tuple(weight.shape))
        if not weight.numel():
            specs = self.part_specs(tuple(weight.shape))
            return {name: torch.empty(size, dtype=dtype, device=weight.device) for name, (size, dtype) in specs.items()}
        if not bool(torch.isfinite(torch.linalg.vector_norm(weight, torch.inf))):
            raise ModelError("the weight has NaN or Inf", "repair the checkpoint: a group with one would hold only NaN")
        table = weight.reshape(rows, width)
        missing = -width % self.group
        if missing:  # pad with the row's last value, which does not widen the group's range
            table = torch.cat([table, table[:, -1:].expand(rows, missing)], dim=1)
        scale_dtype = getattr(torch, self.scale_dtype)
        packed, scales, zeros = quantize_hqq(table.view(-1, self.group), self.bits, self.fitted, scale_dtype)
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{self.spec}: the weight has groups whose scale does not fit float16", "use hqq8")
        return {"packed": packed, "scales": scales, "zeros": zeros}

    def rows_concatenate(self, rows: int) -> bool:
        return True

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows, width = rows_and_width(shape)
        return dequantize_hqq(
            parts["packed"], parts["scales"], parts["zeros"], self.bits, self.group, rows, width, dtype
        ).view(shape)

    def linear(self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        if shape[1] % self.group or self.scale_dtype != "bfloat16":  # the GEMV kernel reads full groups and bf16 scales
            return super().linear(x, parts, shape, bias)
        stored = parts["packed"], parts["scales"], parts["zeros"], self.bits, self.group
        return linear_hqq(x, *stored, shape[0], bias)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        chosen = {name: part.view(shape[0], -1)[rows].view(-1) for name, part in parts.items()}
        return self.dequantize(chosen, (rows.numel(), shape[1]), dtype)

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
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
            name: [each.view(-1) for each in cut(part[:, : used[name]] if dim else part, n, dim)]
            for name, part in rows.items()
        }
        return replace(self, group=size), split_parts(n, cuts, {})

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        super().check_values(parts, labels)
        check_not_negative(parts["scales"], labels["scales"])
