"""What models beside the one that trains take: a teacher, and reward models.

Their weights stay for the whole run. A teacher's forward comes first in each micro-batch, without gradients; what is
left of it is a hidden state for each token of an answer, and its logits share a chunk's room with the model's own
(`ops.divergence`). Reward models are asked between rollouts and steps, about a micro-batch's answers at once, without
gradients: less than a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..auxiliary.find import find_teacher
from ..config import RunConfig
from ..config.policy import DISTILLING
from ..loading.find import ModelFiles
from ..memory.activations import Batches
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_header, safetensors_files
from ..rl.rewards.reward_models import RewardModelFiles, find_reward_models
from ..rl.rewards.specs import MODEL, read_specs

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan
    from .shapes import ModelShapes

# Of the model that trains, which say nothing of another's layers.
OF_STUDENTS: dict[str, Any] = {
    "adapter_path": None, "target_modules": "all-linear", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_dora": False, "use_peft": True, "qat_scheme": None,
}  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """Models beside the one that trains.

    Attributes:
        bytes: of their weights and adapters.
        taught: whether one of them is a teacher.
        teacher: shapes of its model; None where that is the one that trains.
    """

    bytes: int = 0
    taught: bool = False
    teacher: ModelShapes | None = None

    def with_plan(self, plan: MemoryPlan, own: ModelShapes, batches: Batches) -> MemoryPlan:
        """`plan` of a step, which was made for what they leave free, with them."""
        weights, capacity = plan.weights + self.bytes, plan.capacity_bytes + self.bytes
        plan = replace(plan, weights=weights, capacity_bytes=capacity)
        if not self.taught:
            return plan
        shapes = self.teacher or own
        answers = min(batches.largest.rows * own.config.max_completion_length, batches.largest.tokens)
        hidden = answers * shapes.text_config.hidden_size * shapes.dtype.itemsize
        alone = shapes.evaluation(batches.largest) + hidden
        return replace(plan, activations=max(plan.activations + hidden, alone - plan.logits))


def beside(config: RunConfig, device: torch.device, itemsize: int = 4) -> Beside:
    """The models that a run has beside the one that trains.

    Args:
        itemsize: of weights that are not quantized.

    Raises:
        HalfbyteError: one cannot be found.
    """
    models = [entry for entry in config.reward_funcs or [] if isinstance(entry, dict) and MODEL in entry]
    judges = find_reward_models(config, read_specs(models, []))
    held = sum(_judge_bytes(config, judge, device, itemsize) for judge in judges)
    if config.method not in DISTILLING:
        return Beside(held)
    found = find_teacher(config)
    shapes = _shapes(config, found.files, device)
    held += _adapter_bytes(found.adapter) + (shapes.frozen_bytes() if shapes else 0)
    return Beside(held, True, shapes)


def _shapes(config: RunConfig, files: ModelFiles | None, device: torch.device) -> ModelShapes | None:
    from .shapes import ModelShapes

    if files is None:
        return None
    return ModelShapes(
        config.model_copy(update={**OF_STUDENTS, "model_name_or_path": files.name}), files.config, device
    )


def _judge_bytes(config: RunConfig, found: RewardModelFiles, device: torch.device, itemsize: int) -> int:
    if found.adapter is None:
        assert found.files is not None
        return itemsize * _numbers(safetensors_files(Path(found.files.place.name)))
    shapes = _shapes(config, found.files, device)
    return _adapter_bytes(found.adapter) + (shapes.frozen_bytes() if shapes else 0)


def _adapter_bytes(folder: Path | None) -> int:
    """As it is loaded, in float32."""
    return 0 if folder is None else 4 * _numbers([folder / ADAPTER])


def _numbers(files: Sequence[Path]) -> int:
    headers = (read_header(file, ADAPTER_AGAIN) for file in files)
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())
