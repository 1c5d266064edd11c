"""`halfbyte.patch`: reversible fused forwards for a stock Hugging Face or PEFT model, bound to its module instances.

Classes are unchanged, so other models of the process are not affected, and `unpatch` only deletes bound attributes. The
weights, the state dict and the adapters remain the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..formats import Int8
from ..formats.base import is_quantized
from ..layers.bnb import forget_view, is_bnb_linear
from ..ops.fp8_scaling import DelayedScaling
from ..utils.errors import ModelError
from ..utils.notices import notice
from . import recurrent
from .architectures import runs_experts
from .attention import (
    backbone_forward,
    bind_attention,
    metadata_forward,
    multimodal_forward,
    unbind_attention,
)
from .blocks import attention_forward, layer_norm_forward, mixer_forward, mlp_forward, norm_forward
from .checkpointing import layer_forward, set_activations
from .config_facts import has_custom_scores
from .experts import NAME as EXPERTS_NAME
from .families import Family, family_of
from .label_loss import bind_label_loss, has_label_head, unbind_label_loss
from .layer import MLP, Attention, TokenMixer, causal_lm_of
from .patch_record import RECORD, is_bound, record
from .projections import Recipe, read_projection, recipe_by_name, set_recipe
from .vision import bind_vision, unbind_vision

KnownModule = tuple[nn.Module, Family, str]  # with its kind from `modeling.families.family_of`

MULTIMODAL = "multimodal model"  # kind of the module that holds a vision tower and a backbone
BACKBONES = ("Model", "TextModel")

# Kind → its forward, and the operation it fuses.
METADATA = "attention metadata once a batch"
GATED = "gated activation"
FORWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "RMSNorm": (norm_forward, "RMSNorm"),
    "CenteredRMSNorm": (norm_forward, "RMSNorm"),
    "LayerNorm": (layer_norm_forward, "LayerNorm"),
    "DecoderLayer": (layer_forward, "residual additions into the norms"),
    "Attention": (attention_forward, "RoPE"),
    "MLP": (mlp_forward, GATED),
    "GatedDeltaNet": (mixer_forward, "gated norm"),
    "Model": (backbone_forward, METADATA),
    "TextModel": (backbone_forward, METADATA),
    MULTIMODAL: (multimodal_forward, METADATA),
}
VIEWS: dict[str, type[Attention | MLP | TokenMixer]] = {
    "Attention": Attention, "MLP": MLP, "GatedDeltaNet": TokenMixer
}  # fmt: skip
EXPERTS = "experts"
MAMBA2_SCAN = "Mamba-2 scan"
LABEL_LOSS = "cross-entropy of `labels` in training"
UNFUSED_LAYER = "transformers' forward of its layers runs"
UNFUSED_EXPERTS = "transformers' own function runs them"


@dataclass
class PatchReport:
    """Report of `patch`: fused and unfused operations.

    Attributes:
        family: the model's family in `families`, or None.
        fused: operation → number of modules.
        unfused: (operation, reason) → number of modules.
        attention: description of the attention.
        vision: description of the vision tower's attention; "" if it is transformers' own.
        scaling: the FP8 recipe's state: call `roll()` after each optimizer step; None in other recipes.
    """

    family: str | None
    fused: Counter[str] = field(default_factory=Counter)
    unfused: Counter[tuple[str, str]] = field(default_factory=Counter)
    attention: str = "transformers' own"
    vision: str = ""
    scaling: DelayedScaling | None = None

    def __str__(self) -> str:
        lines = [f"{self.family or 'unknown family'}: {'patched' if self.fused else 'nothing fused'}"]
        lines += [f"  fused      {count:4} × {operation}" for operation, count in self.fused.items()]
        for (operation, reason), count in self.unfused.items():
            lines.append(f"  not fused  {count:4} × {operation}: {reason}")
        lines.append(f"  attention  {self.attention}")
        if self.vision:
            lines.append(f"  vision     {self.vision}")
        return "\n".join(lines)


def patch(
    model: nn.Module,
    activations: str | Sequence[str] | None = None,
    recipe: str | Recipe = "bf16",
    fused_loss: bool = True,
) -> PatchReport:
    """Bind fused forwards to the modules of `model`: norms, residual additions, RoPE, gated MLPs, LoRA projections.

    Loss and gradients equal those of the stock model up to rounding. In training, the loss from `labels` is computed
    without full logits; calls with a key-value cache (generation) run transformers' own forwards. A projection is fused
    while exactly one plain LoRA adapter on a frozen weight is active; this is checked in every call. Patching a patched
    model only reports its current state.

    Args:
        model: a causal LM of transformers of a family in `families`, a model with images whose text part is of one (of
            its vision tower, only attention is replaced, see `modeling.vision`), or a `peft.PeftModel` around either.
            Linears may be bitsandbytes' (the real package's or `halfbyte.bitsandbytes`'): their packed weights are read
            without a copy. Any other model is left unchanged, and the report says so.
        activations: level of `modeling.checkpointing.LEVELS` at which decoder layers save activations for backward, for
            all or one for each; None: save everything, or as transformers' gradient checkpointing is set.
        recipe: precision of GEMMs with frozen weights: "bf16" (x's dtype), "fp8-hybrid" or "nvfp4", or options of one
            of the latter, `ops.fp8_scaling.ScalingOptions` or `autograd.linear_nvfp4.Nvfp4Recipe`.
        fused_loss: whether outputs of training calls with `labels` hold the loss alone. False: also the logits, for
            code that reads them, such as an accuracy of the training tokens; also in a model patched before.

    Returns:
        A printable report of the fused and the other modules, with reasons.

    Raises:
        ModelError: `activations` does not fit the model, the recipe is unknown, or the model is of no known family and
            the recipe is not bf16.
        ConfigError: the model's device does not support the recipe.
    """
    options = recipe_by_name(recipe)
    modules = list(_known_modules(model))
    families = [family for _, family, role in modules if role in BACKBONES]
    scans = Counter({MAMBA2_SCAN: recurrent.bind_mamba2_scans(model)})
    if not families:
        reason = f"halfbyte does not know the family of {type(causal_lm_of(model)).__name__}"
        if options is not None:
            raise ModelError(f"recipe: {reason}", "use recipe bf16")
        fused = f"only {MAMBA2_SCAN}" if +scans else "nothing"
        notice(f"unpatched: {reason}", f"{fused} fused: {reason}; the model runs its own forwards")
        if activations is not None:
            notice("activations", f"layers follow transformers' gradient checkpointing: {reason}")
        return PatchReport(None, +scans, Counter({(type(causal_lm_of(model)).__name__, reason): 1}))
    report = PatchReport(families[0].name, +scans, vision=bind_vision(model))
    for module, family, role in modules:
        if role == "RMSNorm" and not hasattr(module, "weight"):
            continue  # norms of heads or routers
        if role in FORWARDS and not (role == "DecoderLayer" and family.own_layer):
            _bind(module, family, role, report)
        elif role == "Experts":
            chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if chosen != EXPERTS_NAME or not runs_experts(module):
                report.unfused[EXPERTS, UNFUSED_EXPERTS] += 1
    if not fused_loss:
        unbind_label_loss(causal_lm_of(model))
    elif has_label_head(model):
        obstacle = bind_label_loss(model)
        if obstacle is None:
            report.fused[LABEL_LOSS] += 1
        else:
            report.unfused[LABEL_LOSS, obstacle] += 1
    _notify_upcast(model)
    if families[0].own_layer:
        report.unfused[FORWARDS["DecoderLayer"][1], UNFUSED_LAYER] += 1
    if families[0].mixer is not None:
        recurrent.notify_slow_scans(next(model.parameters()).device)
    if activations is not None and not families[0].own_layer:
        set_activations(_bound(modules, "DecoderLayer"), activations)
    elif activations is not None:
        notice("activations", f"layers follow transformers' gradient checkpointing: {UNFUSED_LAYER}")
    report.scaling = set_recipe(_bound(modules, *VIEWS), options, next(model.parameters()).device)
    for reason in {cause for _, cause in report.unfused}:
        operations = ", ".join(operation for operation, cause in report.unfused if cause == reason)
        notice(f"unfused: {reason}", f"not fused: {operations}: {reason}")
    return report


def patch_attention(model: nn.Module) -> str:
    """Bind only the attention, in models for which transformers materializes all scores: with caps or with sinks.

    For CPUs, whose layers run transformers' own forwards; `unpatch` undoes it.

    Returns:
        Description of the attention; "" if nothing was bound.
    """
    description = ""
    for module, family, role in list(_known_modules(model)):
        if role in BACKBONES and has_custom_scores(module.config) and _obstacle(module, family, role) is None:
            if not is_bound(module):
                record(module).family = family
                module.forward = MethodType(metadata_forward, module)
            description = bind_attention(module)
    return description


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: every module runs its class's forward again. Does nothing on a model that is not patched."""
    unbind_vision(model)
    for module in model.modules():
        unbind_attention(module)
        unbind_label_loss(module)
        forget_view(module)
        recurrent.unbind_mamba2_scan(module)
        if is_bound(module):
            del module.__dict__["forward"]
        module.__dict__.pop(RECORD, None)


def _known_modules(model: nn.Module) -> Iterator[KnownModule]:
    """Yield modules of known families with row and kind; for a multimodal model, its text part's and itself."""
    for outer in model.modules():
        row = family_of(type(outer))
        if row is None or row[1] not in BACKBONES:
            continue
        if not hasattr(outer, "layers"):
            if row[0].bidirectional_images:
                yield outer, row[0], MULTIMODAL
            continue
        for module in outer.modules():
            if row := family_of(type(module)):
                yield module, *row


def _bound(modules: Sequence[KnownModule], *roles: str) -> list[nn.Module]:
    """Return the patched modules of these kinds."""
    return [module for module, _, role in modules if role in roles and is_bound(module)]


def _bind(module: nn.Module, family: Family, role: str, report: PatchReport) -> None:
    """Bind one module's forward unless it has an obstacle, and add it to the report."""
    forward, fused = FORWARDS[role]
    if obstacle := _obstacle(module, family, role):
        report.unfused[fused, obstacle] += 1
        return
    if not is_bound(module):
        record(module).family = family
        module.forward = MethodType(forward, module)
    if role != "MLP" or family.gated_mlp:  # in a plain MLP, only the projections are fused
        report.fused[fused] += 1
    if role in BACKBONES:
        report.attention = bind_attention(module)
    for name, linear in VIEWS[role].of(module, family).linears.items() if role in VIEWS else ():
        read = read_projection(linear)
        if isinstance(read, str):
            report.unfused[name, read] += 1
        elif read.lora is not None:
            report.fused[f"LoRA of {name}"] += 1
        if not isinstance(read, str) and is_quantized(read.weight) and isinstance(read.weight.format, Int8):
            notice("patched-int8", "8-bit linears multiply unquantized inputs by the dequantized weight while patched")


def _notify_upcast(model: nn.Module) -> None:
    """Log once how much memory a frozen embedding and head in float32 take next to bitsandbytes' linears."""
    causal_lm = causal_lm_of(model)
    ends = (getattr(causal_lm, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    weights = {id(weight): weight for end in ends if (weight := getattr(end, "weight", None)) is not None}
    wide = [weight for weight in weights.values() if weight.dtype == torch.float32 and not weight.requires_grad]
    if wide and any(map(is_bnb_linear, causal_lm.modules())):
        gib = sum(2 * weight.numel() for weight in wide) / 2**30
        notice(
            "upcast-head",
            f"the frozen embedding and head are stored in float32: {gib:.2f} GiB more than in bfloat16. Patched models "
            "do not need it: load the model in bfloat16, and in place of prepare_model_for_kbit_training call "
            "gradient_checkpointing_enable() and enable_input_require_grads()",
        )


def _obstacle(module: Any, family: Family, role: str) -> str | None:
    """Return why a module cannot be patched, or None."""
    if not is_bound(module) and "forward" in module.__dict__:
        return "something else has replaced its forward"
    if role == "MLP" and not hasattr(module, "down_proj"):
        return "its linears have other names"  # GraniteMoeHybrid's shared MLP
    return VIEWS[role].of(module, family).obstacle if role in VIEWS else None
