"""Advice for a run that does not fit its device: before the start, and after an out-of-memory error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..config import Parallel
from ..config.schema import RunKeys
from ..config.yaml import dump_value
from ..data.batch_shapes import Batches
from ..optim import OPTIMIZERS
from ..utils.errors import ConfigError
from ..utils.notices import notice
from ..utils.text import size
from .estimate import estimate
from .experts import is_mixture
from .memory_plan import COMPONENT_NAMES, GIB, SINGLE, MemoryPlan, component_names, flat_plan

# lower bounds of the advice
SHORTEST = 256
SMALLEST_RANK = 8
SMALLEST_OF_EXPERTS = 2
LESS_HOST_MEMORY = {  # configuration key → how the run pins less host memory for it
    "optim": "use an 8-bit optimizer",
    "optim_offload": "use an 8-bit optimizer or set optim_offload: false",
    "activation_checkpointing": "set activation_checkpointing: true",
    "parallel": "raise the degree of shard",
    "expert_offload": "lower expert_offload",
}
EXPERTS = r"experts\.\w+"  # pattern of the expert stacks in rank_pattern

Keys = dict[str, Any]
Candidate = TypeVar("Candidate")


def check_fits(
    plan: MemoryPlan, config: RunKeys, model_config: Any, *, rows: int, batches: Callable[[RunKeys], Batches]
) -> None:
    """Check that a run fits its device; `check_host` checks the host.

    Only warns if the plan is a rough estimate, or if `memory_limit_gib` allows the planned bytes.

    Args:
        rows: number of rows in the data.
        batches: the micro-batches of a changed configuration.

    Raises:
        ConfigError: it does not fit; the fix names the keys with which it would.
    """
    if plan.fits_device:
        return
    limit = None if config.memory_limit_gib is None else config.memory_limit_gib * GIB
    limited = limit is not None and plan.capacity_bytes == int(limit)
    available = f"memory_limit_gib: {config.memory_limit_gib:g} leaves" if limited else f"{plan.device} has"
    problem = f"this run needs {size(plan.total)}, and {available} {size(plan.capacity_bytes)}"
    if plan.rough or (limit is not None and plan.total <= limit):
        why = "the plan is a rough estimate" if plan.rough else "memory_limit_gib allows it"
        notice("memory_plan", f"{problem}. The run starts anyway, because {why}")
        return
    needed = f"{math.ceil(100 * plan.total / GIB) / 100:g}"
    alternative = f"memory_limit_gib: {needed} starts the run anyway"
    if limited:
        alternative = f"or raise memory_limit_gib to {needed}"
    capacity = plan.capacity_bytes if plan.layout.size > 1 else None
    fitting = what_would_fit(config, model_config, rows, batches, layout=plan.layout, capacity_bytes=capacity)
    raise ConfigError(problem, f"{fitting}; {alternative}")


def check_host(pinned: Mapping[str, int], ranks: int, free: int) -> None:
    """Check that a host has room for what all of its ranks pin.

    Args:
        pinned: configuration key → bytes of host memory that a rank pins for it.
        ranks: number of ranks on the host.
        free: free bytes of the host's memory.

    Raises:
        ConfigError: it does not fit; the problem names the keys and the sum.
    """
    rank_bytes = sum(pinned.values())
    if ranks * rank_bytes <= free:
        return
    keys = sorted(pinned, key=pinned.__getitem__, reverse=True)
    needed = f"this run needs {size(rank_bytes)}"
    if ranks > 1:
        total = size(ranks * rank_bytes)
        needed = f"the {ranks} processes of this run on one host need {ranks} × {size(rank_bytes)} = {total}"
    per_key = f" ({', '.join(f'{key} {size(pinned[key])}' for key in keys)} each)" if len(keys) > 1 else ""
    fixes = [LESS_HOST_MEMORY[key] for key in keys] + (["start fewer processes on each host"] if ranks > 1 else [])
    raise ConfigError(
        f"{keys[0]}: {needed} of host memory{per_key}, and {size(free)} are free", f"{', '.join(fixes)}, or free memory"
    )


def what_would_fit(
    config: RunKeys,
    model_config: Any,
    rows: int,
    batches: Callable[[RunKeys], Batches],
    *,
    layout: Parallel = SINGLE,
    capacity_bytes: int | None = None,
) -> str:
    """Name the first single change with which the run fits, cheapest for the result first; else several at once."""

    def fits(keys: Keys) -> bool:
        changed = config.model_copy(update=keys)
        plan = estimate(changed, model_config, batches=batches(changed), layout=layout, capacity_bytes=capacity_bytes)
        return plan.fits

    combined: Keys = {}
    changes = list(_changes(config, rows, is_mixture(model_config)))
    for steps in changes:
        if keys := first_that_fits(steps, fits):
            return f"set {_as_yaml(keys)}"
    for steps in changes:
        if keys := first_that_fits([combined | change for change in steps], fits):
            return f"no single key is enough; set {_as_yaml(keys)}"
        combined |= steps[-1]
    return "no key makes it fit: use a smaller model, or a device with more memory"


def first_that_fits(candidates: Sequence[Candidate], fits: Callable[[Candidate], bool]) -> Candidate | None:
    """Find the first candidate that fits by binary search (later ones need less memory); None if none does."""
    if not fits(candidates[-1]):
        return None
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(candidates[middle]) else (middle + 1, high)
    return candidates[low]


def _as_yaml(keys: Keys) -> str:
    return ", ".join(dump_value(key, value) for key, value in keys.items())


def _changes(config: RunKeys, rows: int, mixture: bool) -> Iterator[list[Keys]]:
    """Yield the changes to try, each as a list of values from mild to strong."""
    if mixture and config.expert_offload is not True and config.expert_offload != "auto":
        yield [{"expert_offload": True}]
    if config.activation_checkpointing in (False, "keep"):
        yield [{"activation_checkpointing": True}]
    rows, batch = min(config.per_device_train_batch_size, rows), config.per_device_train_batch_size
    halves = [rows >> halvings for halvings in range(1, rows.bit_length())]
    if halves:  # the same result, from smaller micro-batches
        steps = config.gradient_accumulation_steps * batch
        yield [
            {"per_device_train_batch_size": half, "gradient_accumulation_steps": -(-steps // half)} for half in halves
        ]
    if config.use_peft and not config.quantized:
        yield [{"load_in_4bit": True, "quantization": None}]
    if not config.use_peft and config.max_grad_norm and OPTIMIZERS[config.optim].in_backward:
        yield [{"max_grad_norm": 0}]  # so that the optimizer may update in the backward
    if not config.use_peft:
        yield [{"use_peft": True}]
    if mixture and config.use_peft and config.target_parameters is None and not config.adapter_path:
        # lower ranks for the experts' adapters, most of a mixture's trained parameters, at constant alpha / rank
        ranks = [config.r >> halvings for halvings in range(1, config.r.bit_length())]
        lower = [
            {
                "rank_pattern": config.rank_pattern | {EXPERTS: rank},
                "alpha_pattern": config.alpha_pattern | {EXPERTS: config.lora_alpha * rank / config.r},
            }
            for rank in ranks
            if rank >= SMALLEST_OF_EXPERTS
        ]
        yield [*lower, {"target_parameters": []}]
    lengths = [config.max_length >> halvings for halvings in range(1, config.max_length.bit_length())]
    if lengths := [length for length in lengths if length >= SHORTEST]:
        yield [{"max_length": length} for length in lengths]
    if config.use_peft and config.r > SMALLEST_RANK and not config.adapter_path:
        yield [{"r": SMALLEST_RANK}]


def advise_out_of_memory(plan: Any, error: BaseException, config: RunKeys | None = None) -> str:
    """Describe an out-of-memory error: the failed allocation, the largest planned component, and the key to change.

    Args:
        plan: a MemoryPlan, its dict, or memory.json.
        error: torch's out-of-memory error; its message has the size of the failed allocation.
        config: the run's configuration, to name exact values.
    """
    flat = flat_plan(plan)
    components = {name: flat.get(name) or 0 for name in COMPONENT_NAMES if name != "runtime"}
    total, capacity = flat.get("total") or sum(components.values()), flat.get("capacity_bytes")
    largest = max(components, key=lambda name: components[name])
    # Quantized weights cannot shrink further: name the next largest component, unless the weights fill the device.
    if (
        largest == "weights"
        and config is not None
        and config.quantized
        and components["weights"] < 0.9 * (capacity or math.inf)
    ):
        largest = max((name for name in components if name != "weights"), key=lambda name: components[name])
    request = re.search(r"[Tt]ried to allocate ([\d.]+ ?[KMG]i?B|\d+ bytes)", str(error))
    problem = f"out of memory while allocating {request[1]}" if request else "out of memory"
    available = f" of {size(capacity)} available" if capacity else ""
    if capacity and total < 0.8 * capacity:
        available += ", so another process may use memory on this device"
    share = f"{size(components[largest])} ({components[largest] / max(total, 1):.0%})"
    return (
        f"{problem}. The plan was {size(total)}{available}; the largest part that can shrink is "
        f"{component_names(flat)[largest]} with {share}.\n"
        f"  change: {_key_to_change(largest, flat, config)}"
    )


def _key_to_change(largest: str, flat: Mapping[str, Any], config: RunKeys | None) -> str:
    """The key that shrinks component `largest` most at the least cost, with that cost."""
    if largest in ("weights", "adapters", "gradients", "optimizer"):
        if config is not None and not config.use_peft:
            return "use_peft: true with load_in_4bit: true (trains an adapter instead of every weight)"
        if largest == "weights" and config is not None and config.quantized:
            return "model_name_or_path: a smaller model (these weights fill the device although they are quantized)"
        if largest == "weights":
            return "load_in_4bit: true (stores the frozen weights in a quarter of the memory)"
        rank = f"r: {max(config.r // 2, 1)}" if config else "r: half its value"
        return f"{rank} (adapters, their gradients and optimizer state shrink with the rank)"
    if largest == "activations" and not flat.get("activation_checkpointing"):
        return "activation_checkpointing: true (recomputes activations in backward; steps take about a third longer)"
    if config is None:
        return "per_device_train_batch_size: half of it, with gradient_accumulation_steps doubled (same result)"
    rows, accumulated = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if rows == 1:
        return f"max_length: {config.max_length // 2} (one row per step is already the smallest batch)"
    return (
        f"per_device_train_batch_size: {rows // 2} with gradient_accumulation_steps: "
        f"{math.ceil(rows * accumulated / (rows // 2))} (the same batch in smaller micro-batches)"
    )
