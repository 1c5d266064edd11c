"""kbit: 2 to 5 bits per weight in bit planes, with one scale byte per 32 weights.

`halfbyte.ops.bitplane` specifies the values. A weight takes k + 0.25 bits; in the affine variant, 2.5 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..ops.bitplane import (
    BLOCK,
    dequantize_bitplane,
    fit_affine,
    fit_codebook,
    fit_scales,
    kbit_codebook,
    linear_bitplane,
    padded_blocks,
    quantize_bitplane,
)
from ..utils.errors import ModelError
from .base import Format, Parts, PartSpecs, check_not_negative, cut, register_format, split_parts

CODEBOOKS = ("nf", "bnf", "fitted", "affine")


def rows_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number and length of a tensor's rows. Blocks run along the last dimension and never span rows."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


@register_format
@dataclass(frozen=True)
class KBit(Format):
    """k-bit codes with one E4M4 scale per 32 weights of a row.

    Args:
        k: bits of a code, 2 to 5.
        codebook: "nf" (normal quantiles), "bnf" (Lloyd-Max on normalised Gaussian blocks), "fitted" (Lloyd-Max on the
            tensor, stored as a part), or "affine" (k = 2: four equal steps and a zero per block).
    """

    k: int = 4
    codebook: Literal["nf", "bnf", "fitted", "affine"] = "bnf"

    name: ClassVar[str] = "kbit"
    names: ClassVar[dict[str, str]] = {f"kbit{k}": f"kbit:{k}:bnf" for k in (2, 3, 4, 5)}

    def __post_init__(self) -> None:
        if self.k not in (2, 3, 4, 5):
            raise ModelError(f"kbit has no {self.k}-bit codes", "use 2, 3, 4 or 5")
        if self.codebook not in CODEBOOKS:
            raise ModelError(f"codebook {self.codebook!r} is not one of kbit's", f"use one of {CODEBOOKS}")
        if self.codebook == "affine" and self.k != 2:
            raise ModelError(f"kbit has no affine variant at {self.k} bits", "use k = 2, or hqq")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.k}:{self.codebook}"

    @classmethod
    def parse(cls, options: str) -> KBit:
        k, codebook = options.split(":")
        return cls(int(k), codebook)  # type: ignore[arg-type]

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls(2, "affine"), cls(3, "bnf"), cls(4, "fitted"), cls(5, "nf")]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, width = rows_and_width(shape)
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
        rows, width = rows_and_width(shape)
        blocks = padded_blocks(weight.reshape(rows, width), BLOCK)
        absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1).float()
        if not bool(torch.isfinite(absmax).all()):
            raise ModelError("the weight has NaN or Inf", "repair the checkpoint: a block with one would hold only NaN")
        if self.codebook == "affine":
            codebook = kbit_codebook("affine", self.k, weight.device)
            scales, zeros, factor = fit_affine(blocks, codebook)
            packed = quantize_bitplane(blocks, scales, zeros, factor, codebook)
            return {"packed": packed, "scales": scales, "zeros": zeros, "factor": factor}
        scales, factor = fit_scales(absmax)
        if self.codebook == "fitted":
            codebook = fit_codebook(blocks, scales, factor, self.k, blocks.numel() - weight.numel())
        else:
            codebook = kbit_codebook(self.codebook, self.k, weight.device)
        packed = quantize_bitplane(blocks, scales, None, factor, codebook)
        parts = {"packed": packed, "scales": scales, "factor": factor}
        return parts | {"codebook": codebook} if self.codebook == "fitted" else parts

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows, width = rows_and_width(shape)
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
        flat = {name: part if name in per_matrix else part.reshape(-1) for name, part in parts.items()}
        return self.dequantize(flat, shape, dtype)

    def linear(self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        if self.codebook == "affine" or shape[1] % BLOCK:
            return super().linear(x, parts, shape, bias)
        stored = parts["packed"], parts["scales"], parts["factor"], self.levels(parts)
        return linear_bitplane(x, *stored, shape[0], bias)

    def levels(self, parts: Parts) -> Tensor:
        """fp32 [2^k], ascending: the value of each code, in units of its scale."""
        if self.codebook == "fitted":
            return parts["codebook"]
        return kbit_codebook(self.codebook, self.k, parts["packed"].device)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        chosen = {
            name: part.view(shape[0], -1)[rows].view(-1) if name in ("packed", "scales", "zeros") else part
            for name, part in parts.items()
        }
        return self.dequantize(chosen, (rows.numel(), shape[1]), dtype)

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
        if dim and (shape[1] // n) % BLOCK:
            return BLOCK
        rows = {name: parts[name].view(shape[0], -1) for name in ("packed", "scales", "zeros") if name in parts}
        cuts = {name: [each.view(-1) for each in cut(part, n, dim)] for name, part in rows.items()}
        return self, split_parts(n, cuts, {name: part for name, part in parts.items() if name not in rows})

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        super().check_values(parts, labels)
        check_not_negative(parts["factor"], labels["factor"])
