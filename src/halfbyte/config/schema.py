"""One run's configuration: one flat YAML file, the same names on the command line and in Python.

Names are those of PEFT, TRL and transformers. Other tools' names are accepted where they mean the same thing and are
mapped with a notice; anything else unknown is an error that names the nearest key.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ..errors import ConfigError
from ..notices import notice
from ..optim import OPTIMIZERS
from .aliases import HINTS
from .foreign import Ignored, Mapped, Refused, foreign_names, translate
from .qat import qat_contradictions
from .recipe import RecipeSection, recipe_contradictions
from .yaml import Located, dump_value, parse_scalar, read_mapping, read_patterns

SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
)  # fmt: skip

SIXTEEN = "16bit"  # in place of a format's name: weights that are not quantized
KEEP = "keep"  # the types of a GGUF file, where a format holds their values

Level = Literal[  # see memory.levels
    "keep", "recompute", "recompute_mlp", "checkpoint", "offload_kept", "offload_attention", "offload", "tiled"
]  # fmt: skip
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelSection(BaseModel):
    """The model"""

    model_name_or_path: str = Field(description="a folder with a Hugging Face checkpoint, a GGUF file, or a hub id")
    model_revision: str = Field("main", description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run model code that comes with the checkpoint")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of computation and of unquantized weights; auto: what the hardware is fast in"
    )
    attn_implementation: str | None = Field(None, description="transformers attention implementation; default: sdpa")
    use_kernels: bool = Field(True, description="fused kernels on GPUs; false: transformers' own forwards")
    device: str | None = Field(
        None,
        pattern=r"^(cpu|cuda|xpu)(:\d+)?$",
        description="cpu, cuda, cuda:1, xpu; default: the first accelerator, else cpu",
    )


class QuantizationSection(BaseModel):
    """Storing the frozen weights"""

    load_in_4bit: bool = Field(True, description="store the frozen linear weights in 4 bits (QLoRA)")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="4-bit data type")
    bnb_4bit_use_double_quant: bool = Field(True, description="quantize the block scales too")
    bnb_4bit_blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(64, description="weights per scale")

    quantization: str | dict[str, str] | None = Field(
        None,
        description="one format for all layers, a mapping from module pattern to format or 16bit, or a YAML file with "
        "that mapping; keep: a GGUF file's own types, where a format holds them; default, and for the rest: the keys"
        " above",
    )
    skip_quant_first_layers: Annotated[int, Field(ge=0)] = Field(0, description="first decoder layers kept in 16 bits")
    skip_quant_last_layers: Annotated[int, Field(ge=0)] = Field(0, description="last decoder layers kept in 16 bits")
    qat_scheme: str | None = Field(
        None,
        description="quantization-aware training: in every step 16-bit weights, with the adapter merged, are rounded to"
        " this format (nf4, int4, int8, fp8, nvfp4, ...), activations are not; `halfbyte merge` then stores them in it",
    )


class AdapterSection(BaseModel):
    """The adapter"""

    use_peft: bool = Field(True, description="train a low-rank adapter; false: full fine-tuning")
    r: PositiveInt = Field(16, description="rank of the adapter")
    lora_alpha: Annotated[float, Field(gt=0)] = Field(
        16.0, description="scale: the adapter's output times lora_alpha/r"
    )
    lora_dropout: Fraction = Field(0.0, description="dropout on the adapter's input")
    target_modules: str | list[str] = Field(
        "all-linear", description="all-linear, a list of module names, or one regular expression"
    )
    modules_to_save: list[str] | None = Field(None, description="modules trained whole and saved with the adapter")
    use_rslora: bool = Field(False, description="scale by lora_alpha/sqrt(r)")
    use_dora: bool = Field(False, description="weight-decomposed adapters (DoRA)")
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict, description="module pattern to rank")
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="module pattern to alpha"
    )
    init_lora_weights: bool | Literal["gaussian"] = Field(True, description="adapter initialisation, as in PEFT")
    adapter_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of adapter weights")
    adapter_path: str | None = Field(None, description="continue from this saved adapter")


class DataSection(BaseModel):
    """The data"""

    dataset: str | list[str] = Field(description="file (jsonl, json, csv, parquet, txt), folder or hub id, or several")
    dataset_split: str = Field("train", description="split of a hub dataset")
    eval_dataset: str | list[str] | None = Field(None, description="held-out data; else eval_split_size is split off")
    eval_split_size: Annotated[float, Field(ge=0)] = Field(
        0.0, description="rows held out for evaluation: a share below 1, or a count"
    )
    dataset_format: Literal["auto", "messages", "prompt-completion", "alpaca", "sharegpt", "text"] = Field(
        "auto", description="row layout; auto: recognised from the columns, and said"
    )
    dataset_text_field: str = Field("text", description="column with plain text")
    column_mapping: dict[str, str] = Field(
        default_factory=dict, description="standard name to your column, e.g. {prompt: question, completion: answer}"
    )
    chat_template_path: str | None = Field(None, description="Jinja file that replaces the tokenizer's chat template")
    max_length: PositiveInt = Field(2048, description="tokens per row; longer rows are cut or dropped, and counted")
    overlong: Literal["truncate", "drop"] = Field("truncate", description="what happens to rows over max_length")
    packing: bool = Field(False, description="pack several documents into one row, isolated from each other")
    padding_free: bool = Field(False, description="concatenate each batch instead of padding it")
    assistant_only_loss: bool = Field(True, description="train on assistant turns only (chat data)")
    completion_only_loss: bool = Field(True, description="train on completions only (prompt-completion data)")
    dataset_num_proc: PositiveInt | None = Field(None, description="processes that tokenize; default: by size")


class TrainingSection(BaseModel):
    """Training"""

    output_dir: str = Field("out", description="where everything of this run is written")
    per_device_train_batch_size: PositiveInt = Field(1, description="rows per step and device")
    per_device_eval_batch_size: PositiveInt | None = Field(None, description="default: as in training")
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-batches per optimizer step")
    num_train_epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="passes over the data")
    max_steps: int = Field(-1, description="optimizer steps; overrides num_train_epochs when positive")
    learning_rate: Annotated[float, Field(gt=0)] = Field(2e-4, description="peak learning rate")
    lr_scheduler_type: str = Field("cosine", description="schedule, by its name in transformers")
    warmup_steps: Annotated[float, Field(ge=0)] = Field(0.03, description="steps, or below 1 a share of all steps")
    optim: str = Field("adamw_torch_fused", description="optimizer, by its name in transformers")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled weight decay")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="clip gradients to this norm; 0: never")
    adam_beta1: Fraction = Field(0.9, description="first-moment decay")
    adam_beta2: Fraction = Field(0.999, description="second-moment decay")
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = Field(None, description="embedding noise (NEFTune)")
    activation_checkpointing: bool | Literal["auto"] | Level = Field(
        "auto",
        description="what layers keep for backward, from most to least: keep, recompute, recompute_mlp, checkpoint (or"
        " true), and in host memory offload_kept, offload_attention, offload, tiled; auto: the fastest mix that fits",
    )
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="plan within this many GiB of the device, and reserve no more; default: what is free"
    )
    logging_steps: PositiveInt = Field(1, description="steps between lines of metrics.jsonl")
    eval_steps: Annotated[float, Field(gt=0)] | None = Field(
        None, description="steps between evaluations, below 1 a share; default: every epoch"
    )
    save_steps: Annotated[float, Field(gt=0)] | None = Field(
        None, description="steps between checkpoints, below 1 a share; default: every epoch"
    )
    save_total_limit: PositiveInt | None = Field(2, description="checkpoints kept")
    resume_from_checkpoint: str | bool | None = Field(None, description="true: the newest checkpoint; or a folder")
    report_to: list[str] = Field(default_factory=list, description="wandb, tensorboard, ... as in transformers")
    sample_prompts: Annotated[int, Field(ge=0)] | list[str] = Field(
        3, description="prompts answered before and after training: a number of held-out rows, or the prompts"
    )
    sample_max_new_tokens: PositiveInt = Field(48, description="length of those answers")
    seed: int = Field(42, description="seeds data order, adapters and dropout")
    deterministic: bool = Field(
        False,
        description="on a GPU too, runs with one seed have equal bytes, whatever it costs; false: where it costs"
        " nearly nothing, and checks.json says whether",
    )


SECTIONS = (ModelSection, QuantizationSection, RecipeSection, AdapterSection, DataSection, TrainingSection)


class RunConfig(ModelSection, QuantizationSection, RecipeSection, AdapterSection, DataSection, TrainingSection):
    """Everything one run needs. `RunConfig(**keys)` validates; `load_config` reads a YAML file with overrides."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), validate_assignment=True, strict=True, allow_inf_nan=False
    )

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)

    @field_validator("*", mode="before")
    @classmethod
    def _paths_as_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in fewer than 16 bits."""
        return self.load_in_4bit and self.quantization != SIXTEEN

    @field_validator("quantization", mode="before")
    @classmethod
    def _patterns_from_file(cls, value: Any) -> Any:
        return read_patterns(value) if isinstance(value, str) and value.endswith((".yaml", ".yml")) else value

    @field_validator("report_to", mode="before")
    @classmethod
    def _report_to_list(cls, value: Any) -> Any:
        """transformers also takes one name, and `none`."""
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @field_validator("target_modules", "dataset", "eval_dataset", "quantization")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value is not None and not value:
            raise PydanticCustomError("empty", "must name at least one, not {value}", {"value": repr(value)})
        return value

    @field_validator("max_steps")
    @classmethod
    def _steps(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise PydanticCustomError(
                "steps", "must be a positive number of steps, or -1 for all epochs, not {value}", {"value": value}
            )
        return value

    @field_validator("warmup_steps", "eval_steps", "save_steps", "eval_split_size")
    @classmethod
    def _whole_or_share(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise PydanticCustomError(
                "whole", "must be a whole number, or a share below 1, not {value}", {"value": value}
            )
        return value

    @field_validator("lr_scheduler_type", "optim")
    @classmethod
    def _named(cls, value: str, info: Any) -> str:
        names = SCHEDULES if info.field_name == "lr_scheduler_type" else tuple(OPTIMIZERS)
        if value not in names:
            raise PydanticCustomError(
                "named",
                "must be one of {names}, not {value}",
                {"names": ", ".join(names), "value": repr(value), "near": _nearest(value, names)},
            )
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> RunConfig:
        """Keys that contradict each other; each rule names the key to change."""
        for key, message, fix in _contradictions(self):
            raise PydanticCustomError("contradiction", "{message}", {"key": key, "message": message, "fix": fix})
        return self


def _contradictions(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, fix) for each pair of keys that cannot both hold."""
    yield from _quantization_contradictions(config)
    yield from recipe_contradictions(config)
    yield from qat_contradictions(config)
    if not config.use_peft:
        if config.quantized:
            key = "quantization" if config.quantization else "load_in_4bit"
            yield (
                key,
                f"{dump_value(key, getattr(config, key))} with use_peft: false: quantized weights cannot be trained",
                f"set {key}: {'16bit' if config.quantization else 'false'} for full fine-tuning, "
                "or use_peft: true for QLoRA",
            )
        for key in ("use_dora", "use_rslora", "adapter_path", "modules_to_save", "rank_pattern", "alpha_pattern"):
            if getattr(config, key):
                yield (
                    key,
                    f"{key} has no meaning with use_peft: false: there is no adapter",
                    f"remove {key}, or set use_peft: true",
                )
    package = OPTIMIZERS[config.optim].package
    if package is not None and find_spec(package) is None:
        yield (
            "optim",
            f"optim: {config.optim} needs the package {package}, which is not installed",
            f"pip install {package}, or set optim: adamw_torch_fused",
        )


def _quantization_contradictions(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """`quantization` against the keys that choose between 16 bits, NF4 and FP4."""
    chosen = dump_value("quantization", config.quantization)
    skips = [key for key in ("skip_quant_first_layers", "skip_quant_last_layers") if getattr(config, key)]
    if skips and not config.quantized:
        yield skips[0], f"{skips[0]} has no meaning when every layer is kept in 16 bits", f"remove {skips[0]}"
    if config.quantization is None:
        return
    if not config.load_in_4bit:
        yield "quantization", f"load_in_4bit: false contradicts {chosen}", "remove one of the two"
    whole = isinstance(config.quantization, str)
    names = {config.quantization} if isinstance(config.quantization, str) else set(config.quantization.values())
    if config.quantization == KEEP:  # those keys are of the layers that are not kept
        if skips:
            yield skips[0], f"{skips[0]} contradicts {chosen}: kept layers are not in 16 bits", "remove one of the two"
        return
    if config.bnb_4bit_quant_type != "nf4" and not (whole and config.quantization == config.bnb_4bit_quant_type):
        said = dump_value("bnb_4bit_quant_type", config.bnb_4bit_quant_type)
        yield "quantization", f"{said} contradicts {chosen}", "remove bnb_4bit_quant_type"
    for key in ("bnb_4bit_blocksize", "bnb_4bit_use_double_quant"):
        value = getattr(config, key)
        if value != QuantizationSection.model_fields[key].default and not names & {"nf4", "fp4"}:
            said = dump_value(key, value)
            yield "quantization", f"{said} has no meaning with {chosen}: it is of nf4 and fp4", f"remove {key}"


def load_config(
    path: Path | str | None,
    overrides: Iterable[str] | dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> RunConfig:
    """Read a YAML file, apply overrides, map foreign names, and validate.

    Args:
        path: the YAML file, or None for overrides only.
        overrides: `["learning_rate=1e-4", "--r", "8"]`, values in YAML's spelling; or a dictionary of values.
        defaults: values for keys that neither gives, in place of the schema's defaults.

    Raises:
        ConfigError: every problem found, each with its key, its place (`run.yaml:4`) and what is allowed.
    """
    problems: list[ConfigError] = []
    given = _own_names(read_mapping(path, TEXT_KEYS) if path else {}, problems)
    if isinstance(overrides, dict):
        written = {key: Located(value, "argument") for key, value in overrides.items()}
    else:
        written = _parse_overrides(list(overrides or ()))
    given |= _own_names(written, problems)
    if problems:
        raise _together(problems)
    try:
        config = RunConfig(**{**(defaults or {}), **{key: setting.value for key, setting in given.items()}})
    except ValidationError as error:
        raise _together([explain(detail, given) for detail in error.errors()]) from None
    if config.eval_steps is not None and not (config.eval_dataset or config.eval_split_size):
        notice(
            "eval_steps", "eval_steps has no effect: there is no held-out data (set eval_split_size or eval_dataset)"
        )
    return config


def _parse_overrides(tokens: list[str]) -> dict[str, Located]:
    """`key=value`, `--key=value` and `--key value`, in order; the last of a repeated key counts."""
    found: dict[str, Located] = {}
    while tokens:
        token = tokens.pop(0)
        key, equals, text = token.removeprefix("--").partition("=")
        if not equals:
            if not token.startswith("--"):
                raise ConfigError(f"command line: {token!r} is not an override", "write key=value")
            if not tokens or tokens[0].startswith("--"):
                raise ConfigError(f"command line: {token} needs a value", f"write {token} VALUE, or {key}=VALUE")
            text = tokens.pop(0)
        key = key.replace("-", "_")
        found[key] = Located(parse_scalar(text, key in TEXT_KEYS), "command line")
    return found


def _own_names(written: dict[str, Located], problems: list[ConfigError]) -> dict[str, Located]:
    """Foreign names replaced by ours, each said once; what cannot be replaced is added to `problems`."""
    values = {key: setting.value for key, setting in written.items()}
    own = {key: setting for key, setting in written.items() if key in RunConfig.model_fields}
    for key, setting in written.items():
        if key in own:
            continue
        match translate(key, values):
            case None:
                problems.append(_unknown(key, setting.where))
            case Refused(why, fix):
                problems.append(ConfigError(f"{setting.where}: {why}", fix))
            case Ignored(why):
                if why:
                    notice(f"ignored {key}", f"{setting.where}: {key} is ignored: {why}")
            case Mapped(keys):
                as_ours = ", ".join(dump_value(ours, value) for ours, value in keys.items())
                notice(f"alias {key}", f"{setting.where}: {key} is read as {as_ours}")
                for ours, value in keys.items():
                    if ours in own and own[ours].value != value:
                        message = f"{setting.where}: {key} is read as {as_ours}, but {own[ours].where} says otherwise"
                        problems.append(ConfigError(message, f"keep one of {key} and {ours}"))
                    own.setdefault(ours, Located(value, f"{setting.where}: {key}"))
    return own


def _unknown(key: str, where: str) -> ConfigError:
    near = HINTS.get(key) or _nearest(key, [*RunConfig.model_fields, *foreign_names()])
    return ConfigError(
        f"{where}: unknown key {key!r}", f"did you mean {near}?" if near else "`halfbyte init` lists the keys"
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1)), "")


def explain(detail: Any, given: dict[str, Located]) -> ConfigError:
    """One pydantic error as a sentence with key, place and what is allowed."""
    context = detail.get("ctx", {})
    key = str(context.get("key") or detail["loc"][0])
    if detail["type"] == "missing":
        return ConfigError(f"{key} is missing", f"add a line `{key}: ...` ({RunConfig.model_fields[key].description})")
    where = f"{given[key].where}: " if key in given else ""
    if detail["type"] == "contradiction":
        return ConfigError(where + context["message"], context["fix"])
    if "near" in context or detail["type"] in ("empty", "steps", "whole"):
        message, near = f"{where}{key} {detail['msg']}", context.get("near")
    else:
        value = given[key].value
        message = f"{where}{key} must be {allowed(key)}, not {value!r}"
        near = _nearest(value, _choices(RunConfig.model_fields[key].annotation)) if isinstance(value, str) else ""
    return ConfigError(message, f"did you mean {near}?" if near else "")


def _together(problems: list[ConfigError]) -> ConfigError:
    unique = list({str(problem): problem for problem in problems}.values())
    if len(unique) == 1:
        return unique[0]
    return ConfigError("\n".join([f"{len(unique)} problems:", *(f"- {problem}" for problem in unique)]))


def allowed(key: str) -> str:
    """The values a key takes, in words: `nf4 or fp4`, `a whole number above 0`, `text or null`."""
    field = RunConfig.model_fields[key]
    return " or ".join(dict.fromkeys(_in_words(field.annotation, field.metadata)))


def _in_words(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _in_words(arguments[0], [*getattr(arguments[1], "metadata", ()), *arguments[1:]])
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _in_words(argument, metadata)
    elif origin is Literal:
        yield from map(str, arguments)
    elif origin is list:
        yield "a list of text"
    elif origin is dict:
        yield f"a mapping from text to {' or '.join(_in_words(arguments[1]))}"
    else:
        plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
        yield plain[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _bounds(metadata: Iterable[Any]) -> str:
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    limits = [
        f" {word} {limit:g}"
        for rule in metadata
        for name, word in words.items()
        if (limit := getattr(rule, name, None)) is not None
    ]
    return " and".join(limits)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for argument in get_args(annotation) for choice in _choices(argument)]


def _takes_text_only(annotation: Any) -> bool:
    kinds = set(get_args(annotation)) if get_origin(annotation) in (Union, types.UnionType) else {annotation}
    return str in kinds and not kinds & {bool, int, float}


TEXT_KEYS = frozenset(key for key, field in RunConfig.model_fields.items() if _takes_text_only(field.annotation))


def dump_config(config: RunConfig) -> str:
    """Every key as YAML, by section, each with its description; `load_config` reads it back equal."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"\n# {section.__doc__}" if lines else f"# {section.__doc__}")
        for key, field in section.model_fields.items():
            lines.append(f"{dump_value(key, getattr(config, key)):<38} # {field.description}")
    return "\n".join(lines) + "\n"
