"""Reading other tools' keys: values that need converting, and the rule for each key.

A foreign key is `Mapped` to ours, `Ignored` because halfbyte does the same or the key has no effect on the result, or
`Refused` with what to do instead. A key that is switched off (null, false, empty) is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..utils.text import brief
from .aliases import DEFAULTS, HARMLESS, NO_EQUIVALENT, NOT_BUILT, OWN_ENGINE, RENAMED
from .datasets import axolotl_datasets, axolotl_test_datasets
from .divided import SEVERAL, WAYS, divided
from .foreign_methods import CHOOSING, TRL, asks_server, method_keys, policy_keys, server_address
from .methods import DEFAULTS as METHODS


@dataclass(frozen=True)
class Mapped:
    """The same meaning under our names."""

    keys: dict[str, Any]


@dataclass(frozen=True)
class Ignored:
    """Nothing to do; `why` is empty where there is nothing to say either."""

    why: str


@dataclass(frozen=True)
class Refused:
    """No equivalent: `why`, and what to do about it."""

    why: str
    fix: str


Outcome = Mapped | Ignored | Refused
Values = dict[str, Any]

# What converting a value of another shape than the tool's runs into: there are as many as converters.
SHAPES = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)

_TEMPLATE = "remove it to use the tokenizer's own chat template, or name a Jinja file with chat_template_path"


def translate(key: str, values: Values) -> Outcome | None:
    """What becomes of foreign `key`, given all keys of its file; None when no tool known here has it."""
    value = values[key]
    if key not in foreign_names():
        return None
    if value is None:
        return Ignored("")
    if key in CONVERTED:
        try:
            return CONVERTED[key](value, values)
        except SHAPES:
            return Refused(f"{key} cannot be {brief(value)}", "write it as its tool does, or remove it")
    if key in RENAMED:
        return Mapped({RENAMED[key]: value})
    if _is_off(value):
        return Ignored("")
    if key in HARMLESS:
        return Ignored(HARMLESS[key])
    if key in NOT_BUILT:
        return Refused(f"{key} is not built yet", NOT_BUILT[key])
    return Refused(f"{key} has no equivalent", NO_EQUIVALENT[key])


def foreign_names() -> list[str]:
    """Every foreign key known here."""
    return [*CONVERTED, *RENAMED, *HARMLESS, *NOT_BUILT, *NO_EQUIVALENT]


def _is_off(value: Any) -> bool:
    return value in (None, False, "", 0, "none", [], {})


def _dtype(key: str) -> Callable[[Any, Values], Outcome]:
    """bf16 and fp16 switch a dtype on; with both off the other tools compute in float32."""
    own, other = {"bf16": ("bfloat16", "fp16"), "fp16": ("float16", "bf16")}[key]

    def convert(value: Any, values: Values) -> Outcome:
        if value == "auto":
            return Mapped({"dtype": "auto"})
        if value:
            return Mapped({"dtype": own})
        return Ignored("") if values.get(other) or key == "fp16" else Mapped({"dtype": "float32"})

    return convert


def _torch_dtype(value: Any, values: Values) -> Outcome:
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    name = str(value).removeprefix("torch.")
    return Mapped({"dtype": short.get(name, name)})


def _adapter(value: Any, values: Values) -> Outcome:
    """Axolotl: lora keeps 16 bits unless a load_in_* key says otherwise, qlora means 4 bits."""
    if value == "qlora":
        return Mapped({"use_peft": True, "load_in_4bit": True})
    if value == "lora":
        return Mapped({"use_peft": True, "load_in_4bit": bool(values.get("load_in_4bit")) or _is_stored(values)})
    return Refused(f"adapter: {value} is not built yet", "set adapter: qlora or lora")


def _finetuning_type(value: Any, values: Values) -> Outcome:
    if value == "lora":
        return Mapped({"use_peft": True, "load_in_4bit": bool(values.get("load_in_4bit")) or _is_stored(values)})
    if value == "full":
        return Mapped({"use_peft": False, "load_in_4bit": False})
    return Refused(f"finetuning_type: {value} is not built yet", "set finetuning_type: lora or full")


def _full(value: Any, values: Values) -> Outcome:
    """Unsloth's switch for full fine-tuning."""
    return Mapped({"use_peft": False, "load_in_4bit": False}) if value else Ignored("")


def _quantization_bit(value: Any, values: Values) -> Outcome:
    method = "hqq" if values.get("quantization_method") == "hqq" else "bitsandbytes"
    formats = {bits: f"hqq{bits}" for bits in (2, 3, 4, 8)} if method == "hqq" else {4: "", 8: "int8"}
    if value not in formats:
        fix = f"set quantization_bit: {' or '.join(map(str, formats))}, or quantization: with a format's name"
        return Refused(f"quantization_bit: {value} of {method} has no equivalent", fix)
    return Mapped({"load_in_4bit": True} | ({"quantization": formats[value]} if formats[value] else {}))


def _load_in_8bit(value: Any, values: Values) -> Outcome:
    if value and values.get("load_in_4bit"):
        return Refused("load_in_8bit and load_in_4bit are both true", "keep one of them")
    return Mapped({"load_in_4bit": True, "quantization": "int8"}) if value else Ignored("")


def _gptq(value: Any, values: Values) -> Outcome:
    """The base is a GPTQ checkpoint, which is taken as it is."""
    return Mapped({"load_in_4bit": True}) if value else Ignored("")


def _is_stored(values: Values) -> bool:
    """Whether a foreign key asks for quantized weights."""
    return bool(values.get("load_in_8bit") or values.get("gptq")) or values.get("quantization_bit") is not None


def overruled(values: Values) -> set[str]:
    """Our keys that mean something else beside a foreign one: with load_in_8bit or gptq, `load_in_4bit: false` says
    only that the weights are not in 4 bits."""
    return {"load_in_4bit"} if _is_stored(values) and values.get("load_in_4bit") is False else set()


def _qat(value: Any, values: Values) -> Outcome:
    """Axolotl: options of torchao's fake quantization."""
    given = {key: option for key, option in value.items() if not _is_off(option)} if isinstance(value, dict) else {}
    scheme = given.pop("weight_dtype", None)
    if given or scheme not in ("int4", "int8", "fp8", "nvfp4", "mxfp4"):
        others = ", ".join(given) or f"weight_dtype: {scheme}"
        return Refused(f"qat: {others} has no equivalent", "set qat_scheme: int4, or nf4, int8, fp8, nvfp4")
    return Mapped({"qat_scheme": scheme, "load_in_4bit": False})


def _one_of(same: tuple[Any, ...], why: str, fix: str) -> Callable[[Any, Values], Outcome]:
    """A key of which only some values mean what halfbyte does."""
    return lambda value, _: Ignored("") if value in same else Refused(f"{why}: {brief(value)}", fix)


def _bnb_config(value: Any, values: Values) -> Outcome:
    ours = {"bnb_4bit_quant_type", "bnb_4bit_use_double_quant"}
    others = set(value) - ours - {"load_in_4bit", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"}
    if others:
        return Refused(f"bnb_config_kwargs has {', '.join(sorted(others))}, which has no equivalent", "remove it")
    return Mapped({key: value[key] for key in value if key in ours})


def _targets(value: Any, values: Values) -> Outcome:
    """LLaMA-Factory: `all`, or names with commas between them."""
    if value == "all":
        return Mapped({"target_modules": "all-linear"})
    return Mapped({"target_modules": _split(value)})


def _split(value: Any) -> list[str]:
    return value if isinstance(value, list) else [name.strip() for name in str(value).split(",") if name.strip()]


def _axolotl_targets(value: Any, values: Values) -> Outcome:
    if values.get("lora_target_linear") or not value:
        return Ignored("" if not value else "lora_target_linear: true covers every linear layer")
    return Mapped({"target_modules": value})


def _masking(value: Any, values: Values) -> Outcome:
    """train_on_inputs, train_on_prompt: one switch for both kinds of data."""
    return Mapped({"assistant_only_loss": not value, "completion_only_loss": not value})


def _roles(value: Any, values: Values) -> Outcome:
    roles = set(_split(value))
    if roles <= {"assistant", "gpt", "model"}:
        return Mapped({"assistant_only_loss": bool(roles)})
    return Refused(f"roles_to_train: {value} has no equivalent", "train assistant turns, or assistant_only_loss: false")


def _attention(name: str) -> Callable[[Any, Values], Outcome]:
    return lambda value, _: Mapped({"attn_implementation": name}) if value else Ignored("")


def _flash_attn(value: Any, values: Values) -> Outcome:
    names = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
    if value not in names:
        return Refused(f"flash_attn: {value} has no equivalent", "set attn_implementation: sdpa")
    return Mapped({"attn_implementation": names[value]})


def _times_per_epoch(key: str) -> Callable[[Any, Values], Outcome]:
    """evals_per_epoch: our steps below 1 are a share of the whole run, so the epochs divide it once more."""

    def convert(value: Any, values: Values) -> Outcome:
        epochs = values.get("num_epochs") or values.get("num_train_epochs") or 1
        if not value:
            return Ignored("")
        if value == 1:
            return Mapped({key: None})
        return Mapped({key: 1 / (value * epochs)})

    return convert


def _strategy(key: str) -> Callable[[Any, Values], Outcome]:
    """transformers' steps/epoch/no: here the number of steps alone decides, and without it each epoch ends in one."""

    def convert(value: Any, values: Values) -> Outcome:
        if value == "steps":
            return Ignored("" if key in values else f"{key} decides, and without it the end of each epoch")
        if value == "epoch":
            return Mapped({key: None})
        if key == "eval_steps":
            return Ignored("evaluation runs whenever there is held-out data")
        return Refused("a run always saves its checkpoints", "set save_total_limit: 1 to keep one")

    return convert


def _checkpointing_off(value: Any, values: Values) -> Outcome:
    return Mapped({"activation_checkpointing": not value})


def _checkpointing(value: Any, values: Values) -> Outcome:
    if value is True and values.get("activation_offloading") is True:
        value = "offload"
    if isinstance(value, bool):
        return Mapped({"activation_checkpointing": value})
    if value in ("unsloth", "offload"):  # Unsloth's and Axolotl's names for inputs that wait on the host
        return Mapped({"activation_checkpointing": "offload"})
    return Refused(f"gradient checkpointing: {brief(value)} is not known", "set activation_checkpointing: true")


def _offloading(value: Any, values: Values) -> Outcome:
    if value is True:
        return Mapped({"activation_checkpointing": "offload"})
    return Refused(f"activation_offloading: {value} has no equivalent", "set it to true") if value else Ignored("")


def _warmup_ratio(value: Any, values: Values) -> Outcome:
    if values.get("warmup_steps"):
        return Ignored("warmup_steps is given too and counts")
    if isinstance(value, int | float) and not 0 <= value < 1:  # which warmup_steps would take for a count
        return Refused(
            f"warmup_ratio: {brief(value)} is no share of the steps", "give one below 1, or set warmup_steps"
        )
    return Mapped({"warmup_steps": float(value)})


def _wandb(value: Any, values: Values) -> Outcome:
    return Mapped({"report_to": ["wandb"]}) if value else Ignored("")


def _special_tokens(value: Any, values: Values) -> Outcome:
    if set(value) <= {"pad_token"}:
        return Ignored("padding is never trained on, and a pad token is chosen when the tokenizer has none")
    return Refused(
        "special_tokens has no equivalent for other tokens than pad_token", "change them in the tokenizer's files"
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
    keys, problem = axolotl_test_datasets(value)
    return Refused(problem, "name the files in eval_dataset") if problem else Mapped(keys)


def _stored(format_: str) -> Callable[[Any, Values], Outcome]:
    """qlora_fp8, qlora_fp4: a switch for each format that stores the weights."""
    return lambda value, _: Mapped({"quantization": format_}) if value else Ignored("")


def _method(key: str) -> Callable[[Any, Values], Outcome]:
    """Keys that choose a method of training, or its loss."""

    def convert(value: Any, values: Values) -> Outcome:
        if _is_off(value):
            return Ignored("")
        found = method_keys(key, values)
        if found is None:
            fix = "set loss_type and loss_weights" if key.startswith("pref_") else f"set method: {', '.join(METHODS)}"
            return Refused(f"{key}: {brief(value)} is not built yet", fix)
        return Mapped(found) if found else Ignored("")

    return convert


def _trl(value: Any, values: Values) -> Outcome:
    keys, other = policy_keys(value)
    if other:
        return Refused(f"trl: {other} has no equivalent", "answers come from the packed model itself: remove it")
    return Mapped(keys) if keys else Ignored("")


def _use_vllm(value: Any, values: Values) -> Outcome:
    if not value:
        return Ignored("")
    if not asks_server(values):
        return Refused("use_vllm without vllm_mode: server has no equivalent", OWN_ENGINE)
    return Mapped({"rollout": "vllm", "vllm_server_base_url": server_address(values)})


def _of_server(value: Any, values: Values) -> Outcome:
    return Ignored("" if values.get("use_vllm") else "it says something beside use_vllm only")


def _qlora_bnb(value: Any, values: Values) -> Outcome:
    return Mapped({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}) if value else Ignored("")


def _divided(value: Any, values: Values) -> Outcome:
    """Keys of several tools that each give one axis of `parallel`."""
    ways, problem = divided(values)
    if problem:
        return Refused(problem, "set parallel, as in {data: 2, tensor: 2}, and remove the other keys")
    return Mapped({"parallel": ways}) if ways else Ignored("")


def _fsdp(value: Any, values: Values) -> Outcome:
    """What it divides is the machine's to say: `auto` shards where memory asks for it."""
    if _is_off(value):
        return Ignored("")
    words = value if isinstance(value, dict) else {word: True for word in " ".join(_split(value)).split()}
    off = ("offload", "offload_params", "fsdp_offload_params", "cpu_offload")
    if any(words.get(word) in (True, "true") for word in off):
        return Refused("offload of parameters by FSDP has no equivalent", "remove it; the memory plan says what fits")
    return Ignored("parallel: auto shards where the memory plan asks for it, and {shard: N} always")


def _peft(value: Any, values: Values) -> Outcome:
    return Refused(f"peft: {', '.join(value)} is not built yet", NOT_BUILT["loftq_config"]) if value else Ignored("")


CONVERTED: dict[str, Callable[[Any, Values], Outcome]] = {
    "bf16": _dtype("bf16"),
    "fp16": _dtype("fp16"),
    "bfloat16": _dtype("bf16"),
    "float16": _dtype("fp16"),
    "pure_bf16": lambda value, _: Mapped({"dtype": "bfloat16", "adapter_dtype": "bfloat16"}) if value else Ignored(""),
    "torch_dtype": _torch_dtype,
    "bnb_4bit_compute_dtype": _torch_dtype,
    "adapter": _adapter,
    "finetuning_type": _finetuning_type,
    "quantization_bit": _quantization_bit,
    "quantization_method": _one_of(
        ("bitsandbytes", "bnb", "bitsandbytes (4/8)", "hqq"), "quantization_method is not built yet", "set bitsandbytes"
    ),
    "load_in_8bit": _load_in_8bit,
    "gptq": _gptq,
    "qat": _qat,
    **{key: _method(key) for key in CHOOSING},
    TRL: _trl,
    "use_vllm": _use_vllm,
    **dict.fromkeys(("vllm_mode", "vllm_server_host", "vllm_server_port"), _of_server),
    "bnb_config_kwargs": _bnb_config,
    "qlora_fp8": _stored("fp8"),
    "qlora_fp4": _stored("nvfp4"),
    "qlora_bnb": _qlora_bnb,
    "peft": _peft,
    **dict.fromkeys([*WAYS, SEVERAL], _divided),
    "fsdp": _fsdp,
    "fsdp_config": _fsdp,
    "lora_target_modules": _axolotl_targets,
    "lora_target_linear": lambda value, _: Mapped({"target_modules": "all-linear"}) if value else Ignored(""),
    "lora_target": _targets,
    "additional_target": lambda value, _: Mapped({"modules_to_save": _split(value)}),
    "train_on_inputs": _masking,
    "train_on_prompt": _masking,
    "roles_to_train": _roles,
    "train_on_eos": _one_of(("turn", "all", "last"), "EOS is always trained, train_on_eos cannot be", "remove it"),
    "flash_attn": _flash_attn,
    "flash_attention": _attention("flash_attention_2"),
    "sdp_attention": _attention("sdpa"),
    "eager_attention": _attention("eager"),
    "flex_attention": _attention("flex_attention"),
    "evals_per_epoch": _times_per_epoch("eval_steps"),
    "saves_per_epoch": _times_per_epoch("save_steps"),
    "gradient_checkpointing": _checkpointing,
    "use_gradient_checkpointing": _checkpointing,
    "bias": _one_of(("none", False), "adapters have no bias, so bias has no equivalent", "set bias: none"),
    "full_finetuning": _full,
    "disable_gradient_checkpointing": _checkpointing_off,
    "activation_offloading": _offloading,
    "warmup_ratio": _warmup_ratio,
    "logging_strategy": _one_of(("steps",), "logging_strategy has no equivalent", "set logging_steps"),
    "eval_strategy": _strategy("eval_steps"),
    "evaluation_strategy": _strategy("eval_steps"),
    "save_strategy": _strategy("save_steps"),
    "adam_epsilon": _one_of((1e-8,), "adam_epsilon other than 1e-8 has no equivalent", "remove it"),
    "packing_strategy": _one_of(("bfd",), "packing_strategy has no equivalent", "remove it"),
    "use_wandb": _wandb,
    "wandb_project": _wandb,
    "special_tokens": _special_tokens,
    "chat_template": _chat_template,
    "template": _chat_template,
    "chat_template_jinja": _chat_template_jinja,
    "datasets": _datasets,
    "test_datasets": _test_datasets,
}


def written_for(values: Values) -> str:
    """The tool a file is written for, by keys that only it has; empty when none is present."""
    if values.keys() & {"base_model", "datasets", "micro_batch_size", "sequence_len"}:
        return "Axolotl"
    if values.keys() & {"stage", "finetuning_type", "cutoff_len", "lora_target", "quantization_bit", "template"}:
        return "LLaMA-Factory"
    return ""


def implied(values: Values, ours: Values) -> Values:
    """Keys that the file leaves out and that its tool fills in otherwise than halfbyte would."""
    tool = written_for(values)
    keys = dict(DEFAULTS.get(tool, {}))
    if tool == "Axolotl" and values.get("adapter") is None:
        keys |= {"use_peft": False, "load_in_4bit": False}
    if tool == "LLaMA-Factory":
        rank = ours.get("r", 8)
        keys |= {"load_in_4bit": False, "r": 8, "lora_alpha": 2.0 * (rank if isinstance(rank, int) else 8)}
    return {key: value for key, value in keys.items() if key not in ours}
