"""AQLM: sums of codebook vectors, as the aqlm package stores them (arXiv:2401.06118, section 3).

A vector of `in_group` neighbouring weights of a row is the sum of one entry of each of C codebooks, times the row's
scale. "1×16" has one codebook of 2^16 entries, "2×8" two of 2^8. A module whose parameter `weight` is [N, K] has

    codes      int8 or int16 [N, K/in_group, C], two's complement of the unsigned index
    codebooks  fp16, bf16 or fp32 [C, 2^bits, 1, in_group]
    scales     fp16, bf16 or fp32 [N, 1, 1, 1]

Sums and products are computed in fp32 and rounded once. Weights are dequantized for every product: no kernel reads the
codes. The entries are loaded and saved byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..utils.errors import CheckpointError, ModelError
from .base import (
    DAMAGED,
    FLOATS,
    Format,
    Loaded,
    Parts,
    PartSpecs,
    Shards,
    check_parts,
    cut,
    entry_name,
    register_format,
    split_parts,
)

SUFFIXES = {"codes": "../codes", "codebooks": "../codebooks", "scales": "../scales"}
USE_OTHER = "use a checkpoint with out_group_size 1 and at most 16 bits per codebook, or the 16-bit model"
CHUNK = 1 << 20  # vectors decoded at a time


@register_format
@dataclass(frozen=True)
class Aqlm(Format):
    """Additive codes of an AQLM checkpoint.

    Args:
        codebooks: number C of codebooks.
        bits: bits of an index into a codebook, at most 16.
        in_group: weights of a vector.
        dtype: dtype of codebooks and scales.
    """

    codebooks: int = 1
    bits: int = 16
    in_group: int = 8
    dtype: str = "float16"

    name: ClassVar[str] = "aqlm"
    names: ClassVar[dict[str, str]] = {}
    parts_of_checkpoints: ClassVar[tuple[str, ...]] = ("codes", "codebooks", "scales")

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.codebooks}x{self.bits}:{self.in_group}:{self.dtype}"

    @classmethod
    def parse(cls, options: str) -> Aqlm:
        sizes, in_group, dtype = options.split(":")
        codebooks, bits = sizes.split("x")
        return cls(int(codebooks), int(bits), int(in_group), dtype)

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the contract test quantizes, and only calibrating tools write this format."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        if len(shape) != 2 or shape[1] % self.in_group:
            raise ModelError(f"{self.spec} stores matrices whose rows are multiples of {self.in_group}, not {shape}")
        rows, inputs = shape
        dtype = getattr(torch, self.dtype)
        return {
            "codes": ((rows, inputs // self.in_group, self.codebooks), _index_dtype(self.bits)),
            "codebooks": ((self.codebooks, 2**self.bits, 1, self.in_group), dtype),
            "scales": ((rows, 1, 1, 1), dtype),
        }

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise ModelError(
            "aqlm weights are only read from checkpoints: halfbyte has no aqlm quantizer",
            "load an aqlm checkpoint, or quantize to another format",
        )

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes, tables = parts["codes"].flatten(0, 1), parts["codebooks"].flatten(2).float()
        values = torch.empty(codes.shape[0], self.in_group, dtype=torch.float32, device=codes.device)
        for first in range(0, codes.shape[0], CHUNK):
            indices = codes[first : first + CHUNK].int() & (2**self.bits - 1)
            chunk = values[first : first + CHUNK]
            chunk.copy_(tables[0][indices[:, 0]])
            for codebook in range(1, self.codebooks):
                chunk.add_(tables[codebook][indices[:, codebook]])
        return values.view(shape).mul_(parts["scales"].float().view(-1, 1)).to(dtype)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        selected = {**parts, "codes": parts["codes"][rows], "scales": parts["scales"][rows]}
        return self.dequantize(selected, (rows.numel(), shape[1]), dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        if dim and (shape[1] // n) % self.in_group:
            return self.in_group
        cuts, shared = {"codes": cut(parts["codes"], n, dim)}, {"codebooks": parts["codebooks"]}
        if dim:
            return self, split_parts(n, cuts, shared | {"scales": parts["scales"]})
        return self, split_parts(n, cuts | {"scales": cut(parts["scales"], n, 0)}, shared)

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        return {SUFFIXES[part_name]: value for part_name, value in parts.items()}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        parts = {part_name: state[key] for part_name, key in SUFFIXES.items() if key in state}
        labels = {part_name: entry_name(name, key) for part_name, key in SUFFIXES.items()}
        for part_name, dims in (("codes", 3), ("codebooks", 4)):
            if part_name not in parts:
                raise CheckpointError(f"{labels[part_name]} is missing from the checkpoint", DAMAGED)
            if parts[part_name].dim() != dims:
                size = tuple(parts[part_name].shape)
                raise CheckpointError(f"{labels[part_name]} is {size}, expected {dims} dimensions", DAMAGED)
        (rows, vectors, _), (count, entries, out_group, in_group) = parts["codes"].shape, parts["codebooks"].shape
        bits, dtype = entries.bit_length() - 1, parts["codebooks"].dtype
        if out_group != 1 or entries != 2**bits or not 1 <= bits <= 16 or dtype not in FLOATS:
            described = f"{dtype} {tuple(parts['codebooks'].shape)}"
            raise CheckpointError(f"{labels['codebooks']} is {described}: no codebooks that halfbyte reads", USE_OTHER)
        format_, shape = cls(count, bits, in_group, str(dtype).removeprefix("torch.")), (rows, vectors * in_group)
        check_parts(parts, format_.part_specs(shape), SUFFIXES, name)
        format_.check_values(parts, labels)
        return format_, parts, shape, dtype

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return frozenset(SUFFIXES.values())

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "aqlm":
            return None
        defaults = {"num_codebooks": 1, "nbits_per_codebook": 16, "in_group_size": 8, "out_group_size": 1}
        sizes = {key: entry.get(key, default) for key, default in defaults.items()}
        if sizes["out_group_size"] != 1 or not 1 <= sizes["nbits_per_codebook"] <= 16:
            raise CheckpointError(
                f"this aqlm checkpoint has out_group_size {sizes['out_group_size']} and"
                f" {sizes['nbits_per_codebook']} bits per codebook",
                USE_OTHER,
            )
        return replace(
            cls(), codebooks=sizes["num_codebooks"], bits=sizes["nbits_per_codebook"], in_group=sizes["in_group_size"]
        )


def _index_dtype(bits: int) -> torch.dtype:
    return torch.int8 if bits <= 8 else torch.int16
