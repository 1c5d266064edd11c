"""The adapters' factors in the compute dtype, all cast in one launch as a forward begins.

PEFT trains A and B in fp32; products take them in 16 bits. Cast where they are used, that is 128 launches a step in an
8B model, each too small to fill a GPU: 2.1 ms on an H200, where one launch for all of them takes 0.1.

A copy is used while its factor is what it was when it was cast; otherwise, and for whatever is not listed here (an
adapter that came later), the product casts for itself. Copies lie side by side in the order of the modules, so that the
A of projections that read one input are one stacked matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..autograd.lora import Copy
from ..dispatch import on_compiler

COPIES = "_halfbyte_copies"  # of a backbone: `Copies`; of a LoRA module: {name of the adapter: (copy of A, copy of B)}
ALIGNED = 8  # elements of 16 bits: products want 16 bytes


@dataclass
class Copies:
    """Factors of one model, and their copies in one buffer."""

    dtype: torch.dtype
    device: torch.device
    factors: list[Tensor]
    copies: list[Copy]

    @classmethod
    def of(cls, backbone: nn.Module, dtype: torch.dtype, device: torch.device) -> Copies:
        """Buffers for all trained factors of another dtype; tells the LoRA modules of `backbone` of them."""
        pairs: list[tuple[nn.Module, str, Any, Any]] = [
            (module, name, module.lora_A[name].weight, module.lora_B[name].weight)
            for module in backbone.modules()
            if isinstance(module, LoraLinear)
            for name in module.active_adapters
            if name in module.lora_A and _castable(module.lora_A[name].weight, dtype, device)
        ]
        factors: list[Tensor] = [a for _, _, a, _ in pairs] + [b for _, _, _, b in pairs]
        sizes = [-(-factor.numel() // ALIGNED) * ALIGNED for factor in factors]
        parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        copies = [Copy(part[: f.numel()].view(f.shape), -1) for part, f in zip(parts, factors, strict=True)]
        for at, (module, name, _, _) in enumerate(pairs):
            module.__dict__.setdefault(COPIES, {})[name] = copies[at], copies[at + len(pairs)]
        return cls(dtype, device, factors, copies)

    def refresh(self) -> None:
        tensors = [copy.tensor for copy in self.copies]
        # A forward that is still to be differentiated has saved them, and finds equal values: had somebody changed the
        # parameters in between, it could not be differentiated in any case.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            torch._foreach_copy_(tensors, self.factors)
        for copy, factor in zip(self.copies, self.factors, strict=True):
            copy.version = factor._version


def _castable(factor: Any, dtype: torch.dtype, device: torch.device) -> bool:
    return factor.requires_grad and factor.dtype is not dtype and factor.device == device


def refresh_copies(backbone: Any) -> None:
    """Cast the factors of `backbone`, a transformers model about to run forward, if it is to be differentiated."""
    if not torch.is_grad_enabled() or on_compiler():
        return
    device: torch.device = backbone.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else backbone.dtype
    copies: Copies | None = backbone.__dict__.get(COPIES)
    if copies is None or copies.dtype is not dtype or copies.device != device:
        clear_copies(backbone)
        backbone.__dict__[COPIES] = copies = Copies.of(backbone, dtype, device)
    if copies.factors:
        copies.refresh()


def clear_copies(backbone: nn.Module) -> None:
    """Undo `refresh_copies`."""
    for module in backbone.modules():
        module.__dict__.pop(COPIES, None)
