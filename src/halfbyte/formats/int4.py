"""GPTQ and AWQ checkpoints with 4-bit weights: read as they are, trained on, and written back with the same bytes.

Entries beside the parameter `weight`, which has K inputs and N outputs in G groups (values: `halfbyte.ops.int4`):

    qweight  int32 [K/8, N] (GPTQ) or [K, N/8] (AWQ)
    qzeros   int32 [G, N/8]
    scales   fp16 or bf16 [G, N]
    g_idx    int32 [K], the group of each input: GPTQ only, any order where it was quantized with `desc_act`

GPTQ's first format stores zeros minus one; `checkpoint_format: gptq_v2` stores them as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import CheckpointError, ModelError
from ..ops.int4 import PACK, dequantize_int4
from .base import FLOATS, Format, Parts, PartSpecs, check_parts, cut, entry_name, register_format, split_parts

ENTRIES = {"qweight": "../qweight", "qzeros": "../qzeros", "scales": "../scales", "g_idx": "../g_idx"}
DAMAGED = "re-download the checkpoint"


@dataclass(frozen=True)
class Int4(Format):
    """Affine int4 that another tool quantized.

    Args:
        group_size: inputs that share a scale and a zero.
        scale_dtype: dtype of the stored scales, "float16", "bfloat16" or "float32".
        indexed: `g_idx` is stored.
    """

    group_size: int = 128
    scale_dtype: str = "float16"
    indexed: bool = False

    names: ClassVar[dict[str, str]] = {}
    awq: ClassVar[bool] = False
    zero_shift: ClassVar[int] = 0

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.group_size}:{self.scale_dtype}:{'indexed' if self.indexed else 'runs'}"

    @classmethod
    def parse(cls, options: str) -> Self:
        group_size, scale_dtype, groups = options.split(":")
        return cls(int(group_size), scale_dtype, groups == "indexed")

    @classmethod
    def examples(cls) -> list[Format]:
        """None: the contract begins with quantizing, which these formats leave to the tools that calibrate."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        if len(shape) != 2 or shape[0] % PACK or shape[1] % PACK:
            raise ModelError(f"{self.name} stores matrices whose sides are multiples of 8, not {shape}")
        outputs, inputs = shape
        groups = -(-inputs // self.group_size)
        packed = (inputs, outputs // PACK) if self.awq else (inputs // PACK, outputs)
        specs: PartSpecs = {
            "qweight": (packed, torch.int32),
            "qzeros": ((groups, outputs // PACK), torch.int32),
            "scales": ((groups, outputs), getattr(torch, self.scale_dtype)),
        }
        return specs | {"g_idx": ((inputs,), torch.int32)} if self.indexed else specs

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        raise ModelError(
            f"{self.name} weights are read from checkpoints; halfbyte does not calibrate new ones",
            "load a checkpoint in it, or quantize to another format",
        )

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return dequantize_int4(
            parts["qweight"], parts["qzeros"], parts["scales"], parts.get("g_idx"), self.awq, self.zero_shift, dtype
        )

    def above(self, pieces: Sequence[Parts], shape: tuple[int, int]) -> tuple[Format, dict[str, Tensor]]:
        first = pieces[0]
        orders = [each["g_idx"] for each in pieces if self.indexed and not each["g_idx"].is_meta]
        if any(not torch.equal(each, orders[0]) for each in orders):
            raise ModelError(
                f"{self.name}: matrices that read one input have their groups in different orders (desc_act)",
                "use a checkpoint quantized without desc_act",
            )
        return self, {
            name: part if name == "g_idx" else torch.cat([each[name] for each in pieces], 1)
            for name, part in first.items()
        }

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
        each = shape[dim] // n
        if each % PACK:
            return PACK
        if not dim:
            cuts = {name: cut(parts[name], n, 1) for name in ("qweight", "qzeros", "scales")}
            return self, split_parts(n, cuts, {"g_idx": parts["g_idx"]} if self.indexed else {})
        cuts = {"qweight": cut(parts["qweight"], n, 0)}
        if self.indexed:  # inputs of any group may be in any of them
            groups = len(parts["scales"])
            if each % groups:
                return math.lcm(groups, PACK)
            cuts["g_idx"] = cut(parts["g_idx"], n, 0)
            return replace(self, group_size=each // groups), split_parts(
                n, cuts, {k: parts[k] for k in ("qzeros", "scales")}
            )
        size = math.gcd(each, self.group_size)
        for name in ("qzeros", "scales"):
            cuts[name] = cut(parts[name].repeat_interleave(self.group_size // size, 0), n, 0)
        return replace(self, group_size=size), split_parts(n, cuts, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        return {ENTRIES[part]: value for part, value in parts.items()}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        parts = {part: state[key] for part, key in ENTRIES.items() if key in state}
        for part in ("qweight", "scales"):
            label = entry_name(name, ENTRIES[part])
            if part not in parts:
                raise CheckpointError(f"{label} is missing from the checkpoint", DAMAGED)
            if parts[part].dim() != 2 or not parts[part].numel():
                raise CheckpointError(f"{label} is {tuple(parts[part].shape)}, expected a matrix", DAMAGED)
        scales, rows = parts["scales"], parts["qweight"].shape[0]
        if scales.dtype not in FLOATS:
            raise CheckpointError(f"{entry_name(name, ENTRIES['scales'])} is {scales.dtype}, not a float", DAMAGED)
        groups, outputs = scales.shape
        inputs = rows if cls.awq else rows * PACK
        if inputs % groups:
            label = entry_name(name, ENTRIES["scales"])
            raise CheckpointError(f"{label} has {groups} groups, which do not divide {inputs} inputs", DAMAGED)
        format_ = cls(inputs // groups, str(scales.dtype).removeprefix("torch."), "g_idx" in parts)
        try:
            specs = format_.part_specs((outputs, inputs))
        except ModelError as error:
            raise CheckpointError(f"{name}: {error.message}", DAMAGED) from error
        check_parts(parts, specs, ENTRIES, name)
        _check_values(parts, groups, name)
        return format_, parts, (outputs, inputs), scales.dtype

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return frozenset(ENTRIES.values())


def _check_values(parts: Parts, groups: int, name: str) -> None:
    if parts["scales"].is_meta:
        return
    wrong = int((~torch.isfinite(parts["scales"])).sum())
    if wrong:
        raise CheckpointError(f"{entry_name(name, ENTRIES['scales'])} has {wrong} scales that are NaN or Inf", DAMAGED)
    index = parts.get("g_idx")
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) < groups:
        message = (
            f"{entry_name(name, ENTRIES['g_idx'])} has groups {int(index.min())} to {int(index.max())} of {groups}"
        )
        raise CheckpointError(message, DAMAGED)


def _check_config(entry: Mapping[str, Any], key: str, known: str, default: str) -> None:
    """Raise for the widths and layouts of a GPTQ or AWQ checkpoint that are not read."""
    method = entry["quant_method"]
    if entry.get("bits", 4) != 4:
        raise CheckpointError(f"this {method} checkpoint has {entry['bits']}-bit weights", "use one with 4 bits")
    found = str(entry.get(key) or default).lower()
    if found != known:
        raise CheckpointError(f"this {method} checkpoint has {key} {found!r}", f"use one with {key} {known!r}")


@register_format
@dataclass(frozen=True)
class Gptq(Int4):
    """GPTQ int4 (arXiv:2210.17323), AutoGPTQ's format: zeros are stored minus one, modulo 16."""

    name: ClassVar[str] = "gptq"
    zero_shift: ClassVar[int] = 1

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "gptq" or entry.get("checkpoint_format") == "gptq_v2":
            return None
        _check_config(entry, "checkpoint_format", "gptq", "gptq")
        return cls()


@register_format
@dataclass(frozen=True)
class GptqV2(Int4):
    """GPTQ int4, GPTQModel's second format: zeros as they are."""

    name: ClassVar[str] = "gptq_v2"

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "gptq" or entry.get("checkpoint_format") != "gptq_v2":
            return None
        _check_config(entry, "checkpoint_format", "gptq_v2", "gptq_v2")
        return cls()


@register_format
@dataclass(frozen=True)
class Awq(Int4):
    """AWQ int4 (arXiv:2306.00978), AutoAWQ's "gemm" version."""

    name: ClassVar[str] = "awq"
    awq: ClassVar[bool] = True

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "awq":
            return None
        _check_config(entry, "version", "gemm", "gemm")
        return cls()
