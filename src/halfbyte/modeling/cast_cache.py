"""Cast cache of LoRA factors: all A and B in the compute dtype, cast in one launch at the start of a forward.

PEFT trains A and B in fp32; GEMMs take them in 16 bits. Casting at each use costs 128 launches a step in an 8B model,
each too small to fill a GPU: 2.1 ms on an H200, where one launch for all factors takes 0.1 ms.

The cache cannot detect stale casts: fused optimizers, bitsandbytes and replayed CUDA graphs change a parameter without
raising its version. Therefore every forward of the backbone refreshes the casts, with or without gradients, and they
are read only during that forward and its recomputation in backward. Everywhere else, and for factors that are not in
the cache (adapters added later), the GEMM casts for itself. Casts are contiguous in the order of the modules, so the A
of projections with one input form one stacked matrix.

With a sharded optimizer (`parallel.shard.optimizer`), no rank holds a full fp32 factor: the casts replace the
parameters (`cast_replacements`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch import autocast_dtype
from ..layers.plain import factor_holders, is_dora, is_plain_lora, read_linear
from .patch_record import CastCache, existing_record, record

ALIGNED = 8  # elements of 16 bits: GEMMs need 16-byte alignment


def use_cast_cache(backbone: Any) -> contextlib.AbstractContextManager[None]:
    """Cast the factors of `backbone`, a transformers model, and let its forward inside the context read the casts.

    Buffers are allocated in the first forward with gradients enabled.
    """
    device: torch.device = backbone.device
    dtype = autocast_dtype(device.type) or backbone.dtype
    cache = record(backbone).cast_cache
    if cache is not None and not cache.is_valid():
        clear_cast_cache(backbone)
        cache = None
    if cache is None or cache.dtype is not dtype or cache.device != device:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        clear_cast_cache(backbone)
        record(backbone).cast_cache = cache = _build_cast_cache(backbone, dtype, device)
    if cache.factors:
        cache.refresh()
    return cache.opened()


def _build_cast_cache(backbone: Any, dtype: torch.dtype, device: torch.device) -> CastCache:
    """Allocate casts for all trained factors of another dtype, and record them on layers and LoRA modules."""
    adapted = [
        (module, name)
        for module in backbone.modules()
        if is_plain_lora(module)
        for name in module.active_adapters
        if name in factor_holders(module)[0] and (name not in module.lora_variant or is_dora(module, name))
        if any(_needs_cast(holder[name].weight, dtype, device) for holder in factor_holders(module))
    ]
    holders = _factor_holders(adapted)
    factors: list[Tensor] = [holder[name].weight for holder, name in holders]
    casts = _contiguous_like(factors, dtype, device)
    cache = CastCache(dtype, device, holders, factors, casts)
    for layer in backbone.layers:
        record(layer).cast_cache = cache
    for index, (module, name) in enumerate(adapted):
        patched = record(module)
        patched.cast_cache, patched.casts[name] = cache, (casts[index], casts[index + len(adapted)])
    return cache


def clear_cast_cache(backbone: nn.Module) -> None:
    """Drop the cast cache of `use_cast_cache`."""
    for module in backbone.modules():
        if (patched := existing_record(module)) is not None:
            patched.cast_cache, patched.casts = None, {}


def cast_factors(module: nn.Module, adapter: str) -> tuple[Tensor, Tensor] | None:
    """Return the cast A and B of an adapter of a LoRA module, or None outside of a forward that has cast them."""
    patched = existing_record(module)
    if patched is None or patched.cast_cache is None or not patched.cast_cache.is_open:
        return None
    return patched.casts.get(adapter)


def with_open_cache(layer: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a part of a layer's forward so that its recomputation in backward reads the casts of this forward."""
    cache = record(layer).cast_cache
    if cache is None or not cache.is_open:
        return function

    @functools.wraps(function)
    def with_casts(*args: Any, **kwargs: Any) -> Any:
        with cache.opened():
            return function(*args, **kwargs)

    return with_casts


def cast_replacements(model: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Parameter, Tensor]]:
    """Return trained factors that only GEMMs read, each with a tensor of the GEMMs' dtype that can replace it.

    These are the factors of plain LoRA: DoRA's norms and quantization-aware training read fp32 factors.
    """
    adapted = []
    for module in model.modules():
        read = read_linear(module) if is_plain_lora(module) else ""
        if not isinstance(read, str):
            adapted += [(module, lora.name) for lora in read.adapters]
    weights = [holder[name].weight for holder, name in _factor_holders(adapted)]
    factors = [weight for weight in weights if _needs_cast(weight, dtype, weight.device)]
    return list(zip(factors, _contiguous_like(factors, dtype, factors[0].device), strict=True)) if factors else []


def _factor_holders(adapted: Sequence[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Return the holders of all A, then of all B, for (module, adapter name) pairs."""
    pairs = [factor_holders(module) for module, _ in adapted]
    names = [name for _, name in adapted]
    return [*zip([a for a, _ in pairs], names, strict=True), *zip([b for _, b in pairs], names, strict=True)]


def _contiguous_like(factors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate tensors shaped like `factors` in one buffer."""
    sizes = [-(-factor.numel() // ALIGNED) * ALIGNED for factor in factors]
    buffers = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
    return [buffer[: f.numel()].view(f.shape) for buffer, f in zip(buffers, factors, strict=True)]


def _needs_cast(factor: Any, dtype: torch.dtype, device: torch.device) -> bool:
    return factor.requires_grad and factor.dtype is not dtype and factor.device == device
