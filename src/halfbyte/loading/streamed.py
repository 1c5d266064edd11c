"""The 16-bit model on rows of tokens, a decoder layer at a time on the device: second moments of linear layers' inputs.

The weights are views of the checkpoint's mapped files. A decoder layer is copied to the device for its forward and
dropped afterwards, so neither device nor host holds the 16-bit model. All rows pass a layer before the next one is
copied, so the moments of a layer are complete, and its weights are on the device, when `visit` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..modeling.layer import decoder_layers
from ..utils.errors import ModelError
from ..utils.waiting import waiting
from .find import ModelFiles
from .load import mapped_model

CHUNK_TOKENS = 4096  # tokens of one forward of a layer

Visit = Callable[[str, Tensor, Tensor], None]  # name of a linear, its weight [N, K], E[x·xᵀ] in fp32 [K, K]


class Moments:
    """Sums of x·xᵀ over the inputs of the linear layers of one decoder layer.

    Args:
        linears: name → module.
        by_row: sum each row of tokens divided by its largest value, and average over rows, as CorDA does in PEFT.
    """

    def __init__(self, linears: dict[str, nn.Module], by_row: bool):
        self.by_row = by_row
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = dict.fromkeys(linears, 0)
        self.same: dict[str, str] = {}  # linear → an earlier one with the same input
        self.mask = torch.empty(0)  # [rows, T] of the current chunk; False: padding
        self._last: tuple[str, Any] = ("", None)
        self._handles = [
            linear.register_forward_pre_hook(partial(self._record, name)) for name, linear in linears.items()
        ]

    def _record(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        owner, last = self._last
        if inputs[0] is last:
            self.same[name] = owner
            return
        self._last = name, inputs[0]
        if x.shape[:-1].numel() != self.mask.numel():  # an expert gets some of the tokens, and no padding
            rows = [x.reshape(-1, x.shape[-1])]
        else:
            tokens = x.reshape(*self.mask.shape, x.shape[-1])
            rows = [row[is_token] for row, is_token in zip(tokens, self.mask, strict=True)]
        for row in rows if self.by_row else [torch.cat(rows)]:
            if len(row):
                values = row.float() / row.float().max().abs() if self.by_row else row.float()
                moment = values.T @ values
                self.sums[name] = self.sums[name].add_(moment) if name in self.sums else moment
                self.counts[name] += 1 if self.by_row else len(row)

    def mean(self, name: str) -> Tensor:
        """Return the second moment of a linear's inputs, fp32 [K, K].

        Raises:
            ModelError: no token has reached it.
        """
        owner = self.same.get(name, name)
        if not self.counts[owner]:
            wrong = f"init_lora_weights: no token of the rows reached {name}, so its inputs are not known"
            raise ModelError(wrong, "give more rows, or leave the module out of target_modules")
        return self.sums[owner] / self.counts[owner]

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()


@waiting("measuring the inputs of the linear layers")
@torch.no_grad()
def stream_moments(
    files: ModelFiles,
    rows: Sequence[Sequence[int]],
    modules: Collection[str],
    visit: Visit,
    *,
    device: torch.device,
    dtype: torch.dtype,
    by_row: bool = False,
) -> None:
    """Pass rows through a 16-bit model and call `visit` for each linear layer when its moment is complete.

    Args:
        rows: token ids of documents; padding is added and not counted.
        modules: names of linears in decoder layers.
        dtype: of the visited weights, and of the computation unless the checkpoint stores 32 bits.
        by_row: as in `Moments`.

    Raises:
        ModelError: no token has reached a layer.
    """
    model = mapped_model(files)
    prefix, layers = decoder_layers(model)
    width = max(map(len, rows))
    ids = torch.stack([functional.pad(torch.tensor(row), (0, width - len(row))) for row in rows]).to(device)
    mask = torch.arange(width, device=device) < torch.tensor([len(row) for row in rows], device=device)[:, None]
    of_layers = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    backbone = model.base_model
    for tensor in (*backbone.parameters(), *backbone.buffers()):
        if id(tensor) not in of_layers:
            tensor.data = _on(tensor.data, device, dtype)
    for index, layer in enumerate(layers):
        name = f"{prefix}.{index}"
        linears = {module: model.get_submodule(module) for module in modules if module.startswith(f"{name}.")}
        layer.forward = partial(_forward, layer, layer.forward, linears, visit, mask, by_row, device, dtype)
    backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False)


def _on(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor.dtype)


def _forward(
    layer: nn.Module,
    forward: Callable[..., Any],
    linears: dict[str, nn.Module],
    visit: Visit,
    mask: Tensor,
    by_row: bool,
    device: torch.device,
    dtype: torch.dtype,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a decoder layer on chunks of the rows, with its weights on the device meanwhile."""
    tensors = [*layer.parameters(), *layer.buffers()]
    mapped = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = _on(tensor.data, device, dtype)
    moments = Moments(linears, by_row)
    count = len(mask)
    together = max(1, CHUNK_TOKENS // mask.shape[1])
    outputs = []
    for first in range(0, count, together):
        rows = slice(first, first + together)
        moments.mask = mask[rows]
        outputs.append(forward(*rows_of(args, rows, count), **rows_of(kwargs, rows, count)))
    moments.close()
    for name, linear in linears.items():
        weight: Any = linear.weight
        visit(name, weight.data.to(dtype), moments.mean(name))
    for tensor, original in zip(tensors, mapped, strict=True):
        tensor.data = original
    return joined(outputs)


def rows_of(value: Any, rows: slice, count: int) -> Any:
    """Return the part of a layer's arguments for some rows of the batch; what has no row for each is passed on."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == count else value
    if isinstance(value, tuple | list):
        return type(value)(rows_of(item, rows, count) for item in value)
    if isinstance(value, dict):
        return {key: rows_of(item, rows, count) for key, item in value.items()}
    return value


def joined(outputs: list[Any]) -> Any:
    """Return the outputs of a layer on chunks of rows as one."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs)
    if isinstance(outputs[0], tuple):
        return tuple(joined([output[at] for output in outputs]) for at in range(len(outputs[0])))
    return outputs[0]
