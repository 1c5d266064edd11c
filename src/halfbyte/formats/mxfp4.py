"""MXFP4: E2M1 codes with a power-of-two scale per 32 values (OCP Microscaling specification 1.0), as in gpt-oss.

A matrix is padded with zero columns to a multiple of 32; leading dimensions count as rows. Three published layouts are
read, all with the even element in the low nibble and E8M0 scales 2^(byte − 127):

    w_blocks       uint8 [..., K/32, 16] and w_scales uint8 [..., K/32]         gpt-oss; a stack of [out, in] matrices
    weight         uint8 [N, K/2]        and weight_scale uint8 [N, K/32]
    weight_packed  uint8 [N, K/2]        and weight_scale uint8 [N, K/32]       compressed-tensors
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.errors import CheckpointError
from .base import (
    DAMAGED,
    Loaded,
    OptionlessFormat,
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
from .compressed_tensors import MXFP4, scheme_of
from .e2m1 import decode_scales, dequantize_e2m1, encode_e2m1, linear_e2m1, pack_e2m1
from .linear import PackedProduct
from .nvfp4 import PACKED, SCALE

BLOCK, NAN = 32, 0xFF
BLOCKS, SCALES = "_blocks", "_scales"


@register_format
@dataclass(frozen=True)
class Mxfp4(OptionlessFormat):
    """E2M1 codes with one E8M0 scale per 32 values; 4.25 bits a weight."""

    name: ClassVar[str] = "mxfp4"
    names: ClassVar[dict[str, str]] = {"mxfp4": "mxfp4"}

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows, columns = rows_and_columns(shape)
        blocks = -(-columns // BLOCK)
        return {"packed": ((rows, blocks * BLOCK // 2), torch.uint8), "scale": ((rows, blocks), torch.uint8)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """See `Format`. Specification, section 6.3: exponent floor(log2 amax) − 2; magnitudes above 6 saturate."""
        self.check_weight(weight)
        rows, columns = rows_and_columns(tuple(weight.shape))
        blocks = F.pad(weight.reshape(rows, columns).float(), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
        amax = blocks.abs().amax(2)
        check_weight_finite(amax, "a block with one would be lost")
        # The mantissa of frexp lies in [½, 1), so floor(log2 amax) is the exponent minus one.
        scale = (torch.frexp(amax).exponent - 3 + 127).clamp(0, NAN - 1).to(torch.uint8)
        codes = encode_e2m1(blocks / decode_scales(scale, None).unsqueeze(2))
        return {"packed": pack_e2m1(codes).view(rows, -1), "scale": scale}

    def rows_concatenate(self, rows: int) -> bool:
        return True

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        width = rows_and_columns(shape)[1]
        return dequantize_e2m1(parts["packed"], parts["scale"], None, (1, BLOCK), width, dtype).view(shape)

    def product(self, parts: Parts, shape: tuple[int, int]) -> PackedProduct | None:
        return PackedProduct(linear_e2m1, (parts["packed"], parts["scale"], None, (1, BLOCK)))

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_e2m1(parts["packed"][rows], parts["scale"][rows], None, (1, BLOCK), shape[1], dtype)

    def _split(self, parts: Parts, shape: tuple[int, int], dim: int, n: int) -> Shards | int:
        if dim and (shape[1] // n) % BLOCK:
            return BLOCK
        return self, split_parts(n, {name: cut(tensor, n, dim) for name, tensor in parts.items()}, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """The published layout for a bf16 matrix; halfbyte's own layout for anything else."""
        if len(shape) != 2 or shape[1] % BLOCK or dtype != torch.bfloat16:
            return super().to_state(parts, shape, dtype)
        return {"": parts["packed"], SCALE: parts["scale"]}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        if {BLOCKS, SCALES} & state.keys():
            labels = {"packed": f"{name}{BLOCKS}", "scale": f"{name}{SCALES}"}
            parts, shape = _from_gpt_oss(state, labels)
            cls().check_values(parts, labels)
            return (cls().stacked() if len(shape) == 3 else cls()), parts, shape, torch.bfloat16
        if SCALE not in state:
            return super().from_state(state, name)
        suffixes = {"packed": PACKED if PACKED in state else "", "scale": SCALE}
        parts = {part_name: state[key] for part_name, key in suffixes.items() if key in state}
        rows, half = parts["packed"].shape if "packed" in parts and parts["packed"].dim() == 2 else (0, 0)
        check_parts(parts, cls().part_specs((rows, 2 * half)), suffixes, name)
        cls().check_values(parts, {"packed": name, "scale": entry_name(name, SCALE)})
        return cls(), parts, (rows, 2 * half), torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        scale = parts["scale"]
        wrong = 0 if scale.is_meta else int((scale == NAN).sum())
        if wrong:
            raise CheckpointError(f"{labels['scale']} has {wrong} scales that are NaN (255)", DAMAGED)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return super().state_suffixes() | {SCALE, PACKED, BLOCKS, SCALES}

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Mxfp4 | None:
        scheme = scheme_of(entry)
        return cls() if entry.get("quant_method") == "mxfp4" or (scheme and scheme.layout == MXFP4) else None


def _from_gpt_oss(state: Parts, labels: Mapping[str, str]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Parts and shape [..., K] from the blocks and scales of gpt-oss."""
    for part_name, key in (("packed", BLOCKS), ("scale", SCALES)):
        if key not in state:
            raise CheckpointError(f"{labels[part_name]} is missing from the checkpoint", DAMAGED)
        if state[key].dtype != torch.uint8:
            raise CheckpointError(f"{labels[part_name]} is {state[key].dtype}, not uint8", DAMAGED)
    blocks, scales = state[BLOCKS], state[SCALES]
    if blocks.dim() < 3 or blocks.shape[-1] != BLOCK // 2:
        raise CheckpointError(f"{labels['packed']} is {tuple(blocks.shape)}, expected [..., K/32, 16]", DAMAGED)
    if scales.shape != blocks.shape[:-1]:
        expected = tuple(blocks.shape[:-1])
        raise CheckpointError(f"{labels['scale']} is {tuple(scales.shape)}, expected {expected}", DAMAGED)
    count = blocks.shape[-2]
    rows = blocks.shape[:-2] if blocks.dim() == 4 else (-1,)  # a stack keeps [E, N]
    parts = {"packed": blocks.reshape(*rows, count * BLOCK // 2), "scale": scales.reshape(*rows, count)}
    return parts, (*blocks.shape[:-2], count * BLOCK)
