"""`halfbyte check`: keys, data, target modules and memory, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ..config import RunConfig, resolve
from ..config.yaml import dump_value
from ..errors import ConfigError
from ..runs.inputs import look_over_inputs
from .imports import quick_imports

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..memory.batches import Batches
    from ..plan.estimate import MemoryPlan

SHORTEST, SMALLEST_RANK = 256, 8  # the least that advice goes down to


def check_run(config: RunConfig) -> None:
    """Print what a run would use and do.

    Raises:
        HalfbyteError: the data cannot be used, a target module does not exist, or it will not fit.
    """
    look_over_inputs(config)
    with quick_imports():
        from ..data.batches import batches_of
        from ..hardware import planned_device
        from ..methods import method_of
        from ..models.find import find_model
        from ..models.load import check_attention, load_tokenizer
        from ..plan.estimate import estimate
        from ..terminal import print_data, print_memory

    console = Console()
    files = find_model(resolve(config).origin)
    model_config = files.config
    device = planned_device(config)
    check_attention(model_config, config.attn_implementation, device, trains=True)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = method_of(config).prepare(config, tokenizer)
    print_data(console, data.report)
    batches = partial(batches_of, data=data, device=device)
    plan = estimate(config, model_config, batches=batches(config))
    console.print(_table(plan))
    facts = {"activation_checkpointing": plan.activation_checkpointing, "reason": plan.reason}
    print_memory(console, {**plan.predicted(), **facts, "capacity_bytes": plan.capacity_bytes})
    if not plan.fits:
        raise ConfigError(
            f"this run needs {plan.total / 2**30:.2f} GiB, and there are {plan.capacity_bytes / 2**30:.2f} GiB",
            what_would_fit(config, model_config, len(data.train), batches),
        )
    console.print("[green]ready:[/] `halfbyte train` can start")


def read_model_config(config: RunConfig) -> PretrainedConfig:
    """The model's config.json."""
    from ..models.find import load_model_config

    return load_model_config(resolve(config).origin)


def _table(plan: MemoryPlan) -> Table:
    table = Table("part", "GiB", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for part, size in plan.predicted().items():
        table.add_row(part, f"{size / 2**30:.3f}", style="bold" if part == "total" else None)
    return table


def what_would_fit(
    config: RunConfig, model_config: PretrainedConfig, rows: int, batches: Callable[[RunConfig], Batches]
) -> str:
    """The first single change with which the run fits, cheapest for the result first; failing that, several at once.

    Args:
        rows: of the data.
        batches: those of a changed configuration.
    """
    from ..plan.estimate import estimate

    def fits(keys: dict[str, Any]) -> bool:
        changed = config.model_copy(update=keys)
        return estimate(changed, model_config, batches=batches(changed)).fits

    for keys in _changes(config, rows):
        if fits(keys):
            return f"set {_in_words(keys)}"
    together: dict[str, Any] = {}
    for keys in _changes(config, rows):
        together |= keys
        if fits(together):
            return f"no single key is enough; set {_in_words(together)}"
    return "no key makes it fit: take a smaller model, or a device with more memory"


def _in_words(keys: dict[str, Any]) -> str:
    return ", ".join(dump_value(key, value) for key, value in keys.items())


def _changes(config: RunConfig, rows: int) -> Iterator[dict[str, Any]]:
    if config.activation_checkpointing in (False, "keep"):
        yield {"activation_checkpointing": True}
    rows = min(config.per_device_train_batch_size, rows)
    while (rows := rows // 2) >= 1:  # the same result, from smaller pieces
        steps = -(-config.gradient_accumulation_steps * config.per_device_train_batch_size // rows)
        yield {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
    if config.use_peft and not config.quantized:
        yield {"load_in_4bit": True, "quantization": None}
    if not config.use_peft:
        yield {"use_peft": True}
    length = config.max_length
    while (length := length // 2) >= SHORTEST:
        yield {"max_length": length}
    if config.use_peft and config.r > SMALLEST_RANK:
        yield {"r": SMALLEST_RANK}
