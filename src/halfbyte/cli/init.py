"""`halfbyte init`: a short configuration for a model, a dataset and this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import SECTIONS, RunConfig, load_config
from ..config.yaml import dump_value
from ..errors import ConfigError
from ..runs.inputs import look_over_inputs
from .check import read_model_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from ..plan.estimate import MemoryPlan

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
        HalfbyteError: there is no such model or dataset.
    """
    keys = {"model_name_or_path": model, "dataset": dataset, "eval_split_size": 0.05}
    base = load_config(None, keys)
    look_over_inputs(base)
    model_config = read_model_config(base)
    base, packing = _packed(base, model_config)
    chosen, plan = _largest(base, model_config)
    config = base.model_copy(update=chosen)
    fits = "it fits" if plan.fits else "it does NOT fit: see `halfbyte check`"
    lines = [
        f"# For this machine: {plan.total / 2**30:.2f} GiB of {plan.capacity_bytes / 2**30:.2f} GiB, {fits}.",
        "# Next: `halfbyte check`, `preview` and `train` with this file. All keys: config.resolved.yaml of any run.",
        *packing,
    ]
    for section in SECTIONS:
        shown = [key for key in section.model_fields if key in SHOWN]
        lines += [
            f"{dump_value(key, getattr(config, key)):<38} # {section.model_fields[key].description}" for key in shown
        ]
    return "\n".join(lines) + "\n"


def _packed(base: RunConfig, model_config: PretrainedConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with packing, where documents can be kept apart; and lines that say what there is to know.

    A model has no weights yet, so a few small layers of its kinds are asked.
    """
    from ..data.collate import PackedCollator
    from ..models.isolation import WORDS, isolate_like

    packed = base.model_copy(update={"packing": True})
    try:
        found = isolate_like(model_config, PackedCollator(0), trust_remote_code=base.trust_remote_code)
    except ConfigError as error:
        return base, [f"# No {' '.join(error.message.split())}"]
    except Exception as error:  # whatever the model's own code says to sizes that were not made for it
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return base, [
            f"# No packing: a small {model_config.model_type} could not be asked whether documents see each other",
            f"# ({reason}). With packing: true the run itself asks.",
        ]
    if found.way == "positions":
        return packed, []
    reason = found.leak or str(found.tried["positions"])
    return packed, [f"# Packed documents would see each other ({reason}), so {WORDS[found.way]}."]


def _largest(base: RunConfig, model_config: PretrainedConfig) -> tuple[dict[str, Any], MemoryPlan]:
    """The longest rows that fit, then the most of them at once; and their plan."""
    from ..hardware import best_device
    from ..plan.estimate import estimate

    limit = getattr(model_config, "max_position_embeddings", None) or LENGTHS[0]
    lengths = CPU_LENGTHS if best_device().type == "cpu" else LENGTHS
    for length in [length for length in lengths if length <= limit] or [limit]:
        for rows in (8, 4, 2, 1):
            chosen = {
                "max_length": length,
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": ROWS_PER_STEP // rows,
            }
            plan = estimate(base.model_copy(update=chosen), model_config)
            if plan.fits:
                return chosen, plan
    return chosen, plan
