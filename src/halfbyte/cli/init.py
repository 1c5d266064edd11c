"""`halfbyte init`: a short configuration for a model, a dataset and this machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config import SECTIONS, Parallel, RunConfig, load_config
from ..config.methods import DEFAULTS
from ..config.policy import DISTILLING, POLICY, SAMPLING
from ..config.schema import RunKeys
from ..config.yaml import dump_value
from ..methods import method_of
from ..runs.inputs import check_inputs, free_output_dir
from ..utils.errors import ConfigError, DataError, UsageError, first_line
from ..utils.text import size
from .startup import quick_imports

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from ..data.prepare import PreparedData
    from ..plan.memory_plan import MemoryPlan

ROWS_PER_STEP = 8  # rows per optimizer step, whatever the micro-batch size
LENGTHS, CPU_LENGTHS = (4096, 2048, 1024, 512, 256), (1024, 512, 256)
SHOWN_KEYS = (
    "model_name_or_path", "load_in_4bit", "r", "lora_alpha", "target_modules", "dataset", "eval_split_size",
    "max_length", "packing", "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "learning_rate",
)  # fmt: skip
SAMPLING_KEYS = {
    "eval_split_size": 16,
    "gradient_accumulation_steps": 32,
}  # few held-out prompts, since each is answered
PLACEHOLDER_REWARDS = ["repetition"]  # until the columns of the data are known


def starting_config(model: str, dataset: str, method: str = "sft", teacher: str | None = None) -> str:
    """Return YAML with common keys; row length and batch size are the largest that fit by the memory plan.

    Args:
        method: training method.
        teacher: model or adapter to learn from, for a distillation method.

    Raises:
        HalfbyteError: there is no such model, dataset or method, or the data cannot be used.
    """
    base = load_config(None, {"model_name_or_path": model, "dataset": dataset, **_method_keys(method, teacher)})
    rows = method_of(base).rows
    check_inputs(base)
    with quick_imports():
        from ..loading.find import find_model
        from ..loading.load import load_tokenizer
        from ..plan.estimate import estimate  # noqa: F401  (used below; imports PEFT)

    files = find_model(base.origin)
    lengths = _lengths(files.config)
    answers = {"max_completion_length": min(base.max_completion_length, lengths[0] // 2)} if rows == "prompts" else {}
    base = base.model_copy(update={"max_length": lengths[0], **answers})
    base, data = _prepare(base, load_tokenizer(files.origin), files.config)
    base, packing_lines = _with_packing(base, files.config) if rows == "text" else (base, [])
    base, reward_lines = _with_rewards(base, data) if method in POLICY else (base, [])
    base, layout_lines = _with_layout(base, files.config, data, lengths[-1])
    chosen, plan = _largest_that_fits(base, files.config, data, lengths)
    if rows == "prompts":
        chosen["gradient_accumulation_steps"] = _accumulation_of_groups(base, chosen["per_device_train_batch_size"])
    config = base.model_copy(update={**chosen, "output_dir": free_output_dir(base)})
    fits = "it fits" if plan.fits else "it does NOT fit: see `halfbyte check`"
    lines = [
        f"# For this machine: {size(plan.total)} of {size(plan.capacity_bytes)}, {fits}.",
        "# Next: `halfbyte check`, `preview` and `train` with this file. All keys: config.resolved.yaml of any run.",
        *packing_lines,
        *reward_lines,
        *layout_lines,
    ]
    further_keys = {"parallel"} if layout_lines else set()
    further_keys |= {"method", *DEFAULTS[method]} if method in DEFAULTS else set()
    further_keys |= {"max_completion_length"} if rows == "prompts" else set()
    further_keys |= {"reward_funcs"} if method in POLICY else set()
    further_keys |= {"teacher_model_name_or_path"} if teacher is not None else set()
    for section in SECTIONS:
        shown = [key for key in section.model_fields if key in SHOWN_KEYS or key in further_keys]
        lines += [
            f"{dump_value(key, getattr(config, key)):<38} # {section.model_fields[key].description}" for key in shown
        ]
    return "\n".join(lines) + "\n"


def _method_keys(method: str, teacher: str | None) -> dict[str, Any]:
    """Return the initial keys of a method.

    Raises:
        UsageError: a distillation method without a teacher, or a teacher for another method.
    """
    if (method in DISTILLING) != (teacher is not None) and method in ("sft", *DEFAULTS):
        missing = teacher is None
        wrong = f"--method {method} needs --teacher" if missing else f"--teacher has no meaning with --method {method}"
        raise UsageError(wrong, "add --teacher MODEL_OR_ADAPTER" if missing else "remove it, or add --method gkd")
    keys: dict[str, Any] = {"eval_split_size": 0.05} | ({} if method == "sft" else {"method": method})
    keys |= SAMPLING_KEYS if method in SAMPLING else {}
    keys |= {"reward_funcs": PLACEHOLDER_REWARDS} if method in POLICY else {}
    return keys | ({} if teacher is None else {"teacher_model_name_or_path": teacher})


def _accumulation_of_groups(config: RunKeys, size: int) -> int:
    """Return the number of micro-batches of `size` answers in a step of at least four complete groups."""
    group = config.group_size
    return math.lcm(size, group) // size * max(1, 4 * group // math.lcm(size, group))


def _with_rewards(base: RunConfig, data: PreparedData) -> tuple[RunConfig, list[str]]:
    """Return the configuration with rewards that fit the columns of the data, and a comment line with the reason."""
    from ..rewards.specs import first_entries

    entries, reason = first_entries(data.train[0]["columns"])
    return base.model_copy(update={"reward_funcs": entries}), [f"# reward_funcs: {reason}."]


def _with_packing(base: RunConfig, model_config: PretrainedConfig) -> tuple[RunConfig, list[str]]:
    """Return the configuration with packing if documents can be isolated, and comment lines.

    The model's weights are not loaded, so a tiny model with the same kinds of layers is tested.
    """
    from ..data.collate import PackedCollator
    from ..modeling.packing import NOTICES, isolate_tiny_model

    packed = base.model_copy(update={"packing": True})
    try:
        isolation = isolate_tiny_model(model_config, PackedCollator(0), trust_remote_code=base.trust_remote_code)
    except ConfigError as error:
        return base, [f"# No {' '.join(error.message.split())}"]
    except Exception as error:  # the model's own code may raise anything for tiny sizes
        reason = f"{type(error).__name__}: {first_line(error)}"
        return base, [
            f"# No packing: the test for attention between documents failed for a tiny {model_config.model_type}",
            f"# ({reason}). With packing: true the run repeats the test.",
        ]
    if isolation.method == "positions":
        return packed, []
    reason = isolation.leak or str(isolation.tried["positions"])
    return packed, [f"# Packed documents would attend to each other ({reason}), so {NOTICES[isolation.method]}."]


def _with_layout(
    base: RunConfig, model_config: PretrainedConfig, data: PreparedData, shortest: int
) -> tuple[RunConfig, list[str]]:
    """Return the configuration with a layout for several GPUs of this machine, and a comment line with the reason.

    The layout is planned for the shortest rows.
    """
    from ..data.batches import batches_of
    from ..plan.cards import card_of
    from ..plan.meshes import Device, Meshes
    from ..utils.hardware import free_bytes

    devices = _devices()
    if len(devices) < 2:
        return base, []
    keys = {"max_length": shortest, "per_device_train_batch_size": 1}
    free = min(map(free_bytes, devices))
    device = Device(devices[0], free, card_of(devices[0]))
    meshes = Meshes(
        base.model_copy(update=keys), model_config, device, lambda changed: batches_of(changed, data, devices[0])
    )
    option, reason = meshes.choose(len(devices))
    return base.model_copy(update={"parallel": option.config.parallel}), [
        f"# {len(devices)} GPUs, parallel: {option.layout}: {reason}."
    ]


def _devices() -> list[torch.device]:
    """Return the devices of a run on this machine."""
    import torch

    from ..utils.hardware import best_device

    best = best_device()
    return (
        [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if best.type == "cuda" else [best]
    )


def _prepare(
    base: RunConfig, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> tuple[RunConfig, PreparedData]:
    """Prepare the data, with held-out rows if there is more than one document.

    Raises:
        DataError: the data cannot be used; the fix names options of this command.
    """
    try:
        try:
            return base, method_of(base).ready(base, tokenizer, model_config)
        except ConfigError:
            base = base.model_copy(update={"eval_split_size": 0.0})
            return base, method_of(base).ready(base, tokenizer, model_config)
    except DataError as error:
        raise DataError(error.message, error.fix.replace("set method: ", "add --method ")) from error


def _lengths(model_config: PretrainedConfig) -> list[int]:
    """Return candidate row lengths, longest first."""
    from ..utils.hardware import best_device

    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or LENGTHS[0]
    lengths = CPU_LENGTHS if best_device().type == "cpu" else LENGTHS
    return [length for length in lengths if length <= limit] or [limit]


def _largest_that_fits(
    base: RunConfig, model_config: PretrainedConfig, data: PreparedData, lengths: Sequence[int]
) -> tuple[dict[str, Any], MemoryPlan]:
    """Choose the longest rows that fit and that the data fills, then the largest batch; return keys and plan."""
    from ..data.batches import batches_of, longest_row
    from ..plan.advice import first_that_fits
    from ..plan.estimate import estimate
    from ..plan.shapes import ModelShapes
    from ..utils.hardware import best_device

    device, layout = best_device(), base.layout or Parallel()
    shapes, replicas = ModelShapes(base, model_config, device), layout.data * layout.shard
    tokens, longest = data.report["train"]["tokens"], longest_row(data.train, data.answers)
    filled = max(longest, tokens // ROWS_PER_STEP) if base.packing else longest
    enough = min((length for length in lengths if length >= filled), default=lengths[0])
    lengths = [length for length in lengths if length <= enough]

    def keys(length: int, rows: int) -> dict[str, Any]:
        steps = max(1, ROWS_PER_STEP // (rows * replicas))
        return {"max_length": length, "per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}

    @functools.cache
    def plan(length: int, rows: int) -> MemoryPlan:
        config = base.model_copy(update=keys(length, rows))
        batches = batches_of(config, data, device)
        return estimate(config, model_config, device=device, batches=batches, shapes=shapes, layout=layout)

    length = first_that_fits(lengths, lambda length: plan(length, 1).fits) or lengths[-1]
    rows = first_that_fits((8, 4, 2, 1), lambda rows: plan(length, rows).fits) or 1
    return keys(length, rows), plan(length, rows)
