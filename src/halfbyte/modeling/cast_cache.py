"""The adapters' factors in the compute dtype, all cast in one launch as a forward begins.

PEFT trains A and B in fp32; products take them in 16 bits. Cast where they are used, that is 128 launches a step in an
8B model, each too small to fill a GPU: 2.1 ms on an H200, where one launch for all of them takes 0.1.

Whether a copy still holds what its factor holds cannot be seen afterwards: fused optimizers, bitsandbytes' and replayed
CUDA graphs change a parameter without raising its version. So copies are made in every forward of the backbone, with
gradients or without, and used only while that forward runs, or is run again for its backward. Anywhere else, and for
whatever is not listed here (an adapter that came later), the product casts for itself. Copies lie side by side in the
order of the modules, so that the A of projections that read one input are one stacked matrix.

Where processes step slices of the factors (`parallel.shard.trained`), no factor is whole in fp32: there the copies
take the factors' places (`in_their_place`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..dispatch import autocast_dtype
from ..layers.plain import read_linear
from .patch_record import patched, record

ALIGNED = 8  # elements of 16 bits: products want 16 bytes


@dataclass
class Copies:
    """Factors of one model, and their copies in one buffer.

    Attributes:
        places: (lora_A or lora_B of a module, name of the adapter) of each factor.
        open: whether the copies may be read.
    """

    dtype: torch.dtype
    device: torch.device
    places: list[tuple[Any, str]]
    factors: list[Tensor]
    copies: list[Tensor]
    open: bool = False

    @classmethod
    def of(cls, backbone: Any, dtype: torch.dtype, device: torch.device) -> Copies:
        """Buffers for all trained factors of another dtype; tells the layers and LoRA modules of `backbone` of them."""
        found = [
            (module, name)
            for module in backbone.modules()
            if isinstance(module, LoraLinear)
            for name in module.active_adapters
            if name in module.lora_A and _castable(module.lora_A[name].weight, dtype, device)
        ]
        places = _places(found)
        factors: list[Tensor] = [holder[name].weight for holder, name in places]
        copies = _side_by_side(factors, dtype, device)
        self = cls(dtype, device, places, factors, copies)
        for layer in backbone.layers:
            record(layer).copies = self
        for at, (module, name) in enumerate(found):
            own = record(module)
            own.copies, own.copied[name] = self, (copies[at], copies[at + len(found)])
        return self

    def fit(self) -> bool:
        """Whether the model's adapters are still these parameters, of another dtype: one may be deleted, and another
        have its name."""
        factors = (holder._modules.get(name) for holder, name in self.places)
        return all(
            module is not None and module._parameters["weight"] is factor and factor.dtype is not self.dtype
            for module, factor in zip(factors, self.factors, strict=True)
        )

    def refresh(self) -> None:
        # A forward that is still to be differentiated has saved them, and finds equal values: had somebody changed the
        # parameters in between, it could not be differentiated in any case.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.copies)):
            torch._foreach_copy_(self.copies, self.factors)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before


def _places(found: Iterable[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Those of all A, then of all B, of adapters by module and name."""
    found = list(found)
    return [(module.lora_A, name) for module, name in found] + [(module.lora_B, name) for module, name in found]


def _side_by_side(factors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors like `factors`, in one buffer."""
    sizes = [-(-factor.numel() // ALIGNED) * ALIGNED for factor in factors]
    parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
    return [part[: f.numel()].view(f.shape) for part, f in zip(parts, factors, strict=True)]


def in_their_place(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Parameter, Tensor]]:
    """Trained factors that products alone read, and for each a tensor in the products' dtype to hold it instead.

    Those of plain LoRA are: a variant (DoRA), or quantization-aware training, computes with their own digits.
    """
    found = []
    for module in model.modules():
        read = read_linear(module) if isinstance(module, LoraLinear) else ""
        if not isinstance(read, str):
            own = [(module, each.name) for each in read.adapters if _castable(each.a, dtype, each.a.device)]
            found += own
    factors = [holder[name].weight for holder, name in _places(found)]
    return list(zip(factors, _side_by_side(factors, dtype, factors[0].device), strict=True)) if factors else []


def _castable(factor: Any, dtype: torch.dtype, device: torch.device) -> bool:
    return factor.requires_grad and factor.dtype is not dtype and factor.device == device


def fresh_copies(backbone: Any) -> contextlib.AbstractContextManager[None]:
    """Around a forward of `backbone`, a transformers model: casts its factors, one launch, and has products use them.

    Buffers are made in the first forward that is to be differentiated.
    """
    device: torch.device = backbone.device
    dtype = autocast_dtype(device.type) or backbone.dtype
    copies = record(backbone).copies
    if copies is not None and not copies.fit():
        clear_copies(backbone)
        copies = None
    if copies is None or copies.dtype is not dtype or copies.device != device:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        clear_copies(backbone)
        record(backbone).copies = copies = Copies.of(backbone, dtype, device)
    if copies.factors:
        copies.refresh()
    return copies.opened()


def copies_of(module: nn.Module, adapter: str) -> tuple[Tensor, Tensor] | None:
    """A and B of an adapter of a LoRA module, cast; None where the forward that is under way has made none."""
    own = patched(module)
    return own.copied.get(adapter) if own is not None and own.copies is not None and own.copies.open else None


def run_again(layer: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a part of the forward of `layer`, for backward to run again: with the copies it reads now."""
    copies = record(layer).copies
    if copies is None or not copies.open:
        return function

    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with copies.opened():
            return function(*args, **kwargs)

    return again


def clear_copies(backbone: nn.Module) -> None:
    """Undo `fresh_copies`."""
    for module in backbone.modules():
        if (own := patched(module)) is not None:
            own.copies, own.copied = None, {}
