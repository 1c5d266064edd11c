"""Any differentiable loss of the logits of a linear head, computed in chunks of rows without storing the logits.

The loss is a user's function of a chunk of logits and targets. Its gradient by the logits comes from autograd, the
GEMMs and sums from `ops.linear_head`. Two cases differ in what the forward saves:

- A sum or a mean, or losses of single rows under a frozen head: the forward computes all gradients for an upstream
  gradient of 1, and the backward scales them, as in `autograd.losses`. Rows are independent, so each may be scaled
  differently.
- Losses of single rows under a trained head: dW and the gradient of the bias sum over rows. The forward saves its
  inputs, and the backward recomputes one chunk of logits at a time.

Under torch.compile the same computation is traced together with the loss function, one chunk after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import autocast_dtype, on_compiler
from ..formats.base import is_quantized
from ..ops.linear_head import Needed, chunk_rows, products_in_chunks
from ..utils.errors import ModelError
from .losses import scaled

# (logits [n, V], targets [n, ...] each) → losses [n], or their 0-d sum
LossFunction = Callable[..., Tensor]
CHECKED_ROWS = 64
Gradients = list[Tensor | None]  # of hidden, weight, bias and each target


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    loss_fn: LossFunction,
    *targets: Tensor,
    bias: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk: int | None = None,
) -> Tensor:
    """A loss of the logits `hidden @ weight.T + bias` that never holds the logits of more than `chunk` rows.

    A row is one position: hidden states [..., H] have N rows. `loss_fn(logits, *targets)` is called for n ≤ `chunk`
    rows at a time with logits [n, V], in the dtype of the GEMM, and targets [n, ...]. It returns the losses [n] of the
    rows or, unless the reduction is "none", their 0-d *sum*. A mean, which torch's losses return by default, is
    refused: 0-d results are compared on up to 64 rows of a chunk. `loss_fn` must be deterministic, since the backward
    may call it again, must treat rows independently, and must not change its arguments in place. For a mean over some
    rows only, divide a "sum" by their number.

    Under autocast the GEMM runs in autocast's dtype, and otherwise in the weight's. Under torch.compile `loss_fn` is
    traced once per chunk, and each new number of rows compiles again. The method is that of arXiv:2410.10989, section
    3.2, for a loss given as a function. A double backward raises an error.

    Args:
        hidden: [..., H], float.
        weight: [V, H], float, or a frozen `QuantizedTensor`, which is dequantized once per call. The gradient of a
            float weight is accumulated in fp32 (fp64 for fp64 input), and computed only if it requires one.
        loss_fn: see above. Tensors that it reads without their being targets must not require a gradient.
        targets: each [..., *], with the leading dimensions of `hidden`; float targets may require a gradient.
        bias: [V] or None.
        reduction: mean over the N rows (0 for none), their sum, or one loss per row.
        chunk: rows at a time. Default: as many as the fused cross-entropy takes under torch.compile, and 3/8 of them
            without it, since each operation of `loss_fn` then allocates a result of the logits' size.

    Returns:
        0-d fp32 loss (fp64 for fp64 input); for "none" the losses [...].

    Raises:
        ModelError: shapes or dtypes do not match, `loss_fn` returns neither losses [n] nor a sum, its result does not
            depend on the logits differentiably, or it reads another tensor that requires a gradient. Under
            torch.compile such tensors are not detected, and 0-d results are refused for the reduction "mean".
    """
    _check_arguments(hidden, weight, targets, bias, reduction, chunk)
    dtype = autocast_dtype(hidden.device.type) or weight.dtype
    rows_shape = hidden.shape[:-1]
    x = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat = [target.reshape(len(x), *target.shape[hidden.dim() - 1 :]) for target in targets]
    # A frozen quantized weight stays quantized until the GEMMs, so that nothing saves its values.
    held = weight if is_quantized(weight) else weight.to(dtype)
    inputs: list[Any] = [x, held, None if bias is None else bias.to(dtype), *flat]
    if chunk is None:
        chunk = chunk_rows(weight.shape[0], x.device.type, x.element_size())
        # 3/8: a cross-entropy in fp32 of bf16 logits holds 7 times a chunk's bytes, of 16,384 × 128,256 logits 1/10.
        chunk = chunk if on_compiler() else max(chunk * 3 // 8 // 64 * 64, 64)
    call = _Call(loss_fn, chunk, reduction)
    needed = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in inputs]
    if call.per_row and (needed[1] or needed[2]):
        loss = _Recomputed.apply(call, needed, autocast_dtype(x.device.type), *inputs)
    else:
        with torch.no_grad():
            loss, gradients = call.run(inputs, needed)
        if any(needed):
            loss = _Scaled.apply(loss, len(inputs), *inputs, *gradients)
    if reduction == "mean":
        return loss / max(len(x), 1)
    return loss.view(rows_shape) if call.per_row else loss


def _check_arguments(
    hidden: Tensor, weight: Tensor, targets: Sequence[Any], bias: Tensor | None, reduction: str, chunk: int | None
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"linear_loss: reduction is {reduction!r}", 'pass "mean", "sum" or "none"')
    if chunk is not None and chunk < 1:
        raise ModelError(f"linear_loss: chunk is {chunk} rows", "pass a positive number, or None")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"linear_loss: hidden states {list(hidden.shape)} do not fit a weight of shape {list(weight.shape)}",
            "pass hidden states [..., H] and a weight [V, H]",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"linear_loss: the bias is {list(bias.shape)} and the weight {list(weight.shape)}")
    for position, target in enumerate(targets):
        if not isinstance(target, Tensor) or target.shape[: hidden.dim() - 1] != hidden.shape[:-1]:
            actual = list(target.shape) if isinstance(target, Tensor) else f"a {type(target).__name__}"
            raise ModelError(
                f"linear_loss: target {position} is {actual}, and hidden is {list(hidden.shape)}",
                "pass tensors with the leading dimensions of hidden, and read constants in loss_fn itself",
            )


class _Call:
    """One call of `linear_loss`: its loss function, rows per chunk, and reduction."""

    def __init__(self, loss_fn: LossFunction, chunk: int, reduction: str):
        self.loss_fn = loss_fn
        self.chunk = chunk
        self.reduction = reduction
        self.per_row = reduction == "none"
        self.adds = False  # whether 0-d results are known to be sums

    def run(
        self, inputs: Sequence[Any], needed: Sequence[bool], upstream: Tensor | None = None
    ) -> tuple[Tensor, Gradients]:
        """Return the losses [N] or their sum, and the needed gradients of Σ upstream · losses (default: of the sum).

        Args:
            inputs: hidden [N, H], weight [V, H], bias [V] or None, targets [N, ...].
            needed: whether to compute the gradient of each input.
            upstream: [N]; only for a loss per row.
        """
        x, weight, bias, *targets = inputs
        if is_quantized(weight):
            weight = weight.dequantize(x.dtype)
        chunks = (self._traced_chunks if on_compiler() else self._chunks)(x, weight, bias, targets, needed, upstream)
        losses, grad_x, grad_w, grad_bias, grad_targets = chunks
        loss = torch.cat(losses) if self.per_row else torch.stack([chunk.sum() for chunk in losses]).sum()
        joined = [torch.cat(chunks) if need else None for chunks, need in zip(grad_targets, needed[3:], strict=True)]
        return loss, [grad_x, grad_w, grad_bias, *joined]

    def _chunks(self, x, weight, bias, targets, needed, upstream):
        """The computation of `run` in eager mode, with one buffer for the logits and sums in fp32."""
        losses: list[Tensor] = []
        grad_targets: list[list[Tensor]] = [[] for _ in targets]
        exact = torch.promote_types(x.dtype, torch.float32)
        grad_bias = torch.zeros_like(bias, dtype=exact) if needed[2] else None
        connected = not any(needed)

        def into_gradient(logits: Tensor, rows: slice) -> None:
            nonlocal connected
            if bias is not None:
                logits.add_(bias)
            chunk_targets = [target[rows].detach() for target in targets]
            if not any(needed):
                result = self.loss_fn(logits, *chunk_targets)
                losses.append(self._checked(result, len(logits), exact))
                self._check_sum(result, logits, chunk_targets)
                return
            leaves = [logits.detach(), *chunk_targets]
            needs_gradient = [any(needed[:3]), *needed[3:]]
            differentiable = [leaf.requires_grad_() for leaf, want in zip(leaves, needs_gradient, strict=True) if want]
            with torch.enable_grad():
                result = self.loss_fn(*leaves)
                loss = self._checked(result, len(logits), exact)
            if not losses:
                _check_captured(loss, differentiable)
            self._check_sum(result, logits, chunk_targets)
            losses.append(loss.detach())
            leaf_gradients: Sequence[Tensor | None] = [None] * len(differentiable)
            if loss.requires_grad:
                connected = True
                upstream_rows = torch.ones_like(loss) if upstream is None else upstream[rows]
                leaf_gradients = torch.autograd.grad(loss, differentiable, upstream_rows, allow_unused=True)
            gradients = iter(leaf_gradients)
            if needs_gradient[0]:
                by_logits = next(gradients)
                logits.zero_() if by_logits is None else logits.copy_(by_logits)
            if grad_bias is not None:
                grad_bias.add_(logits.sum(0, dtype=exact))
            for chunk_gradients, target, want in zip(grad_targets, chunk_targets, needed[3:], strict=True):
                if want:
                    gradient = next(gradients)
                    chunk_gradients.append(torch.zeros_like(target) if gradient is None else gradient)

        grads = products_in_chunks(x, weight, None, into_gradient, Needed(needed[0], needed[1]), self.chunk)
        if not connected:
            raise ModelError(
                "linear_loss: the result of loss_fn does not depend differentiably on the logits or targets",
                "compute the loss from the logits that loss_fn gets, without detach() or no_grad()",
            )
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return losses, grads.hidden, grads.weight, grad_bias, grad_targets

    def _traced_chunks(self, x, weight, bias, targets, needed, upstream):
        """The computation of `run` for torch.compile: without in-place operations, gradients by `torch.func.vjp`."""
        losses: list[Tensor] = []
        grad_targets: list[list[Tensor]] = [[] for _ in targets]
        rows_of_x: list[Tensor] = []
        exact = torch.promote_types(x.dtype, torch.float32)
        grad_w = torch.zeros_like(weight, dtype=exact) if needed[1] else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if needed[2] else None
        for start in range(0, max(len(x), 1), self.chunk):
            rows = slice(start, start + self.chunk)
            chunk_targets = [target[rows] for target in targets]
            logits = F.linear(x[rows], weight, bias)
            if not any(needed):
                losses.append(self._checked(self.loss_fn(logits, *chunk_targets), len(logits), exact))
                self._check_traced(losses[-1])
                continue
            # Integer targets are no inputs of a vjp, and gradients of unneeded ones are not computed.
            inputs = [logits, *(target for target, want in zip(chunk_targets, needed[3:], strict=True) if want)]

            def of_differentiable(logits, *differentiable_targets, chunk_targets=chunk_targets):
                remaining = iter(differentiable_targets)
                all_targets = [
                    next(remaining) if want else target for target, want in zip(chunk_targets, needed[3:], strict=True)
                ]
                return self._checked(self.loss_fn(logits, *all_targets), len(logits), exact)

            loss, gradients_of = torch.func.vjp(of_differentiable, *inputs)
            self._check_traced(loss)
            by_logits, *target_gradients = gradients_of(torch.ones_like(loss) if upstream is None else upstream[rows])
            losses.append(loss)
            if needed[0]:
                rows_of_x.append(by_logits @ weight)
            if grad_w is not None:
                grad_w = grad_w + (by_logits.T @ x[rows]).to(exact)
            if grad_bias is not None:
                grad_bias = grad_bias + by_logits.sum(0, dtype=exact)
            remaining = iter(target_gradients)
            for chunk_gradients, want in zip(grad_targets, needed[3:], strict=True):
                if want:
                    chunk_gradients.append(next(remaining))
        grad_x = torch.cat(rows_of_x) if needed[0] else None
        grad_w = None if grad_w is None else grad_w.to(weight.dtype)
        return losses, grad_x, grad_w, None if grad_bias is None else grad_bias.to(bias.dtype), grad_targets

    def _checked(self, result: Any, rows: int, exact: torch.dtype) -> Tensor:
        """Return the result for a chunk of n `rows`, losses [n] or one number, at least in fp32.

        Raises:
            ModelError: `result` is neither, or is a sum where losses of rows are needed.
        """
        returned = "what loss_fn returned"
        if not isinstance(result, Tensor):
            raise ModelError(
                f"linear_loss: {returned} is a {type(result).__name__}", f"return a tensor of {rows} losses"
            )
        if not result.is_floating_point():
            raise ModelError(f"linear_loss: {returned} has dtype {result.dtype}", "return losses in a float dtype")
        if result.dim() == 0 and self.per_row:
            raise ModelError(
                'linear_loss: loss_fn returned one number, and reduction="none" needs one per row',
                f"return {rows} losses, e.g. by reduction='none' of torch's losses",
            )
        if result.dim() and result.shape != (rows,):
            raise ModelError(
                f"linear_loss: loss_fn returned shape {list(result.shape)} for {rows} rows",
                f"return one loss per row, [{rows}], or their sum, []",
            )
        return result.to(torch.promote_types(result.dtype, exact))

    def _check_traced(self, loss: Tensor) -> None:
        """Refuse one number for a mean over the rows, which a compiler cannot compare (see `_check_sum`)."""
        if loss.dim() == 0 and self.reduction == "mean":
            raise ModelError(
                "linear_loss: loss_fn returned one number, and under torch.compile halfbyte cannot check whether it is"
                " the sum or the mean of a chunk's losses",
                "return one loss per row, e.g. by reduction='none' of torch's losses, or pass reduction=\"sum\"",
            )

    @torch.no_grad()
    def _check_sum(self, result: Tensor, logits: Tensor, targets: Sequence[Tensor]) -> None:
        """Check on some rows, until a loss is not zero, that a 0-d result is the sum of the losses of its rows.

        Raises:
            ModelError: it is another number, such as their mean.
        """
        if result.dim() or self.adds or len(logits) < 2:
            return
        rows = torch.arange(0, len(logits), -(-len(logits) // CHECKED_ROWS), device=logits.device)
        total, *halves = (
            self.loss_fn(*(tensor.detach()[subset] for tensor in (logits, *targets))).double()
            for subset in (rows, rows[::2], rows[1::2])
        )
        halves_sum, size = sum(halves), sum(half.abs() for half in halves)
        self.adds = bool((total != 0) & total.isfinite())
        if self.adds and not (total - halves_sum).abs() <= 0.1 * size:
            raise ModelError(
                "linear_loss: loss_fn returned one number that is not the sum of its rows' losses (torch's losses"
                " return the mean by default)",
                "return the losses of the rows, [n], e.g. by reduction='none' of torch's losses, or their sum",
            )


def _check_captured(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise a ModelError if the graph of `loss` reaches a tensor that requires a gradient and is not in `leaves`."""
    leaf_ids, seen = {id(leaf) for leaf in leaves}, set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of AccumulateGrad, the node of a leaf
        if variable is not None and id(variable) not in leaf_ids:
            raise ModelError(
                f"linear_loss: loss_fn reads a tensor of shape {list(variable.shape)} that requires a gradient and is"
                " not among the targets, so it would get none",
                "pass it as a target, expanded to one entry per row, or detach it",
            )
        nodes.extend(producer for producer, _ in node.next_functions)


class _Scaled(torch.autograd.Function):
    """A loss whose gradients are known: saves them, and scales them by the upstream gradient."""

    @staticmethod
    def forward(ctx, loss, count, *inputs_and_gradients):
        ctx.count = count
        ctx.present = [gradient is not None for gradient in inputs_and_gradients[count:]]
        ctx.save_for_backward(*(gradient for gradient in inputs_and_gradients[count:] if gradient is not None))
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        saved = iter(ctx.saved_tensors)
        gradients: list[Tensor | None] = []
        for present in ctx.present:
            gradient = next(saved) if present else None
            if gradient is not None:  # times a 0-d factor, or times a factor for each of its rows
                flat = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
                gradient = scaled(flat, grad_loss.reshape(-1, 1)).view(gradient.shape)
            gradients.append(gradient)
        return None, None, *gradients, *[None] * ctx.count


class _Recomputed(torch.autograd.Function):
    """Losses of single rows. The backward runs the loss function again, a chunk at a time."""

    @staticmethod
    def forward(ctx, call, needed, autocast, *inputs):
        ctx.call = call
        ctx.needed = needed
        ctx.autocast = autocast
        ctx.save_for_backward(*inputs)
        return call.run(inputs, [False] * len(needed))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        inputs = ctx.saved_tensors
        with torch.autocast(inputs[0].device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
            _, gradients = ctx.call.run(inputs, ctx.needed, grad_loss)
        return None, None, None, *gradients
