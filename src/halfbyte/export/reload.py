"""Reading a merged model back: with the tool its weights are stored for, and each weight as that tool sees it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Blockwise4
from halfbyte.loading.load import load_model
from halfbyte.reading.boundary import answered
from halfbyte.reading.model_config import read_config
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, HalfbyteError
from halfbyte.utils.notices import silent

from .packing import Packing

REPORT = "please report this"


def reload(folder: Path, packing: Packing, dtype: str, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """The merged model: by plain transformers (with bitsandbytes where it stores for that), or by halfbyte.

    Args:
        dtype: of the weights that are not quantized, as config.json says.

    Raises:
        CheckpointError: it does not load, or lacks a weight.
    """
    if packing.config is not None and packing.loader == "halfbyte":
        try:
            with silent():
                return load_model(str(folder), dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        except HalfbyteError as error:
            raise CheckpointError(f"the merged model does not load: {error.message}", REPORT) from error
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "device_map": {"": device}}
    if packing.loader == "fp8":  # the values, not the products of a GPU's FP8 units
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    said = read_config(folder)
    if (said.get("text_config") or said).get("attn_logit_softcapping"):
        options["attn_implementation"] = "eager"  # SDPA leaves scores uncapped, silently before transformers 5.23
    with answered("the merged model does not load", REPORT):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    model, info = loaded
    wrong = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in sorted(info[kind], key=str)]
    if wrong:
        raise CheckpointError(f"the merged model lacks {wrong[0]}", REPORT)
    return model


def stored_values(module: nn.Module) -> Tensor:
    """fp32: the weight of a loaded module, dequantized by the tool that loaded it."""
    weight: Any = module.weight
    if isinstance(weight.data, QuantizedTensor):
        return weight.data.dequantize(torch.float32)
    kind = type(weight).__name__
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(weight.quant_state)
        if weight.device.type == "cpu" and state.shape[-1] % state.blocksize:
            # bitsandbytes 0.50.2's CPU kernel is wrong where blocks cross rows; its GPU kernels are not
            entries = {"": weight.data, **state.as_dict(packed=True)}
            format_, parts, shape, _ = Blockwise4.from_state(entries, "weight")
            return format_.dequantize(parts, shape, torch.float32)
        state.dtype = torch.float32
        return dequantize_4bit(weight.data, state)
    if kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        return int8_vectorwise_dequant(weight.data, weight.SCB)
    return weight.data.float()
