"""Router statistics and balancing loss of a mixture in training: how often each expert is selected.

For L routers with R rows each (tokens without padding), and E experts of which the k most probable are selected:

    aux = E · Σ_e f_e · P_e      f_e = Σ selected_e / (L·R)      P_e = Σ p_e / (L·R)      p = softmax(logits)

over all routers and rows, as transformers' `load_balancing_loss_func` computes it from `router_logits`. f has no
gradient, so a row's gradient depends on other rows only through f: ∂aux/∂logits = p ⊙ (g − ⟨g, p⟩), g = E·f/(L·R). The
forward sums f and P, 2·E numbers; backward adds the gradient to the logits' gradient at each router. Therefore no
additional logits are saved, and layers may be recomputed in backward.

Source: Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..batch import REAL_TOKENS, trains_anything
from ..mesh.mesh import SINGLE_PROCESS, TOKEN_AXES, Mesh
from ..utils.errors import ConfigError, ModelError
from .architectures import runs_experts
from .layer import causal_lm_of

KEY = "router_aux_loss_coef"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # config keys
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")

_tracked: WeakKeyDictionary[nn.Module, Routers] = WeakKeyDictionary()


class Routers:
    """Statistics of a model's routers, collected inside `track_routers`.

    Args:
        model: a causal LM, plain or inside a `peft.PeftModel`.
        balanced: whether `loss` will be called.
    """

    def __init__(self, model: nn.Module, *, balanced: bool):
        self.model, self.balanced = model, balanced
        self.logits = _find_routers(model) if balanced else {}
        self.experts = {name: module for name, module in model.named_modules() if runs_experts(module)}
        device = next(model.parameters()).device
        self.used = {  # layer → int64 [E]
            name: torch.zeros(_expert_count(module), dtype=torch.int64, device=device)
            for name, module in self.experts.items()
        }
        experts = max(map(len, self.used.values()), default=0)
        causal_lm: Any = causal_lm_of(model)
        holders = (causal_lm, causal_lm.config.get_text_config()) if balanced else ()
        self.top_k = next((getattr(holder, key) for holder in holders for key in TOP_K if hasattr(holder, key)), 0)
        self.chosen, self.shares = (torch.zeros(experts, device=device) for _ in range(2))
        self.rows, self.upstream = (torch.zeros((), device=device) for _ in range(2))
        self._counting = False
        self._mask: Tensor | None = None
        self._trained: Tensor | None = None  # 0-d bool: whether this forward's batch is not blank
        self._seen: dict[str, int] = {}  # router, or layer's experts → rows of this forward so far

    @contextlib.contextmanager
    def forward(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Count the forward of a micro-batch, without its padding (`REAL_TOKENS`, else `attention_mask`, [B, T]).

        `usage` leaves out batches without anything to train, which a rank computes while others have rows left.
        """
        mask = batch.get(REAL_TOKENS, batch.get("attention_mask"))
        # no new tensor: in a CUDA graph, other graphs would overwrite it
        self._mask = mask.flatten() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._trained = trains_anything(batch)
        self._begin()
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _begin(self, *_: Any) -> None:
        self._seen.clear()
        for sums in (self.chosen, self.shares, self.rows):
            sums.zero_()

    def loss(self, anchor: Tensor, rows: int) -> Tensor:
        """Return the balancing loss of the last forward, 0-d fp32; its backward must precede the next forward.

        Args:
            anchor: 0-d loss of that forward, to which the result will be added.
            rows: tokens of the forward, padding included.

        Raises:
            ModelError: a router did not see each token once.
        """
        if {self._seen.get(_plain_name(name)) for name in self.logits} != {rows}:
            raise ModelError(f"{KEY}: this model's routers do not see each token of a batch once", "set packing: false")
        return _BalancingLoss.apply(anchor, self)

    def counted(self, sums: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
        """Wrap a function of a batch in `forward`."""

        def within_forward(batch: Mapping[str, Any]) -> Any:
            with self.forward(batch):
                return sums(batch)

        return within_forward

    def usage(self, mesh: Mesh = SINGLE_PROCESS) -> dict[str, Any]:
        """Return how often each expert was selected in training, over all ranks.

        Returns:
            For each layer: tokens by expert (`used`), the entropy of their distribution relative to the uniform one,
            and experts without a token (`dead`). Over all layers: the mean entropy and the number of dead experts.
        """
        counts = {(name, at): float(n) for name, used in self.used.items() for at, n in enumerate(used.tolist())}
        counts = mesh.sum(counts, TOKEN_AXES)
        layers = {}
        for name, used in self.used.items():
            tokens = [int(counts[name, at]) for at in range(len(used))]
            shares = [count / max(sum(tokens), 1) for count in tokens if count]
            entropy = -sum(share * math.log(share) for share in shares) / math.log(max(len(tokens), 2))
            dead = [at for at, count in enumerate(tokens) if not count]
            layers[_plain_name(name)] = {"used": tokens, "entropy": entropy, "dead": dead}
        usages: list[Any] = list(layers.values())
        return {
            "entropy": sum(usage["entropy"] for usage in usages) / len(usages),
            "dead": sum(len(usage["dead"]) for usage in usages),
            "experts": sum(len(usage["used"]) for usage in usages),
            "layers": layers,
        }

    def gradient(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return the loss's gradient with respect to some rows of a router's logits [n, E]."""
        exact = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.to(exact).softmax(-1)
        weight = (self.upstream * len(self.chosen) / self.rows**2 * self.chosen).to(exact)
        gradient = probabilities * (weight - (probabilities @ weight)[:, None])
        return (gradient if mask is None else gradient * mask[:, None]).to(logits.dtype)

    def _part(self, name: str, rows: int) -> Tensor | None:
        """Return the mask of a module's next rows; a module may run its tokens in several calls."""
        start = self._seen.get(name, 0)
        self._seen[name] = start + rows
        if self._mask is None:
            return None
        start %= len(self._mask)
        return self._mask[start : start + rows] != 0 if start + rows <= len(self._mask) else None

    def record_logits(self, name: str, index: int, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Forward hook of a router: count its logits and attach the balancing gradient to them."""
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        logits = outputs[index].reshape(-1, outputs[index].shape[-1])
        mask = self._part(name, len(logits))
        if self._counting:
            self._count(logits.detach(), mask)
        if not (torch.is_grad_enabled() and logits.requires_grad and self.model.training):
            return None
        used = [
            at for at, value in enumerate(outputs) if at != index and isinstance(value, Tensor) and value.requires_grad
        ] or [index]
        changed = iter(_AttachGradient.apply(self, mask, outputs[index], *(outputs[at] for at in used)))
        values = [next(changed) if at in used else value for at, value in enumerate(outputs)]
        return values[0] if isinstance(output, Tensor) else type(output)(values)

    def _count(self, logits: Tensor, mask: Tensor | None) -> None:
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities)
        chosen.scatter_(1, probabilities.topk(self.top_k).indices, 1.0)
        if mask is not None:
            probabilities, chosen = probabilities * mask[:, None], chosen * mask[:, None]
        self.chosen += chosen.sum(0)
        self.shares += probabilities.sum(0)
        self.rows += len(logits) if mask is None else mask.sum()

    def record_choice(self, name: str, module: Any, arguments: tuple[Any, ...]) -> None:
        """Forward pre-hook of a layer's experts: count the selected experts, int [n, k]."""
        if not (self._counting and self.model.training):
            return
        index = arguments[1]
        mask = self._part(name, len(index))
        chosen = torch.zeros(len(index), _expert_count(module), dtype=torch.bool, device=index.device)
        chosen.scatter_(1, index.long(), True)
        if self._trained is not None:
            chosen &= self._trained
        self.used[name] += (chosen if mask is None else chosen & mask[:, None]).sum(0)


class _AttachGradient(torch.autograd.Function):
    """Identity on a router's outputs; backward adds the balancing loss's gradient to that of its logits."""

    @staticmethod
    def forward(ctx, routers, mask, logits, *used):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, mask)
        ctx.routers = routers
        return used

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        logits, mask = ctx.saved_tensors
        gradient = ctx.routers.gradient(logits.reshape(-1, logits.shape[-1]), mask).view_as(logits)
        return None, None, gradient, *gradients


class _BalancingLoss(torch.autograd.Function):
    """The balancing loss; backward stores its incoming gradient for the routers."""

    @staticmethod
    def forward(ctx, anchor, routers):
        ctx.routers = routers
        return len(routers.chosen) * (routers.chosen * routers.shares).sum() / routers.rows**2

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        ctx.routers.upstream.copy_(gradient)
        return None, None


def _plain_name(name: str) -> str:
    """Return a module's name in the model without adapters."""
    for wrapper in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(wrapper, "")
    return name.removeprefix("base_model.model.")


def _find_routers(model: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return name → (router, index of the logits among its outputs), from the model class's recorded outputs."""
    specs = []
    for module in model.modules():
        recorded = getattr(type(module), "_can_record_outputs", None) or {}
        recorded_logits = recorded.get("router_logits", [])
        specs += recorded_logits if isinstance(recorded_logits, list) else [recorded_logits]
    return {
        name: (module, spec.index)
        for name, module in model.named_modules()
        for spec in specs
        if isinstance(module, spec.target_class) and (spec.layer_name or "") in name
    }


def _expert_count(experts: Any) -> int:
    return experts.down_proj.shape[0]


def balancing_unsupported_reason(causal_lm: Any) -> str | None:
    """Return why a causal LM has no balancing loss, or None."""
    module = sys.modules[type(causal_lm).__module__]
    model_type = causal_lm.config.model_type
    if not any(map(runs_experts, causal_lm.modules())):
        return f"a {model_type} has no experts that halfbyte runs"
    if not hasattr(module, "load_balancing_loss_func") or not _find_routers(causal_lm):
        return f"transformers has no balancing loss for a {model_type}"
    return None


def check_balancing(causal_lm: Any, coefficient: float | None) -> None:
    """Check that a run can balance its routers.

    Raises:
        ConfigError: the model has no balancing loss.
    """
    if coefficient and (why := balancing_unsupported_reason(causal_lm)) is not None:
        raise ConfigError(f"{KEY}: {why}", f"remove {KEY}")


def tracked_routers(model: nn.Module) -> Routers | None:
    """Return the routers of a model inside `track_routers`, or None."""
    return _tracked.get(model)


@contextlib.contextmanager
def track_routers(model: nn.Module, *, balanced: bool) -> Iterator[Routers | None]:
    """Track a mixture's routers inside the context; yields None for a model without experts.

    Args:
        balanced: whether `Routers.loss` replaces the model's own router loss.
    """
    routers = Routers(model, balanced=balanced)
    if not routers.experts:
        yield None
        return
    config: Any = causal_lm_of(model).config.get_text_config()
    outputs_logits = getattr(config, "output_router_logits", None)
    hooks = [
        module.register_forward_hook(partial(routers.record_logits, _plain_name(name), index))
        for name, (module, index) in routers.logits.items()
    ]
    experts = routers.experts.items()
    hooks += [module.register_forward_pre_hook(partial(routers.record_choice, name)) for name, module in experts]
    if balanced:  # `head` probes a model on a few tokens before its first loss
        hooks.append(causal_lm_of(model).base_model.register_forward_pre_hook(routers._begin))
    _tracked[model] = routers
    if balanced and outputs_logits:
        config.output_router_logits = False
    try:
        yield routers
    finally:
        del _tracked[model]
        if balanced and outputs_logits:
            config.output_router_logits = outputs_logits
        for hook in hooks:
            hook.remove()
