"""Rules between keys of different sections: keys that exclude each other or have no meaning with others.

Every rule yields the key to change, the problem, and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ..adapter_kinds import adapter_kind
from ..optim import ADAM_KEYS, FOLLOW_METRIC, OPTIMIZERS, SCHEDULES, STORAGE_OF_BITS, Option, optimizer_row
from ..utils.text import brief
from . import layouts as support
from .initialisations import INITIALISATIONS, OPTION_KEYS, initialisation
from .methods import CLASSIFYING, DEFAULTS, DIFFERENCE_LOSSES, LOSS_METHODS, LOSS_TYPES, TASKS, methods_of
from .peft_options import KEY, SELECTION_KEYS, option_contradictions, option_names
from .policy import DISTILLING, POLICY, SAMPLING
from .recipe import RECIPE_OPTIONS
from .schema import VISION_KEYS, AdapterSection, QuantizationSection, RunKeys
from .section import Contradiction, nearest, respelled

TOKEN_KEYS = ("add_tokens", "add_special_tokens", "trainable_token_indices", "resize_token_embeddings_to_multiple_of")
ADAPTER_KEYS = (
    *SELECTION_KEYS,
    *("use_dora", "use_rslora", "adapter_path", "modules_to_save", "rank_pattern", "alpha_pattern"),
    "ensure_weight_tying",
    *("loraplus_lr_ratio", "loraplus_lr_embedding", "lora_preconditioner", "lora_fa", "lora_bias", *OPTION_KEYS),
    *TOKEN_KEYS,
)
COMMON_ADAPTER_KEYS = (  # of every kind of adapter
    *("use_peft", "peft_type", "target_modules", "target_parameters", "modules_to_save", "adapter_dtype"),
    *SELECTION_KEYS,
    *("adapter_path", *VISION_KEYS),
)
SFT_KEYS = ("dataset_format", "dataset_text_field", "completion_only_loss", "train_on")


def run_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield the contradictions between any keys of a run."""
    yield from QuantizationSection.contradictions(config)
    yield from _recipe_contradictions(config)
    yield from _optimizer_contradictions(config)
    yield from _schedule_contradictions(config)
    yield from _best_model_contradictions(config)
    yield from _hub_contradictions(config)
    yield from _watching_contradictions(config)
    yield from _dataset_contradictions(config)
    yield from _shifted_attention_contradictions(config)
    if config.requires_vision_cache and config.trained_vision:
        wrong = f"{config.written('vision_cache')} with {config.trained_vision[0]}: false, which changes the features"
        yield "vision_cache", f"{wrong} in every step", "remove one of the two"
    if config.storage.rounds:
        yield from _qat_contradictions(config)
    yield from _adapter_contradictions(config) if config.use_peft else _full_fine_tuning_contradictions(config)
    if config.parallel != "auto":
        yield from _parallel_contradictions(config)
    if config.method in ("sft", *DEFAULTS):
        yield from _keys_of_other_methods(config)
        yield from _loss_contradictions(config)
        yield from _sampling_contradictions(config)
    if config.method in TASKS:
        yield from _task_contradictions(config)


def _dataset_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions between keys that mix, limit and stream datasets."""
    weighted = config.weighted
    if config.mixing != "temperature" and not config.is_default("mixing_temperature"):
        wrong = f"{config.written('mixing_temperature')} with {config.written('mixing')}"
        yield "mixing_temperature", f"{wrong}, which does not read it", "set mixing: temperature, or remove it"
    if config.mixing == "temperature" and weighted:
        wrong = "weights of dataset with mixing: temperature, which derives them from the sizes"
        yield "mixing", wrong, "remove the weights, or set mixing: interleave"
    if config.mixing == "concat" and not config.is_default("stopping"):
        wrong = f"{config.written('stopping')} with mixing: concat, whose rows are as many as those of all datasets"
        yield "stopping", wrong, "set mixing: interleave or temperature, or remove it"
    if config.train_on == "last" and not config.assistant_only_loss:
        wrong = "train_on: last with assistant_only_loss: false, which trains every turn"
        yield "train_on", wrong, "remove one of the two"
    if config.image_max_pixels_per_row is not None and not config.packing:
        wrong = f"{config.written('image_max_pixels_per_row')} without packing: true, which alone fills rows"
        yield "image_max_pixels_per_row", wrong, "set packing: true, or remove it"
    if config.streaming:
        yield from _streaming_contradictions(config, weighted)
    elif not config.is_default("shuffle_buffer_size"):
        wrong = f"{config.written('shuffle_buffer_size')} without streaming: true, where all rows are shuffled"
        yield "shuffle_buffer_size", wrong, "set streaming: true, or remove it"


def _shifted_attention_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    key = "shift_attn_group_size"
    size = config.shift_attn_group_size
    if size is None:
        return
    if not config.shift_attn:
        yield key, f"{config.written(key)} without shift_attn: true", f"set shift_attn: true, or remove {key}"
    if size % 2:
        yield key, f"{config.written(key)} is odd, and groups are shifted by half of one", "give an even number"
    if size > config.max_length:
        wrong = f"{config.written(key)} is more than max_length: {config.max_length}: every row would be one group"
        yield key, wrong, "give a quarter of max_length, or raise max_length"


def _streaming_contradictions(config: RunKeys, weighted: bool) -> Iterator[Contradiction]:
    chosen = "streaming: true"
    if config.method in SAMPLING:
        wrong = f"{chosen} with method: {config.method}, whose prompts are drawn from all rows"
        yield "streaming", wrong, "remove streaming"
    if config.max_steps < 1:
        yield "max_steps", f"{chosen} needs max_steps: the length of a stream is not known", "set max_steps"
    if not config.is_default("num_train_epochs"):
        wrong = f"{config.written('num_train_epochs')} with {chosen}, which reads its rows once"
        yield "num_train_epochs", wrong, "remove it; max_steps says how long the run trains"
    if config.eval_split_size:
        wrong = f"{config.written('eval_split_size')} with {chosen}: rows of a stream cannot be held out in advance"
        yield "eval_split_size", wrong, "name held-out data in eval_dataset"
    if config.mixing == "temperature":
        wrong = f"mixing: temperature with {chosen}: the sizes of streams are not known"
        yield "mixing", wrong, "set mixing: interleave, with weights"
    if config.mixing == "concat" and weighted:
        wrong = f"weights of dataset with mixing: concat and {chosen}: the sizes of streams are not known"
        yield "mixing", wrong, "set mixing: interleave"
    if config.precompute_ref_log_probs is True:
        wrong = f"precompute_ref_log_probs: true with {chosen}, whose rows are not known before training"
        yield "precompute_ref_log_probs", wrong, "remove it; each step computes its own"


def _keys_of_other_methods(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("method")
    for key, field in type(config).model_fields.items():
        methods = methods_of(field)
        if methods and config.method not in methods and key in config.model_fields_set and not config.is_default(key):
            wrong = f"{config.written(key)} has no meaning with {chosen}: it applies to {', '.join(methods)}"
            yield key, wrong, f"remove it, or set method: {methods[0]}"
    for key in SFT_KEYS if config.method != "sft" else ():
        if not config.is_default(key):
            wrong = f"{config.written(key)} with {chosen}: it applies to the rows of method: sft"
            yield key, wrong, "remove it, and name the columns in column_mapping"


def _loss_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of `loss_type`, and of keys that only some losses read."""
    types = [config.loss_type] if isinstance(config.loss_type, str) else config.loss_type or []
    allowed, chosen = LOSS_TYPES.get(config.method, ()), config.written("method")
    for name in types:
        if name not in allowed:
            yield "loss_type", f"loss_type: {chosen} has no loss {brief(name)}", _loss_type_fix(name, allowed)
    if len(types) > 1 and config.method != "dpo":
        yield (
            "loss_type",
            f"{config.written('loss_type')} with {chosen}: only dpo combines losses",
            "give one, or set method: dpo",
        )
    if config.loss_weights is not None and len(config.loss_weights) != len(types):
        wrong = f"{config.written('loss_weights')} and {config.written('loss_type')} differ in length"
        yield "loss_weights", wrong, "give a weight for each loss type"
    elif config.loss_weights is not None and not any(config.loss_weights):
        yield "loss_weights", f"{config.written('loss_weights')}: every loss has weight 0", "give one above 0"
    if config.method == "kto" and not (config.desirable_weight or config.undesirable_weight):
        wrong = "desirable_weight and undesirable_weight are both 0: every answer has weight 0"
        yield "desirable_weight", wrong, "give one of them above 0"
    if config.beta == 0 and config.method in LOSS_TYPES and config.method not in POLICY:
        yield "beta", f"{config.written('beta')} with {chosen}: all rewards would be 0", "give a number above 0"
    if "exo_pair" in types and not config.label_smoothing:
        yield "loss_type", "loss_type: exo_pair needs label_smoothing above 0", "set it to 1e-3, as the EXO paper does"
    pair_losses = [name for name in types if name not in DIFFERENCE_LOSSES]
    if config.f_divergence_type != "reverse_kl" and pair_losses:
        wrong = (
            f"{config.written('f_divergence_type')} with loss_type: {pair_losses[0]}, which is not a function of the"
            " difference of two rewards"
        )
        yield "f_divergence_type", wrong, f"remove it, or use one of {', '.join(DIFFERENCE_LOSSES)}"
    sorting = [name for name in types if name.startswith("aot")]
    if config.use_weighting and sorting:
        wrong = f"use_weighting: true with loss_type: {sorting[0]}: this loss sorts answers and has no pairs to weight"
        yield "use_weighting", wrong, "remove it, or use another loss type"


def _loss_type_fix(name: str, allowed: Iterable[str]) -> str:
    """Return a fix for an unknown loss type: the method that has it, or the most similar loss type of this method."""
    methods = [f"method: {method}" for method, names in LOSS_TYPES.items() if name in names]
    elsewhere = LOSS_METHODS.get(name) or next(iter(methods), "")
    if elsewhere:
        return f"set {elsewhere}"
    near = respelled(name, allowed)
    return f"did you mean {near}?" if near else f"one of {', '.join(allowed)}" if allowed else "remove it"


def _recipe_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("recipe")
    for recipe, key in ((recipe, key) for recipe, keys in RECIPE_OPTIONS.items() for key in keys):
        if recipe != config.recipe and not config.is_default(key):
            wrong = f"{config.written(key)} has no meaning with {chosen}: it applies to {recipe}"
            yield key, wrong, f"remove it, or set recipe: {recipe}"
    if config.four_over_six_metric != "MSE" and not config.enable_four_over_six:
        key = "four_over_six_metric"
        yield key, f"{config.written(key)} has no effect", "set enable_four_over_six: true, or remove it"
    if config.recipe == "bf16":
        return
    if not config.use_peft:
        wrong = f"{chosen} with use_peft: false: recipes apply to frozen weights, and full fine-tuning has none"
        yield "recipe", wrong, "set recipe: bf16"
    if not config.use_kernels:
        wrong = f"{chosen} with use_kernels: false: only fused forwards support recipes"
        yield "recipe", wrong, "set recipe: bf16"


def _optimizer_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of the optimizer's options, and of keys that it cannot be combined with."""
    row, chosen = optimizer_row(config), config.written("optim")
    yield from _option_contradictions("optim_args", config.optim_args, row.options, chosen)
    for key in ADAM_KEYS:
        if key not in row.adam_keys and not config.is_default(key):
            alternatives = ", ".join(name for name, candidate in OPTIMIZERS.items() if key in candidate.adam_keys)
            is_option = key == "adam_epsilon" and "eps" in row.options
            fix = "set optim_args: {eps: NUMBER}" if is_option else f"remove it, or use one of {alternatives}"
            yield key, f"{config.written(key)} with {chosen}, which does not read it", fix
    if "eps" in (config.optim_args or {}) and not config.is_default("adam_epsilon"):
        yield "adam_epsilon", "adam_epsilon and optim_args: eps are the same number", "remove one of them"
    yield from _state_contradictions(config, chosen, row.options)
    yield from _place_contradictions(config, chosen)
    if config.optim_target_modules is not None:
        yield from _target_contradictions(config, chosen, row.takes_targets)
    if row.updates == "backward":
        by = config.written("optim_in_backward") if config.optim_in_backward is True else chosen
        updating = f"with {by}, which updates each weight in the backward"
        if config.max_grad_norm:
            wrong = f"{config.written('max_grad_norm')} {updating}, before the norm of all gradients is known"
            yield "max_grad_norm", wrong, "set max_grad_norm: 0"
        if config.gradient_accumulation_steps > 1:
            wrong = f"{config.written('gradient_accumulation_steps')} {updating} of every micro-batch"
            yield "gradient_accumulation_steps", wrong, "set it to 1 and raise per_device_train_batch_size"
        if config.dtype == "float16":
            wrong = f"dtype: float16 {updating}, where its loss scale has no overflow check"
            yield "dtype", wrong, "set dtype: bfloat16"
    if config.lora_preconditioner and row.updates == "backward":
        wrong = f"{config.written('lora_preconditioner')} with {chosen}: it needs the gradients of both factors at once"
        yield "lora_preconditioner", wrong, "remove it, or update all weights after the backward"
    if config.loraplus_lr_embedding is not None and config.loraplus_lr_ratio is None:
        wrong = "loraplus_lr_embedding without loraplus_lr_ratio has no effect"
        yield "loraplus_lr_embedding", wrong, "set loraplus_lr_ratio, or remove it"


def _option_contradictions(
    key: str, values: Mapping[str, Any] | None, options: Mapping[str, Option], chosen: str
) -> Iterator[Contradiction]:
    """Yield a contradiction for each entry of `key` that is no option of `chosen`, or has a value of another type."""
    for name, value in (values or {}).items():
        if (option := options.get(name)) is None:
            near, names = nearest(name, options), ", ".join(options) or "none"
            wrong = f"{key}: {chosen} has no option {brief(name)}"
            yield key, wrong, f"did you mean {near}?" if near else f"its options: {names}"
        elif not option.accepts(value):
            wrong = f"{key}: {name} must be {option.allowed()}, not {brief(value)}"
            yield key, wrong, f"correct it, or remove it (default: {option.default})"


def _schedule_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of the schedule's options, and options that a schedule cannot do without."""
    key, values = "lr_scheduler_kwargs", config.lr_scheduler_kwargs or {}
    options, chosen = SCHEDULES[config.lr_scheduler_type], config.written("lr_scheduler_type")
    yield from _option_contradictions(key, values, options, chosen)
    floors = [name for name in ("min_lr", "min_lr_rate") if name in values]
    if "min_lr_rate" in options and len(floors) != 1:
        wrong = f"{key}: {chosen} needs either min_lr or min_lr_rate"
        yield key, wrong, f"remove {floors[0]}" if floors else f"set {key}: {{min_lr_rate: 0.1}}"
    if "num_decay_steps" in options and "num_decay_steps" not in values:
        wrong = f"{key}: {chosen} needs the number of its last steps, in which the learning rate falls"
        yield key, wrong, f"set {key}: {{num_decay_steps: NUMBER}}"
    min_rate = values.get("min_lr", 1e-3)  # greedy's default
    if config.lr_scheduler_type == "greedy" and not isinstance(min_rate, str) and min_rate >= config.learning_rate:
        wrong = f"{key}: {chosen} has min_lr {min_rate}, which is not below learning_rate"
        yield key, wrong, f"set {key}: {{min_lr: {config.learning_rate / 100:g}}}"


def _best_model_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of the keys that compare evaluations."""
    comparing = [key for key in ("load_best_model_at_end", "early_stopping_patience") if getattr(config, key)]
    comparing += ["lr_scheduler_type"] if config.lr_scheduler_type in FOLLOW_METRIC else []
    if comparing and config.eval_dataset is None and not config.eval_split_size:
        wrong = f"{config.written(comparing[0])} needs evaluations, and the run has no held-out data"
        yield comparing[0], wrong, "set eval_dataset, or eval_split_size: 0.05"
    for key in ("metric_for_best_model", "greater_is_better"):
        if not comparing and getattr(config, key) is not None:
            wrong = f"{config.written(key)} has no effect: nothing compares evaluations"
            yield key, wrong, "set load_best_model_at_end: true, or remove it"
    if config.early_stopping_threshold and config.early_stopping_patience is None:
        key = "early_stopping_threshold"
        yield key, f"{config.written(key)} without early_stopping_patience has no effect", "set early_stopping_patience"


def _watching_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of `sample_steps` and `row_losses` with methods without answers, or without such losses."""
    key, method = "sample_steps", config.written("method")
    if config.sample_steps and not config.sample_prompts:
        yield key, f"{config.written(key)} with sample_prompts: 0, which chooses no prompts", "set sample_prompts: 3"
    elif config.sample_steps and config.method in ("reward", "prm", *TASKS):
        yield key, f"{config.written(key)} with {method}, whose model generates no answers", f"remove {key}"
    key = "row_losses"
    if not config.row_losses:
        return
    if config.method in (*SAMPLING, "kto", "embedding"):
        yield key, f"{key}: true with {method}: the loss of a document depends on other rows", f"remove {key}"
    elif config.packing and config.method != "sft":
        yield key, f"{key}: true with packing: true and {method}: packed pairs are not separated", "remove one of them"


def _hub_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    for key in ("hub_model_id", "hub_private_repo", "hub_strategy", "hub_token"):
        if not config.push_to_hub and not config.is_default(key):
            yield key, f"{key} without push_to_hub has no effect", f"set push_to_hub: true, or remove {key}"


def _state_contradictions(config: RunKeys, chosen: str, options: Mapping[str, Option]) -> Iterator[Contradiction]:
    """Yield contradictions of the state's bits and of the rounding of weights."""
    optim_args, bits = config.optim_args or {}, config.optim_bits
    rounding = optim_args.get("rounding", "nearest")
    key = "adapter_dtype" if config.use_peft else "dtype"
    if "rounding" in options and rounding != "nearest" and getattr(config, key) != "bfloat16":
        dtype_keys = config.written(key) if config.use_peft else f"use_peft: false and {config.written(key)}"
        wrong = f"optim_args: rounding {brief(rounding)} with {dtype_keys}: only bf16 weights are rounded"
        yield "optim_args", wrong, f"set {key}: bfloat16, or remove rounding"
    if bits is None:
        return
    storage = options.get("storage")
    if storage is None:
        alternatives = ", ".join(name for name, row in OPTIMIZERS.items() if "storage" in row.options)
        yield (
            "optim_bits",
            f"{config.written('optim_bits')} with {chosen}: its state has fixed bits",
            f"use one of {alternatives}",
        )
        return
    for state_bits in sorted(set(bits.values() if isinstance(bits, dict) else [bits])):
        if STORAGE_OF_BITS[state_bits] not in storage.choices:
            alternatives = ", ".join(str(number) for number, name in STORAGE_OF_BITS.items() if name in storage.choices)
            yield "optim_bits", f"optim_bits: {chosen} has no state in {state_bits} bits", f"use {alternatives}"
    if isinstance(bits, int) and "storage" in optim_args:
        wrong = (
            f"optim_bits: {bits} with optim_args: storage={optim_args['storage']}: both set the state of all parameters"
        )
        yield "optim_bits", wrong, "remove one of them"


def _place_contradictions(config: RunKeys, chosen: str) -> Iterator[Contradiction]:
    """Yield contradictions of when the optimizer updates, and of where its state is."""
    row = OPTIMIZERS[config.optim]
    if config.optim_in_backward is True and not row.in_backward:
        alternatives = ", ".join(name for name, candidate in OPTIMIZERS.items() if candidate.in_backward)
        wrong = f"optim_in_backward: true with {chosen}, which updates all weights at once or always in the backward"
        yield "optim_in_backward", wrong, f"use one of {alternatives}, or remove it"
    if config.optim_offload is True and row.offloaded is None and row.host_bytes is None:
        alternatives = ", ".join(name for name, candidate in OPTIMIZERS.items() if candidate.offloaded)
        wrong = f"optim_offload: true with {chosen}, whose state cannot be streamed"
        yield "optim_offload", wrong, f"use one of {alternatives}, or remove it"
    if config.optim_offload is False and row.host_bytes is not None:
        wrong = f"optim_offload: false with {chosen}, whose state is in host memory"
        yield "optim_offload", wrong, f"set optim: {config.optim.removeprefix('paged_')}, or remove it"


def _target_contradictions(config: RunKeys, chosen: str, takes_targets: bool) -> Iterator[Contradiction]:
    targets, key = config.optim_target_modules, "optim_target_modules"
    if not takes_targets:
        alternatives = ", ".join(name for name, row in OPTIMIZERS.items() if row.takes_targets)
        wrong = f"{config.written(key)} with {chosen}, which does not project gradients"
        yield key, wrong, f"use one of {alternatives}"
    for pattern in [targets] if isinstance(targets, str) else targets or []:
        try:
            re.compile(pattern)
        except re.error as error:
            yield key, f"{key}: {brief(pattern)} is not a regular expression: {error}", "correct it"


def _parallel_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    layout = config.layout
    assert layout is not None
    if config.device and ":" in config.device and layout.size > 1:
        wrong = (
            f"{config.written('device')} with {config.written('parallel')}: a run on several devices cannot use"
            " a single one"
        )
        yield "device", wrong, "remove device or parallel"
    if reason := support.unsupported_reason(layout, config):
        yield reason


def _qat_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("merge_aware" if config.merge_aware else "qat_scheme")
    if config.merge_aware and not config.use_peft:
        yield "merge_aware", f"{chosen} with use_peft: false, which trains 16-bit weights", "set use_peft: true"
    if config.merge_aware and config.method in SAMPLING:
        wrong = f"{chosen} with method: {config.method}, whose answers are sampled with the adapter unmerged"
        yield "merge_aware", wrong, "remove merge_aware"
    if config.recipe != "bf16":
        wrong = f"{chosen} with {config.written('recipe')}: GEMMs with the rounded weights run in 16 bits"
        yield "recipe", wrong, "set recipe: bf16"
    if config.lora_dropout and config.use_peft:
        dropout = config.written("lora_dropout")
        wrong = f"{chosen} with {dropout}: the adapter is merged into the base weights, so its input has no dropout"
        yield "lora_dropout", wrong, "set lora_dropout: 0"


def _adapter_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield keys that the kind of adapter does not read, and keys that it cannot be combined with."""
    row = adapter_kind(config)
    yield from _token_contradictions(config)
    if config.ensure_weight_tying and not config.modules_to_save:
        wrong = "ensure_weight_tying without modules_to_save: no copy of the embedding or the head is trained"
        yield "ensure_weight_tying", wrong, "name the embedding in modules_to_save, or remove it"
    for key in AdapterSection.model_fields:
        if key not in (*COMMON_ADAPTER_KEYS, *row.keys) and not config.is_default(key):
            inside = KEY in row.keys and key in option_names(row)
            fix = f"set {KEY}: {{{key}: {getattr(config, key)}}}" if inside else "remove it"
            yield key, f"{config.written(key)} with {row.chosen}, which does not read it", fix
    if KEY in row.keys:
        yield from option_contradictions(row, config)
    features = ["qat_scheme"] * (config.qat_scheme is not None) + ["rollout"] * (config.rollout == "vllm")
    features += ["merge_aware"] * config.merge_aware
    for feature in features:
        if reason := row.refused.get("qat_scheme" if feature == "merge_aware" else feature):
            wrong = f"{row.chosen} with {config.written(feature)}: {reason}"
            yield row.key, wrong, f"{row.without}, or remove {feature}"
    if config.layers_pattern and config.layers_to_transform is None:
        yield "layers_pattern", "layers_pattern without layers_to_transform has no effect", "remove it"
    expression = isinstance(config.target_modules, str) and not config.is_default("target_modules")
    if config.layers_to_transform is not None and expression:
        wrong = f"layers_to_transform with {config.written('target_modules')}, a regular expression"
        yield "layers_to_transform", wrong, "name the layers in the expression, or list modules in target_modules"
    if config.adapter_path:
        for key in SELECTION_KEYS:
            if getattr(config, key) is not None:
                wrong = f"{key} with adapter_path: the modules of the saved adapter are trained"
                yield key, wrong, "remove one of the two"
    if config.lora_bias:
        refusals = {
            "use_dora": (config.use_dora, "PEFT does not support both"),
            "init_lora_weights": (not isinstance(config.init_lora_weights, bool), "PEFT does not support both"),
            "qat_scheme": (config.qat_scheme is not None, "a merged weight has no room for the bias"),
            "rollout": (config.rollout == "vllm", "vLLM cannot apply it"),
        }
        for key, (refused, reason) in refusals.items():
            if refused:
                yield "lora_bias", f"lora_bias: true with {config.written(key)}: {reason}", "remove one of the two"
    if config.lora_fa and config.loraplus_lr_ratio is not None:
        wrong = (
            f"lora_fa: true with {config.written('loraplus_lr_ratio')}: A, which the ratio refers to, is not trained"
        )
        yield "loraplus_lr_ratio", wrong, "remove it, and set learning_rate"
    if row.init_key == "init_lora_weights":
        yield from _initialisation_contradictions(config)


def _initialisation_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield options of other initialisations, and keys that the chosen one cannot be combined with."""
    key = "init_lora_weights"
    row, chosen = initialisation(config), config.written(key)
    for unread in INITIALISATIONS:
        if unread.options_key and unread is not row and getattr(config, unread.options_key) is not None:
            wrong = f"{unread.options_key} with {chosen}, which does not read it"
            yield unread.options_key, wrong, f"remove it, or set {key}: {unread.name}"
    if row.options_key:
        yield from _option_contradictions(row.options_key, getattr(config, row.options_key), row.options, chosen)
    if config.init_lora_weights == "orthogonal" and any(rank % 2 for rank in (config.r, *config.rank_pattern.values())):
        yield key, f"{chosen} needs even ranks", "set an even r and rank_pattern"
    if row.reads == "nothing":
        return
    if row.quantized_only and not config.storage.quantized:
        wrong = f"{chosen} without quantization: there is no error to compensate for"
        yield key, wrong, "set load_in_4bit: true, or another initialisation"
    if config.adapter_path:
        wrong = f"{chosen} with adapter_path: the saved adapter has its own factors"
        yield key, wrong, "remove one of the two"
    if config.use_dora:
        yield key, f"{chosen} with use_dora: true is not supported", "set use_dora: false"
    if config.storage.rounds:
        rounded = "merge_aware" if config.merge_aware else "qat_scheme"
        yield (
            key,
            f"{chosen} with {rounded}, which rounds the base with the adapter, is not supported",
            f"remove {rounded}",
        )
    if row.frozen and config.lora_preconditioner:
        wrong = f"{chosen}, which does not train {row.frozen}, with {config.written('lora_preconditioner')}"
        yield key, wrong, "remove lora_preconditioner"
    if row.frozen and config.lora_fa:
        yield "lora_fa", f"{chosen}, which does not train {row.frozen}, with lora_fa: true", "remove one of the two"
    if not row.starts_at_zero and config.method in SAMPLING:
        wrong = f"{chosen} with method: {config.method}, whose base without the adapter must be the model at first"
        yield key, wrong, f"set {key}: true"


def _token_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of keys that add tokens or train single rows of the embedding."""
    used = [key for key in TOKEN_KEYS if getattr(config, key)]
    if twice := sorted(set(config.add_tokens or ()) & set(config.add_special_tokens or ())):
        yield "add_special_tokens", f"{brief(twice[0])} is in add_tokens and in add_special_tokens", "keep one of them"
    if not used:
        return
    key = used[0]
    if key == TOKEN_KEYS[-1]:
        yield key, f"{key} without add_tokens: the embeddings do not grow", "remove it"
    if config.adapter_path:
        wrong = f"{key} with adapter_path: the saved adapter's tokens and rows are trained"
        yield key, wrong, "remove one of the two"
    if initialisation(config).reads != "nothing":
        chosen = config.written("init_lora_weights")
        yield key, f"{key} with {chosen}, which is not supported", f"remove {key}, or set init_lora_weights: true"
    if config.method in ("reward", "prm", *TASKS):
        yield key, f"{key} with method: {config.method}, which trains no head of tokens", f"remove {key}"
    if config.rollout == "vllm":
        yield key, f"{key} with rollout: vllm, which cannot apply it", "remove it, or set rollout: halfbyte"


def _task_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of methods that score or embed texts."""
    chosen = config.written("method")
    if config.num_labels is not None and config.labels is not None and len(config.labels) != config.num_labels:
        wrong = f"num_labels: {config.num_labels} and labels: {len(config.labels)} names"
        yield "num_labels", wrong, "remove num_labels"
    if config.problem_type == "regression":
        for key in ("labels", "num_labels"):
            if getattr(config, key) not in (None, 1):
                yield key, f"{key} with problem_type: regression, which predicts one number", f"remove {key}"
    elif config.num_labels == 1:
        yield "num_labels", f"num_labels: 1 with {chosen}", "give two, or set problem_type: regression"
    if config.streaming and config.method in CLASSIFYING and config.labels is None:
        wrong = f"streaming: true with {chosen}, whose labels are those of all rows"
        yield "labels", wrong, "name them in labels, or remove streaming"
    if config.use_peft and not config.adapter_path and initialisation(config).reads != "nothing":
        yield "init_lora_weights", f"{config.written('init_lora_weights')} with {chosen}", "set init_lora_weights: true"
    named = config.target_modules if isinstance(config.target_modules, list) else []
    for key, names in (("target_modules", named), ("modules_to_save", config.modules_to_save or [])):
        if head := [name for name in names if name.rpartition(".")[2] in ("lm_head", "score")]:
            wrong = f"{key} names {head[0]} with {chosen}"
            yield key, wrong, f"remove {head[0]}: the head of tokens is not used, and the trained head is always saved"
    if config.method == "embedding" and config.ensure_weight_tying:
        key = "ensure_weight_tying"
        yield key, f"{config.written(key)} with {chosen}, whose adapter is saved without a head", f"remove {key}"
    if (
        config.method == "embedding"
        and isinstance(config.target_modules, str)
        and config.target_modules != "all-linear"
    ):
        wrong = f"target_modules: one regular expression with {chosen}, whose adapter is saved for the backbone alone"
        yield "target_modules", wrong, "give a list of names, or all-linear"
    if config.storage.rounds:
        key = "merge_aware" if config.merge_aware else "qat_scheme"
        yield key, f"{config.written(key)} with {chosen}", f"remove {key}"


def _full_fine_tuning_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    if config.quantized:
        key = "quantization" if config.quantization else "load_in_4bit"
        wrong = f"{config.written(key)} with use_peft: false: quantized weights cannot be trained"
        unset = "16bit" if config.quantization else "false"
        yield key, wrong, f"set {key}: {unset} for full fine-tuning, or use_peft: true for QLoRA"
    for key in ADAPTER_KEYS:
        if getattr(config, key):
            wrong = f"{key} has no meaning with use_peft: false: there is no adapter"
            yield key, wrong, f"remove {key}, or set use_peft: true"


def _sampling_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of methods that sample answers."""
    if config.method in SAMPLING and config.packing:
        wrong = f"packing: true with method: {config.method}: sampled answers cannot be packed in advance"
        yield "packing", wrong, "set padding_free: true instead"
    if config.method in DISTILLING:
        yield from _distillation_contradictions(config)
    if config.method not in POLICY:
        return
    if not config.reward_funcs:
        yield (
            "reward_funcs",
            f"method: {config.method} needs reward_funcs",
            "name a reward for answers, such as exact or FILE.py:FUNCTION",
        )
    elif config.reward_weights is not None and len(config.reward_weights) != len(config.reward_funcs):
        wrong = f"reward_weights: {brief(config.reward_weights)} for {len(config.reward_funcs)} reward_funcs"
        yield "reward_weights", wrong, "give a weight for each function"
    elif config.reward_weights is not None and not any(config.reward_weights):
        yield (
            "reward_weights",
            f"reward_weights: {brief(config.reward_weights)}: every reward has weight 0",
            "give one above 0",
        )
    answers, group = config.answers_per_generation, config.num_generations or 2
    if answers % group:
        wrong = f"num_generations: {group} does not divide the {answers} answers of a generation"
        answers_are = "per_device_train_batch_size · steps_per_generation (or gradient_accumulation_steps)"
        fix = f"make {answers_are} a multiple of num_generations"
        yield "num_generations", wrong, fix
    if config.micro_batches_per_generation % config.gradient_accumulation_steps:
        wrong = (
            f"steps_per_generation: {config.steps_per_generation} micro-batches are not a whole number of"
            " optimizer steps"
        )
        yield "steps_per_generation", wrong, "give a multiple of gradient_accumulation_steps"
    if config.loss_type == "luspo" and config.importance_sampling_level != "sequence":
        yield "loss_type", "loss_type: luspo needs ratios of sequences", "set importance_sampling_level: sequence"
    if config.loss_type == "vespo" and config.importance_sampling_level != "token":
        yield "loss_type", "loss_type: vespo computes ratios of sequences itself", "remove importance_sampling_level"
    if config.delta is not None and config.delta <= 1 + (config.epsilon_high or config.epsilon):
        yield "delta", f"delta: {config.delta:g} is within the clip range already", "give more than 1 + epsilon_high"
    yield from _correction_contradictions(config)
    yield from _server_contradictions(config)
    if not config.use_peft and config.beta:
        wrong = "beta needs a reference, which is the model without its adapter, and use_peft: false has no adapter"
        yield "beta", wrong, "set beta: 0, or train an adapter (use_peft: true)"
    clip = config.reward_clip_range
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        yield "reward_clip_range", f"reward_clip_range: {brief(clip)} is not a range", "give [lowest, highest]"


def _server_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of rollouts on a vLLM server."""
    url = config.vllm_server_base_url
    if config.rollout != "vllm":
        if url is not None:
            wrong = f"vllm_server_base_url: {brief(url)} with rollout: {config.rollout}, which uses no server"
            yield "vllm_server_base_url", wrong, "set rollout: vllm, or remove it"
        return
    if url is None:
        yield "rollout", "rollout: vllm needs vllm_server_base_url", "set vllm_server_base_url: http://HOST:PORT"
    elif not _is_server_address(url):
        wrong = f"vllm_server_base_url: {brief(url)} is not the address of a server"
        yield "vllm_server_base_url", wrong, "write http://HOST:PORT, without /v1"
    server_keys = {"rollout_weights": "auto", "rollout_memory_gib": None, "kv_cache": "auto"}
    for key, default in server_keys.items():
        if (value := getattr(config, key)) != default:
            yield key, f"{key}: {value} with rollout: vllm, whose server has its own weights and cache", "remove it"
    if not config.use_peft:
        yield (
            "use_peft",
            "use_peft: false with rollout: vllm, which can only load adapters",
            "set use_peft: true, or rollout: halfbyte",
        )
    if config.modules_to_save:
        wrong = "modules_to_save with rollout: vllm, which cannot apply it"
        yield "modules_to_save", wrong, "remove it, or set rollout: halfbyte"
    if config.temperature != 1 and (config.top_p < 1 or config.top_k or config.min_p):
        wrong = f"temperature: {config.temperature:g} with top_p, top_k or min_p and rollout: vllm"
        yield (
            "temperature",
            f"{wrong}: the log-probabilities of vLLM cover only the tokens that remain",
            "set temperature: 1",
        )


def _is_server_address(url: str) -> bool:
    try:
        address = urlsplit(url)
        complete = address.port != 0 and not (address.username or address.query or address.fragment)
    except ValueError:
        return False
    has_host = address.scheme in ("http", "https") and address.hostname and not any(map(str.isspace, url))
    return bool(has_host and complete) and not address.path.rstrip("/").endswith("/v1")


def _distillation_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    if config.teacher_model_name_or_path is None:
        wrong = f"method: {config.method} needs teacher_model_name_or_path"
        yield "teacher_model_name_or_path", wrong, "name the teacher, a model or an adapter"
    if config.beta is not None and config.beta > 1:
        wrong = (
            f"beta: {config.beta:g} with method: {config.method}, which interpolates between two divergences"
            " from 0 to 1"
        )
        yield "beta", wrong, "give a number from 0, KL(teacher, model), to 1, KL(model, teacher)"


def _correction_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions of the importance-sampling correction."""
    low, high = config.importance_sampling_clip_min, config.importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        wrong = f"importance_sampling_clip_min: {low:g} is not below importance_sampling_clip_max: {high:g}"
        yield "importance_sampling_clip_min", wrong, "lower it"
    mode = config.importance_sampling_mode
    if config.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
        wrong = f"importance_sampling_mode: {mode} with loss_type: vespo, which multiplies the ratios of tokens itself"
        yield "importance_sampling_mode", wrong, "set token_truncate or token_mask"
