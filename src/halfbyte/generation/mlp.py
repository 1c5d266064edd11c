"""The MLP or mixture of experts of a layer, for inference.

For a mixture, transformers' own block computes the routing; its experts are replaced by fused ones that read the stored
(quantized) stacks and apply all adapters of the batch. Nothing synchronizes with the host, so steps fit in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ..adapters.expert_adapters import by_expert
from ..autograd.experts import stack_of
from ..layers.plain import read_adapters
from ..modeling.architectures import runs_experts
from ..modeling.experts import HostStack, names_of, obstacle, weights_of
from ..modeling.families import Family, family_of
from ..modeling.layer import MLP
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
    top_experts,
)
from ..ops.glu import glu
from ..tensor import QuantizedTensor
from .adapters import Unsupported, module_of
from .linears import RANKS, Linears

Route = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # [T, K] → logits, weights and experts
Factors = dict[str, tuple[Tensor, Tensor, float]]  # by adapter: A [E, r, K], B [E, N, r], scaling


class DenseMLP:
    """The MLP of a layer without experts."""

    def __init__(self, mlp: MLP, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool):
        act = module_of(mlp.act, adapters)
        if mlp.gated and act is not None and type(act) is not type(ACT2FN[mlp.activation_name]):
            raise Unsupported(f"its activation is a {type(act).__name__}, and the config names {mlp.activation_name}")
        self.view = replace(mlp, act=act)
        self.gate_up = Linears(mlp.inputs, adapters, dtype, unpacked)
        self.down = Linears([mlp.output], adapters, dtype, unpacked)

    def renew(self) -> bool:
        """Refresh the weights as `Linears.renew` does."""
        return self.gate_up.renew() and self.down.renew()

    def __call__(self, x: Tensor) -> Tensor:
        """Return [B, T, K] for x [B, T, K]."""
        return self.down(self.view.activate(self.gate_up(x), glu))[0]


class _SingleLinear(Linears):
    """A single linear layer."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x)[0]


class _ExpertAdapters:
    """The low-rank factors of all adapters on a stack of experts, concatenated along the rank.

    Args:
        factors: of each adapter in use.
        adapters: the adapter of each row of the batch.
    """

    def __init__(self, factors: Factors, adapters: Sequence[str | None], dtype: torch.dtype):
        self.shapes = _shapes(factors)
        owners = [name for name, (a, _, _) in factors.items() for _ in range(a.shape[1])]
        self.padding = -len(owners) % RANKS  # padding to the rank multiple of the kernels
        self.dtype = dtype
        self.mask: Tensor | None = None
        if len(set(adapters)) > 1:  # rows have different adapters
            rows = [[owner == adapter for owner in owners] + [False] * self.padding for adapter in adapters]
            self.mask = torch.tensor(rows, dtype=dtype, device=next(iter(factors.values()))[0].device)
        self.a = torch.empty(0)
        self.b = torch.empty(0)
        self.fill(factors)

    def fill(self, factors: Factors) -> None:
        """Copy the adapters' current values into the same memory."""
        first_a, first_b, _ = next(iter(factors.values()))
        padding_a = first_a.new_zeros(len(first_a), self.padding, first_a.shape[2])
        padding_b = first_b.new_zeros(*first_b.shape[:2], self.padding)
        a = torch.cat([*(a for a, _, _ in factors.values()), padding_a], 1).to(self.dtype)
        b = torch.cat([*(b * scaling for _, b, scaling in factors.values()), padding_b], 2).to(self.dtype)
        if self.a.shape == a.shape:
            self.a.copy_(a)
            self.b.copy_(b)
        else:
            self.a, self.b = a.contiguous(), b.contiguous()

    def of(self, x: Tensor, routing: Routing, gather: bool, tokens: int) -> LowRank:
        """Return the low-rank term for x, which has `tokens` rows for each row of the batch."""
        u = grouped_product(x, StackedWeight.plain(self.a), routing, gather)
        if self.mask is not None:
            u = u * self.mask[routing.tokens // tokens]
        return LowRank(u, self.b, 1.0)


class _Experts:
    """The experts of a layer for a batch of rows.

    Args:
        module: transformers' experts, or PEFT's wrappers around them.

    Raises:
        Unsupported: the module needs transformers' own forward.
    """

    def __init__(self, module: Any, adapters: Sequence[str | None], dtype: torch.dtype):
        self.module = module
        self.dtype = dtype
        self.names = sorted({name for name in adapters if name is not None})
        factors = self._read()
        weights = weights_of(self.base)
        for stack in (weights.first, weights.second):
            if isinstance(stack, HostStack):
                raise Unsupported("its experts are offloaded to host memory")
            if not isinstance(stack, QuantizedTensor) and (stack.dtype is not dtype or not stack.is_contiguous()):
                raise Unsupported("its experts' stacks would be copied")
        self.storage = _storage_of(weights)
        self.weights = weights
        self.adapters_of = {name: _ExpertAdapters(f, adapters, dtype) for name, f in factors.items() if f}
        self.tokens = 1

    def _read(self) -> dict[str, Factors]:
        """Read the adapters' factors of both stacks, keyed by stack and adapter name."""
        module, factors = self.module, {}
        while isinstance(module, ParamWrapper):
            read = read_adapters(module, self.names)
            if isinstance(read, str):
                raise Unsupported(read)
            factors[module.parameter_name] = {
                adapter.name: (*by_expert(adapter.a, adapter.b, module.num_experts), adapter.scaling)
                for adapter in read
            }
            module = module.base_layer
        if not runs_experts(module) or (reason := obstacle(module)) is not None:
            raise Unsupported(reason if runs_experts(module) else f"{type(module).__name__} has a forward of its own")
        self.base = module
        return factors

    def renew(self) -> bool:
        """Refresh the weights as `Linears.renew` does."""
        factors = self._read()
        weights = weights_of(self.base)
        shapes = {name: low.shapes for name, low in self.adapters_of.items()}
        if _storage_of(weights) != self.storage or {n: _shapes(f) for n, f in factors.items() if f} != shapes:
            return False
        for name, low in self.adapters_of.items():
            low.fill(factors[name])
        return True

    def __call__(self, x: Tensor, index: Tensor, routed: Tensor) -> Tensor:
        """Return each token's weighted sum of experts [T, H] for x [T, K], expert indices and weights [T, k]."""
        input_dtype, weights = x.dtype, self.weights
        x = x.to(self.dtype)
        biased = weights.first_bias is not None or weights.second_bias is not None
        if isinstance(weights.unit, Unit) and not biased and not self.adapters_of:
            stacks = [stack_of(stack, self.dtype, index.numel()) for stack in (weights.first, weights.second)]
            return expert_rows(x, *stacks, weights.unit, index, routed).to(input_dtype)
        routing = route(index, weights.first.shape[0])
        names = names_of(self.base)
        c = self._product(names[0], weights.first, weights.first_bias, x, routing, True)
        hidden = expert_unit(c, weights.unit) if isinstance(weights.unit, Unit) else weights.unit(c)
        y = self._product(names[1], weights.second, weights.second_bias, hidden, routing, False)
        return combine(y, routing, routed).to(input_dtype)

    def _product(
        self, name: str, weight: Tensor, bias: Tensor | None, x: Tensor, routing: Routing, gather: bool
    ) -> Tensor:
        low = self.adapters_of[name].of(x, routing, gather, self.tokens) if name in self.adapters_of else None
        stack = stack_of(weight, self.dtype, routing.order.numel())
        bias = None if bias is None else bias.to(self.dtype)
        return grouped_product(x, stack, routing, gather, low_rank=low, bias=bias)


class MoEBlock:
    """A mixture-of-experts block.

    Args:
        block: transformers' module, which has `experts`.
        adapters: the adapter of each row of the batch; None for none.
        dtype: of the GEMMs.
        unpacked: decode the weights of shared experts once, as in `Linears`; stacks stay packed.

    Raises:
        Unsupported: the block needs transformers' own forward.
    """

    def __init__(self, block: Any, family: Family, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool):
        if not isinstance(getattr(block, "experts", None), nn.Module):
            raise Unsupported(f"{type(block).__name__} has a forward of its own")
        self.block, self.dtype = block, dtype
        shared = {name: module for name, module in block.named_children() if family_of(type(module)) == (family, "MLP")}
        views = {name: view for name, module in shared.items() if not (view := MLP.of(module, family)).obstacle}
        options = adapters, dtype, unpacked
        self.shared: dict[str, DenseMLP | _SingleLinear] = {}
        self.shared |= {name: DenseMLP(view, *options) for name, view in views.items()}
        for name, module in block.named_children():  # e.g. the gate of a shared expert
            if isinstance(module, BaseTunerLayer) and isinstance(module.get_base_layer(), nn.Linear):
                self.shared[name] = _SingleLinear([block.get_submodule(name)], *options)
        self._check()
        self.experts = _Experts(block.experts, adapters, dtype)
        parameters = [p for name, p in block.named_parameters() if not name.startswith("experts.")]
        has_other_dtype = any(p.is_floating_point() and p.dtype is not dtype for p in parameters)
        self.mixed = dtype is not torch.float32 and has_other_dtype
        inside = {name: self._rows(mlp) for name, mlp in self.shared.items()}
        unshared = {name: module for name, module in block.named_children() if name not in self.shared}
        inside |= {
            name: route for name, module in unshared.items() if (route := known_router(module, dtype)) is not None
        }
        self.proxy = _BlockProxy(block, self.experts, inside)

    def _rows(self, mlp: DenseMLP | _SingleLinear) -> Callable[[Tensor], Tensor]:
        """Wrap an MLP so that it accepts x [B·T, K] as well as [B, T, K]."""
        return lambda x: mlp(x.view(-1, self.experts.tokens, x.shape[-1])).view(*x.shape[:-1], -1)

    def _check(self) -> None:
        block = self.block
        for name, module in block.named_modules():
            read = name.partition(".")[0] in ("experts", *self.shared)
            if not read and isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                raise Unsupported(f"{type(block).__name__} has an adapter or a trained copy on its {name}")

    def renew(self) -> bool:
        """Refresh the weights as `Linears.renew` does."""
        self._check()
        return self.experts.renew() and all(mlp.renew() for mlp in self.shared.values())

    def __call__(self, x: Tensor) -> Tensor:
        """Return [B, T, K] for x [B, T, K]."""
        self.experts.tokens = x.shape[1]
        with torch.autocast(x.device.type, dtype=self.dtype, enabled=self.mixed):
            out = type(self.block).forward(self.proxy, x)
        return (out if isinstance(out, Tensor) else out[0]).to(self.dtype)


class _BlockProxy:
    """A block in evaluation mode whose experts, and linears or routers with a fast version, are replaced."""

    training = False

    def __init__(self, block: Any, experts: _Experts, shared: dict[str, Callable[[Tensor], Tensor]]):
        self.__dict__ |= shared
        self._block, self.experts = block, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def _shapes(factors: Factors) -> dict[str, tuple[torch.Size, torch.Size]]:
    return {name: (a.shape, b.shape) for name, (a, b, _) in factors.items()}


def _storage_of(weights: Any) -> list[Any]:
    """Return the data pointers and dtypes of the frozen tensors."""
    tensors: list[Tensor] = []
    for weight in (weights.first, weights.second, weights.first_bias, weights.second_bias):
        tensors += [] if weight is None else weight.parts.values() if isinstance(weight, QuantizedTensor) else [weight]
    return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]


# --- routers ---------------------------------------------------------------------------------------------------------


class _RouterKind(NamedTuple):
    """Variant of a router's forward, in addition to softmax and top k.

    Args:
        normalized: whether weights are divided by their sum; None: read `norm_topk_prob`.
        wide: whether weights stay in fp32 (default: the logits' dtype).
    """

    normalized: bool | None
    wide: bool


def _code_key(code: CodeType) -> tuple:
    return code.co_code, code.co_names, code.co_consts[1:]  # the first constant is the docstring


# Many models of transformers have the same router forward, so routers are recognised by their bytecode.
_ROUTER_KINDS = {
    _code_key(Qwen3MoeTopKRouter.forward.__code__): _RouterKind(None, False),
    _code_key(Qwen3_5MoeTopKRouter.forward.__code__): _RouterKind(True, False),
    _code_key(MixtralTopKRouter.forward.__code__): _RouterKind(True, True),
}


def known_router(router: nn.Module, dtype: torch.dtype) -> Route | None:
    """Return a router's forward as one op for x of `dtype`, or None if it needs transformers' own forward."""
    code = getattr(type(router).forward, "__code__", None)
    variant = None if code is None else _ROUTER_KINDS.get(_code_key(code))
    module: Any = router
    if variant is None or "forward" in vars(module) or module.weight.dtype is not dtype:
        return None
    normalized = module.norm_topk_prob if variant.normalized is None else variant.normalized
    of_weights = torch.float32 if variant.wide else dtype

    def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return top_experts(x.reshape(-1, module.hidden_dim), module.weight, module.top_k, normalized, of_weights)

    return route
