"""Layouts of other tools that `merge --quantize` writes: the stored format, and the entry of config.json that loads it.

Marlin and Machete are the kernels of vLLM and SGLang for weights of few bits and 16-bit activations. They multiply
w4a16, w4a16-asym, w8a16, gptq and nvfp4a16.

This module imports no torch, since the command line lists its names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import __version__

Loader = Literal["halfbyte", "bitsandbytes", "fp8"]
Config = Callable[[Sequence[str], int], dict[str, Any]]

GROUP_SIZES = (128, 64, 32)  # inputs per scale that Marlin multiplies; the largest that divides every layer's inputs
TILE, NVFP4_BLOCK = 128, 16
E4M3 = "torch.float8_e4m3fn"


@dataclass(frozen=True)
class Layout:
    """A layout of another tool.

    Attributes:
        spec: the weights' format; `{group}` stands for the group size, `{scales}` for the dtype of scales.
        servers: tools that load it.
        config: from the names of the modules that stay in 16 bits and the group size to `quantization_config`.
        loader: tool that verification loads it with.
        experts: whether experts are quantized, too, each in tensors of its own.
        nvfp4: for NVFP4, the tool whose entries are written; matrices that servers fuse then have one factor.
        calibrated: whether the scale of activations is stored.
    """

    spec: str
    servers: str
    config: Config
    loader: Loader = "halfbyte"
    experts: bool = False
    nvfp4: Literal["modelopt", "compressed-tensors"] | None = None
    calibrated: bool = False

    @property
    def has_groups(self) -> bool:
        """Return whether its group size depends on the model."""
        return "{group}" in self.spec


def _bitsandbytes(kind: str) -> Config:
    def config(skipped: Sequence[str], _group: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": kind != "int8",
            "load_in_8bit": kind == "int8",
            "llm_int8_skip_modules": [*skipped],
            "llm_int8_threshold": 6.0,
        }
        if kind != "int8":
            entry |= {
                "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_quant_storage": "uint8",
                "bnb_4bit_compute_dtype": "bfloat16",
            }
        return entry

    return config


def _fp8_block(skipped: Sequence[str], _group: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": [*skipped],
    }


def _modelopt(skipped: Sequence[str], _group: int) -> dict[str, Any]:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "group_size": NVFP4_BLOCK,
        "ignore": [*skipped],
        "config_groups": {"group_0": {"input_activations": values, "weights": values, "targets": ["Linear"]}},
    }


def _gptq(skipped: Sequence[str], group: int) -> dict[str, Any]:
    """GPTQModel's entry; its negative `dynamic` rules, which vLLM and SGLang read too, name unquantized modules."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "pack_dtype": "int32",
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in skipped if name != "lm_head"},
        "meta": {"quantizer": [f"halfbyte:{__version__}"]},
    }


def _compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Config:
    """The entry of compressed-tensors, as llm-compressor writes it; `weights` override the arguments of W4A16."""

    def arguments(values: dict[str, Any]) -> dict[str, Any]:
        defaults = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": None, "dynamic": False,
            "block_structure": None, "actorder": None, "observer": None, "observer_kwargs": {}, "scale_dtype": None,
            "zp_dtype": None,
        }  # fmt: skip
        return defaults | values

    def config(skipped: Sequence[str], group: int) -> dict[str, Any]:
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": [*skipped],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": layout,
                    "weights": arguments({"group_size": group} | weights),
                    "input_activations": activations and arguments(activations),
                    "output_activations": None,
                }
            },
            "sparsity_config": {},
            "transform_config": {},
        }

    return config


PACK, NVFP4 = "pack-quantized", "nvfp4-pack-quantized"
FLOAT4 = {
    "type": "float", "strategy": "tensor_group", "group_size": NVFP4_BLOCK, "scale_dtype": E4M3, "zp_dtype": E4M3,
}  # fmt: skip
MARLIN = "vLLM, SGLang (Marlin, Machete)"

LAYOUTS = {
    "w4a16": Layout("pack_quantized:{group}:{scales}:runs", MARLIN, _compressed(PACK, {}), experts=True),
    "w4a16-asym": Layout(
        "pack_quantized_zeros:{group}:{scales}:runs", MARLIN, _compressed(PACK, {"symmetric": False}), experts=True
    ),
    "w8a16": Layout("pack_quantized:{group}:{scales}:runs:8", MARLIN, _compressed(PACK, {"num_bits": 8}), experts=True),
    "gptq": Layout("gptq:{group}:{scales}:listed", "vLLM, SGLang (Marlin), GPTQModel", _gptq, experts=True),
    "fp8-block": Layout("fp8:tile", "vLLM, SGLang, transformers", _fp8_block, "fp8"),
    "nvfp4a16": Layout(
        "nvfp4:1d:46mse", "vLLM (Marlin)", _compressed(NVFP4, FLOAT4), experts=True, nvfp4="compressed-tensors"
    ),
    "nvfp4a4": Layout(
        "nvfp4:1d:46mse",
        "vLLM, SGLang on Blackwell",
        _compressed(NVFP4, FLOAT4, FLOAT4 | {"dynamic": "local"}),
        nvfp4="compressed-tensors",
        calibrated=True,
    ),
    "nvfp4-modelopt": Layout(
        "nvfp4:1d:plain", "vLLM, SGLang, TensorRT-LLM on Blackwell", _modelopt, nvfp4="modelopt", calibrated=True
    ),
    "bnb-nf4": Layout(
        "blockwise4:nf4:64:nested", "transformers with bitsandbytes", _bitsandbytes("nf4"), "bitsandbytes"
    ),
    "bnb-fp4": Layout(
        "blockwise4:fp4:64:nested", "transformers with bitsandbytes", _bitsandbytes("fp4"), "bitsandbytes"
    ),
    "bnb-int8": Layout("int8", "transformers with bitsandbytes", _bitsandbytes("int8"), "bitsandbytes"),
}
