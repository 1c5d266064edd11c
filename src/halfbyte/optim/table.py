"""Optimizers by transformers' `optim` names, constructed and grouped as in transformers' Trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ..adapter_kinds import LORA_B, LORA_EMBEDDING
from ..utils.notices import notice
from .groups import (
    Settings,
    backward_gradient_bytes,
    backward_parts,
    embedding_weights,
    matched,
    matched_groups,
    parameter_groups,
    target_matrices,
    trained_parameters,
)
from .options import (
    ADAGRAD_OPTIONS,
    ADEMAMIX_OPTIONS,
    ANY_PRECISION_OPTIONS,
    APOLLO_MINI_OPTIONS,
    APOLLO_OPTIONS,
    BADAM_OPTIONS,
    GROKADAMW_OPTIONS,
    LAMB_OPTIONS,
    LARS_OPTIONS,
    LOW_RANK_NAMES,
    PROJECTION_OPTIONS,
    Q_GALORE_OPTIONS,
    RMSPROP_OPTIONS,
    SCHEDULE_FREE_OPTIONS,
    SGD_OPTIONS,
    SLICED,
    STABLE_ADAMW_OPTIONS,
    STORAGE_OF_BITS,
    TORCHAO_OPTIONS,
    Option,
    fused_options,
    option_values,
)
from .packages import (
    adalomo_bytes,
    any_precision_copies,
    copies_bytes,
    lomo_gradient_bytes,
    make_any_precision,
    make_grokadamw,
    make_lomo,
    make_schedule_free,
    make_stable_adamw,
    make_torchao,
    stable_adamw_copies,
    torchao_bytes,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .badam import Blocks
    from .low_rank import LowRank

WITHOUT_SCALES = ("weight", "fp32", "bf16")  # storages that small parameters and embeddings have too
BETAS = ("adam_beta1", "adam_beta2")
ADAM_KEYS = (*BETAS, "adam_epsilon")
FEWEST_IN_8_BITS = 4096  # elements; bitsandbytes stores the states of smaller parameters in 32 bits


@dataclass(frozen=True)
class Optimizer:
    """A row of the table.

    Attributes:
        make: (model, settings) → the optimizer of the model's trained parameters.
        state_bytes: (model, settings) → bytes of the optimizer's state on the weights' device between steps, excluding
            step counts and tables shared by all parameters; the model may be on the meta device.
        options: keys of `optim_args`.
        adam_keys: keys of `ADAM_KEYS` that it reads.
        updates: which parameters a step updates. all: all of them; backward: each one in the backward, when its
            gradient is complete, which is then freed; block: those of one block.
        gradient_bytes: (model, settings) → bytes of gradients between backward and step; None: those of all trained
            parameters.
        takes_targets: whether the row reads `optim_target_modules`.
        guarded: whether the step reads `found_inf` on the device, as torch.amp.GradScaler expects, and changes nothing
            if it is 1.
        capturable: whether a CUDA graph can capture the step, given `capturable=True` in the groups.
        host_bytes: (model, settings) → bytes of the state in pinned host memory, of which `state_bytes` is a window;
            None: 0.
        scratch: whether a step on an accelerator allocates temporary memory of the size of the trained parameters.
        block: elements that a step treats together, except for the norms of trust ratios, which are summed over ranks;
            it can step slices of parameters that are cut at multiples of it. 0: whole parameters.
        block_by: settings → `block`, if options change it.
        offloaded: the row with its state in host memory; None: it has none.
        in_backward: whether the optimizer has `update_in_backward`.
        has_modes: whether the optimizer trains other weights than those to evaluate and save, so that it has `train()`
            and `eval()`, which exchange them in place.
        package: module of a required extra package, or None.
        requirement: what `pip install` takes for it.
    """

    make: Callable[[nn.Module, Settings], torch.optim.Optimizer]
    state_bytes: Callable[[nn.Module, Settings], int]
    options: Mapping[str, Option] = field(default_factory=dict)
    adam_keys: tuple[str, ...] = ()
    updates: Literal["all", "backward", "block"] = "all"
    gradient_bytes: Callable[[nn.Module, Settings], int] | None = None
    takes_targets: bool = False
    guarded: bool = False
    capturable: bool = False
    host_bytes: Callable[[nn.Module, Settings], int] | None = None
    scratch: bool = False
    block: int = 0
    block_by: Callable[[Settings], int] | None = None
    offloaded: Optimizer | None = None
    in_backward: bool = False
    has_modes: bool = False
    package: str | None = None
    requirement: str | None = None

    @property
    def elementwise(self) -> bool:
        """Whether a step can be divided among ranks at any element, without options that change it."""
        return self.block == 1

    def block_of(self, settings: Settings) -> int:
        """Return `block` with the options of a run."""
        return self.block_by(settings) if self.block_by else self.block


def optimizer_row(settings: Settings) -> Optimizer:
    """Return the row of `settings.optim` with the run's `optim_offload` and `optim_in_backward`; "auto" is no."""
    row = OPTIMIZERS[settings.optim]
    if settings.optim_offload is True and row.offloaded is not None:
        row = row.offloaded
    return _in_backward(row) if settings.optim_in_backward is True and row.in_backward else row


def state_key(settings: Settings) -> str:
    """Return the configuration key that puts the optimizer's state into host memory, if it is there."""
    return "optim" if OPTIMIZERS[settings.optim].host_bytes else "optim_offload"


def _in_backward(row: Optimizer) -> Optimizer:
    """The row of an optimizer that updates each layer in the backward."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        made: Any = row.make(model, settings)
        made.update_in_backward(backward_parts(model))
        return made

    def gradient_bytes(model: nn.Module, settings: Settings) -> int:
        return backward_gradient_bytes(model)

    updates: dict[str, Any] = {"make": make, "updates": "backward", "gradient_bytes": gradient_bytes}
    return replace(row, **updates, guarded=False, capturable=False)


def memory_choices(settings: Settings, alone: bool, has_host: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of `optim_in_backward` and `optim_offload` that a run may have, the fastest first.

    Args:
        alone: whether the run has one process and no loss scale.
        has_host: whether host memory is not the device's.
    """
    row = OPTIMIZERS[settings.optim]
    may_update = alone and row.in_backward and settings.lora_preconditioner is None
    may_update = may_update and not settings.max_grad_norm and settings.gradient_accumulation_steps == 1
    ways, places = [settings.optim_in_backward], [settings.optim_offload]
    ways += [True] if ways == ["auto"] and may_update else []
    places += [True] if places == ["auto"] and has_host and row.offloaded is not None else []
    for offload in places:
        for in_backward in ways:
            yield {"optim_in_backward": in_backward, "optim_offload": offload}


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return the optimizer `settings.optim` of the model's trained parameters, with `lora_preconditioner` before it."""
    made = optimizer_row(settings).make(model, settings)
    if settings.lora_preconditioner == "riemannian":
        from .riemannian import precondition_before

        precondition_before(made, model)
    return made


def _adam_keywords(settings: Settings) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}


def _torch(
    kind: str, copies: int | Callable[[dict[str, Any]], int], betas: bool = False, fused: bool = False,
    options: Mapping[str, Option] | None = None, **row: Any,
) -> Optimizer:  # fmt: skip
    """A torch optimizer with `copies` state tensors per parameter (by its options), in the parameter's dtype."""
    declared = options or {}

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import torch

        keywords = option_values(declared, settings.optim_args) | ({"fused": True} if fused else {})
        if betas:
            keywords |= _adam_keywords(settings)
        return getattr(torch.optim, kind)(parameter_groups(model, settings), lr=settings.learning_rate, **keywords)

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        tensors = copies if isinstance(copies, int) else copies(option_values(declared, settings.optim_args))
        return tensors * sum(p.nbytes for p in trained_parameters(model).values())

    return Optimizer(make, state_bytes, declared, ADAM_KEYS if betas else (), block=1, **row)


def _make_adafactor(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    from transformers import Adafactor

    groups = parameter_groups(model, settings)
    return Adafactor(groups, lr=settings.learning_rate, scale_parameter=False, relative_step=False)


def _adafactor_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of Adafactor's fp32 state: row and column sums of matrices, one number per element of vectors."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()

    return sum(4 * elements(parameter.shape) for parameter in trained_parameters(model).values())


def _moment_bytes(elements: int, copies: int, bits: int) -> int:
    """Bytes of a parameter's `copies` state tensors, in `bits`: 8 (storage dynamic8), 16 (bf16) or 32."""
    from ..ops.optimizer_state import STORAGES

    storage = {8: "dynamic8", 16: "bf16", 32: "fp32"}[bits]
    if bits == 8 and elements < FEWEST_IN_8_BITS:
        storage = "fp32"
    return copies * STORAGES[storage].nbytes(elements)


def _with_fp32_state(groups: list[dict[str, Any]], parameters: list[Tensor]) -> list[dict[str, Any]]:
    """The groups with the option of `fused` optimizers that gives `parameters` fp32 state."""
    chosen = {id(parameter) for parameter in parameters}
    return [
        group | {"fp32_state": tuple(i for i, each in enumerate(group["params"]) if id(each) in chosen)}
        for group in groups
    ]


def _fused(
    kind: str, storage: str = "fp32", offload: bool = False, options: Mapping[str, Option] | None = None
) -> Optimizer:
    """An optimizer of `fused` with state on the device or in host memory.

    Args:
        storage: of the state without the option `storage` or `optim_bits`; "weight": bf16 for bf16 weights as in torch,
            otherwise fp32.
    """
    declared = fused_options(kind, storage) | dict(options or {})

    def storages(settings: Settings) -> tuple[str, dict[str, str]]:
        """Storage of the state, and of the state of parameters by pattern."""
        bits = settings.optim_bits
        if isinstance(bits, int):
            return STORAGE_OF_BITS[bits], {}
        given: str = option_values(declared, settings.optim_args)["storage"]
        return given, {pattern: STORAGE_OF_BITS[each] for pattern, each in (bits or {}).items()}

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from . import fused

        given = option_values(declared, settings.optim_args)
        given["storage"], patterns = storages(settings)
        keywords: dict[str, Any] = {"lr": settings.learning_rate, "offload": offload}
        if kind not in ("RMSprop", "LARS"):
            betas = [settings.adam_beta1, settings.adam_beta2]
            betas += [given.pop("beta3")] if kind == "AdEMAMix" else []
            keywords["betas"] = tuple(betas)
        if kind in ("AdamW", "AdEMAMix"):
            given["eps"] = (settings.optim_args or {}).get("eps", settings.adam_epsilon)
        groups = matched_groups(model, parameter_groups(model, settings), patterns)
        if given["storage"] not in WITHOUT_SCALES:
            unmatched = [group for group in groups if "storage" not in group]
            rest = [group for group in groups if "storage" in group]
            groups = _with_fp32_state(unmatched, embedding_weights(model)) + rest
        keywords["min_quantized"] = FEWEST_IN_8_BITS
        made: torch.optim.Optimizer = getattr(fused, kind)(groups, **keywords, **given)
        return made

    def total(model: nn.Module, settings: Settings) -> int:
        from ..ops.optimizer import RULES
        from ..ops.optimizer_state import STORAGES
        from . import fused
        from .state_dicts import CORRECTIONS

        copies = len(RULES[getattr(fused, kind).rule].states)
        base, patterns = storages(settings)
        correction = CORRECTIONS.get(option_values(declared, settings.optim_args)["rounding"])
        in_fp32 = {id(parameter) for parameter in embedding_weights(model)}

        def nbytes(name: str, parameter: Tensor) -> int:
            elements, is_bf16 = parameter.numel(), str(parameter.dtype) == "torch.bfloat16"
            chosen = matched(name, patterns) or base
            if chosen == "weight":
                chosen = "bf16" if is_bf16 else "fp32"
            small = elements < FEWEST_IN_8_BITS or (id(parameter) in in_fp32 and not matched(name, patterns))
            stored = STORAGES["fp32" if small and chosen not in WITHOUT_SCALES else chosen]
            return copies * stored.nbytes(elements) + (correction.itemsize * elements if correction and is_bf16 else 0)

        return sum(nbytes(name, parameter) for name, parameter in trained_parameters(model).items())

    def window(model: nn.Module, settings: Settings) -> int:
        from .offload import device_bytes

        return device_bytes(total(model, settings))

    def block(settings: Settings) -> int:
        base, patterns = storages(settings)
        return max(SLICED[storage] for storage in (base, *patterns.values()))

    adam_keys = {"AdamW": ADAM_KEYS, "AdEMAMix": ADAM_KEYS, "Lion": BETAS, "LAMB": BETAS}.get(kind, ())
    row = Optimizer(make, total, declared, adam_keys, guarded=True, capturable=not offload, in_backward=True)
    row = replace(row, block=SLICED[storage], block_by=block)
    if kind not in ("LAMB", "LARS"):  # LAMB reads its state twice in a step
        row = replace(row, offloaded=None if offload else _fused(kind, storage, True, options))
    return replace(row, state_bytes=window, host_bytes=total) if offload else row


# --- low-rank and block-wise optimizers ------------------------------------------------------------------------------


def _inner_adamw(
    settings: Settings, bits: int, in_32_bits: list[Tensor], together: bool = True
) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Return the factory of the AdamW inside a low-rank or block-wise optimizer: groups → optimizer.

    Args:
        bits: 32 for state in bf16 for bf16 weights, otherwise fp32; 8 for 8-bit state.
        in_32_bits: parameters with fp32 state in place of 8 bits.
        together: whether the optimizer steps many parameters. If not, 32 bits are torch's fused AdamW, which does not
            hold gradients that are freed after a step.
    """
    keywords: dict[str, Any] = {"lr": settings.learning_rate, **_adam_keywords(settings)}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        from .fused import AdamW

        if bits == 32 and not together:
            return torch.optim.AdamW(groups, fused=True, **keywords)
        storage = {8: "dynamic8", 32: "weight"}[bits]
        return AdamW(_with_fp32_state(groups, in_32_bits), storage=storage, **keywords)

    return make


def _low_rank(options: Mapping[str, Option], bits: int = 32, layerwise: bool = False, **fixed: Any) -> Optimizer:
    """GaLore, Q-GaLore or APOLLO over AdamW with moments in `bits`.

    Args:
        options: keys of `optim_args`; their names in `LowRank` are in `LOW_RANK_NAMES` where they differ.
        fixed: values of `LowRank` that are not options.
    """

    def low_rank(settings: Settings) -> LowRank:
        from .low_rank import LowRank

        given = option_values(options, settings.optim_args)
        if (proj := given.pop("proj", None)) is not None:
            given["random"] = proj == "random"
        return LowRank(**{LOW_RANK_NAMES.get(name, name): value for name, value in given.items()} | fixed)

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from .low_rank import LowRankOptimizer, low_rank_groups

        chosen = target_matrices(model, settings.optim_target_modules)
        groups = low_rank_groups(parameter_groups(model, settings), chosen, low_rank(settings))
        inner = _inner_adamw(settings, bits, embedding_weights(model), together=not layerwise)
        rate, seed = settings.learning_rate, settings.seed
        return LowRankOptimizer(groups, inner, lr=rate, layerwise=layerwise, seed=seed)

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        from .low_rank import low_rank_bytes

        embeddings = {id(weight) for weight in embedding_weights(model)}

        def moment_bytes(elements: int, weight: Tensor, projected: bool) -> int:
            if bits == 32:
                return _moment_bytes(elements, 2, 16 if str(weight.dtype) == "torch.bfloat16" else 32)
            return _moment_bytes(elements, 2, 32 if id(weight) in embeddings and not projected else bits)

        chosen = target_matrices(model, settings.optim_target_modules)
        return low_rank_bytes(trained_parameters(model), chosen, low_rank(settings), moment_bytes)

    return Optimizer(
        make, state_bytes, options, ADAM_KEYS, takes_targets=True, guarded=not layerwise, scratch=not layerwise,
        updates="backward" if layerwise else "all", gradient_bytes=_largest_gradient if layerwise else None,
    )  # fmt: skip


def _largest_gradient(model: nn.Module, settings: Settings) -> int:
    return max((parameter.nbytes for parameter in trained_parameters(model).values()), default=0)


def _badam() -> Optimizer:
    def blocks(settings: Settings) -> Blocks:
        from .badam import Blocks

        given = option_values(BADAM_OPTIONS, settings.optim_args)
        return Blocks(**{name.removeprefix("badam_"): value for name, value in given.items()})

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from .badam import BAdam

        groups, inner = parameter_groups(model, settings), _inner_adamw(settings, 32, [], together=False)
        trained, rate, own = trained_parameters(model), settings.learning_rate, blocks(settings)
        names = own.names(trained)
        if outside := trained.keys() - {name for block in names for name in block}:
            fewer = f"optim: badam trains {len(names)} blocks of decoder layers; {len(outside)} weights outside of them"
            notice("badam", f"{fewer}, such as {min(outside)}, stay as they are (badam_mode: ratio trains all)")
        return BAdam(groups, trained, inner, lr=rate, blocks=own, seed=settings.seed)

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        from .badam import badam_bytes

        return badam_bytes(trained_parameters(model), blocks(settings))

    def gradient_bytes(model: nn.Module, settings: Settings) -> int:
        from .badam import badam_gradient_bytes

        return badam_gradient_bytes(trained_parameters(model), blocks(settings))

    return Optimizer(
        make, state_bytes, BADAM_OPTIONS, ADAM_KEYS, updates="block", gradient_bytes=gradient_bytes, guarded=True
    )


# --- Muon ------------------------------------------------------------------------------------------------------------

# Matrices that Muon leaves to AdamW besides nn.Embedding: heads, whose rows are tokens or labels, and adapters on them
OUTER = re.compile(rf"(?:^|\.)(?:lm_head|embed_out|output_embeddings|score|classifier)\.|{LORA_EMBEDDING}")
FUSED = re.compile(rf"(?:^|\.)(qkv_proj|gate_up_proj)(?:\.base_layer)?(?:\.{LORA_B}\.\w+)?(?:\.weight)?$")


def _muon(bits: Literal[8, 32]) -> Optimizer:
    """Muon with its momentum in `bits` for matrices, and AdamW for vectors, embeddings and heads."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from functools import partial

        from .fused import AdamW
        from .muon import Muon

        if not settings.use_peft:
            notice(
                "muon-whole",
                "optim: muon trains all weights of the model. If the model was pretrained with AdamW, the change of"
                " optimizer costs quality (arXiv:2605.10468). Adapters do not suffer from it: set use_peft: true, or"
                " compare with optim: adamw",
            )
        rest = _not_for_muon(model)
        groups = [
            {
                **group,
                "params": [p for p in group["params"] if (id(p) not in rest) == use_muon],
                "use_muon": use_muon,
            }
            for use_muon in (True, False)
            for group in parameter_groups(model, settings)
        ]
        adamw = partial(AdamW, **_adam_keywords(settings))
        return Muon(groups, settings.learning_rate, momentum_bits=bits, splits=_fused_parts(model), rest=adamw)

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        from .muon import BLOCK as MOMENTUM_BLOCK

        rest = _not_for_muon(model)

        def parameter_bytes(parameter: Tensor) -> int:
            numel = parameter.numel()
            if id(parameter) in rest:
                return 8 * numel
            return 4 * numel if bits == 32 else numel + 4 * math.ceil(numel / MOMENTUM_BLOCK)

        return sum(parameter_bytes(parameter) for parameter in trained_parameters(model).values())

    return Optimizer(make, state_bytes, adam_keys=ADAM_KEYS, guarded=True, capturable=True, scratch=True)


def _not_for_muon(model: nn.Module) -> set[int]:
    """Ids of the trained parameters that are no matrices or stacks of these, or belong to embeddings or heads."""
    embeddings = {id(parameter) for parameter in embedding_weights(model)}
    return {
        id(parameter)
        for name, parameter in trained_parameters(model).items()
        if parameter.dim() not in (2, 3) or id(parameter) in embeddings or OUTER.search(name)
    }


def _fused_parts(model: nn.Module) -> dict[Tensor, list[int]]:
    """Trained weight of a fused projection → the rows of each of its parts, for those of known layout.

    These are `qkv_proj`, whose parts follow from the config, and `gate_up_proj`; as weight of a linear, factor B of its
    adapter, or stack of experts [E, 2I, H].
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
    kv = (getattr(config, "num_key_value_heads", None) or heads) * width
    parts: dict[Tensor, list[int]] = {}
    for name, parameter in trained_parameters(model).items():
        found = FUSED.search(name)
        if found is None or parameter.dim() not in (2, 3):
            continue
        rows = parameter.shape[-2]
        if found[1] == "qkv_proj":
            sizes = [heads * width, kv, kv]
        else:
            sizes = [rows // 2] * 2
        stacked = parameter.dim() == 3 and parameter.shape[-1] != getattr(config, "hidden_size", None)
        if sum(sizes) == rows and not stacked:  # a stack [E, H, 2I] has its parts in columns
            parts[parameter] = sizes
    return parts


def _schedule_free(kind: str, copies: int, version: str = "1.2.6") -> Optimizer:
    options = SCHEDULE_FREE_OPTIONS
    return Optimizer(
        make_schedule_free(kind, options), copies_bytes(copies), options, () if kind == "SGD" else ADAM_KEYS,
        scratch=True, has_modes=True,
        package="schedulefree", requirement=f"schedulefree>={version}",
    )  # fmt: skip


def _torchao(bits: int) -> Optimizer:
    return Optimizer(
        make_torchao(f"AdamW{bits}bit", TORCHAO_OPTIONS), torchao_bytes(bits, TORCHAO_OPTIONS), TORCHAO_OPTIONS,
        ADAM_KEYS, package="torchao", requirement="torchao>=0.11",
    )  # fmt: skip


def _lomo(kind: str, state_bytes: Callable[[nn.Module, Settings], int]) -> Optimizer:
    return Optimizer(
        make_lomo(kind), state_bytes, updates="backward", gradient_bytes=lomo_gradient_bytes,
        package="lomo_optim", requirement="lomo-optim",
    )  # fmt: skip


def _rmsprop_copies(options: dict[str, Any]) -> int:
    return 1 + bool(options["momentum"]) + options["centered"]


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": _fused("AdamW", "weight"),
    "adamw_torch": _torch("AdamW", 2, betas=True, capturable=True, scratch=True),
    "adamw_torch_fused": _torch("AdamW", 2, betas=True, fused=True, guarded=True, capturable=True),
    "adafactor": Optimizer(_make_adafactor, _adafactor_bytes),
    "sgd": _torch("SGD", lambda options: bool(options["momentum"]), options=SGD_OPTIONS),
    "adagrad": _torch("Adagrad", 1, scratch=True, options=ADAGRAD_OPTIONS),
    "rmsprop": _torch("RMSprop", _rmsprop_copies, capturable=True, scratch=True, options=RMSPROP_OPTIONS),
    "adamw_8bit": _fused("AdamW", "dynamic8"),
    "adamw_bnb_8bit": _fused("AdamW", "dynamic8"),
    "paged_adamw_8bit": _fused("AdamW", "dynamic8", offload=True),
    "paged_adamw_32bit": _fused("AdamW", offload=True),
    "ademamix": _fused("AdEMAMix", options=ADEMAMIX_OPTIONS),
    "ademamix_8bit": _fused("AdEMAMix", "dynamic8", options=ADEMAMIX_OPTIONS),
    "paged_ademamix_8bit": _fused("AdEMAMix", "dynamic8", offload=True, options=ADEMAMIX_OPTIONS),
    "paged_ademamix_32bit": _fused("AdEMAMix", offload=True, options=ADEMAMIX_OPTIONS),
    "lion_8bit": _fused("Lion", "dynamic8"),
    "lion_32bit": _fused("Lion"),
    "paged_lion_8bit": _fused("Lion", "dynamic8", offload=True),
    "paged_lion_32bit": _fused("Lion", offload=True),
    "lamb": _fused("LAMB", options=LAMB_OPTIONS),
    "lars": _fused("LARS", options=LARS_OPTIONS),
    "rmsprop_bnb": _fused("RMSprop"),
    "rmsprop_bnb_8bit": _fused("RMSprop", "dynamic8"),
    "rmsprop_bnb_32bit": _fused("RMSprop"),
    "muon": _muon(32),
    "muon_8bit": _muon(8),
    "galore_adamw": _low_rank(PROJECTION_OPTIONS),
    "galore_adamw_layerwise": _low_rank(PROJECTION_OPTIONS, layerwise=True),
    "galore_adamw_8bit": _low_rank(PROJECTION_OPTIONS, bits=8),
    "galore_adamw_8bit_layerwise": _low_rank(PROJECTION_OPTIONS, bits=8, layerwise=True),
    "q_galore_adamw8bit": _low_rank(Q_GALORE_OPTIONS, bits=8),
    "apollo_adamw": _low_rank(APOLLO_OPTIONS),
    "apollo_adamw_layerwise": _low_rank(APOLLO_OPTIONS, layerwise=True),
    "apollo_mini": _low_rank(APOLLO_MINI_OPTIONS),
    "badam": _badam(),
    "schedule_free_radam": _schedule_free("RAdam", 2, "1.4.0"),
    "schedule_free_adamw": _schedule_free("AdamW", 2),
    "schedule_free_sgd": _schedule_free("SGD", 1),
    "lomo": _lomo("Lomo", copies_bytes(0)),
    "adalomo": _lomo("AdaLomo", adalomo_bytes),
    "grokadamw": Optimizer(
        make_grokadamw(GROKADAMW_OPTIONS), copies_bytes(3), GROKADAMW_OPTIONS, package="grokadamw",
        requirement="grokadamw==0.1.2",
    ),
    "stable_adamw": Optimizer(
        make_stable_adamw(STABLE_ADAMW_OPTIONS), copies_bytes(stable_adamw_copies(STABLE_ADAMW_OPTIONS)),
        STABLE_ADAMW_OPTIONS, ADAM_KEYS, scratch=True, package="optimi", requirement="torch-optimi",
    ),
    "adamw_torch_8bit": _torchao(8),
    "adamw_torch_4bit": _torchao(4),
    "adamw_anyprecision": Optimizer(
        make_any_precision(ANY_PRECISION_OPTIONS), copies_bytes(any_precision_copies(ANY_PRECISION_OPTIONS)),
        ANY_PRECISION_OPTIONS, ADAM_KEYS, scratch=True, package="torchdistx",
        requirement="git+https://github.com/pytorch/torchdistx",
    ),
}  # fmt: skip
