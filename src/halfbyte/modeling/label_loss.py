"""The loss that a patched causal LM computes from `labels` in training, without full logits.

transformers' forwards compute all logits and then `self.loss_function(logits, labels, …)`. The forward bound here does
the same through `linear_cross_entropy` where its result is known to be equal; else it calls the forward it replaces.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import IGNORE_INDEX
from ..utils.notices import notice
from .head import PROBE_TOKENS, Head, backbone_inputs, expected_head, hidden_loss, verified_head
from .layer import causal_lm_of
from .patch_record import existing_record, record
from .transformers_versions import CACHE_KEYWORDS

NOT_FOR_THE_BACKBONE = ("logits_to_keep", "num_items_in_batch", "return_dict", "use_cache")
# Arguments for which the forward that was replaced runs, if they are neither None, False nor 0.
UNFUSED = ("logits_to_keep", "output_router_logits", "use_cache", *CACHE_KEYWORDS)

_checked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether the loss is the cross-entropy alone


def bind_label_loss(model: nn.Module) -> str | None:
    """Bind the forward to a causal LM of transformers, plain or in a `peft.PeftModel`.

    A forward that accelerate's hooks call is replaced inside the hooks.

    Returns:
        Why training computes full logits at present, or None. Each call checks the head again.
    """
    causal_lm = causal_lm_of(model)
    model_class: Any = type(causal_lm)
    holder = _place(causal_lm)
    bound = causal_lm.__dict__.get(holder)
    if _is_on(causal_lm):
        return _reason(causal_lm)
    if bound is not None and not is_ours(bound) and getattr(bound, "__func__", None) is not model_class.forward:
        return "something else has replaced its forward"
    stock = inspect.unwrap(model_class.forward)
    if "labels" not in inspect.signature(stock).parameters or "loss_function" not in stock.__code__.co_names:
        return f"{model_class.__name__} computes no loss through its loss_function"
    setattr(causal_lm, holder, MethodType(_forward_of(model_class), causal_lm))
    record(causal_lm).label_loss = True
    return _reason(causal_lm)


def _reason(causal_lm: Any) -> str | None:
    """Return why the structure of a model needs full logits, or None."""
    head = expected_head(causal_lm)
    if isinstance(head, str):
        return head
    if "forward" in causal_lm.get_output_embeddings().__dict__:  # accelerate's hooks on a model on several devices
        return f"something has replaced the forward of the head of {type(causal_lm).__name__}"
    return None


def _is_on(module: nn.Module) -> bool:
    """Return whether the bound forward may fuse: a wrapper of another library may still call it after `unpatch`."""
    patched = existing_record(module)
    return patched is not None and patched.label_loss


def has_label_head(model: nn.Module) -> bool:
    """Return whether a model is a causal LM: it has an output embedding."""
    find = getattr(causal_lm_of(model), "get_output_embeddings", None)
    return find is not None and find() is not None


def unbind_label_loss(module: nn.Module) -> None:
    """Undo `bind_label_loss`; does nothing on a module without that forward. Wrappers set since then stay."""
    if (patched := existing_record(module)) is not None:
        patched.label_loss = False
    if is_ours(module.__dict__.get("_old_forward")):
        setattr(module, "_old_forward", MethodType(type(module).forward, module))  # noqa: B010
    if is_ours(module.__dict__.get("forward")):
        del module.__dict__["forward"]


def is_ours(forward: Any) -> bool:
    """Return whether a forward is one that `bind_label_loss` has bound."""
    return hasattr(getattr(forward, "__func__", None), "_computes_label_loss")


def _place(module: Any) -> str:
    """Return the attribute that holds the forward: inside accelerate's hooks, if there are any."""
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


@functools.cache
def _forward_of(model_class: Any) -> Callable[..., Any]:
    """Return the forward for models of a class; its signature is the class's own, which trainers read."""
    stock = model_class.forward
    names = [*inspect.signature(stock).parameters][1:]

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        is_fused = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and _is_on(self)
        fused = _fused_loss(self, arguments) if is_fused else None
        return stock(self, *args, **kwargs) if fused is None else fused

    forward._computes_label_loss = True  # type: ignore[attr-defined]
    return forward


def _fused_loss(model: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the model's output with the loss and without logits, or None if its own forward must run."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if arguments.get("labels") is None or arguments.get("input_ids") is None or arguments.get("return_dict") is False:
        return None
    if any(_is_set(arguments.get(name)) for name in UNFUSED):
        return None
    if arguments.get("ignore_index") not in (None, IGNORE_INDEX):
        return None
    passed = {key: value for key, value in arguments.items() if value is not None and key not in NOT_FOR_THE_BACKBONE}
    inputs = backbone_inputs(model, passed)
    head: Head | str
    if model.loss_function is not ForCausalLMLoss:
        head = f"{type(model).__name__} has a loss_function of its own"
    else:
        head = _reason(model) or verified_head(model, inputs)
    if not isinstance(head, str):
        if model not in _checked:
            _checked[model] = _is_cross_entropy(model, arguments["input_ids"])
        if not _checked[model]:
            head = f"{type(model).__name__} adds to the cross-entropy"
    if isinstance(head, str):
        notice("full_logits", f"the loss is computed from full logits, which takes more memory: {head}")
        return None
    return _output(model, head, inputs, arguments)


def _is_set(value: Any) -> bool:
    return value is not None and not (isinstance(value, int) and value == 0)  # False is 0


def _output(model: Any, head: Head, inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = model.base_model(**inputs, use_cache=False)
    labels = arguments.get("shift_labels")
    labels = F.pad(arguments["labels"][..., 1:], (0, 1), value=IGNORE_INDEX) if labels is None else labels
    labels, count = labels.to(output.last_hidden_state.device), arguments.get("num_items_in_batch")
    loss = hidden_loss(model, head, output.last_hidden_state, labels)
    if count is None:  # as in torch, the mean of no tokens is NaN, and its gradients are zero
        trained = (labels != IGNORE_INDEX).sum()
        loss = torch.where(trained > 0, loss / trained.clamp(min=1), torch.nan)
    else:
        loss = loss / (count.to(labels.device) if isinstance(count, Tensor) else count)
    return CausalLMOutputWithPast(loss=loss, hidden_states=output.hidden_states, attentions=output.attentions)


@torch.no_grad()
def _is_cross_entropy(model: Any, tokens: Tensor) -> bool:
    """Return whether the loss of the class's forward is the cross-entropy of its logits, for the first tokens."""
    ids = tokens[:1, :PROBE_TOKENS]
    cuda = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):  # the probe must not advance the RNG: resume is exact
        output = type(model).forward(model, input_ids=ids, labels=ids.long(), num_items_in_batch=3, use_cache=False)
    logits, labels = output.logits[0, :-1].float(), ids[0, 1:].long()
    expected = F.cross_entropy(logits, labels.to(logits.device), reduction="sum") / 3
    return bool((output.loss - expected).abs() <= 1e-4 * expected)
