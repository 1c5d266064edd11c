"""`halfbyte check`: keys, data, target modules and memory, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..config import RunConfig
from ..errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..memory.estimate import MemoryPlan

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "runtime", "total")


def check_run(config: RunConfig) -> None:
    """Print what a run would use and do.

    Raises:
        HalfbyteError: the data cannot be used, a target module does not exist, or it will not fit.
    """
    from ..data import prepare
    from ..memory.estimate import estimate
    from ..models.load import load_tokenizer
    from ..saved import tokenizer_keys
    from ..terminal import print_data, print_memory

    console = Console()
    tokenizer = load_tokenizer(config.model_name_or_path, **tokenizer_keys(config))
    print_data(console, prepare(config, tokenizer).report)
    model_config = read_model_config(config)
    check_modules(config, model_config)
    capacity = device_bytes(config)
    plan = estimate(config, model_config, device_bytes=capacity)
    console.print(_table(plan))
    print_memory(console, plan_facts(plan, capacity))
    if plan.total > capacity:
        raise ConfigError(
            f"this run needs {plan.total / 2**30:.2f} GiB, and there are {capacity / 2**30:.2f} GiB",
            what_would_fit(config, model_config, capacity),
        )
    console.print("[green]ready:[/] `halfbyte train` can start")


def read_model_config(config: RunConfig) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        ConfigError: there is no such model.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            config.model_name_or_path, revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model_name_or_path: no usable model at {config.model_name_or_path}: {reason}", "name a folder or hub id"
        ) from error


def check_modules(config: RunConfig, model_config: PretrainedConfig) -> None:
    """Put the adapter on the model's shape, without weights, so that a wrong target module shows up now."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..adapters import add_adapter

    if config.use_peft and not config.adapter_path:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
            add_adapter(model, config)


def device_bytes(config: RunConfig) -> int:
    """Memory this run may use: `memory_limit_gib`, else what is free on its device now."""
    import psutil
    import torch

    from ..hardware import best_device

    if config.memory_limit_gib:
        return int(config.memory_limit_gib * 2**30)
    device = torch.device(config.device) if config.device else best_device()
    if device.type == "cpu":
        return psutil.virtual_memory().available
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def plan_facts(plan: MemoryPlan, capacity: int) -> dict[str, Any]:
    """The plan as the memory bar takes it."""
    from dataclasses import asdict

    return {**asdict(plan), "capacity_bytes": capacity}


def _table(plan: MemoryPlan) -> Table:
    table = Table("part", "GiB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for part in PARTS:
        table.add_row(part, f"{getattr(plan, part) / 2**30:.3f}", style="bold" if part == "total" else None)
    return table


def what_would_fit(config: RunConfig, model_config: PretrainedConfig, capacity: int) -> str:
    """The first single change, cheapest for the result first, with which the run fits."""
    from ..memory.estimate import estimate

    for keys, advice in _changes(config):
        if estimate(config.model_copy(update=keys), model_config, device_bytes=capacity).total <= capacity:
            return advice
    return "no single key makes it fit: take a smaller model, or a device with more memory"


def _changes(config: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    if config.activation_checkpointing is False:
        yield {"activation_checkpointing": True}, "set activation_checkpointing: true"
    rows = config.per_device_train_batch_size
    while (rows := rows // 2) >= 1:
        steps = -(-config.gradient_accumulation_steps * config.per_device_train_batch_size // rows)
        yield (
            {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps},
            f"set per_device_train_batch_size: {rows} (with gradient_accumulation_steps: {steps} for the same result)",
        )
    if config.use_peft and not config.load_in_4bit:
        yield {"load_in_4bit": True}, "set load_in_4bit: true"
    if not config.use_peft:
        yield {"use_peft": True}, "set use_peft: true (and load_in_4bit: true for even less)"
    length = config.max_length
    while (length := length // 2) >= 256:
        yield {"max_length": length}, f"set max_length: {length}"
    if config.use_peft and config.r > 8:
        yield {"r": 8}, "set r: 8"
