"""Row norms of DoRA's linears, computed once per optimizer step.

The norms change with the adapters, and these change between steps. So a step's micro-batches, recomputed layers and
replayed CUDA graphs share one set of norms, and everything outside of a step (evaluation, sampling, another trainer)
computes its own in each call. Norms cannot go stale: they are readable inside `DoraNorms.computed` only, which first
computes them, and a linear whose factors are written to inside computes its own (`autograd.dora.StepNorms`).

Linears of one shape and rank are computed together: a GEMM with each packed weight, and a few launches for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.dora import StepNorms, row_norms
from ..layers.plain import Adapter, is_dora, is_plain_lora, read_linear
from .patch_record import is_bound
from .projections import STEP_NORMS, squared_norms

LARGEST = 2**24  # values of W·Aᵀ that are computed together: 64 MiB in fp32


class _Linear(NamedTuple):
    weight: Tensor
    adapter: Adapter


class DoraNorms:
    """The norms of a model's linears with DoRA, in memory that CUDA graphs may read.

    They are the linears of attentions and MLPs that `patch` has bound. Others compute their norms in each call.

    Args:
        model: patched before the first step; its frozen weights are on the device between forwards, so not sharded.
        dtype: dtype of the forwards' GEMMs.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype
        self._values: dict[Any, Tensor] = {}  # PEFT's DoRA layer → its linear's norms [N]

    @contextlib.contextmanager
    def computed(self) -> Iterator[None]:
        """Compute the norms; inside the context forwards and recomputations read them. Adapters must not change in it.

        A CUDA graph that was captured inside reads the norms of the context that it is replayed in.
        """
        linears = self._linears()
        try:
            for group in _groups(linears):
                self._compute(group)
            yield
        finally:
            for linear in linears:
                vars(linear.adapter.dora).pop(STEP_NORMS, None)

    @cached_property
    def _modules(self) -> list[nn.Module]:
        blocks = [module for module in self.model.modules() if is_bound(module)]
        return [linear for block in blocks for linear in block.children() if _has_dora(linear)]

    def _linears(self) -> list[_Linear]:
        linears = []
        for module in self._modules:
            read = read_linear(module, with_dora=True, with_bias=True)
            if isinstance(read, str) or len(read.adapters) != 1 or read.weight.requires_grad:
                continue
            if read.adapters[0].dora is not None:
                linears.append(_Linear(read.weight, read.adapters[0]))
        return linears

    def _compute(self, group: list[_Linear]) -> None:
        adapters: list[Any] = [linear.adapter for linear in group]
        weights = [linear.weight for linear in group]
        squares = [squared_norms(adapter.dora, weight) for adapter, weight in zip(adapters, weights, strict=True)]
        a, b = [adapter.a for adapter in adapters], [adapter.b for adapter in adapters]
        norms = row_norms(weights, a, b, squares, adapters[0].scaling, self.dtype)
        values = []
        for adapter, row in zip(adapters, norms, strict=True):
            held = self._values.get(adapter.dora)
            if held is None or held.device != row.device:
                held = self._values[adapter.dora] = torch.empty_like(row)
            values.append(held)
            versions = adapter.a._version, adapter.b._version
            vars(adapter.dora)[STEP_NORMS] = StepNorms(held, self.dtype, versions)
        torch._foreach_copy_(values, [*norms])


def _has_dora(module: Any) -> bool:
    """Return whether an adapter of a linear is DoRA."""
    return is_plain_lora(module) and any(is_dora(module, name) for name in module.lora_variant)


def _groups(linears: list[_Linear]) -> list[list[_Linear]]:
    """Return lists of linears that `row_norms` takes together, of at most `LARGEST` values unless one has more."""
    by_shape: dict[Any, list[_Linear]] = {}
    for linear in linears:
        weight, adapter = linear
        key = tuple(weight.shape), len(adapter.a), adapter.scaling, weight.device, adapter.a.dtype, adapter.b.dtype
        by_shape.setdefault(key, []).append(linear)
    groups = []
    for (shape, rank, *_), members in by_shape.items():
        count = max(1, LARGEST // (shape[0] * rank))
        groups += [members[at : at + count] for at in range(0, len(members), count)]
    return groups
