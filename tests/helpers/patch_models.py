"""Tiny models of every family that `halfbyte.patch` knows, batches for them, and how results are compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from halfbyte.formats import Blockwise4
from halfbyte.layers import Linear4bit
from halfbyte.modeling.architectures import all_linear, auto_class
from halfbyte.modeling.head import causal_lm_loss
from tests.helpers.families import FAMILIES, IMAGE, MULTIMODAL, PIXELS, SHAPE, TEXT_PARTS, VISION


def tiny(family: str, *, adapter: bool = True, shape: dict | None = None, **lora) -> nn.Module:
    """A random model of a family whose norms, biases and adapters all matter."""
    whole = MULTIMODAL | TEXT_PARTS
    keys = whole[family] if family in whole else SHAPE | FAMILIES[family] | (shape or {})
    config = getattr(transformers, f"{family}Config")(**keys)
    # transformers 5.17 would choose SDPA for capped scores, and leave the cap out; 5.23 chooses eager itself.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = auto_class(config).from_config(config, **capped)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, **{"target_modules": all_linear(model)} | lora))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.train()


def quantize(model: nn.Module) -> nn.Module:
    """`model` with its frozen linears in NF4."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "lora" not in name and name not in ("lm_head", "default"):
                setattr(module, name, Linear4bit.from_linear(child, Blockwise4("nf4", 32, True)))
    return model


def batch(packed: bool = False, length: int = 18) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 101, (3, length))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        lengths = [(length,), (5, length - 5), (3, 1, length - 4)]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        inputs["labels"][inputs["position_ids"] == 0] = -100
    return inputs


def of_stock(model: nn.Module, inputs: dict) -> dict:
    """`inputs` as transformers' own forward needs them to keep documents apart, where it forgets positions in masks."""
    config = model.config
    if "position_ids" not in inputs or config.model_type != "gpt_oss":
        return inputs
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    places = {"inputs_embeds": embeds, "position_ids": inputs["position_ids"]}
    places |= {"config": config, "attention_mask": None, "past_key_values": None}
    masks = {
        "full_attention": create_causal_mask(**places),
        "sliding_attention": create_sliding_window_causal_mask(**places),
    }
    return inputs | {"attention_mask": masks}


def with_image(family: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`inputs` with an image of four tokens in each row, at places that differ."""
    rows = len(inputs["input_ids"])
    inputs = {key: value.clone() for key, value in inputs.items()}
    types = torch.zeros_like(inputs["input_ids"])
    for row in range(rows):
        types[row, row + 3 : row + 7] = 1
    inputs["input_ids"].clamp_(max=IMAGE - 3)[types == 1] = IMAGE
    inputs["labels"][types == 1] = -100
    if family == "Gemma3":
        return inputs | {"token_type_ids": types, "pixel_values": torch.randn(rows, 3, PIXELS, PIXELS)}
    patches = (PIXELS // VISION["patch_size"]) ** 2
    pixels = torch.randn(rows * patches, 3 * 2 * VISION["patch_size"] ** 2)
    grid = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
    return inputs | {"mm_token_type_ids": types, "pixel_values": pixels, "image_grid_thw": grid}


def loop_over_documents(
    query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, window_size, scale, enable_gqa, softcap=0.0
):
    """Replace variable-length attention by a loop over documents, on a CPU."""
    assert torch.equal(bounds_q, bounds_k)
    assert longest_q == longest_k == int(bounds_q.diff().max())
    outputs = []
    for begin, end in zip(bounds_q[:-1].tolist(), bounds_q[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        ages = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = ((ages >= 0) | (window_size[1] < 0)) & (ages <= (window_size[0] if window_size[0] >= 0 else end))
        if softcap:
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            scores = softcap * torch.tanh(q @ k.mT * scale / softcap)
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=enable_gqa)[0]
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def loss_and_gradients(model: nn.Module, inputs: dict) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss, tokens = causal_lm_loss(model, inputs)
    (loss / tokens).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple, expected: tuple, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < tolerance, f"{name}: {error:.2e}"
