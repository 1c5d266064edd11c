"""What `halfbyte.patch` keeps on the modules of a model: one record each, in one attribute, which `unpatch` deletes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .families import Family

if TYPE_CHECKING:
    from ..autograd.lora import GemmRecipe
    from .cast_cache import Copies
    from .checkpointing import Activations

NAME = "_halfbyte"


@dataclass
class Patched:
    """The record of a module.

    Attributes:
        family: the row by which its forward was bound; None: it runs its own.
        activations: of a decoder layer: what it keeps for backward; None: as transformers' checkpointing says.
        products: of an attention or MLP: in training or not → what computes its first and its second product, where
            that is a recipe.
        implementation: of a backbone: the attention it had.
        copies: of a backbone, its layers and its LoRA modules: the adapters in the compute dtype.
        copied: of a LoRA module: adapter → its A and B there.
    """

    family: Family | None = None
    activations: Activations | None = None
    products: dict[bool, tuple[GemmRecipe, GemmRecipe]] = field(default_factory=dict)
    implementation: str | None = None
    copies: Copies | None = None
    copied: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def patched(module: nn.Module) -> Patched | None:
    return module.__dict__.get(NAME)


def record(module: Any) -> Patched:
    """The module's own, made where there is none."""
    found = patched(module)
    if found is None:  # no setdefault: Dynamo cannot trace it before torch 2.13
        found = module.__dict__[NAME] = Patched()
    return found


def is_bound(module: nn.Module) -> bool:
    """Whether the module runs one of our forwards."""
    found = patched(module)
    return found is not None and found.family is not None
