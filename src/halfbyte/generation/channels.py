"""What mixes a token's channels, as generation runs it: an MLP, or a mixture of experts.

Of a mixture transformers' block computes which experts a token goes to, and how they are weighed. In its forward our
experts stand in the place of its own: stacks as they are stored, the adapters of all rows of a batch beside them, no
autograd. Which experts tokens go to is never waited for, so steps are captured in CUDA graphs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from ..autograd.experts import stack_of
from ..layers.expert_adapters import by_expert
from ..layers.experts import HostStack, names_of, obstacle, weights_of
from ..layers.plain import read_adapters
from ..modeling.architectures import runs_experts
from ..modeling.families import Family, family_of
from ..modeling.layer import MLP
from ..modeling.routers import Routers
from ..ops.experts import (
    LowRank,
    Routing,
    StackedWeight,
    Unit,
    combine,
    expert_rows,
    expert_unit,
    grouped_product,
    route,
)
from ..ops.glu import glu
from ..tensor import QuantizedTensor
from .linears import RANKS, Linears, Unknown
from .routers import known

Factors = dict[str, tuple[Tensor, Tensor, float]]  # by adapter: A [E, r, K], B [E, N, r], scaling


class Channels:
    """A layer's MLP."""

    def __init__(self, mlp: MLP, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool):
        self.mlp = mlp
        self.gate_up = Linears(mlp.inputs, adapters, dtype, unpacked)
        self.down = Linears([mlp.output], adapters, dtype, unpacked)

    def renew(self) -> bool:
        """As `Linears.renew`."""
        return self.gate_up.renew() and self.down.renew()

    def __call__(self, x: Tensor) -> Tensor:
        """[B, T, K] of x [B, T, K]."""
        return self.down(self.mlp.act_on(self.gate_up(x), glu))[0]


class _Single(Linears):
    """One linear."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x)[0]


class _Low:
    """The low-rank terms of all adapters on a stack, one behind the other.

    Args:
        factors: of each adapter in use.
        adapters: the adapter of each row of the batch.
    """

    def __init__(self, factors: Factors, adapters: Sequence[str | None], dtype: torch.dtype):
        self.shapes = _shapes(factors)
        owners = [name for name, (a, _, _) in factors.items() for _ in range(a.shape[1])]
        self.empty = -len(owners) % RANKS  # ranks that kernels want beside them
        self.dtype = dtype
        self.mask: Tensor | None = None
        if len(set(adapters)) > 1:  # rows differ in their adapters
            rows = [[owner == adapter for owner in owners] + [False] * self.empty for adapter in adapters]
            self.mask = torch.tensor(rows, dtype=dtype, device=next(iter(factors.values()))[0].device)
        self.a = torch.empty(0)
        self.b = torch.empty(0)
        self.fill(factors)

    def fill(self, factors: Factors) -> None:
        """Take the values as they are now, into the same memory."""
        some = next(iter(factors.values()))
        more_a = [some[0].new_zeros(len(some[0]), self.empty, some[0].shape[2])] if self.empty else []
        more_b = [some[1].new_zeros(*some[1].shape[:2], self.empty)] if self.empty else []
        a = torch.cat([*(a for a, _, _ in factors.values()), *more_a], 1).to(self.dtype)
        b = torch.cat([*(b * scaling for _, b, scaling in factors.values()), *more_b], 2).to(self.dtype)
        if self.a.shape == a.shape:
            self.a.copy_(a)
            self.b.copy_(b)
        else:
            self.a, self.b = a.contiguous(), b.contiguous()

    def of(self, x: Tensor, routing: Routing, gather: bool, tokens: int) -> LowRank:
        """The term of x's rows, which are `tokens` for each row of the batch."""
        u = grouped_product(x, StackedWeight.plain(self.a), routing, gather)
        if self.mask is not None:
            u = u * self.mask[routing.tokens // tokens]
        return LowRank(u, self.b, 1.0)


class _Experts:
    """A layer's experts for a batch of rows.

    Args:
        module: transformers' experts, or PEFT's wrappers around them.

    Raises:
        Unknown: they must run their own forward.
    """

    def __init__(self, module: Any, adapters: Sequence[str | None], dtype: torch.dtype):
        self.module, self.dtype, self.adapters = module, dtype, adapters
        self.names = sorted({name for name in adapters if name is not None})
        factors = self._read()
        weights = weights_of(self.base)
        for stack in (weights.first, weights.second):
            if isinstance(stack, HostStack):
                raise Unknown("its experts wait in the host's memory")
            if not isinstance(stack, QuantizedTensor) and (stack.dtype is not dtype or not stack.is_contiguous()):
                raise Unknown("its experts' stacks would be copied")
        self.places = _places(weights)
        self.weights = weights
        self.low = {name: _Low(each, adapters, dtype) for name, each in factors.items() if each}
        self.tokens = 1

    def _read(self) -> dict[str, Factors]:
        """Of both stacks by name."""
        module, found = self.module, {}
        while isinstance(module, ParamWrapper):
            read = read_adapters(module, self.names)
            if isinstance(read, str):
                raise Unknown(read)
            own = {each.name: (*by_expert(each.a, each.b, module.num_experts), each.scaling) for each in read}
            found[module.parameter_name] = own
            module = module.base_layer
        if not runs_experts(module) or (reason := obstacle(module)) is not None:
            raise Unknown(reason if runs_experts(module) else f"{type(module).__name__} has a forward of its own")
        if _foreign_hooks(module):
            raise Unknown("it has hooks")
        self.base = module
        return found

    def renew(self) -> bool:
        """As `Linears.renew`."""
        factors = self._read()
        weights = weights_of(self.base)
        shapes = {name: low.shapes for name, low in self.low.items()}
        if _places(weights) != self.places or {n: _shapes(f) for n, f in factors.items() if f} != shapes:
            return False
        for name, low in self.low.items():
            low.fill(factors[name])
        return True

    def __call__(self, x: Tensor, index: Tensor, routed: Tensor) -> Tensor:
        """As transformers' experts: Σ over a token's experts [T, H] of x [T, K], indices and weights [T, k]."""
        given, x, weights = x.dtype, x.to(self.dtype), self.weights
        biased = weights.first_bias is not None or weights.second_bias is not None
        if isinstance(weights.unit, Unit) and not biased and not self.low:
            stacks = [stack_of(stack, self.dtype, index.numel()) for stack in (weights.first, weights.second)]
            return expert_rows(x, *stacks, weights.unit, index, routed).to(given)
        routing = route(index, weights.first.shape[0])
        names = names_of(self.base)
        c = self._product(names[0], weights.first, weights.first_bias, x, routing, True)
        hidden = expert_unit(c, weights.unit) if isinstance(weights.unit, Unit) else weights.unit(c)
        y = self._product(names[1], weights.second, weights.second_bias, hidden, routing, False)
        return combine(y, routing, routed).to(given)

    def _product(
        self, name: str, weight: Tensor, bias: Tensor | None, x: Tensor, routing: Routing, gather: bool
    ) -> Tensor:
        low = self.low[name].of(x, routing, gather, self.tokens) if name in self.low else None
        stack = stack_of(weight, self.dtype, routing.order.numel())
        bias = None if bias is None else bias.to(self.dtype)
        return grouped_product(x, stack, routing, gather, low_rank=low, bias=bias)


class Mixture:
    """What mixes a token's channels in a layer with experts.

    Args:
        block: transformers' module, which has `experts`.
        adapters: the adapter of each row of the batch; None for none.
        dtype: of the products.
        unpacked: of shared experts, as in `Linears`; stacks stay packed.

    Raises:
        Unknown: the block must run its own forward.
    """

    def __init__(self, block: Any, family: Family, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool):
        if not isinstance(getattr(block, "experts", None), nn.Module):
            raise Unknown(f"{type(block).__name__} has a forward of its own")
        self.block, self.dtype = block, dtype
        shared = {name: module for name, module in block.named_children() if family_of(type(module)) == (family, "MLP")}
        views = {name: view for name, module in shared.items() if not (view := MLP.of(module, family)).obstacle}
        given = adapters, dtype, unpacked
        self.shared: dict[str, Channels | _Single] = {name: Channels(view, *given) for name, view in views.items()}
        for name, module in block.named_children():  # a gate of the shared expert, say
            if isinstance(module, BaseTunerLayer) and isinstance(module.get_base_layer(), nn.Linear):
                self.shared[name] = _Single([block.get_submodule(name)], *given)
        self._check()
        self.experts = _Experts(block.experts, adapters, dtype)
        beside = [p for name, p in block.named_parameters() if not name.startswith("experts.")]
        self.mixed = dtype is not torch.float32 and any(p.is_floating_point() and p.dtype is not dtype for p in beside)
        inside = {name: self._rows(each) for name, each in self.shared.items()}
        others = {name: module for name, module in block.named_children() if name not in self.shared}
        routes = {name: known(module, dtype) for name, module in others.items() if not _foreign_hooks(module)}
        inside |= {name: route for name, route in routes.items() if route is not None}
        self.stand_in = _StandIn(block, self.experts, inside)

    def _rows(self, channels: Channels | _Single) -> Callable[[Tensor], Tensor]:
        """Of x [B·T, K], or as a batch has it."""
        return lambda x: channels(x.view(-1, self.experts.tokens, x.shape[-1])).view(*x.shape[:-1], -1)

    def _check(self) -> None:
        block = self.block
        if _foreign_hooks(block):
            raise Unknown("it has hooks")
        for name, module in block.named_modules():
            read = name.partition(".")[0] in ("experts", *self.shared)
            if not read and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                raise Unknown(f"{type(block).__name__} has an adapter or a trained copy on its {name}")

    def renew(self) -> bool:
        """As `Linears.renew`."""
        self._check()
        return self.experts.renew() and all(each.renew() for each in self.shared.values())

    def __call__(self, x: Tensor) -> Tensor:
        """[B, T, K] of x [B, T, K]."""
        self.experts.tokens = x.shape[1]
        with torch.autocast(x.device.type, dtype=self.dtype, enabled=self.mixed):
            out = type(self.block).forward(self.stand_in, x)
        return (out if isinstance(out, Tensor) else out[0]).to(self.dtype)


class _StandIn:
    """A block for its own forward, in evaluation, with other experts, routed and shared, and a router that is known."""

    training = False

    def __init__(self, block: Any, experts: _Experts, shared: dict[str, Callable[[Tensor], Tensor]]):
        self.__dict__ |= shared
        self._block, self.experts = block, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _shapes(factors: Factors) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {name: (a.shape, b.shape) for name, (a, b, _) in factors.items()}


def _places(weights: Any) -> list[Any]:
    """Where the frozen tensors are."""
    tensors: list[Tensor] = []
    for each in (weights.first, weights.second, weights.first_bias, weights.second_bias):
        tensors += [] if each is None else each.parts.values() if isinstance(each, QuantizedTensor) else [each]
    return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]


def _foreign_hooks(module: nn.Module) -> bool:
    """Whether hooks are on it that are not those of training's `Routers`, which count nothing here."""
    of_forward = module._forward_hooks, module._forward_pre_hooks
    hooks = [hook for each in of_forward for hook in each.values()]
    return any(not isinstance(getattr(getattr(hook, "func", None), "__self__", None), Routers) for hook in hooks)
