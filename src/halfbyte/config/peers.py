"""Conversions of values of Surogate, ms-swift, Megatron-LM and Unsloth, and of keys that several tools have.

`CONVERTED` has a converter for each key. Several keys that together give one of ours share a converter that reads all.
"""

from __future__ import annotations

import re
from typing import Any

from .aliases import VALUES
from .initialisations import find_initialisation, initialisation_names
from .methods import DEFAULTS as METHODS
from .methods import TASKS
from .outcomes import (
    Converter,
    Ignored,
    Mapped,
    Outcome,
    Refused,
    Values,
    as_list,
    choice,
    is_off,
    one_of,
    only_with,
    when_on,
)

# Stored weights and adapters

_FORMATS: dict[
    Any, dict[Any, str]
] = {  # method of LLaMA-Factory and ms-swift → bits → format; "": the bnb_4bit_* keys decide
    "bitsandbytes": {4: "", 8: "int8"},
    "hqq": {bits: f"hqq{bits}" for bits in (2, 3, 4, 8)},
    "eetq": {8: "int8", None: "int8"},
    "fp8": {8: "fp8-tile", "float8": "fp8-tile", None: "fp8-tile"},
}
_SAME_METHODS: dict[Any, str] = {"bnb": "bitsandbytes", "bitsandbytes (4/8)": "bitsandbytes", None: "bitsandbytes"}
_NVFP4_NAMES = {
    "2d:plain": "nvfp4", "2d:46mse": "nvfp4-46", "1d:plain": "nvfp4-1d", "1d:46mse": "nvfp4-1d-46",
}  # fmt: skip
# Keys that change Surogate's stored NVFP4 weights as well as its recipe.
NVFP4_KEYS = ("enable_four_over_six", "four_over_six_metric", "disable_2d_quantization")


def asks_stored(values: Values) -> bool:
    """Return whether a key asks for weights in fewer than 16 bits, other than load_in_4bit."""
    switches = ("load_in_8bit", "load_in_fp8", "gptq", "qlora_fp8", "qlora_fp4", "qlora_bnb")
    bits = values.get("quantization_bit"), values.get("quant_bits"), values.get("quant_config") or None
    return any(values.get(key) for key in switches) or any(bits) or values.get("quant_method") in ("fp8", "eetq")


def tuning(key: str) -> Converter:
    """Make a converter of a key that chooses between an adapter and full fine-tuning."""

    def convert(value: Any, values: Values) -> Outcome:
        if value in ("lora", True):
            stored = values.get("load_in_4bit") or values.get("quantization") or asks_stored(values)
            return Mapped({"use_peft": True, "load_in_4bit": bool(stored)})
        if value in ("full", False):
            return Mapped({"use_peft": False, "load_in_4bit": False})
        return Refused(f"{key}: {value} has no equivalent", f"set {key}: lora or full, or peft_type and peft_config")

    return convert


def quantized(key: str, method_key: str) -> Converter:
    """Make a converter of a number of bits, or of a method that implies it."""

    def convert(value: Any, values: Values) -> Outcome:
        method = _SAME_METHODS.get(values.get(method_key), values.get(method_key))
        bits, formats = (value if key != method_key else None), _FORMATS.get(method, {})
        if key == method_key and formats and None not in formats:
            return Ignored("")  # the number of bits decides
        if bits not in formats:
            sizes = ", ".join(str(number) for number in formats if number) or "none"
            fix = f"set {key}: {sizes}, or quantization: with a format's name" if formats else "set quantization: int8"
            return Refused(f"{key}: {value} of {method} has no equivalent", fix)
        return Mapped({"load_in_4bit": True} | ({"quantization": formats[bits]} if formats[bits] else {}))

    return convert


def _qlora_fp8(value: Any, values: Values) -> Outcome:
    """Convert Surogate's FP8: the default has a scale per row, and 128 its tiles of 128×128."""
    size = values.get("qlora_block_size")
    if value and size not in (None, 128):
        return Refused(f"qlora_block_size: {size} has no equivalent", "set qlora_block_size: 128, or remove it")
    return Mapped({"quantization": "fp8-tile" if size else "fp8"}) if value else Ignored("")


def _qlora_fp4(value: Any, values: Values) -> Outcome:
    """Convert Surogate's NVFP4, which scales by four over six unless it is disabled."""
    if not value:
        return Ignored("")
    adaptive = values.get("qlora_four_over_six", values.get("enable_four_over_six", True))
    choice = f"46{values.get('four_over_six_metric', 'MSE').lower()}" if adaptive else "plain"
    options = f"{'1d' if values.get('disable_2d_quantization') else '2d'}:{choice}"
    keys: Values = {"quantization": _NVFP4_NAMES.get(options, f"nvfp4:{options}")}
    if values.get("recipe") == "nvfp4" and not {"enable_four_over_six", "fp4_four_over_six"} & values.keys():
        keys["enable_four_over_six"] = True
    return Mapped(keys)


def _of_recipe(recipe: str, key: str) -> Converter:
    """Make a converter of an option of one recipe."""

    def convert(value: Any, values: Values) -> Outcome:
        chosen = VALUES["recipe"].get(values.get("recipe", ""), values.get("recipe"))
        return Mapped({key: value}) if chosen == recipe else Ignored(f"it has a meaning only with recipe: {recipe}")

    return convert


def _load_in_fp8(value: Any, values: Values) -> Outcome:
    """Convert Unsloth's FP8: a scale per row, or per block of 128×128."""
    formats = {True: "fp8", "row": "fp8", "block": "fp8-tile"}
    if is_off(value):
        return Ignored("")
    if value not in formats:
        return Refused(f"load_in_fp8: {value} has no equivalent", "set load_in_fp8: true, row or block")
    return Mapped({"load_in_4bit": True, "quantization": formats[value]})


def _init_weights(value: Any, values: Values) -> Outcome:
    """Convert ms-swift's name of an initialisation, which has hyphens and booleans as text."""
    name = {"true": True, "false": False}.get(value, str(value).replace("-", "_") if isinstance(value, str) else value)
    if find_initialisation(name) is None:
        fix = f"set init_lora_weights to one of {', '.join(initialisation_names())}"
        return Refused(f"init_weights: {value} has no equivalent", fix)
    return Mapped({"init_lora_weights": name})


def _pissa_init(value: Any, values: Values) -> Outcome:
    """Convert LLaMA-Factory's PiSSA, which is randomized with 16 iterations by default; -1: exact."""
    if is_off(value):
        return Ignored("")
    iterations = values.get("pissa_iter", 16)
    return Mapped({"init_lora_weights": "pissa" if iterations == -1 else f"pissa_niter_{int(iterations)}"})


# Linear layers of attention and of MLPs, by the names that they have in the families of transformers.
_PARTS = {
    "finetune_attention_modules": r".*\.(self_attn|attention|self_attention|attn|linear_attn)\.(.*\.)?"
    r"(\w*proj\w*|query_key_value|dense|Wqkv|qkv|w[qkvo])",
    "finetune_mlp_modules": r".*\.(mlp|feed_forward|ffn)\.(.*\.)?(\w*proj\w*|fc\w*|w[123]|dense_\w+)",
}


def _finetuned_modules(value: Any, values: Values) -> Outcome:
    """Convert Unsloth's choice of layers, three keys that are on by default."""
    if values.get("finetune_language_layers") is False:
        return Refused(
            "finetune_language_layers: false leaves nothing to train", "set it to true: halfbyte trains them"
        )
    if not is_off(values.get("target_modules")) and values["target_modules"] not in ("all-linear", "all"):
        return Ignored("target_modules decides")
    trained = [name for name in _PARTS if values.get(name) is not False]
    if not trained:
        return Refused("finetune_attention_modules and finetune_mlp_modules are both false", "set one of them to true")
    return Ignored("") if len(trained) == len(_PARTS) else Mapped({"target_modules": _PARTS[trained[0]]})


_TASKS = {  # PEFT's task types, and ms-swift's
    "seq_cls": "sequence_classification", "token_cls": "token_classification", "feature_extraction": "embedding",
}  # fmt: skip
_BENCHMARK = re.compile(r"\w+_(test|validation|dev|train)")  # LLaMA-Factory's values of `task`, for its evaluation


def _task(value: Any, values: Values) -> Outcome:
    """Convert the name of a task: ours, in any spelling, PEFT's or ms-swift's."""
    name = str(value).rpartition(".")[2].lower().replace("-", "_")
    if name == "causal_lm":
        return Ignored("")
    name = _TASKS.get(name, name)
    if name in TASKS:
        return Mapped({"method": name})
    if _BENCHMARK.fullmatch(name):
        return Ignored("it is about evaluating, see `halfbyte eval`")
    return Refused(f"the task {value} has no equivalent", f"set task: {', '.join(TASKS)}, or method: reward or prm")


# The run

_SWITCHES = {
    "use_wandb": "wandb", "enable_wandb": "wandb", "use_tensorboard": "tensorboard",
    "enable_tensorboard": "tensorboard", "use_mlflow": "mlflow", "use_comet": "comet_ml", "use_swanlab": "swanlab",
    "use_trackio": "trackio",
}  # fmt: skip
_SWITCHING = {"wandb_project": "wandb", "swanlab_project": "swanlab", "trackio_project_name": "trackio"}
_PROJECTS = {**_SWITCHING, "mlflow_experiment": "mlflow", "mlflow_experiment_name": "mlflow"}
_RUN_NAMES = {
    "wandb_name": "wandb", "wandb_exp_name": "wandb", "mlflow_run_name": "mlflow", "swanlab_exp_name": "swanlab",
    "swanlab_experiment_name": "swanlab", "swanlab_run_name": "swanlab", "trackio_run_name": "trackio",
}  # fmt: skip


def _switched_on(values: Values) -> list[str]:
    """Return the trackers that switches and names of projects turn on."""
    off = {name for key, name in _SWITCHES.items() if values.get(key) is False}
    return sorted({name for key, name in (_SWITCHES | _SWITCHING).items() if values.get(key)} - off)


def _tracker(value: Any, values: Values) -> Outcome:
    """Convert switches of experiment trackers."""
    names = _switched_on(values)
    return Mapped({"report_to": names}) if names else Ignored("")


def _name_in(tracker: str, key: str) -> Converter:
    """Make a converter of the name that a run or its project has in `tracker`; without a meaning if it is off."""

    def convert(value: Any, values: Values) -> Outcome:
        listed = [] if is_off(values.get("report_to")) else as_list(values["report_to"])
        names = listed or _switched_on(values)
        if not value or not {tracker, "all"} & {*names}:
            return Ignored("")
        return Mapped({key: value} if listed else {"report_to": names, key: value})

    return convert


def _recompute(value: Any, values: Values) -> Outcome:
    """Convert Surogate's keys for saved activations, which offload what remains after recomputation."""
    if values.get("offload_residual") or values.get("offload_saved_tensors"):
        return Mapped({"activation_checkpointing": "offload"})
    return Mapped({"activation_checkpointing": values["recompute"]}) if "recompute" in values else Ignored("")


def _offload_optimizer(value: Any, values: Values) -> Outcome:
    if values.get("rlhf_type"):
        return Ignored("the memory plan decides what waits in host memory while answers are sampled")
    return Mapped({"optim_offload": True}) if value else Ignored("")


def _rlhf_type(value: Any, values: Values) -> Outcome:
    method = {"rm": "reward"}.get(value, value)
    if method in METHODS:
        return Mapped({"method": method})
    return Refused(f"rlhf_type: {value} is not built yet", f"set method: {', '.join(METHODS)}")


def _plugins(value: Any, values: Values) -> Outcome:
    """Ignore Axolotl's plugins that are kernels."""
    kernels = {"liger", "cut_cross_entropy", "kernels"}
    unsupported = [name for name in as_list(value) if kernels.isdisjoint(name.lower().split("."))]
    if unsupported:
        return Refused(f"plugins: {', '.join(unsupported)} has no equivalent", "remove it; halfbyte loads no plugins")
    return Ignored("halfbyte has its own fused kernels, see use_kernels")


# Learning rate schedules

_NAMES_OF_SCHEDULE = ("lr_scheduler_type", "lr_scheduler", "lr_decay_style")
_FLOORS = ("cosine_min_lr_ratio", "final_lr_fraction", "min_lr_ratio", "min_lr_rate", "min_lr")
# Keys whose converters read keys of ours, which their outcome replaces.
REPLACING = (*_FLOORS, "wsd_decay_steps_fraction", "interleave_prob", "interleave_probs", "use_muon")


def _schedule(value: Any, values: Values) -> Outcome:
    """Convert the name of a schedule together with the rate that it ends with."""
    usual = "linear" if "final_lr_fraction" in values else "cosine"
    foreign_name = next((values[key] for key in _NAMES_OF_SCHEDULE if values.get(key)), usual)
    name = VALUES["lr_scheduler_type"].get(foreign_name, foreign_name)
    floor = next((key for key in _FLOORS if values.get(key)), "")
    options = dict(values.get("lr_scheduler_kwargs") or {})
    if name == "warmup_stable_decay" and values.get("wsd_decay_steps_fraction"):
        steps = values.get("max_steps") or -1
        if steps < 1:
            wrong = "wsd_decay_steps_fraction without max_steps has no equivalent"
            return Refused(wrong, "set lr_scheduler_kwargs: {num_decay_steps: NUMBER}")
        options["num_decay_steps"] = max(1, int(values["wsd_decay_steps_fraction"] * steps))
    if floor and not name.startswith("constant"):
        rate = float(values[floor])
        absolute = rate if floor == "min_lr" else rate * float(values.get("learning_rate") or values.get("lr") or 2e-4)
        if name in ("cosine", "cosine_with_min_lr"):
            name, options["min_lr" if floor == "min_lr" else "min_lr_rate"] = "cosine_with_min_lr", rate
        elif name == "linear":
            name, options = "polynomial", {"power": 1.0, "lr_end": absolute}
        elif name == "warmup_stable_decay" and floor != "min_lr":
            options["min_lr_ratio"] = rate
        else:
            return Refused(f"{floor} with a schedule {name} has no equivalent", "set lr_scheduler_type: cosine")
    return Mapped({"lr_scheduler_type": name} | ({"lr_scheduler_kwargs": options} if options else {}))


# Data

_STOPPINGS = {"first_exhausted": "first", "all_exhausted": "all"}


def _asks_weights(values: Values) -> bool:
    mixed = str(values.get("mix_strategy", "")).startswith("interleave")
    return bool(values.get("interleave_prob") or (values.get("interleave_probs") and mixed))


def _interleave(value: Any, values: Values) -> Outcome:
    """Convert probabilities of datasets to weights of the entries of `dataset`."""
    if not _asks_weights(values):
        return Ignored("" if is_off(value) else "it has a meaning only with an interleaving mix_strategy")
    paths, weights = as_list(values["dataset"]), [float(weight) for weight in as_list(value)]
    if len(paths) != len(weights):
        wrong = f"{len(weights)} probabilities for {len(paths)} datasets"
        return Refused(wrong, "give one for each dataset, or write dataset: [{path, weight}]")
    entries = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    return Mapped({"dataset": entries} | ({} if "mix_strategy" in values else {"mixing": "interleave"}))


def _stopping_strategy(value: Any, values: Values) -> Outcome:
    if not _asks_weights(values):
        return Ignored("it has a meaning only with interleave_prob")
    return Mapped({"stopping": _STOPPINGS[value]})


def _pretraining_dataset(value: Any, values: Values) -> Outcome:
    """Convert Axolotl's streamed text."""
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in as_list(value)]
    convertible = {"path", "split", "text_column", "type", "ds_type", "trust_remote_code"}
    unsupported = {key for entry in entries for key, option in entry.items() if not is_off(option)} - convertible
    if unsupported:
        fix = "name the files in dataset, and set streaming: true"
        return Refused(f"pretraining_dataset: {', '.join(sorted(unsupported))} has no equivalent", fix)
    keys: Values = {"dataset": [entry["path"] for entry in entries], "dataset_format": "text"}
    keys |= {} if "streaming" in values else {"streaming": True}
    splits, columns = ({entry[key] for entry in entries if entry.get(key)} for key in ("split", "text_column"))
    keys |= {"dataset_split": splits.pop()} if len(splits) == 1 else {}
    return Mapped(keys | ({"dataset_text_field": columns.pop()} if len(columns) == 1 else {}))


def _model_name(value: Any, values: Values) -> Outcome:
    """Convert Unsloth's name of the model; ms-swift's is what the model calls itself."""
    if isinstance(value, list) or "model" in values or "model_author" in values:
        return Ignored("it fills in ms-swift's own data about the model's name")
    return Mapped({"model_name_or_path": value})


# Sections

# Section → its key → the key of another tool, or of ours, with the same meaning.
SECTIONS: dict[str, dict[str, str]] = {
    # Unsloth Studio
    "data": {"format_type": "dataset_format"},
    "training": {
        "training_type": "finetuning_type",
        "batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs",
    },
    "lora": {"lora_r": "r", "target_modules": "lora_target"},
    "logging": {},
    # Axolotl
    "overrides_of_model_config": {"rope_parameters": "rope_scaling"},
    # LLaMA-Factory 1
    "peft_config": {"name": "finetuning_type", "target_modules": "lora_target"},
    "quant_config": {"name": "quantization_method"},
    "optim_config": {"name": "optim"},
}
# Values with which Unsloth leaves a key to others.
UNSET = {
    "max_steps": 0,
    "num_train_epochs": 0,
    "save_steps": 0,
    "eval_steps": 0,
    "target_modules": "",
    "lora_target": "",
}


CONVERTED: dict[str, Converter] = {
    **{key: tuning(key) for key in ("finetuning_type", "tuner_type", "train_type")},
    "quant_bits": quantized("quant_bits", "quant_method"),
    "quant_method": quantized("quant_method", "quant_method"),
    "quantization_bit": quantized("quantization_bit", "quantization_method"),
    "qlora_fp8": _qlora_fp8,
    "qlora_block_size": only_with("qlora_fp8"),
    "qlora_fp4": _qlora_fp4,
    "qlora_four_over_six": only_with("qlora_fp4"),
    "qlora_bnb": when_on(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4_four_over_six": _of_recipe("nvfp4", "enable_four_over_six"),
    "fp8_amax_history": _of_recipe("fp8-hybrid", "amax_history_len"),
    "load_in_fp8": _load_in_fp8,
    "load_in_16bit": when_on(load_in_4bit=False),
    "lora_dtype": choice(
        "lora_dtype",
        {
            "AUTO": {},
            "bf16": {"adapter_dtype": "bfloat16"},
            "bfloat16": {"adapter_dtype": "bfloat16"},
            "fp32": {"adapter_dtype": "float32"},
            "float32": {"adapter_dtype": "float32"},
        },
        "set float32",
    ),
    "init_weights": _init_weights,
    "pissa_init": _pissa_init,
    "pissa_iter": only_with("pissa_init"),
    "pissa_convert": lambda *_: Ignored("the saved adapter always fits the original base"),
    "use_loftq": when_on(init_lora_weights="loftq"),
    **dict.fromkeys(("finetune_language_layers", *_PARTS), _finetuned_modules),
    "finetune_vision_layers": when_on(freeze_vision_tower=False),
    **dict.fromkeys(("task", "task_type", "lora_task_type"), _task),
    **dict.fromkeys(_SWITCHES, _tracker),
    **{key: _name_in(name, "project") for key, name in _PROJECTS.items()},
    **{key: _name_in(name, "run_name") for key, name in _RUN_NAMES.items()},
    **dict.fromkeys(("recompute", "offload_residual", "offload_saved_tensors"), _recompute),
    "offload_optimizer": _offload_optimizer,
    "qlora_offload_experts": when_on(expert_offload=True),
    "use_muon": when_on(optim="muon"),
    "float32": when_on(dtype="float32"),
    **dict.fromkeys(("full_finetuning", "full_finetune"), when_on(use_peft=False, load_in_4bit=False)),
    "gpus": lambda *_: Ignored(
        "halfbyte uses all visible GPUs: CUDA_VISIBLE_DEVICES limits them, and parallel divides the run"
    ),
    "rlhf_type": _rlhf_type,
    "advantage_estimator": one_of(("grpo",), "advantage_estimator has no equivalent", "set method: grpo or rloo"),
    "plugins": _plugins,
    "lr_scheduler": _schedule,
    "lr_decay_style": _schedule,
    **dict.fromkeys(
        (*_FLOORS, "wsd_decay_steps_fraction"), lambda value, values: _schedule(value, values) if value else Ignored("")
    ),
    "embedding_lr_scale": lambda value, values: Mapped(  # a multiple of the learning rate
        {"embedding_learning_rate": float(value) * float(values["learning_rate"])}
    ),
    "mix_strategy": choice(
        "mix_strategy",
        {
            "concat": {"mixing": "concat"},
            "interleave_under": {"mixing": "interleave", "stopping": "first"},
            "interleave_over": {"mixing": "interleave", "stopping": "all"},
        },
        "set mixing: interleave, and stopping: first or all",
    ),
    "interleave_prob": _interleave,
    "interleave_probs": _interleave,
    "stopping_strategy": _stopping_strategy,
    "mask_history": when_on(train_on="last"),
    "truncation_strategy": choice(
        "truncation_strategy",
        {"delete": {"overlong": "drop"}, "right": {"overlong": "truncate"}},
        "set overlong: truncate or drop",
    ),
    "loss_scale": choice(
        "loss_scale",
        {
            "default": {},
            "all": {"assistant_only_loss": False, "completion_only_loss": False},
            "last_round": {"train_on": "last"},
        },
        "set train_on: last or all, or assistant_only_loss",
    ),
    "train_on_completions": lambda value, _: Mapped(
        dict.fromkeys(("assistant_only_loss", "completion_only_loss"), bool(value))
    ),
    "use_chat_template": lambda value, _: Ignored(
        "" if value else "chat rows always have a template, and rows of text have none"
    ),
    "pretraining_dataset": _pretraining_dataset,
    "model_name": _model_name,
    "batching_strategy": choice(
        "batching_strategy",
        {"normal": {}, "padding_free": {"padding_free": True}},
        "set packing: true or padding_free: true",
    ),
    "mixed_precision": choice(
        "mixed_precision",
        {
            "no": {},
            False: {},
            "bf16_mixed": {"dtype": "bfloat16"},
            "bf16": {"dtype": "bfloat16"},
            "fp16_mixed": {"dtype": "float16"},
            "fp16": {"dtype": "float16"},
            "fp32": {"dtype": "float32"},
        },
        "set dtype: bfloat16",
    ),
    "dist_config": lambda *_: Ignored(
        "parallel: auto shards if the memory plan needs it, and parallel: {shard: N} always"
    ),
    "training_type": tuning("training_type"),
    "inference": lambda value, _: Ignored("its settings are for generating, see `halfbyte generate`"),
}
