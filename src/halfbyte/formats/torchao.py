"""Tensors of torchao in safetensors (`torchao.prototype.safetensors`, which transformers' `save_pretrained` calls).

The attributes of a tensor subclass for the parameter `weight` are entries of the module:

    _weight_qdata       int8 [N, K]: Int8Tensor and IntxUnpackedToInt8Tensor; float8_e4m3fn [N, K]: Float8Tensor
    _weight_scale       fp32, fp16 or bf16 [N, G]; for float8 one per row, tensor or tile of 128×128
    _weight_zero_point  int8 [N, G]; none where all zeros are 0

Int8 codes become bit planes (`formats.integers`) of as few bits as the codes need: intx tensors hold 1- to 8-bit codes
in a byte. torchao computes values in the dtype of its result, with two roundings; halfbyte in fp32, with one.

int4 tensors are not read: their codes are laid out for a CUDA kernel, and their zeros are added after scaling. Neither
are NF4 tensors, which have no safetensors layout: torchao saves them as pickled classes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..utils.errors import CheckpointError
from .base import DAMAGED, FLOATS, Format, Loaded, Parts, check_finite, check_parts, entry_name, register_format
from .float8 import E4M3, SCALE, Float8
from .hqq import BITS, HQQ
from .integers import to_planes

SUFFIXES = {"qdata": "../_weight_qdata", "scale": "../_weight_scale", "zero_point": "../_weight_zero_point"}
LAYOUTS = {  # entries of layouts that are not read
    "../_weight_scale_and_zero": "int4 tiles",
    "../_weight_per_tensor_scale": "NVFP4 blocks",
    "../_weight_act_pre_scale": "codes of weights for scaled activations",
}
USE_INTX = (
    "quantize with Int8WeightOnlyConfig, Float8WeightOnlyConfig or IntxWeightOnlyConfig(torch.int4), or use a GPTQ,"
    " AWQ or compressed-tensors checkpoint"
)


@register_format
@dataclass(frozen=True)
class Torchao(HQQ):
    """A weight as torchao stores it. In memory it is `HQQ` or `Float8`."""

    bits: int = 8
    group: int = 128

    name: ClassVar[str] = "torchao"
    names: ClassVar[dict[str, str]] = {}

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the format is only read."""
        return []

    @classmethod
    def from_state(cls, state: Parts, name: str) -> Loaded:
        parts = {part_name: state[key] for part_name, key in SUFFIXES.items() if key in state}
        labels = {part_name: entry_name(name, key) for part_name, key in SUFFIXES.items()}
        codes = parts.get("qdata")
        if codes is None:
            raise CheckpointError(f"{labels['qdata']} is missing from the checkpoint", DAMAGED)
        layout = next((layout for key, layout in LAYOUTS.items() if key in state), None)
        if layout or codes.dim() != 2 or codes.dtype not in (torch.int8, E4M3):
            described = layout or f"{codes.dtype} {tuple(codes.shape)}"
            raise CheckpointError(f"{labels['qdata']} is {described}, which halfbyte does not read", USE_INTX)
        if "scale" not in parts or parts["scale"].dtype not in FLOATS:
            raise CheckpointError(f"{labels['scale']} is missing from the checkpoint, or is no float", DAMAGED)
        if codes.dtype == E4M3:
            return Float8.from_state({"": codes, SCALE: parts["scale"]}, name)
        (rows, inputs), scales = codes.shape, parts["scale"]
        groups = scales.shape[1] if scales.dim() == 2 else 0
        if not groups or len(scales) != rows or inputs % groups:
            raise CheckpointError(
                f"{labels['scale']} is {tuple(scales.shape)}, not one per group of a row of {labels['qdata']}", USE_INTX
            )
        zeros = parts.setdefault("zero_point", torch.zeros_like(scales, dtype=torch.int8))
        check_parts(parts, {"zero_point": ((rows, groups), torch.int8)}, SUFFIXES, name)
        check_finite({"scale": scales}, labels)
        bits = 8 if codes.is_meta else _width(codes)
        middle = 2 ** (bits - 1)
        stored = to_planes((codes.int() + middle).to(torch.uint8), scales, zeros.int() + middle, bits, labels["qdata"])
        return (*stored, (rows, inputs), scales.dtype)

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        return frozenset({*SUFFIXES.values(), *LAYOUTS})

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Format | None:
        return cls() if entry.get("quant_method") == "torchao" else None


def _width(codes: Tensor) -> int:
    """Return the fewest bits of `BITS` that hold signed `codes`, int8."""
    low, high = (int(bound) for bound in codes.aminmax())
    return min(bits for bits in BITS if -(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1))
