"""Checkpoints of mixtures of experts that other tools quantized."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file

from halfbyte.formats import of_checkpoint
from halfbyte.formats.base import entry_name
from halfbyte.tensor import QuantizedTensor
from tests.helpers.expert_models import mixture
from tests.helpers.tool_files import PACKED_HERE

PT = {"format": "pt"}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def bitsandbytes(nested):
    def stored(name, weight):
        packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        entries = {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        return entries, dequantize_4bit(packed, state)

    return stored


def fp8(name, weight):
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.view(len(padded) // 128, 128, -1, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    codes = codes.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous().view(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, values.contiguous()


def gptq(order=None):
    """16 inputs a group, or their groups in any order."""

    def stored(name, weight):
        outputs, inputs = weight.shape
        codes = torch.randint(0, 16, (inputs, outputs))
        zeros = torch.randint(0, 15, (inputs // 16, outputs))  # 15 would wrap
        scales = (torch.rand(inputs // 16, outputs) * 0.02).half()
        index = (torch.arange(inputs) if order is None else order(inputs)) // 16
        shifts = 4 * torch.arange(8)
        state = {
            "qweight": (codes.view(-1, 8, outputs) << shifts[:, None]).sum(1),
            "qzeros": (zeros.view(-1, outputs // 8, 8) << shifts).sum(2),
        }
        state = {key: (value + 2**31) % 2**32 - 2**31 for key, value in state.items()}
        entries = {key: value.to(torch.int32) for key, value in state.items()} | {"scales": scales}
        entries["g_idx"] = index.to(torch.int32)
        module = name.removesuffix("weight")
        values = (codes - (zeros + 1)[index] % 16) * scales.float()[index]
        return {f"{module}{key}": value for key, value in entries.items()}, values.T.contiguous()

    return stored


def awq(name, weight):
    outputs, inputs = weight.shape
    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (inputs // 16, outputs))
    scales = (torch.rand(inputs // 16, outputs) * 0.02).half()
    places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where each of 8 values is in a word

    def words(values):
        packed = (values.view(len(values), -1, 8) << (4 * places)).sum(2)
        return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)

    module = name.removesuffix("weight")
    entries = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    values = (codes - zeros.repeat_interleave(16, 0)) * scales.float().repeat_interleave(16, 0)
    return {f"{module}{key}": value for key, value in entries.items()}, values.T.contiguous()


PACKED = {  # as llm-compressor writes it; Kimi K2 is so, in groups of 32
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def scheme(**weights):
    (group,) = PACKED["config_groups"].values()
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def pack_quantized(entry):
    """By compressed-tensors itself."""
    (group,) = entry["config_groups"].values()

    def stored(name, weight):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        how = QuantizationScheme.model_validate(group)
        outputs, inputs = weight.shape
        size = how.weights.group_size or inputs
        runs = weight.view(outputs, -1, size)
        scale, zero = calculate_qparams(runs.amin(2), runs.amax(2), how.weights)
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
        state |= {} if how.weights.symmetric else {"weight_zero_point": zero.to(torch.int8)}
        packed = Compressor.compress(state, how)
        module = name.removesuffix("weight")
        values = Compressor.decompress({k: v.float() if "scale" in k else v for k, v in packed.items()}, how)
        return {f"{module}{key}": value for key, value in packed.items()}, values["weight"].contiguous()

    return stored


SCHEMES = {
    "pack-quantized": PACKED,
    "pack-quantized, zeros": scheme(symmetric=False, group_size=64),
    "pack-quantized, channels": scheme(strategy="channel", group_size=None),
}


def of_tool(make):
    """Config and entries of `tool_files`, which a matrix' own test compares with the tool."""
    entry = make(torch.ones(128, 128)).config

    def stored(name, weight):
        made = make(weight)
        values = QuantizedTensor(*type(of_checkpoint(entry)).from_state(made.entries, name)).dequantize(torch.float32)
        return {entry_name(name, suffix): value for suffix, value in made.entries.items()}, values

    return entry, stored


KINDS = {
    **{kind: (entry, pack_quantized(entry)) for kind, entry in SCHEMES.items()},
    "bitsandbytes": (BNB | {"bnb_4bit_use_double_quant": True}, bitsandbytes(True)),
    "bitsandbytes, plain scales": (BNB, bitsandbytes(False)),
    "fp8": (FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}, fp8),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq()),
    "gptq, desc_act": ({"quant_method": "gptq", "bits": 4}, gptq(lambda n: torch.arange(n).flip(0))),
    **{kind: of_tool(PACKED_HERE[kind]) for kind in ("gptq 3", "gptq 8", "hqq 5", "torchao int8")},
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
}


def checkpoint(folder, entry, stored, name="Qwen3Moe", **keys):
    """A mixture whose matrices but head, embedding and routers are stored so; the model with their values."""
    torch.manual_seed(4)
    model = mixture(name, **(SIZES | {"head_dim": 32} | keys))
    model.save_pretrained(folder)
    entries, twin = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        quantized = key.endswith("_proj.weight")
        own, twin[key] = stored(key, weight) if quantized else ({key: weight}, weight)
        entries |= own
    plain = folder / "plain"
    plain.mkdir()
    save_file(
        {key: value.float().contiguous() for key, value in twin.items()},
        plain / "model.safetensors",
        metadata=PT,
    )
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in entries.items()},
        folder / "model.safetensors",
        metadata=PT,
    )
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
