"""What a step is planned to allocate, for tests that compare it with a real one."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.config import RunConfig
from halfbyte.memory.batches import Batches, Shape
from halfbyte.plan.estimate import GIB, _Planner
from halfbyte.plan.policy import Choice
from halfbyte.plan.shapes import ModelShapes


def moving(config: RunConfig, model_config: Any, batch: Shape, level: str) -> tuple[int, int]:
    """Planned bytes beside weights, gradients and optimizer, and those of the loss among them."""
    config = config.model_copy(update={"gradient_accumulation_steps": 2})  # gradients are there from the start
    shapes = ModelShapes(config, model_config, torch.device("cpu"))
    planner = _Planner(shapes, Batches.alike(batch.rows, batch.length), GIB)
    choice = Choice((level,) * planner.depth, graphs=False)
    return planner._moving(batch, choice, planner.stages[0]), planner._step(batch, choice).logits
