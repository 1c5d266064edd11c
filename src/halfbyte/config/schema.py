"""The keys of a run, by section: their names, types, defaults and what each means. Each key is declared here only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from ..utils.errors import ConfigError
from ..utils.text import brief
from .methods import PreferenceSection, of
from .policy import DISTILLING, DistillationSection, PolicySection
from .resolved import Origin, Parallel, Precision, Storage
from .section import Contradiction, Section, contradiction
from .yaml import read_patterns

SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
)  # fmt: skip

SIXTEEN = "16bit"  # in place of a format's name: weights that are not quantized
KEEP = "keep"  # the types of a GGUF file, where a format holds their values
FOUR_BIT = ("bnb_4bit_quant_type", "bnb_4bit_blocksize", "bnb_4bit_use_double_quant")
RECIPE_OPTIONS = {
    "fp8-hybrid": ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    "nvfp4": (
        *("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
        *("enable_four_over_six", "four_over_six_metric"),
    ),
}

Level = Literal[  # see memory.activations
    "keep", "recompute", "recompute_mlp", "checkpoint", "offload_kept", "offload_attention", "offload", "tiled"
]  # fmt: skip
Axis = Literal["data", "shard", "tensor", "pipeline", "context"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Scale = Annotated[float, Field(ge=1e-8)]  # with less no gradient reaches an adapter


class ModelSection(Section):
    """The model"""

    model_name_or_path: str = Field(description="a folder with a Hugging Face checkpoint, a GGUF file, or a hub id")
    model_revision: str = Field("main", description="branch, tag or commit of a hub model")
    trust_remote_code: bool = Field(False, description="run model code that comes with the checkpoint")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of computation and of unquantized weights; auto: what the hardware is fast in"
    )
    attn_implementation: str | None = Field(None, description="transformers attention implementation; default: sdpa")
    use_kernels: bool = Field(True, description="fused kernels on GPUs; false: transformers' own forwards")
    device: str | None = Field(None, description="cpu, cuda, cuda:1, xpu; default: the first accelerator, else cpu")

    @field_validator("device")
    @classmethod
    def _device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|(cuda|xpu)(:\d{1,3})?", value):
            allowed = "must be cpu, cuda, xpu, or one of several as in cuda:1, not {value}"
            raise PydanticCustomError("limit", allowed, {"value": brief(value)})
        return value


class QuantizationSection(Section):
    """Storing the frozen weights"""

    load_in_4bit: bool = Field(
        True, description="quantize the frozen linear weights (QLoRA): to 4 bits, or as `quantization` says"
    )
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

    @property
    def quantized(self) -> bool:
        """Whether any weight is stored in fewer than 16 bits."""
        return self.load_in_4bit and self.quantization != SIXTEEN

    @property
    def storage(self) -> Storage:
        """How the frozen linear layers are stored."""
        if not self.quantized:
            return Storage(qat_scheme=self.qat_scheme)
        keep = self.quantization == KEEP
        chosen = self.bnb_4bit_quant_type if keep or self.quantization is None else self.quantization
        patterns = chosen.items() if isinstance(chosen, dict) else [("*", chosen)]
        formats = tuple((pattern, self._full_spec(spec)) for pattern, spec in patterns)
        return Storage(formats, self.skip_quant_first_layers, self.skip_quant_last_layers, keep)

    def _full_spec(self, spec: str) -> str:
        """Return the format spec that `nf4` or `fp4` abbreviates with these keys; other specs unchanged."""
        if spec not in ("nf4", "fp4"):
            return spec
        scales = "nested" if self.bnb_4bit_use_double_quant else "plain"
        return f"blockwise4:{spec}:{self.bnb_4bit_blocksize}:{scales}"

    @field_validator("quantization", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            return _mixture_in(value)
        return dict(value) if isinstance(value, Mapping) else value

    def contradictions(self) -> Iterator[Contradiction]:
        skips = [key for key in ("skip_quant_first_layers", "skip_quant_last_layers") if getattr(self, key)]
        if skips and not self.quantized:
            yield skips[0], f"{skips[0]} has no meaning when every layer is kept in 16 bits", f"remove {skips[0]}"
        if self.quantization is not None:
            yield from self._in_quantization(skips)
        if self.qat_scheme is not None:
            yield from self._in_qat()

    def _in_quantization(self, skips: list[str]) -> Iterator[Contradiction]:
        """`quantization` against the keys that choose between 16 bits, NF4 and FP4."""
        chosen, quantization = self.written("quantization"), self.quantization
        if not self.load_in_4bit:
            yield "quantization", f"load_in_4bit: false contradicts {chosen}", "remove one of the two"
        if quantization == "keep":  # the other keys are of the layers that are not kept
            if skips:
                yield skips[0], f"{skips[0]} contradicts {chosen}: kept layers are not in 16 bits", "remove one of the two"
            return
        if self.bnb_4bit_quant_type not in ("nf4", quantization):
            wrong = f"{self.written('bnb_4bit_quant_type')} contradicts {chosen}"
            yield "quantization", wrong, "remove bnb_4bit_quant_type"
        names = set(quantization.values()) if isinstance(quantization, dict) else {quantization}
        for key in FOUR_BIT[1:]:
            if not self.is_default(key) and not names & {"nf4", "fp4"}:
                wrong = f"{self.written(key)} has no meaning with {chosen}: it is of nf4 and fp4"
                yield "quantization", wrong, f"remove {key}"

    def _in_qat(self) -> Iterator[Contradiction]:
        chosen = self.written("qat_scheme")
        if self.quantized:
            key = "quantization" if self.quantization else "load_in_4bit"
            wrong = "it trains 16-bit weights to be rounded later, and those are rounded already"
            fix = f"set {key}: {'16bit' if self.quantization else 'false'}, or remove qat_scheme"
            yield key, f"{chosen} with {self.written(key)}: {wrong}", fix
        for key in FOUR_BIT:
            if not self.is_default(key):
                fix = "remove it; qat_scheme: blockwise4:nf4:128:nested spells all three, or qat_scheme: fp4"
                yield key, f"{self.written(key)} has no meaning with {chosen}", fix


class RecipeSection(Section):
    """Arithmetic"""

    recipe: Literal["bf16", "fp8-hybrid", "nvfp4"] = Field(
        "bf16",
        description="what products with frozen weights are computed in, whatever stores those: bf16 (dtype), fp8-hybrid"
        " (E4M3, gradients E5M2), nvfp4 (rounded to it)",
    )
    margin: Annotated[int, Field(ge=0, le=16)] = Field(0, description="fp8-hybrid: powers of two of headroom")
    amax_history_len: PositiveInt = Field(1024, description="fp8-hybrid: optimizer steps whose magnitudes set scales")
    amax_compute_algo: Literal["max", "most_recent"] = Field("max", description="fp8-hybrid: which of those steps")
    reduce_amax: bool = Field(True, description="fp8-hybrid: take magnitudes over all ranks with other tokens")
    disable_rht: bool = Field(False, description="nvfp4: no random Hadamard transform")
    disable_stochastic_rounding: bool = Field(False, description="nvfp4: round gradients to nearest")
    disable_2d_quantization: bool = Field(False, description="nvfp4: weight scales per 16 values, not per 16×16")
    enable_four_over_six: bool = Field(False, description="nvfp4: map each block's largest value to 6 or to 4")
    four_over_six_metric: Literal["MSE", "L1", "AbsMax"] = Field(
        "MSE", description="nvfp4: the error that decides between them"
    )


class AdapterSection(Section):
    """The adapter"""

    use_peft: bool = Field(True, description="train a low-rank adapter; false: full fine-tuning")
    r: PositiveInt = Field(16, description="rank of the adapter")
    lora_alpha: Scale = Field(16.0, description="scale: the adapter's output times lora_alpha/r")
    lora_dropout: Fraction = Field(0.0, description="dropout on the adapter's input")
    target_modules: str | list[str] = Field(
        "all-linear", description="all-linear, a list of module names, or one regular expression"
    )
    target_parameters: list[str] | None = Field(
        None,
        description="stacked experts and routers to adapt, by name; default: all experts where target_modules is"
        " all-linear, and no routers; []: none",
    )
    modules_to_save: list[str] | None = Field(None, description="modules trained whole and saved with the adapter")
    use_rslora: bool = Field(False, description="scale by lora_alpha/sqrt(r)")
    use_dora: bool = Field(False, description="weight-decomposed adapters (DoRA)")
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict, description="module pattern to rank")
    alpha_pattern: dict[str, Scale] = Field(default_factory=dict, description="module pattern to alpha")
    init_lora_weights: bool | Literal["gaussian"] = Field(True, description="adapter initialisation, as in PEFT")
    adapter_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of adapter weights")
    adapter_path: str | None = Field(None, description="continue from this saved adapter")


class DataSection(Section):
    """The data"""

    dataset: str | list[str] = Field(description="file (jsonl, json, csv, parquet, txt), folder or hub id, or several")
    dataset_split: str = Field("train", description="split of a hub dataset, or of a folder with files of several")
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


class TrainingSection(Section):
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
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = of(
        ("sft",), None, "weight of the loss that balances a mixture's routers, as transformers has it; default: 0"
    )
    activation_checkpointing: bool | Literal["auto"] | Level = Field(
        "auto",
        description="what layers keep for backward, from most to least: keep, recompute, recompute_mlp, checkpoint (or"
        " true), and in host memory offload_kept, offload_attention, offload, tiled; auto: the fastest mix that fits",
    )
    expert_offload: bool | Literal["auto"] | PositiveInt = Field(
        "auto",
        description="decoder layers whose packed experts wait in host memory and come as they are used: true (all),"
        " false (none) or a number; auto: as few as it takes to fit",
    )
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="plan within this many GiB of the device, and reserve no more; default: what is free (more than"
        " that: a run is tried that does not fit)",
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
    method: str = Field(
        "sft", description="what is trained for: sft is supervised fine-tuning, the others have sections below"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(42, description="seeds data order, adapters and dropout")
    deterministic: bool = Field(
        False,
        description="on a GPU too, runs with one seed have equal bytes, whatever it costs; false: where it costs"
        " nearly nothing, and checks.json says whether",
    )


class ParallelSection(Section):
    """Several GPUs"""

    parallel: Literal["auto"] | dict[Axis, PositiveInt] = Field(
        "auto",
        description="how many ways the run is divided, as in {data: 2} or {data: 2, shard: 4}: rows (data), rows and"
        " the bytes of frozen weights (shard), products (tensor), layers (pipeline), tokens of a row (context);"
        " auto: over the GPUs there are, as the memory plan finds best",
    )
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-1p", "zb-v"] = Field(
        "auto",
        description="in which order a pipeline's stages compute; auto: 1f1b or interleaved, as its simulation ends"
        " first (zero-bubble schedules gain nothing where adapters alone are trained)",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="how often `halfbyte train` goes on from the last checkpoint when a process of several dies"
    )


def _mixture_in(path: str) -> dict[str, str]:
    """The mixture of formats in a YAML file."""
    fix = "name a file of lines `pattern: format`, as `halfbyte mix` writes it"
    try:
        found = read_patterns(path)
    except ConfigError as error:
        raise contradiction("quantization", f"quantization: {error.message}", fix) from error
    if not found:
        raise contradiction("quantization", f"quantization: {path} is empty", fix)
    for pattern, spec in found.items():
        if not isinstance(spec, str):
            said = f"quantization: {path} holds no mixture of formats: {pattern} is {spec!r}"
            raise contradiction("quantization", said, fix)
    return found


SECTIONS = (
    ModelSection, QuantizationSection, RecipeSection, AdapterSection, DataSection, TrainingSection, PreferenceSection,
    PolicySection, DistillationSection, ParallelSection,
)  # fmt: skip


class Adapter(AdapterSection):
    """The low-rank adapter of a run, and the model it belongs to."""

    model_config = ConfigDict(frozen=True, validate_assignment=False)

    origin: Origin


class RunKeys(
    ModelSection,
    QuantizationSection,
    RecipeSection,
    AdapterSection,
    DataSection,
    TrainingSection,
    PreferenceSection,
    PolicySection,
    DistillationSection,
    ParallelSection,
):
    """All keys of a run, and the typed values that they resolve to. `RunConfig` adds the rules between sections."""

    @property
    def origin(self) -> Origin:
        """The model that the run starts from."""
        revision = None if self.model_revision == "main" else self.model_revision
        return Origin(self.model_name_or_path, revision, self.trust_remote_code, self.storage.keep)

    @property
    def adapter(self) -> Adapter | None:
        """The low-rank adapter; None for full fine-tuning."""
        if not self.use_peft:
            return None
        return Adapter(**{key: getattr(self, key) for key in AdapterSection.model_fields}, origin=self.origin)

    @property
    def precision(self) -> Precision:
        """Dtypes and recipe. Full fine-tuning stores float32 weights unless `dtype` is given: bfloat16's 8 bits of
        precision lose an update of 1e-4 of a weight."""
        weights = "float32" if not self.use_peft and self.dtype == "auto" else self.dtype
        options = {key: getattr(self, key) for key in RECIPE_OPTIONS.get(self.recipe, ())}
        if self.recipe == "nvfp4":
            options["seed"] = self.seed
        return Precision(self.dtype, weights, self.recipe, options)

    @property
    def layout(self) -> Parallel | None:
        """The degree of each axis of parallelism; None: the memory plan chooses (`parallel: auto`)."""
        return None if self.parallel == "auto" else Parallel(**self.parallel)

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)

    @property
    def group_size(self) -> int:
        """Number of answers to a prompt; the answers of a group are consecutive rows."""
        return 1 if self.method in DISTILLING else self.num_generations or 2

    @property
    def micro_batches_per_generation(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def answers_per_generation(self) -> int:
        """Number of answers that one process samples at a time."""
        return self.per_device_train_batch_size * self.micro_batches_per_generation
