"""Keys of other tools: the outcome for each key, and conversions of values.

A foreign key is `Mapped` to our keys, `Ignored` because halfbyte does the same or the key has no effect on the result,
or `Refused` with what to do instead. A key that is switched off (null, false, empty) is ignored without a message.
"""

from __future__ import annotations

from typing import Any

from ..utils.text import brief
from . import peers
from .aliases import DEFAULTS, HARMLESS, NO_EQUIVALENT, NOT_BUILT, ON_BY_DEFAULT, OWN_ENGINE, RENAMED
from .dataset_keys import axolotl_datasets, axolotl_test_datasets
from .methods import DEFAULTS as METHODS
from .methods import LOSS_TYPES
from .outcomes import (
    Converter,
    Ignored,
    Mapped,
    Outcome,
    Refused,
    Values,
    as_list,
    is_off,
    one_of,
    only_with,
    when_on,
)
from .peers import asks_stored
from .schema import RunKeys

# Errors of converters for a value of a type that the tool does not accept either.
CONVERSION_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)

_TEMPLATE = "remove it to use the tokenizer's own chat template, or name a Jinja file with chat_template_path"


def translate(key: str, values: Values) -> Outcome | None:
    """Return the outcome for foreign `key`, given all keys of its file; None if no known tool has it."""
    value = values[key]
    if key not in foreign_names():
        return None
    if value is None:
        return Ignored("")
    if key in CONVERTED:
        try:
            return CONVERTED[key](value, values)
        except CONVERSION_ERRORS:
            return Refused(f"{key} cannot be {brief(value)}", "correct it as its tool expects, or remove it")
    if key in RENAMED:
        return Mapped({RENAMED[key]: value})
    if value is True if key in ON_BY_DEFAULT else is_off(value):
        return Ignored("")
    if key in HARMLESS:
        return Ignored(HARMLESS[key])
    if key in NOT_BUILT:
        return Refused(f"{key} is not built yet", NOT_BUILT[key])
    return Refused(f"{key} has no equivalent", NO_EQUIVALENT[key])


def foreign_names() -> list[str]:
    """Every known foreign key."""
    return [*CONVERTED, *RENAMED, *HARMLESS, *NOT_BUILT, *NO_EQUIVALENT]


def is_foreign_section(key: str, values: Values) -> bool:
    """Return whether a key of ours holds a section of LLaMA-Factory 1, which names the kind of adapter in it."""
    return key == "peft_config" and isinstance(values[key], dict) and "name" in values[key]


def _dtype(key: str) -> Converter:
    """Convert the switches bf16 and fp16; other tools compute in float32 if both are off."""
    dtype, switches = {"bf16": ("bfloat16", ("fp16", "float16")), "fp16": ("float16", ("bf16", "bfloat16"))}[key]

    def convert(value: Any, values: Values) -> Outcome:
        if value == "auto":
            return Mapped({"dtype": "auto"})
        if value:
            return Mapped({"dtype": dtype})
        if any(map(values.get, switches)) or key == "fp16":
            return Ignored("")
        return Mapped({"dtype": "float32"})

    return convert


def _torch_dtype(value: Any, values: Values) -> Outcome:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    name = str(value).removeprefix("torch.")
    return Mapped({"dtype": short.get(name, name)})


def _adapter(value: Any, values: Values) -> Outcome:
    """Convert Axolotl's `adapter`: lora keeps 16 bits unless a load_in_* key quantizes, qlora means 4 bits."""
    if value == "qlora":
        return Mapped({"use_peft": True, "load_in_4bit": True})
    if value == "lora":
        return Mapped({"use_peft": True, "load_in_4bit": bool(values.get("load_in_4bit")) or asks_stored(values)})
    return Refused(f"adapter: {value} is not built yet", "set adapter: qlora or lora, or peft_type")


def _load_in_8bit(value: Any, values: Values) -> Outcome:
    if value and values.get("load_in_4bit"):
        return Refused("load_in_8bit and load_in_4bit are both true", "keep one of them")
    return Mapped({"load_in_4bit": True, "quantization": "int8"}) if value else Ignored("")


def overridden_keys(values: Values) -> set[str]:
    """Return our keys that a foreign key overrides.

    With load_in_8bit or gptq, `load_in_4bit: false` only means that the weights are not stored in 4 bits. LLaMA-Factory
    names the optimizer inside of GaLore, APOLLO and BAdam with `optim`. Surogate's options of NVFP4 apply to stored
    weights with any recipe.
    """
    keys = {"load_in_4bit"} if asks_stored(values) and values.get("load_in_4bit") is False else set()
    keys |= {"optim"} if any(values.get(switch) for switch in OPTIMIZER_SWITCHES) else set()
    keys |= set(peers.NVFP4_KEYS) if values.get("qlora_fp4") and values.get("recipe") != "nvfp4" else set()
    outcomes = [translate(key, values) for key in peers.REPLACING if key in values]
    return keys.union(*(outcome.keys for outcome in outcomes if isinstance(outcome, Mapped)))


def _qat(value: Any, values: Values) -> Outcome:
    """Convert Axolotl's options of torchao's fake quantization."""
    options = {key: option for key, option in value.items() if not is_off(option)} if isinstance(value, dict) else {}
    scheme = options.pop("weight_dtype", None)
    if options or scheme not in ("int4", "int8", "fp8", "nvfp4", "mxfp4"):
        unknown = ", ".join(options) or f"weight_dtype: {scheme}"
        return Refused(f"qat: {unknown} has no equivalent", "set qat_scheme: int4, or nf4, int8, fp8, nvfp4")
    return Mapped({"qat_scheme": scheme, "load_in_4bit": False})


def _bnb_config(value: Any, values: Values) -> Outcome:
    quantizer_keys = {"bnb_4bit_quant_type", "bnb_4bit_use_double_quant"}
    unsupported = set(value) - quantizer_keys - {"load_in_4bit", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"}
    if unsupported:
        return Refused(f"bnb_config_kwargs has {', '.join(sorted(unsupported))}, which has no equivalent", "remove it")
    return Mapped({key: value[key] for key in value if key in quantizer_keys})


def _targets(value: Any, values: Values) -> Outcome:
    """Convert LLaMA-Factory's `all`, or comma-separated names."""
    if value == "all":
        return Mapped({"target_modules": "all-linear"})
    return Mapped({"target_modules": as_list(value)})


def _axolotl_targets(value: Any, values: Values) -> Outcome:
    if values.get("lora_target_linear") or not value:
        return Ignored("" if not value else "lora_target_linear: true covers every linear layer")
    return Mapped({"target_modules": value})


def _masking(value: Any, values: Values) -> Outcome:
    """Convert train_on_inputs and train_on_prompt, which apply to both kinds of data."""
    return Mapped({"assistant_only_loss": not value, "completion_only_loss": not value})


def _roles(value: Any, values: Values) -> Outcome:
    roles = set(as_list(value))
    if roles <= {"assistant", "gpt", "model"}:
        return Mapped({"assistant_only_loss": bool(roles)})
    return Refused(f"roles_to_train: {value} has no equivalent", "train assistant turns, or assistant_only_loss: false")


def _attention(name: str) -> Converter:
    return lambda value, _: Mapped({"attn_implementation": name}) if value else Ignored("")


def _flash_attn(value: Any, values: Values) -> Outcome:
    names = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
    names |= {name: name for name in ("eager", "flash_attention_2", "flash_attention_3", "flex_attention")}
    if value not in names:
        return Refused(f"flash_attn: {value} has no equivalent", "set attn_implementation: sdpa")
    return Mapped({"attn_implementation": names[value]})


def _times_per_epoch(key: str) -> Converter:
    """Make a converter of evals_per_epoch and saves_per_epoch to a share of all steps of the run."""

    def convert(value: Any, values: Values) -> Outcome:
        epochs = values.get("num_epochs") or values.get("num_train_epochs") or 1
        if not value:
            return Ignored("")
        if value == 1:
            return Mapped({key: None})
        return Mapped({key: 1 / (value * epochs)})

    return convert


def _strategy(key: str) -> Converter:
    """Make a converter of transformers' steps/epoch/no; here the default of `key` is every epoch."""

    def convert(value: Any, values: Values) -> Outcome:
        if value == "steps":
            return Ignored("" if key in values else f"{key} decides; its default is every epoch")
        if value == "epoch":
            return Mapped({key: None})
        if key == "eval_steps":
            return Ignored("evaluation runs whenever there is held-out data")
        return Refused("a run always saves its checkpoints", "set save_total_limit: 1 to keep one")

    return convert


def _checkpointing(value: Any, values: Values) -> Outcome:
    if value is True and values.get("activation_offloading") is True:
        value = "offload"
    if isinstance(value, bool):
        return Mapped({"activation_checkpointing": value})
    if value in ("unsloth", "offload"):  # names of Unsloth and Axolotl for inputs in host memory
        return Mapped({"activation_checkpointing": "offload"})
    return Refused(f"gradient checkpointing: {brief(value)} is not known", "set activation_checkpointing: true")


def _offloading(value: Any, values: Values) -> Outcome:
    if value in (True, "legacy", "hidden_states"):
        return Mapped({"activation_checkpointing": "offload"})
    return Refused(f"activation_offloading: {value} has no equivalent", "set it to true") if value else Ignored("")


def _warmup_ratio(value: Any, values: Values) -> Outcome:
    if values.get("warmup_steps"):
        return Ignored("warmup_steps is given as well and takes precedence")
    if isinstance(value, int | float) and not 0 <= value < 1:  # warmup_steps would read it as a number of steps
        return Refused(
            f"warmup_ratio: {brief(value)} is not a share of the steps", "give a number below 1, or set warmup_steps"
        )
    return Mapped({"warmup_steps": float(value)})


def _special_tokens(value: Any, values: Values) -> Outcome:
    if set(value) <= {"pad_token", "additional_special_tokens"}:
        if added := value.get("additional_special_tokens"):
            return Mapped({"add_special_tokens": as_list(added)})
        return Ignored("padding is never trained on, and halfbyte chooses a pad token if the tokenizer has none")
    return Refused(
        "special_tokens has no equivalent for other tokens than pad_token and additional_special_tokens",
        "change them in the tokenizer's files",
    )


def _chat_template(value: Any, values: Values) -> Outcome:
    if value == "tokenizer_default":
        return Ignored("")
    return Refused(f"a chat template by name ({value}) has no equivalent", _TEMPLATE)


def _chat_template_jinja(value: Any, values: Values) -> Outcome:
    if "\n" not in value and value.endswith((".jinja", ".jinja2")):
        return Mapped({"chat_template_path": value})
    return Refused(
        "a template inside the configuration has no equivalent", "save it to a file and name that in chat_template_path"
    )


def _datasets(value: Any, values: Values) -> Outcome:
    keys, problem = axolotl_datasets(value)
    return (
        Refused(problem, "name the files in dataset, and see dataset_format and column_mapping")
        if problem
        else Mapped(keys)
    )


def _test_datasets(value: Any, values: Values) -> Outcome:
    keys, problem = axolotl_test_datasets(value, values.get("datasets"))
    return Refused(problem, "name the files in eval_dataset") if problem else Mapped(keys)


def _method(key: str) -> Converter:
    """Make a converter of a key that chooses a training method or its loss."""

    def convert(value: Any, values: Values) -> Outcome:
        if is_off(value):
            return Ignored("")
        keys = method_keys(key, values)
        if keys is None:
            fix = "set loss_type and loss_weights" if key.startswith("pref_") else f"set method: {', '.join(METHODS)}"
            return Refused(f"{key}: {brief(value)} is not built yet", fix)
        return Mapped(keys) if keys else Ignored("")

    return convert


def _trl(value: Any, values: Values) -> Outcome:
    keys, unsupported = policy_keys(value)
    if unsupported:
        return Refused(f"trl: {unsupported} has no equivalent", "remove it; halfbyte samples answers itself")
    return Mapped(keys) if keys else Ignored("")


def _use_vllm(value: Any, values: Values) -> Outcome:
    if not value:
        return Ignored("")
    if not asks_server(values):
        return Refused("use_vllm without vllm_mode: server has no equivalent", OWN_ENGINE)
    return Mapped({"rollout": "vllm", "vllm_server_base_url": server_address(values)})


def _parallel(value: Any, values: Values) -> Outcome:
    """Convert keys that each give the degree of one axis of `parallel`."""
    degrees, problem = parallel_degrees(values)
    if problem:
        return Refused(problem, "set parallel, as in {data: 2, tensor: 2}, and remove the other keys")
    return Mapped({"parallel": degrees}) if degrees else Ignored("")


def _fsdp(value: Any, values: Values) -> Outcome:
    """Convert FSDP's options; `parallel: auto` shards if the model does not fit otherwise."""
    if is_off(value):
        return Ignored("")
    words = value if isinstance(value, dict) else {word: True for word in " ".join(as_list(value)).split()}
    off = ("offload", "offload_params", "fsdp_offload_params", "cpu_offload")
    if any(words.get(word) in (True, "true") for word in off):
        return Refused("parameter offload of FSDP has no equivalent", "remove it; the memory plan chooses what fits")
    return Ignored("parallel: auto shards if the memory plan needs it, and parallel: {shard: N} always")


def _peft(value: Any, values: Values) -> Outcome:
    """Convert Axolotl's section of PEFT's options, which has LoftQ's only."""
    if set(value or ()) - {"loftq_config"}:
        return Refused(f"peft: {', '.join(value)} has no equivalent", "set these keys themselves")
    options = (value or {}).get("loftq_config")
    return Mapped({"init_lora_weights": "loftq", "loftq_config": options}) if options else Ignored("")


# Keys for parallelism

PARALLEL_AXES = {
    # accelerate and transformers (ParallelismConfig), Axolotl, LLaMA-Factory and Unsloth
    "dp_replicate_size": "data",
    "data_parallel_size": "data",
    "dp_shard_size": "shard",
    "tp_size": "tensor",
    "tensor_parallel_size": "tensor",
    "pp_size": "pipeline",
    "pipeline_parallel_size": "pipeline",
    "cp_size": "context",
    "sp_size": "context",
    "context_parallel_size": "context",
    "sequence_parallel_size": "context",
    "sequence_parallel_degree": "context",
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "hyper_parallel_cp_size": "context",
}
PARALLELISM_SECTION = "parallelism_config"  # section of transformers with such keys


def parallel_degrees(values: dict[str, Any]) -> tuple[dict[str, int], str]:
    """Return the degree of each axis that `values` ask for, and an error message or "".

    Raises:
        ValueError, TypeError: a degree is not a number, or the section is not a mapping.
    """
    degrees = [(key, values[key]) for key in PARALLEL_AXES if values.get(key) is not None]
    degrees += [
        (key, degree) for key, degree in dict(values.get(PARALLELISM_SECTION) or {}).items() if degree is not None
    ]
    axes: dict[str, tuple[str, int]] = {}
    for key, degree in degrees:
        if key not in PARALLEL_AXES:
            return {}, f"{PARALLELISM_SECTION} has {key}"
        if isinstance(degree, bool) or int(degree) != degree or degree < 1:
            return {}, f"{key} must be a whole number above 0"
        first_key, number = axes.setdefault(PARALLEL_AXES[key], (key, degree))
        if number != degree:
            return {}, f"{first_key}: {number} and {key}: {degree} both give the degree of {PARALLEL_AXES[key]}"
    return {axis: number for axis, (_, number) in axes.items() if number > 1}, ""


# Keys for training methods

# LLaMA-Factory's pref_loss values that are methods here; the others are losses of dpo.
PREFERENCE_METHODS = ("orpo", "simpo")
STAGES = {"rm": "reward"}
RL_OPTIONS = {  # Axolotl's values of rl that are a method with options
    "ipo": {"method": "dpo", "loss_type": "ipo"},
    "gdpo": {"method": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
}
TRL_SECTION = "trl"  # Axolotl's section of keys for policy optimization
SAME_IN_TRL = (  # keys of that section with the same name and meaning
    *("beta", "loss_type", "num_generations", "max_completion_length", "temperature", "top_p", "top_k"),
    *("num_iterations", "epsilon", "epsilon_high", "delta", "mask_truncated_completions", "reward_weights"),
)
# Keys about logging and kernels, without an equivalent.
IGNORED_IN_TRL = ("log_completions", "num_completions_to_print", "use_liger_loss")
REWARD_SWITCHES = {"reward_model": "reward", "process_reward_model": "prm"}  # Axolotl's switches → method
METHOD_KEYS = ("rl", *REWARD_SWITCHES, "stage", "pref_loss", "pref_ftx")


def method_keys(key: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return our keys for one of `METHOD_KEYS`: empty if other keys decide, None if it has no equivalent.

    Args:
        values: all keys of the file.
    """
    value, loss = values[key], values.get("pref_loss", "sigmoid")
    if key in REWARD_SWITCHES:
        return _method_if_known(REWARD_SWITCHES[key])
    if key == "rl":
        return RL_OPTIONS.get(value) or _method_if_known(value)
    if key == "stage":
        if value == "pt":
            return {"dataset_format": "text"} | (
                {} if {"packing", "neat_packing"} & values.keys() else {"packing": True}
            )
        preferred = loss if loss in PREFERENCE_METHODS else "dpo"
        return {} if value == "sft" else _method_if_known(preferred if value == "dpo" else STAGES.get(value, value))
    if values.get("stage") != "dpo":  # LLaMA-Factory ignores them then
        return {}
    likelihood = float(values.get("pref_ftx") or 0)
    if loss in PREFERENCE_METHODS:
        return None if key == "pref_ftx" else {}
    if loss not in LOSS_TYPES["dpo"]:
        return None
    return {"loss_type": [loss, "sft"], "loss_weights": [1.0, likelihood]} if likelihood else {"loss_type": loss}


def _method_if_known(name: Any) -> dict[str, Any] | None:
    return {"method": name} if name in METHODS else None


def policy_keys(section: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return our keys for Axolotl's section `trl`, and a key in it without an equivalent, or "".

    Raises:
        AttributeError, TypeError: the section has another shape.
    """
    set_keys = {key: value for key, value in section.items() if value not in (None, False, [], {})}
    keys = {key: value for key, value in set_keys.items() if key in SAME_IN_TRL}
    if "scale_rewards" in section:
        keys["scale_rewards"] = {True: "group", False: "none"}.get(section["scale_rewards"], section["scale_rewards"])
    if "reward_funcs" in set_keys:
        keys["reward_funcs"] = [_as_file_and_function(name) for name in set_keys["reward_funcs"]]
    served = asks_server(set_keys)
    if served:
        keys |= {"rollout": "vllm", "vllm_server_base_url": server_address(set_keys)}
        keys |= {key: set_keys[key] for key in ("vllm_server_timeout",) if key in set_keys}
    engine = [key for key in set_keys if key.startswith("vllm_")] if served or not set_keys.get("use_vllm") else []
    unsupported = set_keys.keys() - keys.keys() - {*IGNORED_IN_TRL, *engine, *(["use_vllm"] if served else [])}
    return keys, min(unsupported, default="")


def asks_server(values: dict[str, Any]) -> bool:
    """Return whether TRL would use a vLLM server; by default it runs vLLM in its own process."""
    return bool(values.get("use_vllm")) and values.get("vllm_mode") == "server"


def server_address(values: dict[str, Any]) -> str:
    """Address at which TRL looks for the vLLM server."""
    host, port = values.get("vllm_server_host") or "localhost", values.get("vllm_server_port") or 8000
    return values.get("vllm_server_base_url") or f"http://{'localhost' if host == '0.0.0.0' else host}:{port}"


def _as_file_and_function(name: str) -> str:
    """Convert Axolotl's `package.module.function` to FILE.py:FUNCTION."""
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py:{function}" if module else name


# Keys for low-rank and block-wise optimizers of LLaMA-Factory

# Switch → its option keys, their names in `optim_args`, and LLaMA-Factory's defaults.
OPTIMIZER_SWITCHES: dict[str, dict[str, tuple[str, Any]]] = {
    "use_galore": {
        "galore_rank": ("rank", 16),
        "galore_update_interval": ("update_proj_gap", 200),
        "galore_scale": ("scale", 2.0),
        "galore_proj_type": ("proj_type", "std"),
    },
    "use_apollo": {
        "apollo_rank": ("rank", 16),
        "apollo_update_interval": ("update_proj_gap", 200),
        "apollo_scale": ("scale", 32.0),
        "apollo_proj": ("proj", "random"),
        "apollo_proj_type": ("proj_type", "std"),
        "apollo_scale_type": ("scale_type", "channel"),
    },
    "use_badam": {
        "badam_mode": ("badam_mode", "layer"),
        "badam_switch_mode": ("badam_switch_mode", "ascending"),
        "badam_switch_interval": ("badam_switch_interval", 50),
        "badam_start_block": ("badam_start_block", None),
        "badam_update_ratio": ("badam_update_ratio", 0.05),
        "badam_mask_mode": ("badam_mask_mode", "adjacent"),
    },
}
# Other keys of the switches. The order of two factors, and messages, do not change the result.
OPTIMIZER_KEYS = {
    "use_galore": ("galore_target", "galore_layerwise"),
    "use_apollo": ("apollo_target", "apollo_layerwise", "apollo_scale_front"),
    "use_badam": ("badam_verbose",),
}


def _optimizer(switch: str) -> Converter:
    """Make a converter of a switch of LLaMA-Factory and all its keys."""
    name = switch.removeprefix("use_")

    def convert(value: Any, values: Values) -> Outcome:
        if not value:
            return Ignored("")
        conflicting = [candidate for candidate in OPTIMIZER_SWITCHES if candidate != switch and values.get(candidate)]
        if conflicting:
            return Refused(f"{switch} and {conflicting[0]} are both true", "keep one of them")
        inner = values.get("optim", "adamw_torch")
        narrow = inner in ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit") and name == "galore"
        if not narrow and inner not in ("adamw_torch", "adamw_torch_fused"):
            return Refused(f"{switch} with optim: {inner} is not built yet", "set optim: adamw_torch")
        layerwise = "_layerwise" if values.get(f"{name}_layerwise") else ""
        optim = name if name == "badam" else f"{name}_adamw{'_8bit' * narrow}{layerwise}"
        switch_keys = OPTIMIZER_SWITCHES[switch].items()
        options = {option_name: values.get(key, default) for key, (option_name, default) in switch_keys}
        keys = {"optim": optim, "optim_args": {key: option for key, option in options.items() if option is not None}}
        if name != "badam":
            target = values.get(f"{name}_target", "all")
            keys["optim_target_modules"] = "all-linear" if target == "all" else as_list(target)
        return Mapped(keys)

    return convert


# Sections of keys


def _section(name: str) -> Converter:
    """Make a converter of a section, by the outcomes of its keys."""

    def convert(value: Any, values: Values) -> Outcome:
        inner = {peers.SECTIONS[name].get(key, key): option for key, option in value.items()}
        options = {key: option for key, option in inner.items() if key not in peers.UNSET or option != peers.UNSET[key]}
        keys: Values = {}
        for key, option in options.items():
            outcome = Mapped({key: option}) if key in RunKeys.model_fields else translate(key, values | options)
            if isinstance(outcome, Refused):
                return Refused(f"{name}: {outcome.why}", outcome.fix)
            if outcome is None:
                return Refused(f"{name}: {key} is not a known key", "remove it")
            keys |= outcome.keys if isinstance(outcome, Mapped) else {}
        return Mapped(keys)

    return convert


def _lora(value: Any, values: Values) -> Outcome:
    """Convert Surogate's switch, or Unsloth's section of the same name."""
    return _section("lora")(value, values) if isinstance(value, dict) else peers.tuning("lora")(value, values)


def _data(value: Any, values: Values) -> Outcome:
    """Convert Unsloth's section, or the data itself."""
    return _section("data")(value, values) if isinstance(value, dict) else Mapped({"dataset": value})


# The table of conversions

CONVERTED: dict[str, Converter] = {
    **peers.CONVERTED,
    **{name: _section(name) for name in peers.SECTIONS},
    "lora": _lora,
    "data": _data,
    "bf16": _dtype("bf16"),
    "fp16": _dtype("fp16"),
    "bfloat16": _dtype("bf16"),
    "float16": _dtype("fp16"),
    "pure_bf16": lambda value, _: Mapped({"dtype": "bfloat16", "adapter_dtype": "bfloat16"}) if value else Ignored(""),
    "torch_dtype": _torch_dtype,
    "bnb_4bit_compute_dtype": _torch_dtype,
    "adapter": _adapter,
    "quantization_method": one_of(
        ("bitsandbytes", "bnb", "bitsandbytes (4/8)", "hqq", "eetq"),
        "quantization_method is not built yet",
        "set bitsandbytes",
    ),
    "load_in_8bit": _load_in_8bit,
    "gptq": when_on(load_in_4bit=True),
    "qat": _qat,
    **{key: _method(key) for key in METHOD_KEYS},
    TRL_SECTION: _trl,
    "use_vllm": _use_vllm,
    **dict.fromkeys(("vllm_mode", "vllm_server_host", "vllm_server_port"), only_with("use_vllm")),
    "bnb_config_kwargs": _bnb_config,
    "peft": _peft,
    **dict.fromkeys([*PARALLEL_AXES, PARALLELISM_SECTION], _parallel),
    "fsdp": _fsdp,
    "fsdp_config": _fsdp,
    "lora_target_modules": _axolotl_targets,
    "lora_target_linear": lambda value, _: Mapped({"target_modules": "all-linear"}) if value else Ignored(""),
    "lora_target": _targets,
    "additional_target": lambda value, _: Mapped({"modules_to_save": as_list(value)}),
    "train_on_inputs": _masking,
    "train_on_prompt": _masking,
    "roles_to_train": _roles,
    "train_on_eos": one_of(("turn", "all", "last"), "EOS is always trained, train_on_eos cannot be", "remove it"),
    "flash_attn": _flash_attn,
    "flash_attention": _attention("flash_attention_2"),
    "sdp_attention": _attention("sdpa"),
    "eager_attention": _attention("eager"),
    "flex_attention": _attention("flex_attention"),
    "evals_per_epoch": _times_per_epoch("eval_steps"),
    "saves_per_epoch": _times_per_epoch("save_steps"),
    "gradient_checkpointing": _checkpointing,
    "use_gradient_checkpointing": _checkpointing,
    "bias": one_of(("none", False), "adapters have no bias, so bias has no equivalent", "set bias: none"),
    "disable_gradient_checkpointing": lambda value, _: Mapped({"activation_checkpointing": not value}),
    "activation_offloading": _offloading,
    **dict.fromkeys(("warmup_ratio", "lr_warmup_fraction"), _warmup_ratio),
    "logging_strategy": one_of(("steps",), "logging_strategy has no equivalent", "set logging_steps"),
    "eval_strategy": _strategy("eval_steps"),
    "evaluation_strategy": _strategy("eval_steps"),
    "save_strategy": _strategy("save_steps"),
    "train_sampling_strategy": one_of(
        ("random",), "train_sampling_strategy has no equivalent", "remove it, or set packing: true"
    ),
    "truncation_mode": one_of(("keep_start",), "truncation_mode has no equivalent", "remove it, or set overlong"),
    "use_cpu": lambda value, _: Mapped({"device": "cpu"}) if value else Ignored(""),
    "packing_strategy": one_of(("bfd",), "packing_strategy has no equivalent", "remove it"),
    **{switch: _optimizer(switch) for switch in OPTIMIZER_SWITCHES},
    **{
        key: only_with(switch)
        for switch, keys in OPTIMIZER_SWITCHES.items()
        for key in (*keys, *OPTIMIZER_KEYS[switch])
    },
    "special_tokens": _special_tokens,
    "chat_template": _chat_template,
    "template": _chat_template,
    "chat_template_jinja": _chat_template_jinja,
    "datasets": _datasets,
    **dict.fromkeys(("test_datasets", "validation_datasets"), _test_datasets),
}


# Keys that only one tool has, in the order in which they decide.
_SIGNS = {
    "Unsloth": {"training"},
    "ms-swift": {"tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "val_dataset", "attn_impl"},
    "Surogate": {"lora", "qlora_fp8", "qlora_fp4", "qlora_bnb", "validation_datasets", "gpus"},
    "Axolotl": {"base_model", "datasets", "micro_batch_size", "sequence_len"},
    "LLaMA-Factory": {
        *("stage", "finetuning_type", "cutoff_len", "lora_target", "quantization_bit", "template"),
        *("model_class", "dist_config"),
    },
}


def detect_tool(values: Values) -> str:
    """Return the tool whose keys a file has, or ""."""
    sections = [key for key in ("model_class", "dist_config") if key in values]
    if sections or ("peft_config" in values and is_foreign_section("peft_config", values)):
        # LLaMA-Factory 1 has keys of other tools, too
        return "LLaMA-Factory"
    if "model" in values and values.keys() & {"recipe", "sequence_len", "lora_rank"} - _SIGNS["ms-swift"]:
        return "ms-swift" if values.keys() & _SIGNS["ms-swift"] else "Surogate"
    return next((tool for tool, keys in _SIGNS.items() if values.keys() & keys), "")


def tool_defaults(values: Values, own_keys: Values) -> Values:
    """Return our keys for defaults of the file's tool that differ from halfbyte's."""
    tool = detect_tool(values)
    keys = dict(DEFAULTS.get(tool, {}))
    if tool == "Axolotl" and values.get("adapter") is None:
        keys |= {"use_peft": False, "load_in_4bit": False}
    if tool == "LLaMA-Factory":
        rank = own_keys.get("r", 8)
        keys |= {"load_in_4bit": False, "r": 8, "lora_alpha": 2.0 * (rank if isinstance(rank, int) else 8)}
        keys |= {"use_peft": False} if "model_class" in values and not values.get("peft_config") else {}
    if tool == "Surogate" and own_keys.get("recipe") == "nvfp4":
        keys |= {"enable_four_over_six": True}
    if tool == "ms-swift" and own_keys.get("use_peft") is False:
        keys |= {"learning_rate": 1e-5}
    if own_keys.get("quantization"):
        keys.pop("load_in_4bit", None)
    return {key: value for key, value in keys.items() if key not in own_keys}
