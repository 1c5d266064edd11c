"""Replay of one training step on fake tensors, to measure its allocations.

The model has no storage (fake tensors have shapes, dtypes and the real operators' memory behaviour, but no data). One
forward and backward run through the modules that will train, patched as in the run, and a ledger records when each
storage is allocated and freed. So the numbers hold for any architecture, adapter variant, level and format without a
formula for each. Stand-ins replace only code that fake tensors cannot run: kernels (`ledger.kernels`), attention of
devices that are absent, quantization in every forward (QAT), and the fused loss.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from ..autograd.attention import has_repeatable_rows
from ..autograd.tiled_attention import TENSORS
from ..formats import Format
from ..modeling.attention import Implementation
from ..modeling.compute_dtype import compute_autocast, no_input_casts
from ..modeling.head import backbone_inputs, expected_head, head_terms
from ..modeling.layer import causal_lm_of
from ..modeling.patch import patch
from ..ops.attention import parts_of_rows
from ..ops.cross_entropy import Objective
from ..ops.linear_head import HeadAdapter, Needed, chunk_rows
from ..ops.losses import cross_entropy_in_chunks
from ..qat import fake_quantize
from ..qat.model import ROUNDED
from ..tensor import QuantizedTensor
from ..utils.notices import silent
from .ledger import LOGITS, Ledger, kernels

ATTENTION = "halfbyte_planned"  # name of the stand-in in transformers' attention table


@dataclass(frozen=True)
class LayerBytes:
    """Activation bytes of one decoder layer.

    Args:
        saved: allocated between its forward and its backward, with its output and without its input.
        forward: workspace on top of all saved bytes at the highest moment of its forward.
        backward: workspace on top of all saved bytes at the highest moment of its backward.
        widest: its two largest saved tensors.
    """

    saved: int
    forward: int
    backward: int
    widest: int = 0

    def line(self, end: LayerBytes, share: float) -> LayerBytes:
        """Interpolate linearly between this layer, at 0, and `end`, at 1."""
        pairs = zip(astuple(self), astuple(end), strict=True)
        return LayerBytes(*(int(a + share * (b - a)) for a, b in pairs))


@dataclass(frozen=True)
class Step:
    """Bytes of a step beyond weights, gradients and optimizer.

    Args:
        initial: allocated when the first layer starts.
        layers: of each decoder layer.
        head: workspace on top of all saved bytes at the highest moment between the last layer's forward and backward.
        logits: the share of `head` that the head and the loss allocate.
    """

    initial: int
    layers: tuple[LayerBytes, ...]
    head: int
    logits: int

    def line(self, end: Step, share: float) -> Step:
        """Interpolate linearly between this step, at 0, and `end`, at 1."""
        initial, head, logits = (
            int(a + share * (b - a))
            for a, b in ((self.initial, end.initial), (self.head, end.head), (self.logits, end.logits))
        )
        layers = tuple(a.line(b, share) for a, b in zip(self.layers, end.layers, strict=True))
        return Step(initial, layers, head, logits)


@dataclass(frozen=True)
class Target:
    """The device that a step is replayed for.

    Args:
        type: device type, such as "cuda".
        dtype: compute dtype.
        attention: implementation on that device; None: the model's own code.
        patched: whether halfbyte's fused forwards run.
    """

    type: str
    dtype: torch.dtype
    attention: Implementation | None = None
    patched: bool = False


# Raised where shapes depend on values, which fake tensors lack.
NO_SHAPES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def own_error(model: Any) -> RuntimeError | None:
    """Return the error of an unpatched model's forward, or None if it runs or depends on values.

    Args:
        model: transformers causal LM on the meta device; it must not be used afterwards.
    """
    with silent(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        give_shapes_a_device(model)
        try:
            model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False)
        except NO_SHAPES:
            return None
        except RuntimeError as error:
            return error
    return None


def replay(
    model: Any, layers: Sequence[str], batch: dict[str, Tensor], target: Target, levels: Sequence[str] | None = None
) -> Step:
    """Measure one micro-batch's forward and backward; in evaluation mode, only its forward.

    Args:
        model: causal LM, plain or a PeftModel, on the meta device, in training or evaluation mode; it must not be used
            afterwards.
        layers: names of its decoder layers.
        batch: `input_ids` [B, T] and the collator's other tensors, on any device.
        levels: activation level of each layer; None: transformers' checkpointing as set on the model.

    Returns:
        The step's bytes; in evaluation mode, the highest moment as `head`.
    """
    for format_ in {module.format for module in model.modules() if isinstance(module, ROUNDED)}:
        bytes_to_round(format_, target.type)  # measured while tensors still have data
    with silent(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        give_shapes_a_device(model)
        ledger = Ledger()
        if target.patched:
            with kernels(ledger, target.type):  # DoRA's norms read the weights
                patch(model, levels and list(levels))
        if target.attention is not None:
            stand_in(causal_lm_of(model), target.attention)
        batch = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()}
        ledger.ignore(iter((*model.parameters(), *model.buffers(), *batch.values())))
        ledger.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        with no_input_casts(model, target.dtype), ledger, kernels(ledger, target.type), _rounding(target.type):
            if not model.training:
                with torch.no_grad(), compute_autocast(model, target.dtype):
                    _loss(model, batch, ledger, target)
                return Step(0, (), ledger.peak, 0)
            moments = _Moments(ledger, [model.get_submodule(name) for name in layers])
            with compute_autocast(model, target.dtype):
                loss = _loss(model, batch, ledger, target)
            moments.in_forward = False
            loss.backward()
            return moments.step()


class _Moments:
    """Records live bytes before and after each layer, and its highest moment."""

    def __init__(self, ledger: Ledger, layers: Sequence[nn.Module]):
        self.ledger, self.in_forward = ledger, True
        self.started, self.done, self.highest, self.backward, self.widest = ([0] * len(layers) for _ in range(5))
        self.sizes: Counter[int] = Counter()
        self.head = self.logits = 0
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._begin, index))
            layer.register_forward_hook(functools.partial(self._end, index))

    def _begin(self, index: int, module: nn.Module, args: Any) -> None:
        if self.in_forward:  # a checkpointed layer runs again in backward
            self.ledger.highest()
            self.started[index], self.sizes = self.ledger.live, self.ledger.sizes.copy()

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
        """Hook on the gradient of a layer's output: the backward of everything after this layer is done."""
        logits = self.ledger.peak_by_tag.get(LOGITS, 0)
        peak = self.ledger.highest()
        if index + 1 < len(self.done):
            self.backward[index + 1] = peak
        else:
            self.head, self.logits = peak, logits

    def step(self) -> Step:
        """Return the step's bytes, after backward."""
        logits, end = self.ledger.peak_by_tag.get(LOGITS, 0), self.ledger.highest()
        if not self.done:  # without known layers a step has one moment
            return Step(0, (), end, logits)
        self.backward[0] = end
        layers = tuple(
            LayerBytes(done - begun, highest - done, backward - done, widest)
            for begun, done, highest, backward, widest in zip(
                self.started, self.done, self.highest, self.backward, self.widest, strict=True
            )
        )
        return Step(self.started[0], layers, self.head - self.done[-1], self.logits)


# --- stand-ins -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes of one layer's attention on an accelerator, on top of q, k, v, the output and its logsumexp.

    Args:
        saved: for backward.
        workspace: at the highest moment of forward, and of backward.
        backward_workspace: at the highest moment of backward only.
        accumulates: whether backward accumulates dq in fp32, and dk and dv for each query head.
    """

    saved: int = 0
    workspace: int = 0
    backward_workspace: int = 0
    accumulates: bool = True

    @classmethod
    def of(cls, kernel: Implementation, query: Tensor, key: Tensor, capped: bool) -> AttentionBytes:
        """Bytes of the implementation `kernel` for `query` [B, Hq, T, D] and `key` [B, Hk, T, D]."""
        rows, heads, length, _ = query.shape
        square, size = rows * length * length, query.element_size()
        if kernel.own_backward:
            return cls(accumulates=False)
        if kernel.repeatable and has_repeatable_rows(query):
            at_once, keys = parts_of_rows(query, key) or (0, 0)
            size = 2 * at_once * keys * (heads // key.shape[1]) * length**2
            return cls(backward_workspace=size, accumulates=False)
        if kernel.tiles:
            return cls(workspace=TENSORS * kernel.tiles)
        if kernel.scores:  # tanh of capped scores; the softmax in fp32, and once more in the compute dtype
            low_precision = size if query.dtype != torch.float32 else 0
            copies = 2 * query.numel() * size if key.shape[1] < heads else 0  # keys and values of every query head
            return cls(square * heads * (capped * size + 4 + low_precision) + copies, square * heads * (size + 4))
        if kernel.mask:  # a Boolean mask as an additive one, and keys and values of every query head
            return cls(square * size + 2 * (query.numel() - key.numel()) * size, square * size)
        return cls()


def stand_in(model: nn.Module, kernel: Implementation) -> None:
    """Have the text layers of `model` call `attend`, with the allocations of `kernel`."""
    AttentionInterface.register(ATTENTION, attend)
    masks = eager_mask if kernel.scores else sdpa_mask
    AttentionMaskInterface.register(ATTENTION, masks if kernel.mask else lambda *args, **kwargs: None)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation, config._halfbyte_planned = ATTENTION, kernel


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], value [B, Hk, T, Dv] → [B, T, H, Dv]."""
    extra = AttentionBytes.of(module.config._halfbyte_planned, query, key, kwargs.get("softcap") is not None)
    return _Attention.apply(query, key, value, extra).transpose(1, 2), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, extra):
        rows, heads, length, _ = query.shape
        out = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        logsumexp = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp, _bytes(extra.saved, query))
        ctx.workspace, ctx.accumulates = max(extra.workspace, extra.backward_workspace), extra.accumulates
        _bytes(extra.workspace, query)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, logsumexp, _ = ctx.saved_tensors
        workspace = [torch.empty_like(logsumexp), _bytes(ctx.workspace, query)]  # δ = dout · out of each head
        if ctx.accumulates:
            workspace.append(torch.empty_like(query, dtype=torch.float32))
        if ctx.accumulates and key.shape[1] < query.shape[1]:
            workspace += [torch.empty_like(query), torch.empty_like(out)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _bytes(size: int, like: Tensor) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


@functools.cache
def bytes_to_round(format: Format, device_type: str) -> float:
    """Peak bytes per weight of quantizing and dequantizing, including the fp32 result, measured once on the CPU.

    An upper bound for large weights in formats that work in chunks.
    """
    weight = torch.linspace(-1, 1, 64 * 1024, device="cpu").view(64, 1024)
    ledger = Ledger()
    ledger.ignore(iter((weight,)))
    with ledger, kernels(ledger, device_type) if device_type != "cpu" else contextlib.nullcontext():
        fake_quantize.round_trip(weight, format, torch.float32)
    return ledger.peak / weight.numel()


@contextlib.contextmanager
def _rounding(device_type: str) -> Iterator[None]:
    """Replace QAT's fake quantization by its allocations, because quantizers read values."""
    original = fake_quantize.round_trip

    def round_trip(weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        wide = None if weight.dtype == torch.float32 else weight.float()  # quantizers start from fp32
        weight.new_empty(int(bytes_to_round(format, device_type) * weight.numel()), dtype=torch.uint8)
        del wide
        return torch.empty_like(weight, dtype=dtype)

    fake_quantize.round_trip = round_trip
    try:
        yield
    finally:
        fake_quantize.round_trip = original


class _ChunkedLoss(torch.autograd.Function):
    """`autograd.losses.linear_cross_entropy` with its chunks visible to the ledger."""

    @staticmethod
    def forward(ctx, softcap: float | None, chunk: int, labels: Tensor, hidden: Tensor, weight: Tensor, *adapter: Any):
        rows, grads = cross_entropy_in_chunks(
            hidden,
            weight,
            labels,
            Objective(softcap=softcap),
            HeadAdapter(*adapter),
            need_entropy=False,
            needed=Needed(*ctx.needs_input_grad[3:-1]),
            chunk=chunk,
        )
        ctx.save_for_backward(*grads)
        return rows.loss.sum()

    @staticmethod
    def backward(ctx, grad_loss):
        grads = [None if grad is None else grad.mul_(grad_loss.to(grad.dtype)) for grad in ctx.saved_tensors]
        return None, None, None, *grads, None


def _loss(model: Any, batch: dict[str, Tensor], ledger: Ledger, target: Target) -> Tensor:
    """Stand-in for `modeling.head.causal_lm_loss`, which probes the head with numbers."""
    labels, head = torch.zeros_like(batch["input_ids"]).reshape(-1), expected_head(model)
    inputs = backbone_inputs(model, batch)
    if isinstance(head, str):
        logits = model(**inputs, use_cache=False).logits
        with ledger.tagged(LOGITS):
            return F.cross_entropy(logits.flatten(0, -2).float(), labels, reduction="sum")
    causal_lm = causal_lm_of(model)
    hidden = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(target.dtype)
    weight, adapter = head_terms(causal_lm, hidden)
    chunk = chunk_rows(weight.shape[0], target.type, hidden.element_size())
    with ledger.tagged(LOGITS):
        return _ChunkedLoss.apply(head.softcap, chunk, labels, hidden, weight, *adapter)


def give_shapes_a_device(model: nn.Module, make: Callable[..., Tensor] = torch.empty) -> None:
    """Replace meta tensors with fake CPU tensors: autocast and attention read the device.

    Args:
        make: returns the new tensors, which outside of fake tensors are real.
    """
    replacements: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        return make(tensor.shape, dtype=tensor.dtype, device="cpu")

    def replacement(tensor: Any) -> Any:
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
                if tensor is not None and id(tensor) not in replacements:
                    replacements[id(tensor)] = replacement(tensor)
                tensors[name] = None if tensor is None else replacements[id(tensor)]
