"""Planned bytes of a training step, for tests that compare them with a real step."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Batches, Shape
from halfbyte.plan.costs import LayerCost
from halfbyte.plan.estimate import GIB, _Planner
from halfbyte.plan.policy import Choice
from halfbyte.plan.shapes import ModelShapes

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_hidden_layers": 6, "vocab_size": 128_256}  # fmt: skip
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
         "head_dim": 128, "num_hidden_layers": 6, "vocab_size": 151_936}  # fmt: skip


@functools.cache
def layer_of(family: str, rows: int, length: int, recipe: str = "bf16") -> LayerCost:
    """Cost of a layer of Llama 8B's width (Qwen3: of 0.6B's), replayed at every level."""
    sizes = SMALL if family == "Qwen3" else LLAMA_8B
    config = RunConfig(model_name_or_path="m", dataset="d", packing=True, dtype="bfloat16", recipe=recipe)
    shapes = ModelShapes(
        config, getattr(transformers, f"{family}Config")(**sizes, pad_token_id=0), torch.device("cuda")
    )
    return _Planner(shapes, Batches.uniform(rows, length), GIB).layer(Shape(rows, length))


def transient_bytes(config: RunConfig, model_config: Any, batch: Shape, level: str) -> tuple[int, int]:
    """Return the planned bytes excluding weights, gradients and optimizer, and the loss's part of them."""
    config = config.model_copy(update={"gradient_accumulation_steps": 2})  # gradients are there from the start
    shapes = ModelShapes(config, model_config, torch.device("cpu"))
    planner = _Planner(shapes, Batches.uniform(batch.rows, batch.length), GIB)
    choice = Choice((level,) * planner.depth, graphs=False)
    return planner._transient(batch, choice, planner.stages[0]), planner._step(batch, choice).logits
