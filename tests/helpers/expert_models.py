"""Tiny mixtures, and their twins on dequantized weights."""

from __future__ import annotations

import copy

import torch
import transformers
from torch import nn

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.modeling.architectures import expert_stacks
from halfbyte.tensor import QuantizedTensor
from tests.helpers.families import families

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16}
_ALL = families(width=64, mlp=96, expert=32, vocabulary=128)
SMALL = {"intermediate_size": 32}  # of these families' experts
MIXTURES = {
    "Qwen3Moe": _ALL["Qwen3Moe"] | {"norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 3},
    "Olmoe": _ALL["Olmoe"] | SMALL,
    "Qwen2Moe": _ALL["Qwen2Moe"],
    "DeepseekV3": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                            "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None},
    "GptOss": {"num_local_experts": 4, **SMALL},
}  # fmt: skip
TOKENS = torch.arange(1, 27).view(2, 13)
ADAPTER_KEYS = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "r": 4, "lora_alpha": 8.0}


def mixture(name: str, **keys) -> nn.Module:
    """A random float32 model whose every parameter matters."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | MIXTURES.get(name, {}) | keys))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return model.eval()


def adapted(model: nn.Module, **keys) -> nn.Module:
    """`model` with adapters whose B is not 0."""
    torch.manual_seed(5)
    peft_model = add_adapter(model, RunConfig(**ADAPTER_KEYS | keys))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return peft_model


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a training step on `TOKENS`, and its gradients."""
    loss = model.train()(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same_step(actual: tuple, expected: tuple) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-6)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in actual[1].items():
        assert (gradient - expected[1][name]).norm() <= 1e-5 * expected[1][name].norm(), name


def dequantized(model: nn.Module, stored: nn.Module) -> nn.Module:
    """`model` with the values that `stored` holds, its experts run by transformers' own loop."""
    twin = copy.deepcopy(model)
    own = dict(twin.named_parameters())
    lies = {name for name, module in expert_stacks(model, []).items() if module.is_transposed}
    with torch.no_grad():
        for name, parameter in stored.named_parameters():
            packed = isinstance(parameter, QuantizedTensor)
            value = parameter.dequantize(torch.float32) if packed else parameter
            own[name].copy_(value.transpose(1, 2) if packed and name in lies else value)
    for module in twin.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return twin


def stacks(model: nn.Module) -> dict[str, QuantizedTensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and isinstance(parameter, QuantizedTensor)
    }
