"""Checkpoints of the hqq package, in 8, 6, 5, 4, 3 and 2 bits, which transformers saves as safetensors.

A module whose parameter `weight` has n groups of `group_size` consecutive weights has these entries among others:

    W_q           codes, uint8 [n · bits/8, group_size], or int32 [⌈n/10⌉, group_size] for 3 bits
    scale, zero   fp16, bf16 or fp32 [n, 1]
    shape         int64 [2]: N, K
    nbits, axis, group_size   int32 []
    view_as_float             uint8 []: whether W_q is viewed as floats

A word holds one code of each of several equal runs of groups, the first in its highest bits. 6- and 5-bit codes take a
byte. Codes and their scales and zeros are loaded into the bit planes of `formats.hqq`, which are saved in halfbyte's
layout. hqq computes values in the dtype of the scales, with two roundings; halfbyte in fp32, with one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..utils.errors import CheckpointError
from .base import DAMAGED, FLOATS, Format, Loaded, Parts, check_finite, entry_name, register_format
from .hqq import BITS, GROUPS, HQQ
from .integers import to_planes

CODES = "W_q"
NUMBERS = ("nbits", "axis", "view_as_float")
REQUIRED = (CODES, "scale", "zero", "shape", "nbits")
OTHERS = (  # entries that are not used
    "group_size", "packing", "unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
SHIFTS = {8: (0,), 6: (0,), 5: (0,), 4: (4, 0), 3: tuple(range(27, -1, -3)), 2: (6, 4, 2, 0)}  # of a word's codes
USE_AXIS_1 = (
    "quantize with axis=1, nbits 8, 6, 5, 4, 3 or 2, and a group_size that divides rows; or use the 16-bit model"
)


@register_format
@dataclass(frozen=True)
class HqqLibrary(HQQ):
    """A weight as the hqq package stores it. In memory it is `HQQ`."""

    name: ClassVar[str] = "hqq_library"
    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the format is only read."""
        return []

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        for key in REQUIRED:
            if f"../{key}" not in state:
                raise CheckpointError(f"{entry_name(name, f'../{key}')} is missing from the checkpoint", DAMAGED)
        numbers = {key: _number(state, key, name) for key in NUMBERS}
        bits = numbers["nbits"]
        shape = state["../shape"]
        label = entry_name(name, f"../{CODES}")
        if bits not in SHIFTS:
            raise CheckpointError(f"{entry_name(name, '../nbits')} is {bits}", USE_AXIS_1)
        if numbers["axis"] != 1 and "../axis" in state:
            raise CheckpointError(
                f"{entry_name(name, '../axis')} is {numbers['axis']}: groups lie across rows", USE_AXIS_1
            )
        if shape.numel() != 2 or shape.is_meta:
            raise CheckpointError(f"{entry_name(name, '../shape')} is not the shape of a matrix", DAMAGED)
        rows, inputs = (int(size) for size in shape.flatten())
        parts = {key: state[f"../{key}"] for key in (CODES, "scale", "zero")}
        if numbers["view_as_float"]:
            parts[CODES] = parts[CODES].view(torch.int32 if bits == 3 else torch.uint8)
        groups, remainder = divmod(parts["scale"].numel(), max(rows, 1))
        labels = {key: entry_name(name, f"../{key}") for key in parts}
        if not groups or remainder or inputs % groups:
            count = parts["scale"].numel()
            raise CheckpointError(f"{labels['scale']} has {count} groups, which do not divide {rows} rows", USE_AXIS_1)
        _check_sizes(parts, (rows * groups, inputs // groups), bits, labels)
        check_finite(parts, labels)
        codes = torch.cat([(parts[CODES] >> shift) & (2**bits - 1) for shift in SHIFTS[bits]])[: rows * groups]
        codes = codes.to(torch.uint8).reshape(rows, inputs)
        scales, zeros = (parts[key].reshape(rows, groups) for key in ("scale", "zero"))
        return (*to_planes(codes, scales, zeros, bits, label), (rows, inputs), scales.dtype)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return frozenset(f"../{key}" for key in (*REQUIRED, *NUMBERS, *OTHERS))

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        if entry.get("quant_method") != "hqq":
            return None
        arguments = entry.get("quant_config") or {}
        if "weight_quant_params" not in arguments:  # arguments by layer; every weight stores its own
            arguments = next(iter(arguments.values()), {}) if isinstance(arguments, Mapping) else {}
        weights = arguments.get("weight_quant_params") or {}
        bits, group = weights.get("nbits", 4), weights.get("group_size", 64)
        return cls(bits if bits in BITS else 4, group if group in GROUPS else 64, scale_dtype="float16")


def _number(state: Parts, key: str, name: str) -> int:
    """Return an entry that holds one number; 0 if it is missing or on the meta device."""
    entry = state.get(f"../{key}")
    if entry is None or entry.is_meta:
        return 0
    if entry.numel() != 1:
        raise CheckpointError(f"{entry_name(name, f'../{key}')} is {tuple(entry.shape)}, not a number", DAMAGED)
    return int(entry)


def _check_sizes(parts: Mapping[str, Tensor], groups: tuple[int, int], bits: int, labels: Mapping[str, str]) -> None:
    """Check shapes and dtypes against `groups` [n, size].

    Raises:
        CheckpointError: an entry has another shape or dtype.
    """
    words = -(-groups[0] // len(SHIFTS[bits]))
    expected = {CODES: (words, groups[1]), "scale": (groups[0], 1), "zero": (groups[0], 1)}
    for key, size in expected.items():
        if tuple(parts[key].shape) != size:
            raise CheckpointError(f"{labels[key]} is {tuple(parts[key].shape)}, expected {size}", DAMAGED)
    dtype = torch.int32 if bits == 3 else torch.uint8
    if parts[CODES].dtype != dtype:
        raise CheckpointError(f"{labels[CODES]} is {parts[CODES].dtype}, expected {dtype}", DAMAGED)
    if parts["scale"].dtype not in FLOATS or parts["zero"].dtype not in FLOATS:
        raise CheckpointError(f"{labels['scale']} and {labels['zero']} are not floats", DAMAGED)
