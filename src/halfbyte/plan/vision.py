"""Bytes that the vision tower and the projector allocate for the images of a micro-batch.

They are measured as a step's are, by a ledger of allocations. Towers whose patches follow the sizes of images read
these sizes as numbers, which fake tensors lack: such a tower runs on the CPU with two and with three blocks of zeros,
on two small images. Its bytes are linear in patches and, from the second block on, in blocks: the first one's inputs
need no gradient. Other towers are replayed whole on fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..modeling.architectures import FREEZE_TOWER, non_text_modules, vision_parts
from ..modeling.compute_dtype import no_input_casts
from ..modeling.layer import causal_lm_of
from ..modeling.transformers_versions import enable_checkpointing
from ..modeling.vision import FEATURES, bind_vision
from ..utils.notices import silent
from .ledger import Ledger, kernels
from .replay import give_shapes_a_device

GRID, PIXELS = "image_grid_thw", "pixel_values"
SIDES = 8, 16  # patches of the sides of small images
BLOCKS = 2, 3


@dataclass(frozen=True)
class BatchImages:
    """The images of the micro-batch that has most.

    Attributes:
        columns: the tower's inputs for one image of the data.
        image_tokens: tokens of that image.
        tokens: tokens of all images of the micro-batch.
        cached: whether features are read in place of pixels.
    """

    columns: Mapping[str, Tensor]
    image_tokens: int
    tokens: int
    cached: bool = False


class TowerBytes(NamedTuple):
    """Bytes of tower and projector: alive from their forward to their backward, and the most in either."""

    saved: int
    peak: int


def vision_bytes(model: nn.Module, images: BatchImages, dtype: torch.dtype, checkpointed: bool = False) -> TowerBytes:
    """Return the bytes of a forward of tower and projector, and of its backward if one of them is trained.

    Args:
        model: on the meta device, plain or with its adapter.
        images: those of the micro-batch; features that are cached are computed for one image at a time.
        dtype: compute dtype.
        checkpointed: whether a trained tower recomputes its blocks in backward.

    Raises:
        RuntimeError: the model's own code reads values that fake tensors lack, or cannot run on small images.
    """
    ratio = 1.0 if images.cached else images.tokens / images.image_tokens
    if GRID not in images.columns:
        columns = {name: torch.cat([value] * max(round(ratio), 1)) for name, value in images.columns.items()}
        return _replayed(copy.deepcopy(model), columns, dtype, checkpointed, fake=True)
    width = images.columns[PIXELS].shape[1]
    patches = images.columns[PIXELS].shape[0] * ratio
    depth = len(_blocks(model) or ())
    counts = BLOCKS if depth > max(BLOCKS) else (depth,)
    by_count = []
    for count in counts:
        by_side = [
            _replayed(_with_blocks(model, count), _small(side, width), dtype, checkpointed, fake=False)
            for side in SIDES
        ]
        by_count.append([_line([side**2 for side in SIDES], values, patches) for values in zip(*by_side, strict=True)])
    of_all = (
        by_count[0] if len(counts) == 1 else [_line(counts, values, depth) for values in zip(*by_count, strict=True)]
    )
    return TowerBytes(*map(int, of_all))


def _small(side: int, width: int) -> dict[str, Tensor]:
    return {PIXELS: torch.zeros(side**2, width), GRID: torch.tensor([[1, side, side]])}


def _line(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Return the value at `at` of the line through two points."""
    return values[0] + (values[1] - values[0]) * (at - points[0]) / (points[1] - points[0])


def _blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the longest list of modules in the tower."""
    causal_lm = causal_lm_of(model)
    towers = [causal_lm.get_submodule(name) for name in vision_parts(causal_lm)[FREEZE_TOWER]]
    lists = [module for tower in towers for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=None)


def _with_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a copy of a model whose tower has its first `count` blocks."""
    copied = copy.deepcopy(model)
    if (blocks := _blocks(copied)) is not None:
        del blocks[count:]
    return copied


def _replayed(
    model: nn.Module, columns: Mapping[str, Tensor], dtype: torch.dtype, checkpointed: bool, fake: bool
) -> TowerBytes:
    """Return the bytes of the tower of a model on the meta device, which must not be used afterwards.

    Args:
        fake: whether to compute on fake tensors.
    """
    causal_lm = causal_lm_of(model)
    parts = [causal_lm.get_submodule(name) for name in non_text_modules(causal_lm)]
    for name in vision_parts(causal_lm)[FREEZE_TOWER] if checkpointed else ():
        enable_checkpointing(causal_lm.get_submodule(name))
    with silent():
        bind_vision(model)
    backbone: Any = causal_lm.base_model
    names = inspect.signature(getattr(type(backbone), FEATURES)).parameters
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext():
        for part in parts:
            give_shapes_a_device(part, torch.zeros)
        inputs = {name: value for name, value in columns.items() if name in names}
        if fake:
            inputs = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in inputs.items()}
        tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
        ledger = Ledger()
        ledger.ignore(iter([*tensors, *inputs.values()]))
        ledger.ignore(tensor.grad for tensor in tensors if tensor.grad is not None)
        trained = any(tensor.requires_grad for tensor in tensors)
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype.itemsize == 2)
        calls = (
            kernels(ledger, "cpu") if fake else contextlib.nullcontext()
        )  # kernels would read fake tensors' addresses
        with no_input_casts(model.train(), dtype), ledger, calls, torch.set_grad_enabled(trained), autocast:
            output = getattr(backbone, FEATURES)(**inputs)
            saved = ledger.live
            if trained:
                named = (output.pooler_output, getattr(output, "deepstack_features", None))
                features: Any = [leaf.float().sum() for leaf in tree_leaves(named) if isinstance(leaf, Tensor)]
                sum(features).backward()
    return TowerBytes(saved, ledger.peak)
