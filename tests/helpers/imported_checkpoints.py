"""Checkpoints of a tiny model in the entries of other tools: GPTQ, AWQ, ModelOpt, MXFP4, compressed-tensors."""

import json

import torch
from safetensors.torch import load_file, save_file

from halfbyte.formats import Awq, Gptq, GptqV2, Mxfp4, Nvfp4, PackQuantized
from halfbyte.formats.base import entry_name


def int4(cls, outputs, inputs):
    packed = (inputs, outputs // 8) if cls is Awq else (inputs // 8, outputs)
    word = {"low": -(2**31), "high": 2**31 - 1, "dtype": torch.int32}
    state = {
        "../qweight": torch.randint(size=packed, **word),
        "../qzeros": torch.randint(size=(inputs // 32, outputs // 8), **word) & 0x77777777,  # 15 would wrap
        "../scales": (torch.rand(inputs // 32, outputs) * 0.01).half(),
    }
    return state if cls is Awq else state | {"../g_idx": (torch.randperm(inputs) // 32).int()}


def packed(cls, outputs, inputs):
    word = {"low": -(2**31), "high": 2**31 - 1, "dtype": torch.int32}
    return {
        "../weight_packed": torch.randint(size=(outputs, inputs // 8), **word),
        "../weight_scale": (torch.rand(outputs, inputs // 32) * 0.01).bfloat16(),
        "../weight_shape": torch.tensor([outputs, inputs]),
    }


def fp4(cls, outputs, inputs):
    format_ = cls(tiles=False) if cls is Nvfp4 else cls()
    weight = torch.randn(outputs, inputs) * 0.05
    return format_.to_state(format_.quantize(weight), (outputs, inputs), torch.bfloat16)


CONFIGS = {
    Gptq: {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    GptqV2: {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    Awq: {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    Nvfp4: {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    Mxfp4: {"quant_method": "mxfp4"},
    PackQuantized: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
    },
}
MAKERS = {Gptq: int4, GptqV2: int4, Awq: int4, Nvfp4: fp4, Mxfp4: fp4, PackQuantized: packed}


def converted(source, target, cls):
    """The checkpoint with all linears of its layers in `cls`; returns their entries by name."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            (target / path.name).write_bytes(path.read_bytes())
    tensors = {name: value for path in source.glob("*.safetensors") for name, value in load_file(path).items()}
    states = {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        states[name] = MAKERS[cls](cls, *tensors.pop(name).shape)
        tensors |= {entry_name(name, suffix): value for suffix, value in states[name].items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"quantization_config": CONFIGS[cls]}
    (target / "config.json").write_text(json.dumps(config))
    return states
