"""Linear layers as generation runs them: read once, the adapters of all rows of a batch stacked beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..formats import Blockwise4
from ..models.projections import hooked
from ..ops.decode_layers import Projections, Weight4
from ..tensor import QuantizedTensor


class Unknown(Exception):
    """In words, why a model's own forwards must run."""


def _plain(module: Any) -> nn.Linear:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward or hooked(module):
        raise Unknown(f"{type(module).__name__} has a forward of its own")
    return module


def _factors(module: nn.Module, names: Sequence[str]) -> tuple[nn.Linear, dict[str, tuple[Tensor, Tensor, float]]]:
    """The frozen linear, and (A [r, K], B [N, r], scaling) of each adapter that it has among `names`."""
    if not isinstance(module, BaseTunerLayer):
        return _plain(module), {}
    base = _plain(module.base_layer)
    if not isinstance(module, LoraLinear) or type(module).forward is not LoraLinear.forward or hooked(module):
        raise Unknown(f"an adapter is PEFT's {type(module).__name__}")
    if module.merged:
        raise Unknown("an adapter is merged")
    adapters = {}
    for name in (name for name in names if name in module.lora_A):
        a, b = module.lora_A[name], module.lora_B[name]
        if name in module.lora_variant or b.bias is not None:
            raise Unknown(f"adapter {name} is not plain LoRA")
        adapters[name] = a.weight, b.weight, module.scaling[name]
    return base, adapters


def _product(linear: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """[M, K] → [M, N]; what a call would look up is bound once."""
    bias = None if linear.bias is None else linear.bias.detach().to(dtype)
    weight: Any = linear.weight
    if isinstance(weight, QuantizedTensor):
        return partial(
            weight.format.linear, parts=weight.parts, shape=(linear.out_features, linear.in_features), bias=bias
        )
    return partial(F.linear, weight=weight.detach().to(dtype), bias=bias)


def _weight4(linear: nn.Linear, dtype: torch.dtype) -> Weight4 | None:
    """A linear whose weight is 4-bit, as `ops.decode_layers` takes it."""
    weight: Any = linear.weight
    if not isinstance(weight, QuantizedTensor) or not isinstance(weight.format, Blockwise4):
        return None
    parts, format_ = weight.parts, weight.format
    bias = None if linear.bias is None else linear.bias.detach().to(dtype)
    scales = parts["absmax"], format_.nested_parts(parts), format_.blocksize, format_.quant_type
    return Weight4(parts["packed"], *scales, linear.out_features, bias)


class Linears:
    """Linears of one input, with the low-rank terms of every adapter in use.

    Args:
        modules: nn.Linear each, or PEFT's LoRA around one.
        adapters: the adapter of each row of the batch; None for none.
        dtype: of the products.

    Raises:
        Unknown: a module computes something else.
    """

    def __init__(self, modules: Sequence[nn.Module], adapters: Sequence[str | None], dtype: torch.dtype):
        names = sorted({name for name in adapters if name is not None})
        read = [_factors(module, names) for module in modules]
        self.products = [_product(base, dtype) for base, _ in read]
        self.weights = [_weight4(base, dtype) for base, _ in read]
        a: list[Tensor] = []
        owners: list[str] = []
        self.b: list[tuple[int, int, Tensor] | None] = []
        for _, factors in read:
            begin = len(owners)
            for name, (down, _, _) in factors.items():
                a.append(down.detach().to(dtype))
                owners += [name] * len(down)
            up = [(b.detach() * scaling).to(dtype) for _, b, scaling in factors.values()]
            self.b.append((begin, len(owners), torch.cat(up, 1)) if up else None)
        self.a = torch.cat(a) if a else None
        self.mask: Tensor | None = None
        if a and len(set(adapters)) > 1:  # rows differ in their adapters
            rows = [[owner == adapter for owner in owners] for adapter in adapters]
            self.mask = torch.tensor(rows, dtype=dtype, device=a[0].device).unsqueeze(1)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """[B, T, Nᵢ] each for x [B, T, K]."""
        rows = x.flatten(0, 1)
        out = [product(rows) for product in self.products]
        if self.a is not None:
            u = F.linear(x, self.a)
            u = (u if self.mask is None else u * self.mask).flatten(0, 1)
            for y, term in zip(out, self.b, strict=True):
                if term is not None:
                    begin, end, b = term
                    y.addmm_(u[:, begin:end], b.t())
        return [y.unflatten(0, x.shape[:2]) for y in out]

    def projections(self) -> Projections | None:
        """These linears as `ops.decode_layers` takes them; None unless all weights are 4-bit."""
        weights = [weight for weight in self.weights if weight is not None]
        if len(weights) < len(self.weights):
            return None
        ups = [None if term is None or term[0] == term[1] else (term[0], term[2]) for term in self.b]
        mask = None if self.mask is None else self.mask[:, 0]
        return Projections(weights, self.a, ups, mask)


def adapter_names(model: Any) -> list[str]:
    """The adapters of a model; none without PEFT."""
    return list(getattr(model, "peft_config", {}))
