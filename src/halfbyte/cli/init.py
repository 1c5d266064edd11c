"""`halfbyte init`: a short configuration for a model, a dataset and this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import SECTIONS, RunConfig, load_config
from ..config_yaml import dump_value
from .check import read_model_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..memory.estimate import MemoryPlan

ROWS_PER_STEP = 8  # rows per optimizer step, whatever the device holds at once
LENGTHS, CPU_LENGTHS = (4096, 2048, 1024, 512, 256), (1024, 512, 256)
SHOWN = (
    "model_name_or_path", "load_in_4bit", "r", "lora_alpha", "target_modules", "dataset", "eval_split_size",
    "max_length", "packing", "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "learning_rate",
)  # fmt: skip


def starting_config(model: str, dataset: str) -> str:
    """YAML with the keys most runs set; row length and batch are the largest that the memory plan holds.

    Raises:
        ConfigError: there is no such model.
    """
    keys = {"model_name_or_path": model, "dataset": dataset, "packing": True, "eval_split_size": 0.05}
    base = load_config(None, keys)
    model_config = read_model_config(base)
    chosen, plan = _largest(base, model_config)
    config = base.model_copy(update=chosen)
    fits = "it fits" if plan.fits else "it does NOT fit: see `halfbyte check`"
    lines = [
        f"# For this machine: {plan.total / 2**30:.2f} GiB of {plan.capacity_bytes / 2**30:.2f} GiB, {fits}.",
        "# Next: `halfbyte check`, `preview` and `train` with this file. All keys: config.resolved.yaml of any run.",
    ]
    for section in SECTIONS:
        shown = [key for key in section.model_fields if key in SHOWN]
        lines += [
            f"{dump_value(key, getattr(config, key)):<38} # {section.model_fields[key].description}" for key in shown
        ]
    return "\n".join(lines) + "\n"


def _largest(base: RunConfig, model_config: PretrainedConfig) -> tuple[dict[str, Any], MemoryPlan]:
    """The longest rows that fit, then the most of them at once; and their plan."""
    from ..hardware import best_device
    from ..memory.estimate import estimate
    from ..models.attention import implementation

    limit = getattr(model_config, "max_position_embeddings", None) or LENGTHS[0]
    lengths = CPU_LENGTHS if best_device().type == "cpu" else LENGTHS
    for length in [length for length in lengths if length <= limit] or [limit]:
        for rows in (8, 4, 2, 1):
            chosen = {
                "max_length": length,
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": ROWS_PER_STEP // rows,
            }
            plan = estimate(base.model_copy(update=chosen), model_config, attention=implementation)
            if plan.fits:
                return chosen, plan
    return chosen, plan
