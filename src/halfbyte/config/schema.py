"""Name, type, default and description of every key of a run, by section. `docs/configuration.py` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from ..adapter_kinds import UNTRAINED_TYPES, adapter_types
from ..utils.errors import ConfigError
from ..utils.text import brief
from .datasets import DatasetEntry, check_entries, entries_of
from .initialisations import find_initialisation, initialisation_names
from .methods import PreferenceSection, method_field
from .policy import DISTILLING, DistillationSection, PolicySection
from .recipe import RECIPE_OPTIONS, RecipeSection
from .reporting import ReportingSection
from .resolved import (
    ORIGINAL_CONTEXT,
    ROPE_LIMITS,
    ROPE_OPTIONS,
    ROPE_ORDER,
    Origin,
    Parallel,
    Precision,
    RopeScaling,
    Storage,
)
from .section import LARGEST, Contradiction, Section, contradiction, nearest
from .several import SeveralSection
from .tasks import TaskSection
from .yaml import read_patterns

SIXTEEN = "16bit"  # in place of a format's name: do not quantize
KEEP = "keep"  # store a GGUF file's layers in their own types where halfbyte has the format
FOUR_BIT = ("bnb_4bit_quant_type", "bnb_4bit_blocksize", "bnb_4bit_use_double_quant")
VISION_KEYS = ("freeze_vision_tower", "freeze_multi_modal_projector")
Level = Literal[  # described in modeling.checkpointing
    "keep", "recompute", "recompute_mlp", "checkpoint", "offload_kept", "offload_attention", "offload", "tiled"
]  # fmt: skip
Axis = Literal["data", "shard", "tensor", "pipeline", "context"]
StateBits = Literal[8, 16, 32]  # the keys of optim.STORAGE_OF_BITS
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Scale = Annotated[float, Field(ge=1e-8)]  # a smaller scale underflows the adapter's gradients


class ModelSection(Section):
    """The model"""

    model_name_or_path: str = Field(
        description="folder with a Hugging Face checkpoint, GGUF file, or hub id of the base model"
    )
    model_revision: str = Field("main", description="branch, tag or commit of the hub model")
    trust_remote_code: bool = Field(False, description="allow Python code that comes with the checkpoint to run")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of computation and of unquantized weights; auto: the fastest one of the hardware"
    )
    attn_implementation: str | None = Field(None, description="attention implementation of transformers; default: sdpa")
    use_kernels: bool = Field(True, description="use fused kernels on GPUs; false: transformers' forwards")
    rope_scaling: dict[str, bool | int | float | str | list[int | float]] | None = Field(
        None,
        description="extend the context beyond the trained one to max_length, from which the factor follows: yarn,"
        " linear, dynamic or llama3; or a mapping as transformers' rope_parameters, {rope_type: yarn, factor: 4.0}",
    )
    device: str | None = Field(
        None, description="device, as in cpu, cuda, cuda:1 or xpu; default: the first accelerator, else cpu"
    )

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _rope_scaling(cls, value: Any) -> Any:
        """Accept the name of a type; check the names and values of its options."""
        return checked_rope(value) if isinstance(value, str | Mapping) else value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|(cuda|xpu)(:\d{1,3})?", value):
            allowed = "must be cpu, cuda, xpu, or one of several as in cuda:1, not {value}"
            raise PydanticCustomError("limit", allowed, {"value": brief(value)})
        return value


class QuantizationSection(Section):
    """Quantization"""

    load_in_4bit: bool = Field(
        True, description="quantize the frozen linear weights (QLoRA), to 4 bits or to the formats of `quantization`"
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="4-bit data type of the frozen weights")
    bnb_4bit_use_double_quant: bool = Field(True, description="quantize the block scales as well (nested quantization)")
    bnb_4bit_blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(
        64, description="number of weights that share a scale"
    )

    quantization: str | dict[str, str] | None = Field(
        None,
        description="format of all linear layers, a mapping from module pattern to format or 16bit, or a YAML file with"
        " that mapping; keep: the types of a GGUF file where halfbyte supports them; default, also for its other"
        " layers: the bnb_4bit_* keys",
    )
    quantize_vision_tower: bool | str | dict[str, str] = Field(
        False,
        description="format of the vision tower's linear layers: true (as the language model's), a format, or a mapping"
        " from module pattern to format or 16bit; false: 16 bits",
    )
    skip_quant_first_layers: Annotated[int, Field(ge=0)] = Field(
        0, description="number of first decoder layers that stay in 16 bits"
    )
    skip_quant_last_layers: Annotated[int, Field(ge=0)] = Field(
        0, description="number of last decoder layers that stay in 16 bits"
    )
    qat_scheme: str | None = Field(
        None,
        description="quantization-aware training: every step rounds the 16-bit weights plus adapter to this format"
        " (nf4, int4, int8, fp8, nvfp4, ...), and `halfbyte merge` stores them in it; activations are not rounded",
    )
    merge_aware: bool = Field(
        False,
        description="every step rounds the quantized weights plus adapter to the weights' own format, and `halfbyte"
        " merge` stores exactly that: quantization-aware training on a quantized base",
    )

    @property
    def quantized(self) -> bool:
        """Return whether any weight is stored in fewer than 16 bits."""
        return self.load_in_4bit and self.quantization != SIXTEEN

    @property
    def storage(self) -> Storage:
        """Storage of the frozen linear layers."""
        if not self.quantized:
            return Storage(qat_scheme=self.qat_scheme)
        keep = self.quantization == KEEP
        chosen = self.bnb_4bit_quant_type if keep or self.quantization is None else self.quantization
        patterns = chosen.items() if isinstance(chosen, dict) else [("*", chosen)]
        formats = tuple((pattern, self._full_spec(spec)) for pattern, spec in patterns)
        skips = self.skip_quant_first_layers, self.skip_quant_last_layers
        return Storage(formats, *skips, keep, merge_aware=self.merge_aware, vision=self._vision)

    @property
    def _vision(self) -> tuple[tuple[str, str], ...] | None:
        """`Storage.vision`."""
        chosen = self.quantize_vision_tower
        if isinstance(chosen, bool):
            return () if chosen else None
        patterns = chosen.items() if isinstance(chosen, dict) else [("*", chosen)]
        return tuple((pattern, self._full_spec(spec)) for pattern, spec in patterns)

    def _full_spec(self, spec: str) -> str:
        """Return the format spec that `nf4` or `fp4` abbreviates with these keys; other specs unchanged."""
        if spec not in ("nf4", "fp4"):
            return spec
        scales = "nested" if self.bnb_4bit_use_double_quant else "plain"
        return f"blockwise4:{spec}:{self.bnb_4bit_blocksize}:{scales}"

    @field_validator("quantization", "quantize_vision_tower", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        if isinstance(value, str) and value.endswith((".yaml", ".yml")):
            return _mixture_in(value)
        return dict(value) if isinstance(value, Mapping) else value

    def contradictions(self) -> Iterator[Contradiction]:
        skips = [key for key in ("skip_quant_first_layers", "skip_quant_last_layers") if getattr(self, key)]
        if skips and not self.quantized:
            yield skips[0], f"{skips[0]} has no meaning when every layer stays in 16 bits", f"remove {skips[0]}"
        if self.quantization is not None:
            yield from self._in_quantization(skips)
        if self.qat_scheme is not None:
            yield from self._in_qat()
        if self.merge_aware and not self.quantized:
            yield "merge_aware", "merge_aware: true without quantized weights", "set load_in_4bit: true, or qat_scheme"
        if self.quantize_vision_tower is not False and (not self.quantized or self.merge_aware):
            wrong = f"{self.written('quantize_vision_tower')} needs quantized weights of the language model, too"
            storage = "merge_aware: true" if self.quantized else "16-bit weights"
            yield "quantize_vision_tower", f"{wrong}, and has no meaning with {storage}", "remove quantize_vision_tower"
        if self.merge_aware and (refused := [*skips, *["quantization"] * (self.quantization == KEEP)]):
            wrong = f"merge_aware: true with {self.written(refused[0])}: a merge stores layers by patterns of names"
            yield "merge_aware", wrong, f"remove {refused[0]}; `16bit` in quantization leaves layers in 16 bits"

    def _in_quantization(self, skips: list[str]) -> Iterator[Contradiction]:
        """Yield contradictions between `quantization` and the `load_in_4bit` and `bnb_4bit_*` keys."""
        chosen, quantization = self.written("quantization"), self.quantization
        if not self.load_in_4bit:
            yield "quantization", f"load_in_4bit: false contradicts {chosen}", "remove one of the two"
        if quantization == KEEP:  # the other keys apply to layers whose GGUF type is not supported
            if skips:
                yield (
                    skips[0],
                    f"{skips[0]} contradicts {chosen}: it keeps the types of the GGUF file",
                    "remove one of the two",
                )
            return
        if self.bnb_4bit_quant_type not in ("nf4", quantization):
            wrong = f"{self.written('bnb_4bit_quant_type')} contradicts {chosen}"
            yield "quantization", wrong, "remove bnb_4bit_quant_type"
        names = set(quantization.values()) if isinstance(quantization, dict) else {quantization}
        for key in FOUR_BIT[1:]:
            if not self.is_default(key) and not names & {"nf4", "fp4"}:
                wrong = f"{self.written(key)} has no meaning with {chosen}: it applies to nf4 and fp4"
                yield "quantization", wrong, f"remove {key}"

    def _in_qat(self) -> Iterator[Contradiction]:
        chosen = self.written("qat_scheme")
        if self.quantized:
            key = "quantization" if self.quantization else "load_in_4bit"
            wrong = "it needs 16-bit weights, and these are quantized already"
            fix = f"set {key}: {'16bit' if self.quantization else 'false'}, or remove qat_scheme"
            yield key, f"{chosen} with {self.written(key)}: {wrong}", fix
        for key in FOUR_BIT:
            if not self.is_default(key):
                fix = "remove it; qat_scheme: blockwise4:nf4:128:nested sets all three, or set qat_scheme: fp4"
                yield key, f"{self.written(key)} has no meaning with {chosen}", fix


class AdapterSection(Section):
    """The adapter"""

    use_peft: bool = Field(True, description="train a low-rank adapter (LoRA); false: full fine-tuning")
    peft_type: str = Field(
        "lora",
        description="PEFT's type of the adapter: lora, another one of the table in docs/adapters.md, or one that"
        " `adapter_kinds.register_adapter` added",
    )
    peft_config: dict[str, Any] | None = Field(
        None, description="options of PEFT's types other than lora, by the names of PEFT's configuration class"
    )
    r: PositiveInt = Field(16, description="rank of the adapter")
    lora_alpha: Scale = Field(16.0, description="numerator of the adapter's scale lora_alpha/r")
    lora_dropout: Fraction = Field(0.0, description="dropout probability of the adapter's input")
    target_modules: str | list[str] = Field(
        "all-linear", description="modules to adapt: all-linear, a list of module names, or one regular expression"
    )
    target_parameters: list[str] | None = Field(
        None,
        description="names of stacked experts and routers to adapt; default: with target_modules: all-linear every"
        " expert and no router; []: none",
    )
    exclude_modules: str | list[str] | None = Field(
        None, description="modules of target_modules that get no adapter: a list of names, or one regular expression"
    )
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="indices of the layers that get adapters; default: all"
    )
    layers_pattern: list[str] | None = Field(
        None, description="with layers_to_transform: names of the lists of layers; default: any list of modules"
    )
    freeze_vision_tower: bool = Field(
        True,
        description="image rows: leave the vision tower as it is; false: adapt its linear layers, or with use_peft:"
        " false train all of its weights",
    )
    freeze_multi_modal_projector: bool = Field(
        True,
        description="image rows: leave the projector between tower and language model as it is; false: train it in the"
        " same way",
    )
    modules_to_save: list[str] | None = Field(None, description="modules to train in full and to save with the adapter")
    add_tokens: list[str] | dict[str, str] | None = Field(
        None,
        description="tokens to add to the tokenizer and to train: a list, or token → description, whose tokens' mean"
        " embedding starts it",
    )
    add_special_tokens: list[str] | dict[str, str] | None = Field(
        None, description="as add_tokens, for special tokens, which decoding skips"
    )
    trainable_token_indices: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="ids of tokens whose rows of the embedding and the head are trained and saved with the adapter",
    )
    ensure_weight_tying: bool = Field(
        False, description="with modules_to_save: train one copy of an embedding and the head that is tied to it"
    )
    resize_token_embeddings_to_multiple_of: PositiveInt | None = Field(
        None, description="with new tokens beyond the embeddings' rows: grow them to a multiple of this number"
    )
    use_rslora: bool = Field(False, description="scale the adapter by lora_alpha/sqrt(r) (rsLoRA)")
    use_dora: bool = Field(False, description="train weight-decomposed adapters (DoRA)")
    rank_pattern: dict[str, PositiveInt] = Field(
        default_factory=dict, description="ranks of modules that match a pattern, as in {q_proj: 32}"
    )
    alpha_pattern: dict[str, Scale] = Field(
        default_factory=dict, description="lora_alpha of modules that match a pattern"
    )
    init_lora_weights: bool | str = Field(
        True,
        description="initialisation of the adapter, as in PEFT: true, false, gaussian, orthogonal, pissa,"
        " pissa_niter_N, olora, mica, loftq, qera, corda, eva, lora_ga",
    )
    loftq_config: dict[str, bool | int | float | str] | None = Field(
        None,
        description="options of init_lora_weights: loftq: loftq_iter (default: 1), weighted (true: fit the outputs"
        " on rows of the data instead of the weights), and loftq_bits, which must equal the format's bits",
    )
    corda_config: dict[str, bool | int | float | str] | None = Field(
        None,
        description="options of init_lora_weights: corda: corda_method, ipm (default: start from the data's directions)"
        " or kpm (from the others)",
    )
    eva_config: dict[str, bool | int | float | str] | None = Field(
        None,
        description="options of init_lora_weights: eva, as in PEFT: rho, tau, use_label_mask, whiten,"
        " adjust_scaling_factors",
    )
    lora_ga_config: dict[str, bool | int | float | str] | None = Field(
        None, description="options of init_lora_weights: lora_ga, as in PEFT: direction, scale, stable_gamma"
    )
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="learning rate of the adapter's B relative to its A (LoRA+); default: one rate for both"
    )
    loraplus_lr_embedding: Annotated[float, Field(gt=0)] | None = Field(
        None, description="with loraplus_lr_ratio: learning rate of the adapters of embeddings; default: 1e-6"
    )
    lora_preconditioner: Literal["riemannian"] | None = Field(
        None,
        description="precondition the gradients of A and B by the other factor, r×r, before the optimizer (riemannian)",
    )
    lora_bias: bool = Field(
        False, description="train a bias of the adapter's B, which adapted weights alone cannot hold: not mergeable"
    )
    lora_fa: bool = Field(
        False, description="train the adapter's B alone; A stays as initialised, and its input is not saved (LoRA-FA)"
    )
    adapter_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the adapter's weights")
    adapter_path: str | None = Field(None, description="saved adapter to continue training")

    @property
    def trained_vision(self) -> list[str]:
        """Keys of the parts of a model with images that are trained in addition to its language model."""
        return [key for key in VISION_KEYS if not getattr(self, key)]

    @field_validator("add_tokens", "add_special_tokens", mode="before")
    @classmethod
    def _names_of_tokens(cls, value: Any) -> Any:
        """Accept comma-separated text, as LLaMA-Factory does; refuse empty and repeated tokens."""
        tokens = value.split(",") if isinstance(value, str) else value
        names = list(tokens) if isinstance(tokens, list | dict) else []
        if not all(isinstance(name, str) and name.strip() for name in names):
            raise PydanticCustomError("empty", "must name tokens, not {value}", {"value": repr(value)})
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise PydanticCustomError("repeated", "names {value} twice", {"value": repr(repeated)})
        return tokens

    @field_validator("layers_to_transform", "layers_pattern", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Accept one layer or name, as PEFT does."""
        return [value] if isinstance(value, int | str) and not isinstance(value, bool) else value

    @field_validator("peft_type")
    @classmethod
    def _peft_type(cls, value: str) -> str:
        """Accept the types of the table of adapters, also in PEFT's upper case."""
        if refused := UNTRAINED_TYPES.get(value.upper()):
            raise contradiction("peft_type", f"peft_type: {value} is not trained in a run: {refused[0]}", refused[1])
        if value.lower() not in (types := adapter_types()):
            message, named = "must be one of {names}, not {value}", {"names": ", ".join(types), "value": repr(value)}
            raise PydanticCustomError("named", message, named | {"near": nearest(value, types)})
        return value.lower()

    @field_validator("init_lora_weights")
    @classmethod
    def _init_lora_weights(cls, value: bool | str) -> bool | str:
        """Accept the rows of the table of initialisations."""
        if find_initialisation(value) is None:
            names = initialisation_names()
            message, named = "must be one of {names}, not {value}", {"names": ", ".join(names), "value": repr(value)}
            raise PydanticCustomError("named", message, named | {"near": nearest(str(value), names)})
        return value


class DataSection(Section):
    """The data"""

    dataset: str | list[str | dict[str, str | int | float]] = Field(
        description="training data: a file (jsonl, json, csv, parquet, txt), folder or hub id, or a list of them or of"
        " {path, weight, split, max_samples}"
    )
    mixing: Literal["concat", "interleave", "temperature"] = Field(
        "concat",
        description="rows of several datasets, whose shares, before packing, are in proportion to their weights: concat"
        " (all rows of all datasets; with weights the same number, each dataset's rows"
        " repeated or sampled to its share), interleave (each dataset's share, in turn, equal without weights, until"
        " `stopping`), temperature (interleave with shares in proportion to size^(1/mixing_temperature))",
    )
    mixing_temperature: Annotated[float, Field(ge=1)] = Field(
        2.0, description="mixing: temperature: 1 draws in proportion to the sizes, larger values more evenly"
    )
    stopping: Literal["first", "all"] = Field(
        "first",
        description="interleaved datasets: an epoch ends when the first dataset has no rows left, or when all had"
        " each of their rows at least once (shorter ones are repeated)",
    )
    max_samples: PositiveInt | None = Field(
        None, description="number of rows to read of each dataset, from its start; default: all"
    )
    streaming: bool = Field(
        False,
        description="read and tokenize the rows while training, for data larger than memory or disk; needs max_steps",
    )
    shuffle_buffer_size: PositiveInt = Field(
        4096, description="streaming: rows that are read at a time, shuffled (and packed) together; 1: no shuffling"
    )
    dataset_split: str = Field(
        "train", description="split of a hub dataset, or of a folder with files of several splits"
    )
    eval_dataset: str | list[str] | None = Field(
        None, description="held-out data; default: eval_split_size rows of the training data"
    )
    eval_split_size: Annotated[float, Field(ge=0)] = Field(
        0.0, description="rows to hold out for evaluation: a share below 1, or a number"
    )
    dataset_format: Literal["auto", "messages", "prompt-completion", "alpaca", "sharegpt", "text"] = Field(
        "auto", description="layout of the rows; auto: detect it from the columns and log it"
    )
    dataset_text_field: str = Field("text", description="name of the column with plain text")
    column_mapping: dict[str, str] = Field(
        default_factory=dict,
        description="your name of each standard column, as in {prompt: question, completion: answer}",
    )
    chat_template_path: str | None = Field(
        None, description="Jinja file to use instead of the tokenizer's chat template"
    )
    max_length: PositiveInt = Field(2048, description="largest number of tokens in a row")
    overlong: Literal["truncate", "drop"] = Field(
        "truncate", description="whether to truncate or to drop rows longer than max_length"
    )
    packing: bool = Field(False, description="pack several documents into one row, without attention between them")
    padding_free: bool = Field(False, description="concatenate the rows of a batch instead of padding them")
    assistant_only_loss: bool = Field(True, description="chat data: compute the loss on assistant turns only")
    train_on: Literal["last", "all"] = Field(
        "all", description="chat data: assistant turns that the loss is computed on: the last one, or all"
    )
    completion_only_loss: bool = Field(True, description="prompt-completion data: compute the loss on completions only")
    media_dir: str | None = Field(
        None, description="folder of the rows' images, outside of which none is read; default: the data file's folder"
    )
    allow_image_urls: bool = Field(False, description="download images that rows name by URL")
    image_min_pixels: PositiveInt | None = Field(
        None,
        description="enlarge images with fewer pixels to this number, where tokens follow the size",
    )
    image_max_pixels: PositiveInt | None = Field(
        None, description="scale images with more pixels down to this number, where tokens follow the size"
    )
    image_max_pixels_per_row: PositiveInt | None = Field(
        None,
        description="packing: largest sum of the pixels of a row's images, as the vision tower reads them;"
        " default: limited by the row's tokens alone",
    )
    vision_cache: Literal["auto", "fp8"] | bool = Field(
        "auto",
        description="image rows with frozen tower and projector: compute each image's features once, before training,"
        " and keep them on disk; auto: for more than one epoch, if they fit; fp8: always, in 8 bits",
    )
    dataset_num_proc: PositiveInt | None = Field(
        None, description="number of processes that tokenize; default: chosen by the amount of data"
    )

    @field_validator("dataset")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        check_entries(value)
        return value

    @property
    def requires_vision_cache(self) -> bool:
        """Whether features of images are kept in any case, so that a run without them is an error."""
        return self.vision_cache in (True, "fp8")

    @property
    def datasets(self) -> list[DatasetEntry]:
        """The entries of `dataset`."""
        return entries_of(self.dataset, self.max_samples)

    @property
    def weighted(self) -> bool:
        """Return whether the entries of `dataset` have weights."""
        return any(entry.weight is not None for entry in self.datasets)


class TrainingSection(Section):
    """Training"""

    output_dir: str = Field("out", description="folder for all files of the run")
    per_device_train_batch_size: PositiveInt = Field(1, description="rows in a micro-batch on each device")
    per_device_eval_batch_size: PositiveInt | None = Field(
        None, description="rows in an evaluation batch on each device; default: as in training"
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="number of micro-batches in an optimizer step")
    num_train_epochs: Annotated[float, Field(gt=0)] = Field(1.0, description="number of passes over the data")
    max_steps: int = Field(-1, description="number of optimizer steps; -1: determined by num_train_epochs")
    learning_rate: Annotated[float, Field(gt=0)] = Field(2e-4, description="peak learning rate")
    lr_scheduler_type: str = Field("cosine", description="learning rate schedule, by its name in transformers")
    lr_scheduler_kwargs: dict[str, bool | int | float | str] | None = Field(
        None, description="options of the schedule, by their names in transformers, as in {min_lr_rate: 0.1}"
    )
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.03, description="warmup steps: a number, or a share of all steps below 1"
    )
    optim: str = Field("adamw", description="optimizer, by its name in transformers")
    optim_args: dict[str, bool | int | float | str] | None = Field(
        None,
        description="options of the optimizer: a mapping, or text as in transformers, `rank=64, update_proj_gap=100`",
    )
    optim_bits: StateBits | dict[str, StateBits] | None = Field(
        None,
        description="bits of the optimizer's state (8, 16, 32), or a mapping of patterns of parameter names to bits,"
        ' `{"*embed_tokens*": 32}`, of which the last that matches decides; default: by optim',
    )
    optim_in_backward: bool | Literal["auto"] = Field(
        "auto",
        description="update each layer in the backward when its gradients are complete, and free these; without"
        " clipping and accumulation; auto: if the run fits only so",
    )
    optim_offload: bool | Literal["auto"] = Field(
        "auto",
        description="keep the optimizer's state in pinned host memory and stream it through a window; auto: if the run"
        " fits only so, and with optimizers called paged",
    )
    optim_target_modules: str | list[str] | None = Field(
        None,
        description="linear layers whose gradients a low-rank optimizer projects: all-linear, a list of parts of module"
        " names, or one regular expression; default: all-linear",
    )
    embedding_learning_rate: Annotated[float, Field(gt=0)] | None = Field(
        None, description="peak learning rate of embeddings and head that are trained in full; default: learning_rate"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled weight decay")
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="norm to clip gradients to; 0: no clipping")
    adam_beta1: Fraction = Field(0.9, description="decay of the first moment")
    adam_beta2: Fraction = Field(0.999, description="decay of the second moment")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(
        1e-8, description="number added to the root of the second moment"
    )
    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="scale of the noise added to embeddings (NEFTune)"
    )
    shift_attn: bool = method_field(
        ("sft",),
        False,
        "train with the shifted sparse attention of LongLoRA: half of the heads attend in groups of tokens, the others"
        " in groups that begin half a group later; evaluation and inference attend to everything",
    )
    shift_attn_group_size: PositiveInt | None = method_field(
        ("sft",), None, "shift_attn: tokens of a group, an even number; default: a quarter of max_length"
    )
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = method_field(
        ("sft",),
        None,
        "weight of the load-balancing loss of mixture-of-experts routers, as in transformers; default: 0",
    )
    activation_checkpointing: bool | Literal["auto"] | Level = Field(
        "auto",
        description="activations that decoder layers save for the backward, from most to least: keep, recompute,"
        " recompute_mlp, checkpoint (or true); in host memory offload_kept, offload_attention, offload, tiled; auto:"
        " the fastest mix of levels that fits",
    )
    expert_offload: bool | Literal["auto"] | PositiveInt = Field(
        "auto",
        description="decoder layers whose quantized experts stay in host memory until they are used: true (all), false"
        " (none) or a number; auto: the fewest with which the run fits",
    )
    memory_limit_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="limit of device memory in GiB, for the plan and for torch's allocator; default: the free memory; a"
        " larger value than that tries a run that may not fit",
    )
    logging_steps: PositiveInt = Field(1, description="optimizer steps between lines of metrics.jsonl")
    eval_steps: Annotated[float, Field(gt=0)] | None = Field(
        None, description="steps between evaluations, or a share of all steps below 1; default: every epoch"
    )
    save_steps: Annotated[float, Field(gt=0)] | None = Field(
        None, description="steps between checkpoints, or a share of all steps below 1; default: every epoch"
    )
    save_total_limit: PositiveInt | None = Field(2, description="number of newest checkpoints to keep")
    load_best_model_at_end: bool = Field(
        False,
        description="end with the weights of the best evaluation: every evaluation that is the best so far saves a"
        " checkpoint, also between save_steps, and save_total_limit does not remove it",
    )
    metric_for_best_model: str | None = Field(
        None,
        description="number of an evaluation that decides which is best, also for early stopping and for schedules that"
        " follow a metric; default: the method's first one",
    )
    greater_is_better: bool | None = Field(
        None, description="whether a larger metric_for_best_model is better; default: by the metric"
    )
    early_stopping_patience: PositiveInt | None = Field(
        None,
        description="number of evaluations without an improvement after which training stops; default: it does not",
    )
    early_stopping_threshold: Annotated[float, Field(ge=0)] = Field(
        0.0, description="smallest change of metric_for_best_model that early stopping counts as an improvement"
    )
    resume_from_checkpoint: str | bool | None = Field(
        None, description="checkpoint folder to resume from; true: the newest one of output_dir"
    )
    sample_prompts: Annotated[int, Field(ge=0)] | list[str] = Field(
        3, description="prompts to answer before and after training: a number of held-out rows, or a list of prompts"
    )
    sample_max_new_tokens: PositiveInt = Field(
        48, description="largest number of tokens in an answer to sample_prompts"
    )
    sample_steps: PositiveInt | None = Field(
        None, description="optimizer steps between answers to sample_prompts, which samples.jsonl stores; default: none"
    )
    row_losses: bool = Field(
        False, description="store the losses of held-out and some training documents before and after training"
    )
    method: str = Field(
        "sft", description="training method: sft (supervised fine-tuning), or one of the methods in the sections below"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        42, description="seed of the data order, the adapter's initialisation, dropout and sampling"
    )
    deterministic: bool = Field(
        False,
        description="make runs with the same seed bit-equal on GPUs even if it is slow; false: only where it costs"
        " almost no time, as recorded in checks.json",
    )


class ParallelSection(Section):
    """Several GPUs"""

    parallel: Literal["auto"] | dict[Axis, PositiveInt] = Field(
        "auto",
        description="degree of each axis of parallelism, as in {data: 2, shard: 4}: data (DDP), shard (FSDP: data"
        " parallelism with sharded frozen weights), tensor, pipeline and context; auto: the memory plan chooses a"
        " layout for the available GPUs",
    )
    pipeline_schedule: Literal["auto", "1f1b", "interleaved", "zb-1p", "zb-v"] = Field(
        "auto",
        description="schedule of pipeline stages; auto: 1f1b or interleaved, whichever is faster in simulation;"
        " zero-bubble schedules (zb-*) are no faster if only adapters are trained",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="number of restarts from the last checkpoint after a process of a multi-GPU run dies"
    )


def checked_rope(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_scaling` as a mapping with `rope_type`, after checking its options.

    Raises:
        PydanticCustomError: an unknown type or option, or a value out of its limits.
    """
    options: dict[str, Any] = {"rope_type": value} if isinstance(value, str) else dict(value)
    if "type" in options:  # transformers' earlier name
        options.setdefault("rope_type", options.pop("type"))
    rope_type = options.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in ROPE_OPTIONS:
        message, named = "must name a rope_type of {names}, not {value}", {"names": ", ".join(ROPE_OPTIONS)}
        raise PydanticCustomError("limit", message, named | {"value": brief(rope_type)})
    for key, number in options.items():
        if key != "rope_type" and key not in ROPE_OPTIONS[rope_type]:
            message, named = "has no option {option} for {type}, but {names}", {"type": rope_type, "option": brief(key)}
            raise PydanticCustomError("limit", message, named | {"names": ", ".join(ROPE_OPTIONS[rope_type])})
        if key == "rope_type" or (key == "truncate" and isinstance(number, bool)):
            continue
        numbers = number if isinstance(number, list) and key in ("short_factor", "long_factor") else [number]
        types = {ORIGINAL_CONTEXT: (int,), "truncate": ()}.get(key, (int, float))
        lowest, highest = ROPE_LIMITS.get(key, (1e-6, LARGEST))
        if not numbers or not all(type(n) in types and lowest <= n <= highest for n in numbers):
            message, named = "must have {words} as {option}, not {value}", {"option": key, "value": brief(number)}
            named["words"] = f"a number from {lowest:,g} to {highest:,g}" if types else "true or false"
            raise PydanticCustomError("limit", message, named)
    for (low, high), usual in ROPE_ORDER.items():
        if options.keys() & {low, high} and options.get(low, usual[0]) >= options.get(high, usual[1]):
            raise PydanticCustomError("limit", "must have a smaller {low} than {high}", {"low": low, "high": high})
    return options


def _mixture_in(path: str) -> dict[str, str]:
    """Read a mapping of module patterns to formats from a YAML file."""
    fix = "name a file with lines `pattern: format`, as `halfbyte mix` writes it"
    try:
        patterns = read_patterns(path)
    except ConfigError as error:
        raise contradiction("quantization", f"quantization: {error.message}", fix) from error
    if not patterns:
        raise contradiction("quantization", f"quantization: {path} is empty", fix)
    for pattern, spec in patterns.items():
        if not isinstance(spec, str):
            wrong = f"quantization: {path} is not a mapping of patterns to formats: {pattern} is {spec!r}"
            raise contradiction("quantization", wrong, fix)
    return patterns


SECTIONS = (
    ModelSection, QuantizationSection, RecipeSection, AdapterSection, DataSection, TrainingSection, ReportingSection,
    SeveralSection, PreferenceSection, PolicySection, DistillationSection, TaskSection, ParallelSection,
)  # fmt: skip


class Adapter(AdapterSection):
    """Keys of a low-rank adapter, and its base model."""

    model_config = ConfigDict(frozen=True, validate_assignment=False)

    origin: Origin


class RunKeys(
    ModelSection,
    QuantizationSection,
    RecipeSection,
    AdapterSection,
    DataSection,
    TrainingSection,
    ReportingSection,
    SeveralSection,
    PreferenceSection,
    PolicySection,
    DistillationSection,
    TaskSection,
    ParallelSection,
):
    """All keys of a run, and the typed values that they resolve to, without the rules between sections."""

    @property
    def origin(self) -> Origin:
        """The model that the run starts from."""
        revision = None if self.model_revision == "main" else self.model_revision
        rope = None if self.rope_scaling is None else RopeScaling(self.rope_scaling, self.max_length)
        return Origin(self.model_name_or_path, revision, self.trust_remote_code, self.storage.keep, rope)

    @property
    def adapter(self) -> Adapter | None:
        """The low-rank adapter; None for full fine-tuning."""
        if not self.use_peft:
            return None
        return Adapter(**{key: getattr(self, key) for key in AdapterSection.model_fields}, origin=self.origin)

    @property
    def precision(self) -> Precision:
        """Dtypes and recipe of the computation.

        Full fine-tuning stores float32 weights unless `dtype` is given: bfloat16, with 8 bits of precision, rounds an
        update of 1e-4 of a weight away.
        """
        weights = "float32" if not self.use_peft and self.dtype == "auto" else self.dtype
        options = {key: getattr(self, key) for key in RECIPE_OPTIONS.get(self.recipe, ())}
        if self.recipe == "nvfp4":
            options["seed"] = self.seed
        return Precision(self.dtype, weights, self.recipe, options)

    @property
    def layout(self) -> Parallel | None:
        """Degree of each axis of parallelism; None: the memory plan chooses (`parallel: auto`)."""
        return None if self.parallel == "auto" else Parallel(**self.parallel)

    @property
    def output_path(self) -> Path:
        return Path(self.output_dir)

    @property
    def attention_group(self) -> int | None:
        """Number of tokens in a group of shifted attention; None: attention is not shifted."""
        return (self.shift_attn_group_size or max(2, self.max_length // 8 * 2)) if self.shift_attn else None

    @property
    def group_size(self) -> int:
        """Number of answers per prompt. The answers of a group are consecutive rows."""
        return 1 if self.method in DISTILLING else self.num_generations or 2

    @property
    def micro_batches_per_generation(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def answers_per_generation(self) -> int:
        """Number of answers that each rank samples per generation."""
        return self.per_device_train_batch_size * self.micro_batches_per_generation
