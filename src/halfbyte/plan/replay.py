"""What one training step allocates, found by replaying it on shapes alone.

The model is built without storage (fake tensors: shapes, dtypes and the real operators' memory behaviour, no data), one
forward and backward run through the very modules that will train, and a ledger notes each storage when it appears and
when it dies. So the numbers hold for any architecture, attention implementation, adapter variant and checkpointing,
without a formula for each. Only two things are stand-ins: a quantized linear (which keeps nothing and dequantizes into
scratch, twice) and the attention of devices whose kernels are not here, for which the CPU's fused one answers.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..autograd.lora import to_compute_dtype
from ..formats import Format
from ..ops.cross_entropy import Objective
from ..ops.losses import chunk_rows, cross_entropy_in_chunks
from ..qat.fake_quantize import round_trip


class Ledger(TorchDispatchMode):
    """Counts the bytes of live storages while it is entered; `peak` of all, and `peak_by_tag` of that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.tag = "activations"
        self.peak_by_tag: dict[str, int] = {}
        self._live_by_tag: dict[str, int] = {}
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, tensors: Iterator[Tensor]) -> None:
        """Storages that were there before, such as weights: views of them cost nothing."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        result = run(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size, tag = storage.nbytes(), self.tag
        weakref.finalize(storage, self._change, -size, tag)
        self._change(size, tag)

    def _change(self, size: int, tag: str) -> None:
        self.live += size
        self._live_by_tag[tag] = self._live_by_tag.get(tag, 0) + size
        if self.live > self.peak:
            self.peak, self.peak_by_tag = self.live, dict(self._live_by_tag)

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Enter what is allocated inside under `tag`."""
        before, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = before


def _grouped_product(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's product of experts. As fake tensors it takes bfloat16 alone, where a CPU multiplies float32, too."""
    result = torch.ops.aten._grouped_mm.default(a.to(torch.bfloat16), b.to(torch.bfloat16), *args, **kwargs)
    return result if a.dtype is torch.bfloat16 else torch.empty_like(result, dtype=a.dtype)


class _DequantizedProduct(torch.autograd.Function):
    """x Wᵀ of a quantized weight: the dequantized weight is scratch in forward, and again in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return F.linear(x, torch.empty(weight.shape, dtype=x.dtype, device=x.device), bias)

    @staticmethod
    def backward(ctx, grad):
        weight = torch.empty(ctx.weight.shape, dtype=grad.dtype, device=grad.device)
        return grad @ weight, None, None


class QuantizedStandIn(nn.Linear):
    """A frozen linear with the memory behaviour of `layers.QuantizedLinear`; assigned as the class of a plain linear.

    Attributes:
        format: how the weight is stored.
    """

    format: Format

    def forward(self, x: Tensor) -> Tensor:
        return _DequantizedProduct.apply(x.to(self.weight.dtype), self.weight, self.bias)


@functools.cache
def bytes_to_round(format: Format) -> float:
    """Bytes a weight at the highest moment of quantizing and dequantizing, the result in fp32 included; of a trial on
    the CPU. Formats that work in chunks take less than this of large weights."""
    weight = torch.linspace(-1, 1, 64 * 1024, device="cpu").view(64, 1024)
    ledger = Ledger()
    ledger.ignore(iter((weight,)))
    with ledger:
        round_trip(weight, format, torch.float32)
    return ledger.peak / weight.numel()


class _FakeQuantizedProduct(torch.autograd.Function):
    """x·Qᵀ of a weight that is rounded in every forward and again in backward, with what that takes as scratch."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: FakeQuantizedStandIn, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        if weight.requires_grad:
            ctx.save_for_backward(x)
        return F.linear(x, linear.rounded(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        grad_weight = None
        grad_input = grad @ ctx.linear.rounded(grad.dtype)
        for x in ctx.saved_tensors:
            grad_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            grad_weight = grad_weight.to(ctx.linear.weight.dtype)
        return grad_input, None, grad_weight, None


class FakeQuantizedStandIn(nn.Linear):
    """A linear with the memory behaviour of `layers_qat.QATLinear`; assigned as the class of a plain linear.

    Attributes:
        format: what the weight is rounded to.
    """

    format: Format

    def forward(self, x: Tensor) -> Tensor:
        x = to_compute_dtype(x)
        return _FakeQuantizedProduct.apply(x, self, self.weight, None if self.bias is None else self.bias.to(x.dtype))

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Of the weight's shape, after its scratch was there; 16 bits, or a sum with an adapter, are in fp32 first."""
        shape, device = self.weight.shape, self.weight.device
        scratch = [torch.empty(int(bytes_to_round(self.format) * shape.numel()), dtype=torch.uint8, device=device)]
        if not self.weight.requires_grad or self.weight.dtype != torch.float32:
            scratch.append(torch.empty(shape, dtype=torch.float32, device=device))
        scratch.clear()
        return torch.empty(shape, dtype=dtype, device=device)


class _ChunkedLoss(torch.autograd.Function):
    """`autograd.losses.linear_cross_entropy` with its chunks in the open, where the ledger sees them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, chunk: int):
        needs = ctx.needs_input_grad
        rows, *grads = cross_entropy_in_chunks(
            hidden,
            weight,
            labels,
            Objective(softcap=softcap),
            need_entropy=False,
            grad_hidden=needs[0],
            grad_weight=needs[1],
            chunk=chunk,
        )
        ctx.save_for_backward(*grads)
        return rows.loss.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grads = [
            None if grad is None else (grad * grad_loss.reshape(1, 1)).to(grad.dtype) for grad in ctx.saved_tensors
        ]
        return *grads, None, None, None


@dataclass(frozen=True)
class Replay:
    """Bytes beyond weights, gradients and optimizer at the highest moment of a step."""

    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.activations + self.logits


def give_shapes_a_device(model: nn.Module) -> None:
    """Replace meta tensors by fake CPU ones (call under FakeTensorMode): autocast and attention ask for a device."""
    made: dict[int, Any] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in stores:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    fake: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        fake.grad = torch.empty_like(fake) if tensor.requires_grad else None
                    made[id(tensor)] = fake
                if tensor is not None:
                    tensors[name] = made[id(tensor)]


def replay_step(
    model: Any, batch: dict[str, Tensor], *, compute_dtype: torch.dtype, device_type: str, softcap: float | None = None
) -> Replay:
    """Run one micro-batch of `causal_lm_loss`, forward and backward, on fake tensors and return its peak.

    Args:
        model: causal LM, plain or a PeftModel, of fake tensors with gradients allocated, in training mode.
        batch: fake `input_ids` [B, T] and whatever else the collator gives.
        compute_dtype: of matrix products; autocast is entered with it, as the trainer does.
        device_type: the device that will train; it decides the size of the loss's chunks.
        softcap: of the logits.
    """
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers())))
    ledger.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    mixed = compute_dtype != torch.float32
    with ledger:
        with torch.autocast("cpu", dtype=compute_dtype if mixed else torch.bfloat16, enabled=mixed):
            loss = _loss(model, batch, ledger, compute_dtype, chunk_device=device_type, softcap=softcap)
        loss.backward()
    return Replay(ledger.peak_by_tag.get("activations", 0), ledger.peak_by_tag.get("logits", 0))


def _loss(model: Any, batch: dict[str, Tensor], ledger: Ledger, dtype: torch.dtype, *, chunk_device: str, softcap):
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal_lm.get_output_embeddings()
    labels = torch.zeros_like(batch["input_ids"]).reshape(-1)
    plain = type(head) is nn.Linear and head.bias is None and causal_lm.base_model is not causal_lm
    if not plain:  # the loss then needs full logits, as `models.head` decides
        logits = model(**batch, use_cache=False).logits
        with ledger.tagged("logits"):
            return F.cross_entropy(logits.flatten(0, -2).float(), labels, reduction="sum")
    hidden = causal_lm.base_model(**batch, use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    chunk = chunk_rows(head.weight.shape[0], chunk_device, hidden.element_size())
    with ledger.tagged("logits"):
        return _ChunkedLoss.apply(hidden, head.weight.to(dtype), labels, softcap, chunk)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Tensors made inside have shapes and dtypes, and no data."""
    with FakeTensorMode():
        yield
