"""Which runs each axis of parallelism supports: every requirement, the key to change, and the fix.

All functions return a `Reason`, or None when the layout is supported. They read keys and numbers of a model's config,
so a layout is refused before torch is imported. Requirements of modules are checked where the axis is applied:
`parallel.tensor.check_tensor_parallel`, `parallel.context.check_context_parallel` and
`parallel.pipeline.model.check_stages`.

axis      requires of the layout   of the method          of the keys                     of the model
all       -                        -                      no layerwise optimizer; an      -
                                                          adapter whose row in
                                                          `adapter_kinds` allows it
data      -                        one process for gkd,   -                               -
                                   grpo and rloo
shard     -                        sft, comparison, task  no lora_preconditioner          decoder layers
tensor    no pipeline              sft                    no router loss, recipe: bf16,   heads, key heads and channels
                                                          an elementwise optimizer, no    divisible by the degree
                                                          lora_preconditioner
context   no pipeline              sft                    no router loss                  attention layers only; enough
                                                                                          heads; documents by position
pipeline  only data and shard      sft                    no router loss, adapters only,  tiny model's stages equal the
                                                          no modules_to_save, no          model; documents by positions
                                                          low-rank or block-wise
                                                          optimizer
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..adapter_kinds import adapter_kind
from ..optim import OPTIMIZERS, optimizer_row
from .methods import COMPARING, TASKS
from .policy import SAMPLING
from .resolved import AXES, Parallel
from .schema import RunKeys

WITH_PIPELINE = ("data", "shard")
ATTENTION = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
}  # values of layer_types in transformers' configs
DIVIDE_ROWS = "use parallel: {data: N} or {shard: N}"
WITHOUT_PIPELINE = "leave `pipeline` out of `parallel`"
WITHOUT_CONTEXT = "leave context out of `parallel`"


class Reason(NamedTuple):
    """Why a layout is not supported: the key to change, the problem, and the fix."""

    key: str
    problem: str
    fix: str


def unsupported_reason(layout: Parallel, keys: RunKeys) -> Reason | None:
    """Return why a run with these keys cannot have this layout, whatever its model."""
    return unsupported_layout(layout) or _unsupported_method(layout, keys.method) or _unsupported_keys(layout, keys)


def unsupported_layout(layout: Parallel) -> Reason | None:
    """Return why no run can have this layout: `pipeline` combines with `data` and `shard` only."""
    excluded = [axis for axis in layout.axes if axis not in ("pipeline", *WITH_PIPELINE)]
    if layout.pipeline == 1 or not excluded:
        return None
    problem = f"parallel: {layout}: pipeline goes with {' and '.join(WITH_PIPELINE)}, not with {excluded[0]}"
    return Reason("parallel", problem, f"leave out pipeline or {excluded[0]}")


def _unsupported_method(layout: Parallel, method: str) -> Reason | None:
    """Return why the method cannot have this layout. Comparing losses need full sequences on each process."""
    if method == "sft" or layout.size == 1:
        return None
    if method in SAMPLING:
        problem = f"parallel: {layout}: method: {method} trains on one device"
        return Reason("parallel", problem, "remove parallel, or start one process")
    allowed = ["data", *(["shard"] if method in (*COMPARING, *TASKS) else [])]
    if set(layout.axes) <= set(allowed):
        return None
    problem = f"parallel: {layout} with method: {method}: its loss needs full sequences on each process"
    return Reason("parallel", problem, f"use parallel: {' or '.join(f'{{{axis}: N}}' for axis in allowed)}")


def _unsupported_keys(layout: Parallel, keys: RunKeys) -> Reason | None:
    pipeline, tensor = layout.pipeline > 1, layout.tensor > 1
    axis = next((axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) > 1), "")
    if keys.router_aux_loss_coef and axis:
        key = "router_aux_loss_coef"
        problem = f"{key} with parallel: {axis}: {getattr(layout, axis)}: the loss sums over all layers and sequences"
        return Reason(key, problem, f"remove {key}, or use data or shard")
    if keys.shift_attn and axis:
        problem = f"shift_attn with parallel: {axis}: {getattr(layout, axis)}: a process needs all heads of full rows"
        return Reason("shift_attn", problem, "remove shift_attn, or use data or shard")
    if pipeline and not keys.use_peft:
        return Reason("use_peft", "parallel: a pipeline trains adapters, and use_peft is false", WITHOUT_PIPELINE)
    if pipeline and keys.modules_to_save:
        key = "modules_to_save"
        return Reason(key, f"{key}: a pipeline trains low-rank adapters only", f"remove it, or {WITHOUT_PIPELINE}")
    if (keys.add_tokens or keys.add_special_tokens or keys.trainable_token_indices) and set(layout.axes) - {"data"}:
        key = next(key for key in ("add_tokens", "add_special_tokens", "trainable_token_indices") if getattr(keys, key))
        problem = f"{key} with parallel: {layout}: rows of the embedding are trained on one device or with data"
        return Reason(key, problem, f"remove {key}, or use parallel: {{data: N}}")
    if keys.merge_aware and set(layout.axes) - {"data"}:
        problem = f"merge_aware with parallel: {layout}: each process rounds full weights"
        return Reason("merge_aware", problem, "remove merge_aware, or use parallel: {data: N}")
    row = adapter_kind(keys)
    if keys.use_peft and (refused := [axis for axis in layout.axes if axis in row.refused]):
        problem = f"{row.chosen} with parallel: {layout}: {row.refused[refused[0]]}"
        return Reason(row.key, problem, f"{row.without}, or leave {refused[0]} out of `parallel`")
    if tensor and keys.recipe != "bf16":
        problem = (
            f"parallel: {{tensor: {layout.tensor}}}: recipe {keys.recipe} would scale each process's part separately"
        )
        return Reason("recipe", problem, "set recipe: bf16")
    if reason := _unsupported_optimizer(layout, keys):
        return reason
    if tensor and OPTIMIZERS[keys.optim].block_of(keys) != 1:
        alternatives = ", ".join(name for name, row in OPTIMIZERS.items() if row.elementwise)
        problem = f"parallel: {{tensor: {layout.tensor}}}: optim {keys.optim} cannot step slices of a parameter"
        return Reason("optim", problem, f"use one of {alternatives}")
    return None


def _unsupported_optimizer(layout: Parallel, keys: RunKeys) -> Reason | None:
    """Return why an optimizer that projects, or that does not update all weights at once, cannot have this layout."""
    row, optimizer = optimizer_row(keys), f"optim: {keys.optim} with parallel: {layout}"
    if row.updates == "backward" and layout.size > 1:
        problem = f"{optimizer}: it updates weights in the backward, before gradients are reduced over processes"
        return Reason("optim", problem, "use an optimizer that is not layerwise, or one process")
    if layout.pipeline > 1 and (row.updates == "block" or row.takes_targets):
        problem = f"{optimizer}: the checkpoint of a pipeline cannot hold its state"
        return Reason("optim", problem, f"use another optimizer, or {WITHOUT_PIPELINE}")
    if keys.lora_preconditioner and layout.shard * layout.tensor > 1:
        key = "lora_preconditioner"
        problem = f"{key}: {keys.lora_preconditioner} with parallel: {layout}: a process has slices of the factors only"
        return Reason(key, problem, f"remove {key}, or use data or pipeline")
    return None


def unsupported_sizes(degree: int, heads: int, key_heads: int, channels: int) -> Reason | None:
    """Return why tensor parallelism cannot split layers of these sizes.

    Args:
        degree: the degree of `tensor`.
        heads, key_heads: number of attention heads, and of key and value heads.
        channels: width of the MLP.
    """
    named = (("attention heads", heads), ("key heads", key_heads), ("channels of the MLP", channels))
    for name, count in named:
        if count % degree:
            return unsupported_tensor(degree, f"{degree} does not divide {count} {name}")
    return None


def unsupported_tensor(degree: int, problem: str) -> Reason:
    """The reason of a model that tensor parallelism cannot split."""
    return Reason("parallel", f"parallel: {{tensor: {degree}}}: {problem}", DIVIDE_ROWS)


def unsupported_context(model_config: Any, degree: int, tensor: int = 1) -> Reason | None:
    """Return why context parallelism cannot run a model, from its transformers config.

    Args:
        degree: the degree of `context`.
        tensor: the degree of `tensor` in the same layout.
    """
    config = model_config.get_text_config()
    axis, heads = f"parallel: context: {degree}", getattr(config, "num_attention_heads", None)
    if unsupported := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION):
        problem = (
            f"{axis}: layers of type {', '.join(unsupported)} of {model_config.model_type} mix tokens outside attention"
        )
        return Reason("parallel", problem, WITHOUT_CONTEXT)
    if not isinstance(heads, int):
        problem = f"{axis}: the config of {model_config.model_type} has no num_attention_heads"
        return Reason("parallel", problem, WITHOUT_CONTEXT)
    if degree * tensor > heads:
        fit = ", ".join(str(n) for n in range(2, heads // tensor + 1) if heads % (n * tensor) == 0)
        problem = f"{axis}: a process has {heads // tensor} attention heads"
        return Reason("parallel", problem, f"set context to one of {fit}" if fit else WITHOUT_CONTEXT)
    if getattr(config, "output_router_logits", False):
        return Reason("parallel", f"{axis}: the router's loss needs full sequences", WITHOUT_CONTEXT)
    return None


def unsupported_packing(layout: Parallel, key: str | None) -> Reason | None:
    """Return why a model whose packed documents are not isolated by positions cannot have this layout.

    Args:
        key: the key that packs documents (`packing` or `padding_free`), or None if the run packs none.
    """
    if layout.context > 1:
        problem = f"parallel: context: {layout.context}: packed documents of this model are not isolated by positions"
        fix = f"set packing: false and padding_free: false, or {WITHOUT_CONTEXT}"
        return Reason("parallel", problem, fix)
    if layout.pipeline > 1 and key:
        problem = f"{key}: documents of this model are not isolated by positions, which pipeline stages require"
        return Reason(key, problem, f"set {key}: false, or {WITHOUT_PIPELINE}")
    return None


def layouts(processes: int) -> Iterator[Parallel]:
    """Yield every supported layout of `processes` processes, those with the fewest axes first."""
    factors = [n for n in range(1, processes + 1) if processes % n == 0]
    degrees = itertools.product(factors, repeat=len(AXES))
    candidates = [Parallel(**dict(zip(AXES, sizes, strict=True))) for sizes in degrees if math.prod(sizes) == processes]
    candidates.sort(key=lambda layout: (len(layout.axes), [-getattr(layout, axis) for axis in AXES]))
    yield from (layout for layout in candidates if unsupported_layout(layout) is None)
