"""A tiny gpt-oss checkpoint in the published layout: experts in MXFP4, other linears in 16 bits."""

import json

import torch
from safetensors.torch import load_file, save_file

from halfbyte.formats import Mxfp4
from halfbyte.tensor import QuantizedTensor
from tests.helpers.expert_models import mixture

SKIP = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def save_gpt_oss(folder, **keys):
    """Write the checkpoint and return the quantized stacks of experts by name."""
    model = mixture("GptOss", **keys).to(torch.bfloat16)
    model.save_pretrained(folder)
    entries, stacks = load_file(folder / "model.safetensors"), {}
    for key in [key for key in entries if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        shape = model.get_parameter(key).mT.shape
        stack = QuantizedTensor.quantize_stack(entries.pop(key).mT.contiguous(), Mxfp4(), shape)
        count, rows, half = stack.packed.shape
        entries[f"{key}_blocks"], entries[f"{key}_scales"] = stack.packed.view(count, rows, half // 16, 16), stack.scale
        stacks[key] = stack
    save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": SKIP}
    (folder / "config.json").write_text(json.dumps(config))
    return stacks
