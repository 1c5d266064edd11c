"""Keys that cannot both hold, and keys that have no meaning beside others: the one place where they are refused.

Every rule gives the key to change, what is wrong, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..utils.text import brief
from .methods import DEFAULTS, LOSS_METHODS, LOSS_TYPES, OF_DIFFERENCES, methods_of
from .policy import POLICY, in_policy
from .section import nearest
from .yaml import dump_value

if TYPE_CHECKING:
    from .schema import QuantizationSection, RunConfig
    from .section import Section

Contradiction = tuple[str, str, str]
FOUR_BIT = ("bnb_4bit_quant_type", "bnb_4bit_blocksize", "bnb_4bit_use_double_quant")
OF_ADAPTERS = ("use_dora", "use_rslora", "adapter_path", "modules_to_save", "rank_pattern", "alpha_pattern")
OF_TEXT = ("dataset_format", "dataset_text_field", "completion_only_loss")
RECIPE_OPTIONS = {
    "fp8-hybrid": ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    "nvfp4": (
        *("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
        *("enable_four_over_six", "four_over_six_metric"),
    ),
}


def in_storage(config: QuantizationSection) -> Iterator[Contradiction]:
    """Among the keys that say how weights are stored."""
    skips = [key for key in ("skip_quant_first_layers", "skip_quant_last_layers") if getattr(config, key)]
    if skips and not config.quantized:
        yield skips[0], f"{skips[0]} has no meaning when every layer is kept in 16 bits", f"remove {skips[0]}"
    if config.quantization is not None:
        yield from _in_quantization(config, skips)
    if config.qat_scheme is not None:
        yield from _in_qat_storage(config)


def _in_quantization(config: QuantizationSection, skips: list[str]) -> Iterator[Contradiction]:
    """`quantization` against the keys that choose between 16 bits, NF4 and FP4."""
    chosen, quantization = _said(config, "quantization"), config.quantization
    if not config.load_in_4bit:
        yield "quantization", f"load_in_4bit: false contradicts {chosen}", "remove one of the two"
    if quantization == "keep":  # the other keys are of the layers that are not kept
        if skips:
            yield skips[0], f"{skips[0]} contradicts {chosen}: kept layers are not in 16 bits", "remove one of the two"
        return
    if config.bnb_4bit_quant_type not in ("nf4", quantization):
        wrong = f"{_said(config, 'bnb_4bit_quant_type')} contradicts {chosen}"
        yield "quantization", wrong, "remove bnb_4bit_quant_type"
    names = set(quantization.values()) if isinstance(quantization, dict) else {quantization}
    for key in FOUR_BIT[1:]:
        if not _is_default(config, key) and not names & {"nf4", "fp4"}:
            wrong = f"{_said(config, key)} has no meaning with {chosen}: it is of nf4 and fp4"
            yield "quantization", wrong, f"remove {key}"


def _in_qat_storage(config: QuantizationSection) -> Iterator[Contradiction]:
    chosen = _said(config, "qat_scheme")
    if config.quantized:
        key = "quantization" if config.quantization else "load_in_4bit"
        wrong = "it trains 16-bit weights to be rounded later, and those are rounded already"
        fix = f"set {key}: {'16bit' if config.quantization else 'false'}, or remove qat_scheme"
        yield key, f"{chosen} with {_said(config, key)}: {wrong}", fix
    for key in FOUR_BIT:
        if not _is_default(config, key):
            fix = "remove it; qat_scheme: blockwise4:nf4:128:nested spells all three, or qat_scheme: fp4"
            yield key, f"{_said(config, key)} has no meaning with {chosen}", fix


def in_run(config: RunConfig) -> Iterator[Contradiction]:
    """Among all keys of a run."""
    yield from in_storage(config)
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
        yield from in_policy(config)


def _of_other_methods(config: RunConfig) -> Iterator[Contradiction]:
    chosen = _said(config, "method")
    for key, field in type(config).model_fields.items():
        methods = methods_of(field)
        if methods and config.method not in methods and key in config.model_fields_set and not _is_default(config, key):
            wrong = f"{_said(config, key)} has no meaning with {chosen}: it is of {', '.join(methods)}"
            yield key, wrong, f"remove it, or set method: {methods[0]}"
    for key in OF_TEXT if config.method != "sft" else ():
        if not _is_default(config, key):
            wrong = f"{_said(config, key)} with {chosen}: it is of the rows of method: sft"
            yield key, wrong, "remove it: rows are recognised by their columns, see column_mapping"


def _in_losses(config: RunConfig) -> Iterator[Contradiction]:
    """`loss_type` and the keys that only some losses know."""
    types = [config.loss_type] if isinstance(config.loss_type, str) else config.loss_type or []
    known, chosen = LOSS_TYPES.get(config.method, ()), _said(config, "method")
    for name in types:
        if name not in known:
            yield "loss_type", f"loss_type: {chosen} has no {brief(name)}", _instead(name, known)
    if len(types) > 1 and config.method != "dpo":
        yield "loss_type", f"{_said(config, 'loss_type')} with {chosen}: it takes one", "several are of method: dpo"
    if config.loss_weights is not None and len(config.loss_weights) != len(types):
        wrong = f"{_said(config, 'loss_weights')} beside {_said(config, 'loss_type')}: not as many"
        yield "loss_weights", wrong, "give a weight for each loss type"
    elif config.loss_weights is not None and not any(config.loss_weights):
        yield "loss_weights", f"{_said(config, 'loss_weights')}: no loss is left to train on", "give one above 0"
    if config.method == "kto" and not (config.desirable_weight or config.undesirable_weight):
        wrong = "desirable_weight and undesirable_weight are both 0: no answer is left to train on"
        yield "desirable_weight", wrong, "give one of them above 0"
    if config.beta == 0 and config.method in LOSS_TYPES and config.method not in POLICY:
        yield "beta", f"{_said(config, 'beta')} with {chosen}: rewards would all be 0", "give a number above 0"
    if "exo_pair" in types and not config.label_smoothing:
        yield "loss_type", "loss_type: exo_pair needs label_smoothing above 0", "set it to 1e-3, as the EXO paper does"
    others = [name for name in types if name not in OF_DIFFERENCES]
    if config.f_divergence_type != "reverse_kl" and others:
        wrong = f"{_said(config, 'f_divergence_type')} with loss_type: {others[0]}, which is not of a difference"
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


def _in_recipe(config: RunConfig) -> Iterator[Contradiction]:
    chosen = _said(config, "recipe")
    for recipe, key in ((recipe, key) for recipe, keys in RECIPE_OPTIONS.items() for key in keys):
        if recipe != config.recipe and not _is_default(config, key):
            wrong = f"{_said(config, key)} has no meaning with {chosen}: it is of {recipe}"
            yield key, wrong, f"remove it, or set recipe: {recipe}"
    if config.four_over_six_metric != "MSE" and not config.enable_four_over_six:
        key = "four_over_six_metric"
        yield key, f"{_said(config, key)} decides nothing", "set enable_four_over_six: true, or remove it"
    if config.recipe == "bf16":
        return
    if not config.use_peft:
        wrong = f"{chosen} with use_peft: false: it is for frozen weights, and none is"
        yield "recipe", wrong, "set recipe: bf16"
    if not config.use_kernels:
        wrong = f"{chosen} with use_kernels: false: only fused forwards know recipes"
        yield "recipe", wrong, "set recipe: bf16"


def _in_parallel(config: RunConfig) -> Iterator[Contradiction]:
    from .combinations import obstacle, of_keys, of_method  # which know the sections
    from .resolve import Parallel

    assert config.parallel != "auto"
    layout = Parallel(**config.parallel)
    if config.device and ":" in config.device and layout.size > 1:
        wrong = f"{_said(config, 'device')} with {_said(config, 'parallel')}: it is one device"
        yield "device", wrong, "remove device, or parallel"
    if impossible := obstacle(layout) or of_method(layout, config.method):
        yield "parallel", *impossible
    elif clashing := of_keys(layout, config):
        yield clashing


def _in_qat_training(config: RunConfig) -> Iterator[Contradiction]:
    chosen = _said(config, "qat_scheme")
    if config.recipe != "bf16":
        wrong = f"{chosen} with {_said(config, 'recipe')}: products with the rounded weights run in 16 bits"
        yield "recipe", wrong, "set recipe: bf16"
    if config.lora_dropout and config.use_peft:
        said = _said(config, "lora_dropout")
        wrong = f"{chosen} with {said}: base and adapter are merged before rounding, and see the same input"
        yield "lora_dropout", wrong, "set lora_dropout: 0"
    if config.use_dora:
        wrong = f"{chosen} with use_dora: true: only plain LoRA is merged in every step"
        yield "use_dora", wrong, "set use_dora: false, or remove qat_scheme"


def _in_full_fine_tuning(config: RunConfig) -> Iterator[Contradiction]:
    if config.quantized:
        key = "quantization" if config.quantization else "load_in_4bit"
        wrong = f"{_said(config, key)} with use_peft: false: quantized weights cannot be trained"
        unset = "16bit" if config.quantization else "false"
        yield key, wrong, f"set {key}: {unset} for full fine-tuning, or use_peft: true for QLoRA"
    for key in OF_ADAPTERS:
        if getattr(config, key):
            wrong = f"{key} has no meaning with use_peft: false: there is no adapter"
            yield key, wrong, f"remove {key}, or set use_peft: true"


def _said(config: Section, key: str) -> str:
    return dump_value(key, getattr(config, key))


def _is_default(config: Section, key: str) -> bool:
    return bool(getattr(config, key) == type(config).model_fields[key].default)
