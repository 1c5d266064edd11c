"""What one training step allocates, found by running it on shapes alone.

The model is built without storage (fake tensors: shapes, dtypes and the real operators' memory behaviour, no data), one
forward and backward run through the very modules that will train, patched as they will be, and a ledger notes each
storage when it appears and when it dies. So the numbers hold for any architecture, adapter variant, level and format,
without a formula for each: what a function saves is asked of the function. Stand-ins are only what has no fake tensors:
kernels (`ledger.kernels`), attention of devices that are not here (`plan.attention`), rounding in every forward, and
the loss, which is opaque.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from ..formats import Format
from ..modeling.adapters import compute_autocast, no_input_casts
from ..modeling.attention import Implementation
from ..modeling.head import backbone_inputs, expected_head
from ..modeling.layer import causal_lm_of
from ..modeling.patch import patch
from ..ops.cross_entropy import Objective
from ..ops.losses import chunk_rows, cross_entropy_in_chunks
from ..qat import fake_quantize
from ..qat.layers import QATLinear
from ..tensor import QuantizedTensor
from ..utils.notices import silent
from .attention import stand_in
from .ledger import LOGITS, Ledger, kernels


@dataclass(frozen=True)
class LayerBytes:
    """Of one decoder layer.

    Args:
        saved: wait between its forward and its backward; its result among them, its input not.
        forward: beyond all that is saved, at the highest moment of its forward.
        backward: likewise, of its backward.
        widest: its two largest tensors that are saved.
    """

    saved: int
    forward: int
    backward: int
    widest: int = 0

    def line(self, other: LayerBytes, at: float) -> LayerBytes:
        """On the line through this one, at 0, and `other`, at 1."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return LayerBytes(*(int(a + at * (b - a)) for a, b in pairs))


@dataclass(frozen=True)
class Step:
    """Bytes of a step beyond weights, gradients and optimizer.

    Args:
        before: as the first layer begins.
        layers: one each.
        head: beyond all that is saved, at the highest moment between the last layer's forward and its backward.
        logits: of those, the head's.
    """

    before: int
    layers: tuple[LayerBytes, ...]
    head: int
    logits: int

    def line(self, other: Step, at: float) -> Step:
        """As `LayerBytes.line`."""
        before, head, logits = (
            int(a + at * (b - a))
            for a, b in ((self.before, other.before), (self.head, other.head), (self.logits, other.logits))
        )
        layers = tuple(a.line(b, at) for a, b in zip(self.layers, other.layers, strict=True))
        return Step(before, layers, head, logits)


@dataclass(frozen=True)
class Where:
    """The device that a step is replayed for.

    Args:
        type: of the device.
        dtype: of matrix products.
        attention: what computes it there; None: the model's own.
        patched: whether our other forwards run, too.
    """

    type: str
    dtype: torch.dtype
    attention: Implementation | None = None
    patched: bool = False


# Of models whose shapes depend on values, which a replay has none of.
NO_SHAPES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def own_error(model: Any) -> RuntimeError | None:
    """The error of a model's own forward on its own weights' shapes; None where it runs, or depends on values.

    Args:
        model: causal LM of transformers as it was built, on the meta device; it is used up.
    """
    with silent(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        _give_shapes_a_device(model)
        try:
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
        except NO_SHAPES:
            return None
        except RuntimeError as error:
            return error
    return None


def replay(
    model: Any, layers: Sequence[str], batch: dict[str, Tensor], where: Where, levels: Sequence[str] | None = None
) -> Step:
    """Run one micro-batch, forward and backward; in evaluation mode, the forward alone.

    Args:
        model: causal LM, plain or a PeftModel, on the meta device, in training or evaluation mode; it is used up.
        layers: names of the decoder layers in it.
        batch: `input_ids` [B, T] and whatever else the collator gives, on any device.
        levels: of their activations; None: as transformers' checkpointing says.

    Returns:
        The step; of a forward alone, its highest moment as `head`.
    """
    for format_ in {module.format for module in model.modules() if isinstance(module, QATLinear)}:
        bytes_to_round(format_, where.type)  # tried while tensors still have data
    with silent(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        _give_shapes_a_device(model)
        if where.patched:
            patch(model, levels and list(levels))
        if where.attention is not None:
            stand_in(causal_lm_of(model), where.attention)
        batch = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()}
        ledger = Ledger()
        ledger.ignore(iter((*model.parameters(), *model.buffers(), *batch.values())))
        ledger.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        with no_input_casts(model, where.dtype), ledger, kernels(ledger, where.type), _rounding(where.type):
            if not model.training:
                with torch.no_grad(), compute_autocast(model, where.dtype):
                    _loss(model, batch, ledger, where)
                return Step(0, (), ledger.peak, 0)
            moments = _Moments(ledger, [model.get_submodule(name) for name in layers])
            with compute_autocast(model, where.dtype):
                loss = _loss(model, batch, ledger, where)
            moments.in_forward = False
            loss.backward()
            return moments.step()


class _Moments:
    """Notes what is alive as layers begin and end, and the highest moment of each."""

    def __init__(self, ledger: Ledger, layers: Sequence[nn.Module]):
        self.ledger, self.in_forward = ledger, True
        self.begun, self.done, self.highest, self.backward, self.widest = ([0] * len(layers) for _ in range(5))
        self.sizes: Counter[int] = Counter()
        self.head = self.logits = 0
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._begin, index))
            layer.register_forward_hook(functools.partial(self._end, index))

    def _begin(self, index: int, module: nn.Module, args: Any) -> None:
        if self.in_forward:  # a checkpointed layer runs again in backward
            self.ledger.highest()
            self.begun[index], self.sizes = self.ledger.live, self.ledger.sizes.copy()

    def _end(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if not self.in_forward:
            return
        self.highest[index], self.done[index] = self.ledger.highest(), self.ledger.live
        self.backward[index] = self.done[index]
        self.widest[index] = sum(sorted((self.ledger.sizes - self.sizes).elements())[-2:])
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(functools.partial(self._back, index))

    def _back(self, index: int, grad: Tensor) -> None:
        """The gradient of a layer's result is there: what came after the layer is over."""
        logits = self.ledger.peak_by_tag.get(LOGITS, 0)
        peak = self.ledger.highest()
        if index + 1 < len(self.done):
            self.backward[index + 1] = peak
        else:
            self.head, self.logits = peak, logits

    def step(self) -> Step:
        """After backward."""
        logits, end = self.ledger.peak_by_tag.get(LOGITS, 0), self.ledger.highest()
        if not self.done:  # of no layers that are known, a step has one moment
            return Step(0, (), end, logits)
        self.backward[0] = end
        layers = tuple(
            LayerBytes(done - begun, highest - done, backward - done, widest)
            for begun, done, highest, backward, widest in zip(
                self.begun, self.done, self.highest, self.backward, self.widest, strict=True
            )
        )
        return Step(self.begun[0], layers, self.head - self.done[-1], self.logits)


# --- stand-ins -------------------------------------------------------------------------------------------------------


@functools.cache
def bytes_to_round(format: Format, device_type: str) -> float:
    """Bytes a weight at the highest moment of quantizing and dequantizing, the result in fp32 included; of a trial on
    the CPU. Formats that work in chunks take less than this of large weights."""
    weight = torch.linspace(-1, 1, 64 * 1024, device="cpu").view(64, 1024)
    ledger = Ledger()
    ledger.ignore(iter((weight,)))
    with ledger, kernels(ledger, device_type) if device_type != "cpu" else contextlib.nullcontext():
        fake_quantize.round_trip(weight, format, torch.float32)
    return ledger.peak / weight.numel()


@contextlib.contextmanager
def _rounding(device_type: str) -> Iterator[None]:
    """Inside, weights that are rounded in a forward take the memory of that; quantizers look at values."""
    own = fake_quantize.round_trip

    def round_trip(weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        wide = None if weight.dtype == torch.float32 else weight.float()  # as quantizers begin
        weight.new_empty(int(bytes_to_round(format, device_type) * weight.numel()), dtype=torch.uint8)
        del wide
        return torch.empty_like(weight, dtype=dtype)

    fake_quantize.round_trip = round_trip
    try:
        yield
    finally:
        fake_quantize.round_trip = own


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
        grads = [None if grad is None else grad.mul_(grad_loss.to(grad.dtype)) for grad in ctx.saved_tensors]
        return *grads, None, None, None


def _loss(model: Any, batch: dict[str, Tensor], ledger: Ledger, where: Where) -> Tensor:
    """`modeling.head.causal_lm_loss`, which asks numbers how the head works."""
    labels, head = torch.zeros_like(batch["input_ids"]).reshape(-1), expected_head(model)
    inputs = backbone_inputs(model, batch)
    if isinstance(head, str):
        logits = model(**inputs, use_cache=False).logits
        with ledger.tagged(LOGITS):
            return F.cross_entropy(logits.flatten(0, -2).float(), labels, reduction="sum")
    causal_lm = causal_lm_of(model)
    hidden = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(where.dtype)
    weight = causal_lm.get_output_embeddings().weight.to(where.dtype)
    chunk = chunk_rows(weight.shape[0], where.type, hidden.element_size())
    with ledger.tagged(LOGITS):
        return _ChunkedLoss.apply(hidden, weight, labels, head.softcap, chunk)


def _give_shapes_a_device(model: nn.Module) -> None:
    """Replace meta tensors by fake CPU ones: autocast and attention ask for a device."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def stands_for(tensor: Any) -> Any:
        if isinstance(tensor, QuantizedTensor):
            return nn.Parameter(tensor.map(fake), requires_grad=False)
        if not isinstance(tensor, nn.Parameter):
            return fake(tensor)
        parameter = nn.Parameter(fake(tensor), requires_grad=tensor.requires_grad)
        parameter.grad = torch.empty_like(parameter) if tensor.requires_grad else None
        return parameter

    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in stores:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = stands_for(tensor)
                tensors[name] = None if tensor is None else made[id(tensor)]
