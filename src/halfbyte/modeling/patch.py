"""`halfbyte.patch`: fused forwards for a stock Hugging Face or PEFT model, bound to its module instances, reversible.

Classes stay as they are, so other models of the process do not notice, and `unpatch` only deletes what was bound. The
weights, the state dict and the adapters are the model's own throughout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from ..layers.experts import NAME as OURS
from ..ops.fp8_scaling import DelayedScaling
from ..utils.errors import ModelError
from ..utils.notices import notice
from . import recurrent
from .architectures import runs_experts
from .attention import (
    backbone_forward,
    bind_attention,
    has_own_scores,
    metadata_forward,
    multimodal_forward,
    unbind_attention,
)
from .blocks import attention_forward, layer_norm_forward, mixer_forward, mlp_forward, norm_forward
from .checkpointing import layer_forward, set_activations
from .families import Family, family_of
from .layer import MLP, Attention, TokenMixer, causal_lm_of
from .patch_record import NAME, is_bound, record
from .projections import read_projection
from .recipes import Recipe, named_recipe, set_recipe

Known = tuple[nn.Module, Family, str]  # with its kind, as `modeling.families.family_of` names it

MULTIMODAL = "multimodal model"  # the kind of what holds a vision tower and a backbone
BACKBONES = ("Model", "TextModel")

# Kind → its forward, and what that fuses.
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
OWN_LAYER = "transformers' forward of its layers runs"
OWN_EXPERTS = "transformers' own function runs them"


@dataclass
class PatchReport:
    """What `patch` fused, and what it left as it was.

    Attributes:
        family: the model's family as in `families`, None where it is not known.
        fused: operation → number of modules.
        unfused: (what, why) → number of modules.
        attention: how attention is computed, in words.
        scaling: the FP8 recipe's state: call `roll()` after each optimizer step; None in other recipes.
    """

    family: str | None
    fused: Counter[str] = field(default_factory=Counter)
    unfused: Counter[tuple[str, str]] = field(default_factory=Counter)
    attention: str = "transformers' own"
    scaling: DelayedScaling | None = None

    def __str__(self) -> str:
        lines = [f"{self.family or 'unknown family'}: {'patched' if self.fused else 'nothing fused'}"]
        lines += [f"  fused      {count:4} × {what}" for what, count in self.fused.items()]
        lines += [f"  not fused  {count:4} × {what}: {why}" for (what, why), count in self.unfused.items()]
        return "\n".join([*lines, f"  attention  {self.attention}"])


def patch(
    model: nn.Module, activations: str | Sequence[str] | None = None, recipe: str | Recipe = "bf16"
) -> PatchReport:
    """Bind fused forwards to the modules of `model`: norms, residual additions, RoPE, gated MLPs, LoRA projections.

    Loss and gradients stay those of the stock model up to rounding; with a key-value cache (generation), transformers'
    own forwards run. A projection is fused as long as one plain LoRA adapter on a frozen weight is active, which is
    looked at in every call. Patching again is harmless: it reports the model as it is now.

    Args:
        model: a causal LM of transformers of a family in `families`, or a model with images whose text part is
            of one (its vision tower is left alone), or a `peft.PeftModel` around either; anything else is left as it
            is, and the report says so.
        activations: what the decoder layers keep for backward, a level of `memory.policy.LEVELS` for all or one for
            each; None: everything, or as transformers' gradient checkpointing says.
        recipe: what products with the frozen weights are computed in: "bf16" (x's dtype), "fp8-hybrid" or "nvfp4", or
            options of one of the latter, `ops.fp8_scaling.ScalingOptions` or `autograd.linear_nvfp4.Nvfp4Recipe`.

    Returns:
        What is fused and what not, with reasons; print it.

    Raises:
        ModelError: `activations` does not fit the model, or `recipe` is none, or the model is of no known family and
            so computes in no recipe but bf16.
        ConfigError: a recipe that the model's device cannot compute.
    """
    options = named_recipe(recipe)
    known = list(_known_modules(model))
    families = [family for _, family, kind in known if kind in BACKBONES]
    if not families:
        reason = f"{type(causal_lm_of(model)).__name__} is of no family that halfbyte knows"
        if options is not None:
            raise ModelError(f"recipe: {reason}", "use recipe bf16")
        notice(f"unpatched: {reason}", f"nothing fused: {reason}; the model runs its own forwards")
        if activations is not None:
            notice("activations", f"layers keep what transformers' gradient checkpointing says: {reason}")
        return PatchReport(None, unfused=Counter({(type(causal_lm_of(model)).__name__, reason): 1}))
    report = PatchReport(families[0].name)
    for module, family, kind in known:
        if kind == "RMSNorm" and not hasattr(module, "weight"):
            continue  # a few heads' or a router's
        if kind in FORWARDS and not (kind == "DecoderLayer" and family.own_layer):
            _bind(module, family, kind, report)
        elif kind == "Experts" and not _runs_ours(module):
            report.unfused[EXPERTS, OWN_EXPERTS] += 1
    if families[0].own_layer:
        report.unfused[FORWARDS["DecoderLayer"][1], OWN_LAYER] += 1
    if families[0].mixer is not None:
        recurrent.say_what_is_missing(next(model.parameters()).device)
    if activations is not None and not families[0].own_layer:
        set_activations(_bound(known, "DecoderLayer"), activations)
    elif activations is not None:
        notice("activations", f"layers keep what transformers' gradient checkpointing says: {OWN_LAYER}")
    report.scaling = set_recipe(_bound(known, *VIEWS), options, next(model.parameters()).device)
    for reason in {why for _, why in report.unfused}:
        parts = ", ".join(what for what, why in report.unfused if why == reason)
        notice(f"unfused: {reason}", f"not fused: {parts}: {reason}")
    return report


def patch_attention(model: nn.Module) -> str:
    """Bind the attention alone, where transformers computes all scores at once: capped ones, and those with sinks.

    For CPUs, whose layers run transformers' own forwards; `unpatch` undoes it.

    Returns:
        What computes it, in words; "" where nothing was bound.
    """
    said = ""
    for module, family, kind in list(_known_modules(model)):
        if kind in BACKBONES and has_own_scores(module.config) and _obstacle(module, family, kind) is None:
            if not is_bound(module):
                record(module).family = family
                module.forward = MethodType(metadata_forward, module)
            said = bind_attention(module)
    return said


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: every module runs its class's forward again. Harmless on a model that is not patched."""
    for module in model.modules():
        unbind_attention(module)
        if is_bound(module):
            del module.__dict__["forward"]
        module.__dict__.pop(NAME, None)


def _known_modules(model: nn.Module) -> Iterator[Known]:
    """Modules of known families, with row and kind; of a multimodal model, those of its text part, and the model."""
    for outer in model.modules():
        found = family_of(type(outer))
        if found is None or found[1] not in BACKBONES:
            continue
        if not hasattr(outer, "layers"):
            if found[0].images_see_themselves:
                yield outer, found[0], MULTIMODAL
            continue
        for module in outer.modules():
            if found := family_of(type(module)):
                yield module, *found


def _bound(known: Sequence[Known], *kinds: str) -> list[nn.Module]:
    """The modules of these kinds that are patched."""
    return [module for module, _, kind in known if kind in kinds and is_bound(module)]


def _bind(module: nn.Module, family: Family, kind: str, report: PatchReport) -> None:
    """Bind one module's forward, unless something stands in the way, and put it into the report."""
    forward, fused = FORWARDS[kind]
    if obstacle := _obstacle(module, family, kind):
        report.unfused[fused, obstacle] += 1
        return
    if not is_bound(module):
        record(module).family = family
        module.forward = MethodType(forward, module)
    if kind != "MLP" or family.gated_mlp:  # of another only the products are ours
        report.fused[fused] += 1
    if kind in BACKBONES:
        report.attention = bind_attention(module)
    for role, linear in VIEWS[kind].of(module, family).linears.items() if kind in VIEWS else ():
        read = read_projection(linear)
        if isinstance(read, str):
            report.unfused[role, read] += 1
        elif read.lora is not None:
            report.fused[f"LoRA of {role}"] += 1


def _runs_ours(experts: Any) -> bool:
    """Whether a layer's experts are computed by `layers.experts`."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    return runs_experts(experts) and chosen == OURS


def _obstacle(module: Any, family: Family, kind: str) -> str | None:
    if not is_bound(module) and "forward" in module.__dict__:
        return "something else has replaced its forward"
    if kind == "MLP" and not hasattr(module, "down_proj"):
        return "its linears have other names"  # GraniteMoeHybrid's shared one
    return VIEWS[kind].of(module, family).obstacle if kind in VIEWS else None
