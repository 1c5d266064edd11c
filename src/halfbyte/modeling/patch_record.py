"""State that `halfbyte.patch` keeps on a model's modules: one `PatchRecord` each, in one attribute, until `unpatch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .families import Family

if TYPE_CHECKING:
    from ..autograd.lora import GemmRecipe
    from ..config import Level
    from ..memory.offload import Offload

RECORD = "_halfbyte"


@dataclass(frozen=True)
class Activations:
    """A layer's activation level, and the offload that moves its tensors to the host if the level offloads."""

    level: Level
    offload: Offload | None = None


@dataclass
class CastCache:
    """A model's LoRA factors and their casts to the compute dtype, in one buffer; see `cast_cache`.

    Attributes:
        holders: (PEFT's holder of the A or of the B of a module, adapter name) of each factor.
        is_open: whether the casts may be read.
    """

    dtype: torch.dtype
    device: torch.device
    holders: list[tuple[Any, str]]
    factors: list[Tensor]
    casts: list[Tensor]
    is_open: bool = False

    def is_valid(self) -> bool:
        """Return whether the model still has these factors: an adapter may be deleted and its name reused."""
        modules = (holder._modules.get(name) for holder, name in self.holders)
        return all(
            module is not None and module._parameters["weight"] is factor and factor.dtype is not self.dtype
            for module, factor in zip(modules, self.factors, strict=True)
        )

    def refresh(self) -> None:
        """Cast all factors in one launch."""
        # A forward whose backward is still pending has saved the casts and finds equal values. If the parameters had
        # changed in between, its backward would fail in any case.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.casts)):
            torch._foreach_copy_(self.casts, self.factors)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Allow reads of the casts inside the context."""
        was_open, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = was_open


@dataclass
class ActiveRows:
    """The adapters of the rows of a joint forward.

    Attributes:
        adapters: index of the adapter of each of equal ranges of rows; empty outside of such a forward.
        read: the modules whose adapters it has read.
    """

    adapters: tuple[int, ...] = ()
    read: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class RowModules:
    """The modules of the same name in the models of several adapters, which one model computes together."""

    rows: ActiveRows
    modules: list[Any]

    @property
    def active(self) -> list[Any]:
        """The modules of the adapters that the ranges of rows have, in the order of the ranges."""
        return [self.modules[adapter] for adapter in self.rows.adapters]


@dataclass
class PatchRecord:
    """The patch state of a module.

    Attributes:
        family: the family row by which the forward was bound; None: the module runs its own forward.
        activations: activation level of a decoder layer; None: as transformers' gradient checkpointing is set.
        products: for attention or MLP with a recipe: training mode → GEMM functions of the first and second GEMM.
        implementation: attention that a backbone was loaded with.
        cast_cache: for a backbone, its layers and its LoRA modules.
        casts: for a LoRA module: adapter → its A and B in the compute dtype.
        scan: for a Mamba-2 layer: whether its forward is `recurrent.isolated_forward`.
        label_loss: for a causal LM: whether its forward computes the training loss of `labels` without logits.
        row_modules: for a linear or a decoder layer of a model that computes several adapters (`row_adapters`).
    """

    family: Family | None = None
    activations: Activations | None = None
    products: dict[bool, tuple[GemmRecipe, GemmRecipe]] = field(default_factory=dict)
    implementation: str | None = None
    cast_cache: CastCache | None = None
    casts: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scan: bool = False
    label_loss: bool = False
    row_modules: RowModules | None = None


def existing_record(module: nn.Module) -> PatchRecord | None:
    """Return a module's record, or None."""
    return module.__dict__.get(RECORD)


def record(module: Any) -> PatchRecord:
    """Return a module's record, creating it if there is none."""
    patched = existing_record(module)
    if patched is None:  # no setdefault: Dynamo cannot trace it before torch 2.13
        patched = module.__dict__[RECORD] = PatchRecord()
    return patched


def active_row_modules(module: nn.Module) -> list[Any]:
    """Return the adapters' modules that a joint forward reads instead of this module; empty outside of one."""
    patched = existing_record(module)
    return [] if patched is None or patched.row_modules is None else patched.row_modules.active


def mark_read(module: nn.Module) -> None:
    """Note that a joint forward has read the adapters of this module."""
    rows = record(module).row_modules
    assert rows is not None
    rows.rows.read.add(id(module))


def is_bound(module: nn.Module) -> bool:
    """Return whether a module runs one of halfbyte's forwards."""
    patched = existing_record(module)
    return patched is not None and patched.family is not None
