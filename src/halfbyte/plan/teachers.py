"""What a teacher takes, beside the model that learns from it.

Its weights stay for the whole run. In each micro-batch its forward comes first, without gradients; what is left of it
is a hidden state for each token of an answer. Its logits share a chunk's room with the model's own (`ops.divergence`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import RunConfig
from ..config.policy import DISTILLING
from ..memory.batches import Batches
from ..models.teachers import TeacherFiles, find_teacher
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_header

if TYPE_CHECKING:
    from .estimate import MemoryPlan
    from .shapes import ModelShapes

# Of the student, which say nothing of a teacher's own layers.
OF_STUDENTS: dict[str, Any] = {
    "adapter_path": None, "target_modules": "all-linear", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_dora": False, "use_peft": True, "qat_scheme": None,
}  # fmt: skip


@dataclass(frozen=True)
class Taught:
    """A run's teacher, if it has one.

    Attributes:
        found: None: there is none.
        shapes: of its model; None where that is the one that trains.
        adapter: bytes of its adapter, in float32 as it is loaded.
    """

    found: TeacherFiles | None = None
    shapes: ModelShapes | None = None
    adapter: int = 0

    @property
    def bytes(self) -> int:
        """That stay."""
        return self.adapter + (self.shapes.frozen_bytes() if self.shapes else 0)

    def beside(self, plan: MemoryPlan, own: ModelShapes, config: RunConfig, batches: Batches) -> MemoryPlan:
        """`plan` of a step, which was made for what the teacher leaves free, with the teacher."""
        if self.found is None:
            return plan
        shapes = self.shapes or own
        answers = min(batches.largest.rows * config.max_completion_length, batches.largest.tokens)
        hidden = answers * shapes.text_config.hidden_size * shapes.dtype.itemsize
        alone = shapes.evaluation(batches.largest) + hidden
        moving = max(plan.activations + hidden, alone - plan.logits)
        weights, capacity = plan.weights + self.bytes, plan.capacity_bytes + self.bytes
        return replace(plan, weights=weights, activations=moving, capacity_bytes=capacity)


def taught(config: RunConfig, device: torch.device) -> Taught:
    """The teacher of a run.

    Raises:
        HalfbyteError: it cannot be found.
    """
    if config.method not in DISTILLING:
        return Taught()
    found = find_teacher(config)
    adapter = 0
    if found.adapter is not None:
        header = read_header(found.adapter / ADAPTER, ADAPTER_AGAIN)
        adapter = sum(4 * math.prod(entry["shape"]) for entry in header.values())
    return Taught(found, _shapes(config, found, device), adapter)


def _shapes(config: RunConfig, found: TeacherFiles, device: torch.device) -> ModelShapes | None:
    from .shapes import ModelShapes

    if found.files is None:
        return None
    keys = {**OF_STUDENTS, "model_name_or_path": found.files.name}
    return ModelShapes(config.model_copy(update=keys), found.files.config, device)
