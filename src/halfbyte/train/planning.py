"""The machine of a run, the layout that `parallel: auto` chooses on it, and the memory plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import Parallel, RunConfig
from ..config.policy import SAMPLING
from ..config.schema import RunKeys
from ..data.batches import batches_of
from ..data.prepare import PreparedData
from ..loading.find import ModelFiles
from ..loading.load import resolve_dtype
from ..memory import allocators
from ..mesh.mesh import Mesh
from ..methods import Method
from ..modeling.projections import check_recipe, configured_recipe
from ..parallel.launch.bandwidth import all_gather_bandwidth, host_copy_bandwidth
from ..plan.advice import check_fits, check_host
from ..plan.cards import Card, card_of
from ..plan.estimate import estimate
from ..plan.memory_plan import MemoryPlan
from ..plan.meshes import Device, Meshes
from ..plan.policy import OFFLOADED
from ..plan.shapes import ModelShapes
from ..qat.model import qat_format
from ..report.terminal import print_memory
from ..rl.dataset import rollout_plan_of
from ..utils.console import Console, is_verbose
from ..utils.environment import environment
from ..utils.hardware import chosen_device, free_bytes, free_cached_memory
from ..utils.notices import silent
from ..utils.text import one_line, size
from ..utils.waiting import waiting
from .callbacks import check_dtype


@dataclass(frozen=True)
class Machine:
    """The device and dtypes of a run.

    Attributes:
        compute_dtype: dtype of matrix products.
        weights_dtype: dtype of weights that are not quantized.
        facts: the first entries of environment.json.
    """

    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype
    facts: dict[str, Any]


@waiting("looking at the device")
def look_at_machine(config: RunConfig, method: Method, mesh: Mesh) -> Machine:
    device = mesh.device(chosen_device(config.device))
    check_recipe(configured_recipe(config.precision), device)
    if config.storage.qat_scheme is not None:
        qat_format(config.storage.qat_scheme)
    with silent():  # the header has the dtype
        compute = resolve_dtype(config.precision.compute, device)
        weights = resolve_dtype(config.precision.weights, device)
    check_dtype(config, device, compute)
    facts = environment(str(device), compute, config.precision.compute)
    facts |= {"numbers": method.numbers.document(), "started": time.time()}
    return Machine(device, compute, weights, facts)


@waiting("choosing a layout")
def choose_layout(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console,
) -> tuple[RunConfig, Parallel]:  # fmt: skip
    """Choose a layout for `parallel: auto` at this world size and print the reason; the global batch stays."""
    if config.parallel != "auto" or layout.size == 1:
        return config, layout
    card = _card(machine, mesh)
    ranks_per_host = ranks_on_host(mesh, layout)
    device = Device(machine.device, _free_bytes(machine, mesh, ranks_per_host), card, ranks_per_host)
    meshes = Meshes(config, files.config, device, lambda changed: batches_of(changed, data, machine.device), shapes)
    option, reason = meshes.choose(layout.size)
    option, reason = mesh.from_main((option, reason))  # ranks may measure different free host memory
    console.print(one_line(f"parallel: {option.layout}: {reason}"), soft_wrap=True)
    changes = {"parallel": "auto", "gradient_accumulation_steps": option.config.gradient_accumulation_steps}
    return config.model_copy(update=changes), option.layout


@waiting("planning memory")
def plan_memory(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console, checkpoint: Path | None, capacity_bytes: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory of a run on the main rank; check that it fits.

    Args:
        checkpoint: checkpoint to continue from; the plan of its rollouts is kept.
        capacity_bytes: memory of the device to plan for, with one rank; default: what is free now.
    """

    def batches(changed: RunKeys) -> Any:
        return batches_of(changed, data, machine.device)

    card = _card(machine, mesh)  # before free memory is read, since it allocates
    ranks_per_host = ranks_on_host(mesh, layout)
    answered = None if checkpoint is None or config.method not in SAMPLING else rollout_plan_of(checkpoint)
    estimate_on = partial(
        estimate,
        config,
        files.config,
        device=machine.device,
        batches=batches(config),
        layout=layout,
        answered=answered,
        ranks_per_host=ranks_per_host,
        capacity_bytes=_free_bytes(machine, mesh, ranks_per_host) if layout.size > 1 else capacity_bytes,
        shapes=shapes if layout.tensor == 1 else None,
    )
    plan = mesh.from_main(estimate_on(card=card))
    if mesh.size > 1 and not OFFLOADED.keys().isdisjoint(plan.levels):  # all ranks copy at once
        card = card.measured(host=host_copy_bandwidth(mesh, machine.device))
        plan = mesh.from_main(estimate_on(card=card))
    print_memory(console, plan)
    check_host(plan.host, ranks_per_host, free_host_bytes(mesh))
    if plan.answering is not None and is_verbose(console):
        step = size(plan.activations + plan.logits)
        relation = "in addition to" if plan.answering.stays else "in turn with"
        console.print(one_line(f"rollouts {plan.answering}, {relation} a step's {step}"), soft_wrap=True)
    check_fits(plan, config, files.config, rows=len(data.train), batches=batches)
    return plan


def _card(machine: Machine, mesh: Mesh) -> Card:
    """Return this rank's card with the measured bandwidth to other ranks. Measuring also allocates NCCL's buffers, so
    free memory excludes them."""
    card = card_of(machine.device).measured(link=all_gather_bandwidth(mesh, machine.device))
    free_cached_memory(machine.device)
    return card


def _free_bytes(machine: Machine, mesh: Mesh, ranks_per_host: int) -> int:
    """Return the free bytes on the rank with the least free memory."""
    return -mesh.max(-free_bytes(machine.device, ranks_per_host))


def free_host_bytes(mesh: Mesh) -> int:
    """Return the free host memory on the host with the least, bytes."""
    return -mesh.max(-allocators.available_bytes())


def ranks_on_host(mesh: Mesh, layout: Parallel) -> int:
    """Return the number of ranks on the host with the most ranks; all, if they are not started yet."""
    if mesh.size == 1:
        return layout.size
    return mesh.most_on_a_host()
