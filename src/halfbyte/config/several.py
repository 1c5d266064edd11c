"""Several adapters in one run: `adapters` and `sweep`, and the configuration of each adapter's own run.

One frozen base is loaded, and every adapter trains as a run of its own would, with a folder in `output_dir/adapters`.
The keys of the model, its storage, the arithmetic and the shape of a micro-batch are shared; `DIFFERING` may differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import Field, ValidationError, field_validator

from ..utils.text import brief
from .initialisations import read_by
from .section import Contradiction, Section, contradiction, nearest

FOLDER = "adapters"  # in output_dir; also a key
KEYS = ("adapters", "sweep")
LARGEST_SWEEP = 64
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")
DIFFERING = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("init_lora_weights", "loraplus_lr_ratio", "loraplus_lr_embedding", "lora_preconditioner", "lora_fa", "lora_bias"),
    *("dataset", "mixing", "mixing_temperature", "stopping", "max_samples", "eval_dataset", "eval_split_size"),
    *("dataset_format", "dataset_text_field", "column_mapping", "overlong", "assistant_only_loss", "train_on"),
    *("completion_only_loss", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "optim_bits", "weight_decay"),
    *("max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon", "neftune_noise_alpha", "logging_steps"),
    *("eval_steps", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "early_stopping_patience", "early_stopping_threshold", "sample_prompts"),
    *("sample_max_new_tokens", "sample_steps", "row_losses", "seed"),
)
# keys that the memory of a run over all adapters does not depend on; it has the sum of their ranks
UNPLANNED = (
    *("r", "lora_alpha", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    "output_dir",
)
# key → why a run with several adapters cannot have another value than the default
SINGLE = {
    "use_peft": "they share the frozen weights",
    "adapter_path": "each of them starts anew",
    "modules_to_save": "the weights that they share are frozen",
    "add_tokens": "the embeddings that they share are frozen",
    "add_special_tokens": "the embeddings that they share are frozen",
    "trainable_token_indices": "the embeddings that they share are frozen",
    "qat_scheme": "it rounds the weights with one adapter",
    "merge_aware": "it rounds the weights with one adapter",
    "streaming": "each of them reads its own rows in full",
    "report_to": "a tracker follows one run of a process",
    "push_to_hub": "each of them would need a repository; upload them with `hf upload`",
}


class SeveralSection(Section):
    """Several adapters in one run"""

    adapters: list[dict[str, Any]] | None = Field(
        None,
        description="adapters to train at once on one frozen base, as in [{name: a, dataset: a.jsonl, r: 8}, ...]: any"
        " key that describes an adapter, its data or its training; each has a folder in output_dir/adapters",
    )
    sweep: dict[str, list[Any]] | None = Field(
        None,
        description="keys and their values, as in {learning_rate: [1e-4, 2e-4], r: [8, 32]}: train an adapter for each"
        " combination at once on one frozen base",
    )

    @property
    def trains_several(self) -> bool:
        """Whether the run trains the adapters of `adapters` or `sweep`."""
        return self.adapters is not None or self.sweep is not None

    @field_validator("adapters", mode="before")
    @classmethod
    def _adapter_paths(cls, value: Any) -> Any:
        """Refuse paths, which are ms-swift's adapters to continue."""
        paths = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if saved := [path for path in paths if isinstance(path, str)]:
            wrong = f"adapters: {brief(saved[0])} is a saved adapter, and adapters lists those to train"
            raise contradiction("adapters", wrong, "name it in adapter_path")
        return value


Keys = TypeVar("Keys", bound=SeveralSection)


def with_datasets(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run with the datasets of all its adapters as `dataset`, if each has one of its own."""
    entries = keys.get("adapters")
    if "dataset" in keys or not isinstance(entries, list) or not entries:
        return dict(keys)
    if not all(isinstance(entry, Mapping) and entry.get("dataset") for entry in entries):
        return dict(keys)
    listed = [entry["dataset"] for entry in entries]
    flat = [source for sources in listed for source in (sources if isinstance(sources, list) else [sources])]
    return {**keys, "dataset": [source for number, source in enumerate(flat) if source not in flat[:number]]}


def adapter_runs(config: Keys) -> dict[str, Keys]:
    """Return the configuration of each adapter's own run, by its name; empty unless the run trains several."""
    if not config.trains_several:
        return {}
    return {name: _run_of(config, name, changes) for name, changes in _changes(config).items()}


def have_equal_plans(first: SeveralSection, second: SeveralSection) -> bool:
    """Return whether the runs of two adapters get the same memory plan, which has all adapters."""
    return all(getattr(first, key) == getattr(second, key) for key in type(first).model_fields if key not in UNPLANNED)


def _run_of(config: Any, name: str, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of one adapter's run.

    Raises:
        ValidationError: its keys are invalid.
    """
    keys = {key: getattr(config, key) for key in config.model_fields_set if key not in KEYS}
    return type(config)(**{**keys, **changes, "output_dir": str(config.output_path / FOLDER / name)})


def _changes(config: SeveralSection) -> dict[str, dict[str, Any]]:
    """Return the keys in which each adapter differs from the run, by its name."""
    if config.adapters is not None:
        return {
            str(entry.get("name")): {key: value for key, value in entry.items() if key != "name"}
            for entry in config.adapters
        }
    sweep = config.sweep or {}
    points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    return {"_".join(f"{key}-{_text(value)}" for key, value in point.items()): point for point in points}


def _text(value: Any) -> str:
    """Return a value as part of a folder's name."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")[-60:]


def several_contradictions(config: Any) -> Iterator[Contradiction]:
    """Yield the contradictions of `adapters` and `sweep`, and those of each adapter's own run."""
    if not config.trains_several:
        return
    key = "adapters" if config.adapters is not None else "sweep"
    if config.adapters is not None and config.sweep is not None:
        yield "sweep", "sweep in addition to adapters", "give one of the two"
    for single, reason in SINGLE.items():
        if not config.is_default(single):
            yield single, f"{config.written(single)} with {key}: {reason}", f"remove {single}, or {key}"
    if config.method != "sft":
        wrong = f"{config.written('method')} with {key}, which train by method: sft"
        yield "method", wrong, f"remove {key}, and start a run for each"
    if (layout := config.layout) is not None and layout.size > 1:
        yield "parallel", f"{config.written('parallel')} with {key}, which train on one device", "remove parallel"
    if isinstance(config.resume_from_checkpoint, str):
        wrong = f"{config.written('resume_from_checkpoint')} with {key}, each of which has its own checkpoints"
        yield "resume_from_checkpoint", wrong, "set resume_from_checkpoint: true, for the newest of each"
    yield from _entry_contradictions(config) if key == "adapters" else _sweep_contradictions(config)
    for name, changes in _changes(config).items():
        try:
            run = _run_of(config, name, changes)
        except ValidationError as error:
            yield key, *_explained(name, error)
            continue
        if (reads := read_by(run)) != "nothing":
            wrong = f"{key}: {name}: {run.written('init_lora_weights')} reads {reads} while the base loads, once"
            yield key, wrong, "choose an initialisation that draws at random, or start a run of its own"


def _entry_contradictions(config: Any) -> Iterator[Contradiction]:
    names: set[str] = set()
    for entry in config.adapters or ():
        name = entry.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            wrong = f"is named {brief(name)}" if "name" in entry else "has no name"
            yield "adapters", f"adapters: one {wrong}", "give each a name of letters, digits, and . _ + -"
        elif name.lower() in names:
            yield "adapters", f"adapters: two are named {name}", "give each a name of its own"
        names.add(str(name).lower())
        yield from _unknown(config, "adapters", [key for key in entry if key != "name"])


def _sweep_contradictions(config: Any) -> Iterator[Contradiction]:
    sweep, count = config.sweep or {}, 1
    yield from _unknown(config, "sweep", sweep)
    for key, values in sweep.items():
        if not values:
            yield "sweep", f"sweep: {key} has no values", f"list at least one value of {key}"
        texts = [_text(value) for value in values]
        if repeated := next((text for text in texts if texts.count(text) > 1), None):
            yield "sweep", f"sweep: two values of {key} are named {repeated}", "list each value once"
        count *= len(values)
    if count > LARGEST_SWEEP:
        wrong = f"sweep: {count} adapters, and a run trains at most {LARGEST_SWEEP}"
        yield "sweep", wrong, "list fewer values, or split the sweep into several runs"


def _unknown(config: Any, key: str, names: Any) -> Iterator[Contradiction]:
    """Yield the keys that adapters of one run cannot differ in."""
    for name in names:
        if name in DIFFERING:
            continue
        if name in type(config).model_fields:
            yield key, f"{key}: {name} cannot differ among adapters of one run", f"give {name} once, outside of {key}"
        near = nearest(str(name), DIFFERING)
        yield key, f"{key}: unknown key {brief(name)}", f"did you mean {near}?" if near else f"remove {brief(name)}"


def _explained(name: str, error: ValidationError) -> tuple[str, str]:
    """Return problem and fix of an adapter's keys."""
    detail = error.errors(include_url=False)[0]
    if detail["type"] == "contradiction":
        return f"adapter {name}: {detail['ctx']['message']}", detail["ctx"]["fix"]
    key = ".".join(map(str, detail["loc"]))
    return f"adapter {name}: {key}: {detail['msg']}", f"correct {key}"
