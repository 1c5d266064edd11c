"""A tiny Llama that transformers loads with `BitsAndBytesConfig`, with PEFT's LoRA, and its training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import halfbyte
from halfbyte.layers import bnb

CONFIGS: dict[str, dict[str, Any]] = {
    "nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
    "int8": {"load_in_8bit": True},
}
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_llama(folder: Path) -> Path:
    """Save a float Llama of two layers with biases."""
    torch.manual_seed(0)
    shape = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained(folder)
    return folder


def load(folder: Path, name: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Load a model; `name` is a key of `CONFIGS`, or None for a quantized checkpoint."""
    own = {} if name is None else {"quantization_config": transformers.BitsAndBytesConfig(**CONFIGS[name], **options)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, dtype=dtype, **own)


def adapted(model: nn.Module) -> Any:
    """Add LoRA adapters of random values to all linears, in training mode."""
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=list(ROLES), r=4, init_lora_weights=False)).train()


def step(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one batch of 2 × 17 tokens."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 101, (2, 17))
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(found: tuple, expected: tuple, tolerance: float) -> None:
    """Compare losses, and each gradient by its relative 2-norm."""
    assert abs(found[0] - expected[0]) <= tolerance * expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 10 * tolerance * gradient.norm(), name


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: codes stored as floats may be NaN."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def files(model: Any, folder: Path) -> dict[str, bytes]:
    """Bytes of the files that `save_pretrained` writes."""
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".json")}


def assert_patched_equals_stock(folder: Path, scratch: Path, name: str, tolerance: float = 1e-6) -> None:
    """Check the patched step, saved files and `unpatch` of a model loaded as `CONFIGS[name]`."""
    model = load(folder, name)
    stock = files(model, scratch / f"{name}-stock")
    model = adapted(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modules = list(model.modules())
    expected = step(model)
    report = halfbyte.patch(model)
    assert not report.unfused
    assert all(report.fused[f"LoRA of {role}"] == 2 for role in ROLES)
    assert_same_step(step(model), expected, tolerance)
    assert_same_step(step(model), expected, tolerance)  # from the held views
    assert list(model.modules()) == modules
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(bytes_of(value), bytes_of(state[key])), key
    patched = files(model, scratch / f"{name}-adapter")
    halfbyte.unpatch(model)
    assert not any(module in bnb._views for module in modules)
    assert files(model, scratch / f"{name}-adapter-unpatched") == patched
    found = step(model)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())
    # the base alone, patched, and loaded again from its files
    base = load(folder, name)
    halfbyte.patch(base)
    assert files(base, scratch / f"{name}-patched") == stock
    again = adapted(load(scratch / f"{name}-patched", None))
    halfbyte.patch(again)
    assert_same_step(step(again), expected, tolerance)
