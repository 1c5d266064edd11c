"""Second moments of a model's linear layers, inputs and gradients of the outputs, a decoder layer at a time.

They say what an error E of a layer's weight costs: to second order the loss grows by ½·tr(G·E·C·Eᵀ), with the inputs'
moment C and the gradients' moment G of the Kronecker-factored Fisher matrix (Martens & Grosse 2015, §3). Each token
counts in C by the squared norm of its gradient, since the layers after it read few tokens.

The forward keeps the hidden states before each decoder layer. The backward starts at the last layer, computes one
layer's forward again at a time, and gives the layer's moments to the caller before the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loading.streamed import CHUNK_TOKENS, joined, rows_of
from ..modeling.head import causal_lm_loss
from ..modeling.layer import causal_lm_of, decoder_layers
from ..ops import IGNORE_INDEX
from ..tensor import QuantizedTensor

Visit = Callable[[str, Tensor, Tensor], None]  # name of a linear, fp32 C [K, K] and G [N, N]
LayerForward = Callable[..., Any]  # of a layer's index, its forward, the hidden states and further arguments


@dataclass
class _Call:
    """Arguments of a decoder layer's forward on all rows."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def rows(self, rows: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(self.hidden)
        return rows_of(self.args, rows, count), rows_of(self.kwargs, rows, count)

    def chunks(self) -> list[slice]:
        together = max(1, CHUNK_TOKENS // self.hidden.shape[1])
        return [slice(first, first + together) for first in range(0, len(self.hidden), together)]


def padded(documents: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids, int64 [rows, T], and which of them are no padding, bool [rows, T]."""
    width = max(map(len, documents))
    ids = torch.stack([functional.pad(torch.tensor(row), (0, width - len(row))) for row in documents])
    lengths = torch.tensor([len(row) for row in documents])
    return ids.to(device), (torch.arange(width) < lengths[:, None]).to(device)


@contextlib.contextmanager
def replaced_forwards(layers: nn.ModuleList, forward: LayerForward) -> Iterator[list[Callable[..., Any]]]:
    """Run `forward(index, hidden, *args, **kwargs)` for each decoder layer; yield the layers' own forwards."""
    forwards = [layer.forward for layer in layers]
    for index, layer in enumerate(layers):
        layer.forward = partial(forward, index)
    try:
        yield forwards
    finally:
        for layer in layers:
            del layer.forward


@contextlib.contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Widen a module's weights, except quantized ones; they dequantize themselves in the input's dtype."""
    tensors = [*module.parameters(), *module.buffers()]
    narrow = [t for t in tensors if not isinstance(t.data, QuantizedTensor) and t.is_floating_point()]
    stored = [tensor.data for tensor in narrow]
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, data in zip(narrow, stored, strict=True):
            tensor.data = data


def stream_curvature(
    model: nn.Module,
    documents: Sequence[Sequence[int]],
    modules: Mapping[str, nn.Module],
    visit: Visit,
    advance: Callable[[], None],
) -> None:
    """Call `visit` for each of `modules` with its moments over tokens of the documents, from the last layer on.

    Args:
        model: in eval mode; its weights outside of decoder layers are in fp32.
        modules: name → linear of a decoder layer, with its adapter.
        advance: called after each layer of the forward and of the backward.
    """
    ids, mask = padded(documents, next(model.parameters()).device)
    prefix, layers = decoder_layers(causal_lm_of(model))
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORE_INDEX)}
    with torch.no_grad():  # verifies the head before forwards are replaced
        causal_lm_loss(model, {name: value[:1, :8] for name, value in batch.items()})
    calls: list[_Call] = []

    def keep(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _Call(hidden.detach(), args, kwargs)
        calls.append(call)
        with torch.no_grad(), in_float32(layers[index]):
            outputs = []
            for rows in call.chunks():
                chunk_args, chunk_kwargs = call.rows(rows)
                outputs.append(forwards[index](hidden[rows].float(), *chunk_args, **chunk_kwargs))
        advance()
        output = joined(outputs)
        if index == len(layers) - 1:
            last.append(_hidden(output).requires_grad_())
        return output

    last: list[Tensor] = []
    with replaced_forwards(layers, keep) as forwards:
        loss, _ = causal_lm_loss(model, batch)
        (gradient,) = torch.autograd.grad(loss, last)
        for index in reversed(range(len(layers))):
            linears = {name: module for name, module in modules.items() if name.startswith(f"{prefix}.{index}.")}
            gradient = _backward(layers[index], forwards[index], calls.pop(), gradient, mask, linears, visit)
            advance()


def _backward(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: _Call,
    gradient: Tensor,
    mask: Tensor,
    linears: Mapping[str, nn.Module],
    visit: Visit,
) -> Tensor:
    """Visit the linears of one layer, and return the gradient of the layer's input."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def observe(name: str, real: Tensor, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0].detach()

        def add(gradient: Tensor) -> None:
            g, tokens = gradient[real].float(), x[real].float()
            c = (tokens * g.square().sum(-1, keepdim=True)).T @ tokens
            inputs[name] = inputs[name].add_(c) if name in inputs else c
            outputs[name] = outputs[name].addmm_(g.T, g) if name in outputs else g.T @ g

        output.register_hook(add)

    gradients: list[Tensor] = []
    with in_float32(layer):
        for rows in call.chunks():
            handles = [m.register_forward_hook(partial(observe, name, mask[rows])) for name, m in linears.items()]
            hidden = call.hidden[rows].float().requires_grad_()
            chunk_args, chunk_kwargs = call.rows(rows)
            with torch.enable_grad():
                output = _hidden(forward(hidden, *chunk_args, **chunk_kwargs))
                gradients += torch.autograd.grad(output, [hidden], gradient[rows])
            for handle in handles:
                handle.remove()
    for name in linears:
        visit(name, inputs.pop(name), outputs.pop(name))
    return torch.cat(gradients)


def _hidden(output: Any) -> Tensor:
    """Return the hidden states of a decoder layer's output."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden
