"""Bytes of auxiliary models: a teacher, and reward models.

Their weights stay resident for the whole run. A teacher's forward runs first in each micro-batch, without gradients. It
leaves one hidden state per completion token; its logits share the chunk workspace of the student's (`ops.divergence`).
Reward models score a micro-batch's completions between rollouts and steps, without gradients, in less memory than a
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..auxiliary.model import AuxiliaryModel, find_teacher
from ..config.policy import DISTILLING
from ..config.schema import AdapterSection, RunKeys
from ..data.batch_shapes import Batches
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_header, safetensors_files
from ..rewards.reward_models import find_reward_models
from ..rewards.specs import MODEL, read_specs

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan
    from .shapes import ModelShapes

# Keys that describe the student's adapter and quantization-aware training, reset for a teacher or reward model.
STUDENT_KEYS: dict[str, Any] = {
    "qat_scheme": None,
    **{key: field.get_default(call_default_factory=True) for key, field in AdapterSection.model_fields.items()},
}


@dataclass(frozen=True)
class AuxiliaryModels:
    """Auxiliary models of a run.

    Attributes:
        bytes: device bytes of their weights and adapters.
        has_teacher: whether one of them is a teacher.
        teacher: shapes of the teacher's model; None if the teacher is an adapter on the trained model.
    """

    bytes: int = 0
    has_teacher: bool = False
    teacher: ModelShapes | None = None

    def with_plan(self, plan: MemoryPlan, trained: ModelShapes, batches: Batches) -> MemoryPlan:
        """Add these models to `plan`, whose capacity excludes their bytes."""
        weights, capacity = plan.weights + self.bytes, plan.capacity_bytes + self.bytes
        plan = replace(plan, weights=weights, capacity_bytes=capacity)
        if not self.has_teacher:
            return plan
        shapes = self.teacher or trained
        answers = min(batches.largest.rows * trained.config.max_completion_length, batches.largest.tokens)
        hidden = answers * shapes.text_config.hidden_size * shapes.dtype.itemsize
        teacher_forward = shapes.evaluation(batches.largest) + hidden
        return replace(plan, activations=max(plan.activations + hidden, teacher_forward - plan.logits))


def find_auxiliary(config: RunKeys, device: torch.device, itemsize: int = 4) -> AuxiliaryModels:
    """Find the run's teacher and reward models and count their bytes.

    Args:
        itemsize: bytes of an element of unquantized weights.

    Raises:
        HalfbyteError: one cannot be found.
    """
    entries = [entry for entry in config.reward_funcs or [] if isinstance(entry, dict) and MODEL in entry]
    reward_models = find_reward_models(config, read_specs(entries, []))
    reward_bytes = 0
    for model in reward_models:
        if model.adapter is None:
            assert model.files is not None
            reward_bytes += itemsize * _count_elements(safetensors_files(Path(model.files.origin.name)))
        else:  # an adapter with its base
            reward_bytes += _bytes(model, _shapes(config, model, device))
    if config.method not in DISTILLING:
        return AuxiliaryModels(reward_bytes)
    teacher = find_teacher(config)
    shapes = _shapes(config, teacher, device)
    return AuxiliaryModels(reward_bytes + _bytes(teacher, shapes), True, shapes)


def _shapes(config: RunKeys, model: AuxiliaryModel, device: torch.device) -> ModelShapes | None:
    """Return the shapes of an auxiliary model; None if it shares the trained model's weights."""
    from .shapes import ModelShapes

    if model.files is None:
        return None
    keys = {**STUDENT_KEYS, "model_name_or_path": model.files.name}
    return ModelShapes(config.model_copy(update=keys), model.files.config, device)


def _bytes(model: AuxiliaryModel, shapes: ModelShapes | None) -> int:
    """Device bytes of an auxiliary model's weights, and of its adapter, which is loaded in float32."""
    adapter = 0 if model.adapter is None else 4 * _count_elements([model.adapter / ADAPTER])
    return adapter + (shapes.frozen_bytes() if shapes else 0)


def _count_elements(files: Sequence[Path]) -> int:
    """Number of tensor elements in safetensors files."""
    headers = (read_header(file, ADAPTER_AGAIN) for file in files)
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
