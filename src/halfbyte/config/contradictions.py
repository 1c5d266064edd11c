"""Keys that cannot both hold, and keys that have no meaning beside others: the one place where they are refused.

Every rule gives the key to change, what is wrong, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from ..parallel import support
from ..utils.text import brief
from .methods import DEFAULTS, LOSS_METHODS, LOSS_TYPES, OF_DIFFERENCES, methods_of
from .policy import DISTILLING, POLICY, SAMPLING
from .schema import RECIPE_OPTIONS, QuantizationSection, RunKeys
from .section import Contradiction, nearest

OF_ADAPTERS = ("use_dora", "use_rslora", "adapter_path", "modules_to_save", "rank_pattern", "alpha_pattern")
OF_TEXT = ("dataset_format", "dataset_text_field", "completion_only_loss")


def in_run(config: RunKeys) -> Iterator[Contradiction]:
    """Among all keys of a run."""
    yield from QuantizationSection.contradictions(config)
    yield from _in_recipe(config)
    if config.qat_scheme is not None:
        yield from _in_qat_training(config)
    if not config.use_peft:
        yield from _in_full_fine_tuning(config)
    if config.parallel != "auto":
        yield from _in_parallel(config)
    if config.method in ("sft", *DEFAULTS):
        yield from _of_other_methods(config)
        yield from _in_losses(config)
        yield from _in_policy(config)


def _of_other_methods(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("method")
    for key, field in type(config).model_fields.items():
        methods = methods_of(field)
        if methods and config.method not in methods and key in config.model_fields_set and not config.is_default(key):
            wrong = f"{config.written(key)} has no meaning with {chosen}: it is of {', '.join(methods)}"
            yield key, wrong, f"remove it, or set method: {methods[0]}"
    for key in OF_TEXT if config.method != "sft" else ():
        if not config.is_default(key):
            wrong = f"{config.written(key)} with {chosen}: it is of the rows of method: sft"
            yield key, wrong, "remove it: rows are recognised by their columns, see column_mapping"


def _in_losses(config: RunKeys) -> Iterator[Contradiction]:
    """`loss_type` and the keys that only some losses know."""
    types = [config.loss_type] if isinstance(config.loss_type, str) else config.loss_type or []
    known, chosen = LOSS_TYPES.get(config.method, ()), config.written("method")
    for name in types:
        if name not in known:
            yield "loss_type", f"loss_type: {chosen} has no {brief(name)}", _instead(name, known)
    if len(types) > 1 and config.method != "dpo":
        yield "loss_type", f"{config.written('loss_type')} with {chosen}: it takes one", "several are of method: dpo"
    if config.loss_weights is not None and len(config.loss_weights) != len(types):
        wrong = f"{config.written('loss_weights')} beside {config.written('loss_type')}: not as many"
        yield "loss_weights", wrong, "give a weight for each loss type"
    elif config.loss_weights is not None and not any(config.loss_weights):
        yield "loss_weights", f"{config.written('loss_weights')}: no loss is left to train on", "give one above 0"
    if config.method == "kto" and not (config.desirable_weight or config.undesirable_weight):
        wrong = "desirable_weight and undesirable_weight are both 0: no answer is left to train on"
        yield "desirable_weight", wrong, "give one of them above 0"
    if config.beta == 0 and config.method in LOSS_TYPES and config.method not in POLICY:
        yield "beta", f"{config.written('beta')} with {chosen}: rewards would all be 0", "give a number above 0"
    if "exo_pair" in types and not config.label_smoothing:
        yield "loss_type", "loss_type: exo_pair needs label_smoothing above 0", "set it to 1e-3, as the EXO paper does"
    others = [name for name in types if name not in OF_DIFFERENCES]
    if config.f_divergence_type != "reverse_kl" and others:
        wrong = f"{config.written('f_divergence_type')} with loss_type: {others[0]}, which is not of a difference"
        yield "f_divergence_type", wrong, f"remove it, or take one of {', '.join(OF_DIFFERENCES)}"
    sorting = [name for name in types if name.startswith("aot")]
    if config.use_weighting and sorting:
        wrong = f"use_weighting: true with loss_type: {sorting[0]}: it sorts answers, so no weight is a pair's"
        yield "use_weighting", wrong, "remove it, or take another loss type"


def _instead(name: str, known: Iterable[str]) -> str:
    """The fix for a loss type that the method does not have: the method that has it, or the nearest of its own."""
    others = [f"method: {method}" for method, names in LOSS_TYPES.items() if name in names]
    elsewhere = LOSS_METHODS.get(name) or next(iter(others), "")
    if elsewhere:
        return f"set {elsewhere}"
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"one of {', '.join(known)}" if known else "remove it"


def _in_recipe(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("recipe")
    for recipe, key in ((recipe, key) for recipe, keys in RECIPE_OPTIONS.items() for key in keys):
        if recipe != config.recipe and not config.is_default(key):
            wrong = f"{config.written(key)} has no meaning with {chosen}: it is of {recipe}"
            yield key, wrong, f"remove it, or set recipe: {recipe}"
    if config.four_over_six_metric != "MSE" and not config.enable_four_over_six:
        key = "four_over_six_metric"
        yield key, f"{config.written(key)} decides nothing", "set enable_four_over_six: true, or remove it"
    if config.recipe == "bf16":
        return
    if not config.use_peft:
        wrong = f"{chosen} with use_peft: false: it is for frozen weights, and none is"
        yield "recipe", wrong, "set recipe: bf16"
    if not config.use_kernels:
        wrong = f"{chosen} with use_kernels: false: only fused forwards know recipes"
        yield "recipe", wrong, "set recipe: bf16"


def _in_parallel(config: RunKeys) -> Iterator[Contradiction]:
    layout = config.layout
    assert layout is not None
    if config.device and ":" in config.device and layout.size > 1:
        wrong = f"{config.written('device')} with {config.written('parallel')}: it is one device"
        yield "device", wrong, "remove device, or parallel"
    if reason := support.unsupported_reason(layout, config):
        yield reason


def _in_qat_training(config: RunKeys) -> Iterator[Contradiction]:
    chosen = config.written("qat_scheme")
    if config.recipe != "bf16":
        wrong = f"{chosen} with {config.written('recipe')}: products with the rounded weights run in 16 bits"
        yield "recipe", wrong, "set recipe: bf16"
    if config.lora_dropout and config.use_peft:
        said = config.written("lora_dropout")
        wrong = f"{chosen} with {said}: base and adapter are merged before rounding, and see the same input"
        yield "lora_dropout", wrong, "set lora_dropout: 0"
    if config.use_dora:
        wrong = f"{chosen} with use_dora: true: only plain LoRA is merged in every step"
        yield "use_dora", wrong, "set use_dora: false, or remove qat_scheme"


def _in_full_fine_tuning(config: RunKeys) -> Iterator[Contradiction]:
    if config.quantized:
        key = "quantization" if config.quantization else "load_in_4bit"
        wrong = f"{config.written(key)} with use_peft: false: quantized weights cannot be trained"
        unset = "16bit" if config.quantization else "false"
        yield key, wrong, f"set {key}: {unset} for full fine-tuning, or use_peft: true for QLoRA"
    for key in OF_ADAPTERS:
        if getattr(config, key):
            wrong = f"{key} has no meaning with use_peft: false: there is no adapter"
            yield key, wrong, f"remove {key}, or set use_peft: true"


def _in_policy(config: RunKeys) -> Iterator[Contradiction]:
    """Keys of methods that sample answers that cannot all hold."""
    if config.method in SAMPLING and config.packing:
        yield "packing", f"packing: true with method: {config.method}: answers come as they are written", "set padding_free: true in its place"
    if config.method in DISTILLING:
        yield from _in_distillation(config)
    if config.method not in POLICY:
        return
    if not config.reward_funcs:
        yield "reward_funcs", f"method: {config.method} needs reward_funcs", "say what an answer is rewarded for"
    elif config.reward_weights is not None and len(config.reward_weights) != len(config.reward_funcs):
        wrong = f"reward_weights: {brief(config.reward_weights)} beside {len(config.reward_funcs)} reward_funcs"
        yield "reward_weights", wrong, "give a weight for each function"
    elif config.reward_weights is not None and not any(config.reward_weights):
        yield "reward_weights", f"reward_weights: {brief(config.reward_weights)} weigh nothing", "give one above 0"
    answers, group = config.answers_per_generation, config.num_generations or 2
    if answers % group:
        wrong = f"num_generations: {group} does not divide the {answers} answers of a generation"
        answers_are = "per_device_train_batch_size · steps_per_generation (or gradient_accumulation_steps)"
        fix = f"make {answers_are} a multiple of num_generations"
        yield "num_generations", wrong, fix
    if config.micro_batches_per_generation % config.gradient_accumulation_steps:
        wrong = f"steps_per_generation: {config.steps_per_generation} micro-batches are no whole number of steps"
        yield "steps_per_generation", wrong, "give a multiple of gradient_accumulation_steps"
    if config.loss_type == "luspo" and config.importance_sampling_level != "sequence":
        yield "loss_type", "loss_type: luspo is of sequences", "set importance_sampling_level: sequence"
    if config.loss_type == "vespo" and config.importance_sampling_level != "token":
        yield "loss_type", "loss_type: vespo takes whole answers itself", "remove importance_sampling_level"
    if config.delta is not None and config.delta <= 1 + (config.epsilon_high or config.epsilon):
        yield "delta", f"delta: {config.delta:g} is within what is clipped anyway", "give more than 1 + epsilon_high"
    yield from _in_correction(config)
    yield from _in_server(config)
    if not config.use_peft and config.beta:
        wrong = "beta needs a reference, which is the model without its adapter"
        yield "beta", wrong, "set beta: 0, or train an adapter (use_peft: true)"
    clip = config.reward_clip_range
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        yield "reward_clip_range", f"reward_clip_range: {brief(clip)}", "give [least, most]"


def _in_server(config: RunKeys) -> Iterator[Contradiction]:
    """Of rollouts by vLLM."""
    url = config.vllm_server_base_url
    if config.rollout != "vllm":
        if url is not None:
            wrong = f"vllm_server_base_url: {brief(url)} with rollout: {config.rollout}, which asks no server"
            yield "vllm_server_base_url", wrong, "set rollout: vllm, or remove it"
        return
    if url is None:
        yield "rollout", "rollout: vllm needs vllm_server_base_url", "say where the server is: http://HOST:PORT"
    elif not _is_server(url):
        wrong = f"vllm_server_base_url: {brief(url)} is no address of a server"
        yield "vllm_server_base_url", wrong, "write http://HOST:PORT, without /v1"
    own = {"rollout_weights": "auto", "rollout_memory_gib": None, "kv_cache": "auto"}
    for key, default in own.items():
        if (value := getattr(config, key)) != default:
            yield key, f"{key}: {value} with rollout: vllm, which has weights and a cache of its own", "remove it"
    if not config.use_peft:
        yield (
            "use_peft",
            "use_peft: false with rollout: vllm, which takes adapters only",
            "set use_peft: true, or rollout: halfbyte",
        )
    for key in ("use_dora", "modules_to_save"):
        if getattr(config, key):
            yield key, f"{key} with rollout: vllm, which cannot apply it", "remove it, or set rollout: halfbyte"
    if config.temperature != 1 and (config.top_p < 1 or config.top_k or config.min_p):
        wrong = f"temperature: {config.temperature:g} beside top_p, top_k or min_p with rollout: vllm"
        yield "temperature", f"{wrong}, whose log-probabilities are over what those leave", "set temperature: 1"


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        return False
    named = parts.scheme in ("http", "https") and parts.hostname and not any(each.isspace() for each in url)
    return bool(named and whole) and not parts.path.rstrip("/").endswith("/v1")


def _in_distillation(config: RunKeys) -> Iterator[Contradiction]:
    if config.teacher_model_name_or_path is None:
        wrong = f"method: {config.method} needs teacher_model_name_or_path"
        yield "teacher_model_name_or_path", wrong, "name the model or the adapter that is learned from"
    if config.beta is not None and config.beta > 1:
        wrong = f"beta: {config.beta:g} with method: {config.method}, where it lies between two divergences"
        yield "beta", wrong, "give a number from 0, KL(teacher, model), to 1, KL(model, teacher)"


def _in_correction(config: RunKeys) -> Iterator[Contradiction]:
    """Of importance sampling."""
    low, high = config.importance_sampling_clip_min, config.importance_sampling_clip_max
    if low is not None and high is not None and low >= high:
        wrong = f"importance_sampling_clip_min: {low:g} is not below importance_sampling_clip_max: {high:g}"
        yield "importance_sampling_clip_min", wrong, "lower it"
    mode = config.importance_sampling_mode
    if config.loss_type == "vespo" and mode is not None and mode.startswith("sequence"):
        wrong = f"importance_sampling_mode: {mode} with loss_type: vespo, which multiplies ratios of tokens itself"
        yield "importance_sampling_mode", wrong, "set token_truncate or token_mask"
