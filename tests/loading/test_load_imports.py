"""Checkpoints of other tools through the loader: a tiny Llama in GPTQ, AWQ, ModelOpt or MXFP4 entries."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.formats import Awq, Gptq, GptqV2, Mxfp4, Nvfp4, PackQuantized
from halfbyte.formats.base import entry_name
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError


def int4(cls, outputs, inputs):
    packed = (inputs, outputs // 8) if cls is Awq else (inputs // 8, outputs)
    word = {"low": -(2**31), "high": 2**31 - 1, "dtype": torch.int32}
    state = {
        "../qweight": torch.randint(size=packed, **word),
        "../qzeros": torch.randint(size=(inputs // 32, outputs // 8), **word),
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


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.name)
def test_a_checkpoint_keeps_its_bytes(cls, tiny_checkpoint, tmp_path):
    states = converted(tiny_checkpoint("Llama"), tmp_path / "model", cls)
    model = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    for name, state in states.items():
        expected = QuantizedTensor(*cls.from_state(state, name))
        weight = model.get_parameter(name)
        assert type(weight.format) is cls
        for part, value in expected.parts.items():
            assert torch.equal(weight.parts[part], value), (name, part)
    x = torch.arange(12).view(1, 12)
    assert torch.isfinite(model(input_ids=x).logits).all()


def test_a_corrupted_scale_names_the_tensor(tiny_checkpoint, tmp_path):
    converted(tiny_checkpoint("Llama"), tmp_path / "model", Nvfp4)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight_scale_2"] = torch.tensor(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight_scale_2 is nan"):
        load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
