"""Triton: cross-entropy by one program a row, which it reads twice and writes once.

The first read finds maximum and sum, the second makes the gradient. A row of 128,256 logits in bf16 is 256 KB; the rows
in flight on an H200 exceed its 50 MB of L2, so the second read runs backwards, from what was read last. The floor of n
logits in 16 bits is between 4n and 6n bytes / bandwidth. On an H200 512 rows take 98 µs and 1,024 rows 183 µs: 96% and
102% of a copy's 4.21 TB/s by 6n, 64% and 68% by 4n. With half as many warps, 16, the 512 rows take 118 µs.

Eight neighbouring logits are one 16-byte load of one thread. Maximum and sum are kept for each such lane, so that the
loop over the row needs no barrier and one exponential more for eight logits; lanes meet once, after the loop. Logits
are in units of log 2: their product with the scale, minus the maximum, is one fused multiply-add before the hardware's
2ˣ.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import cross_entropy as reference
from ..operands import evenly_spaced, put_back
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

BLOCK = 16_384  # logits a program takes at a time
VALUES_PER_THREAD = 16
LANE = tl.constexpr(8)
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _columns(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def _logits(products, inner, outer, SOFTCAP: tl.constexpr):
    """Logits in units of log 2, and the softcap's part of their derivative."""
    if SOFTCAP:
        decay = tl.exp(-2.0 * tl.abs(products * inner))
        whole = 1.0 + decay
        tanh = (1.0 - decay) / whole
        # 1 − tanh² without its cancellation where tanh is near 1.
        return tl.where(products * inner < 0, -tanh, tanh) * outer, 4.0 * decay / (whole * whole)
    else:
        return products * outer, 1.0


@triton.jit
def _finite(maximum):
    """A maximum to subtract: of nothing but −inf it is 0, since −inf − (−inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _cross_entropy(
    logits_ptr, labels_ptr, loss_ptr, logsumexp_ptr, entropy_ptr,
    vocabulary, stride, ignore_index, inner, outer, slope, smoothing, z_loss,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    row_ptr = logits_ptr + row * stride
    col = _columns(BLOCK)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(logsumexp_ptr + row, 0.0)
        if ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros((BLOCK // LANE, LANE), dtype=logits_ptr.dtype.element_ty)
            for start in range(0, vocabulary, BLOCK):
                tl.store(row_ptr + start + col, zeros, mask=start + col < vocabulary)
    else:
        inside = (label >= 0) & (label < vocabulary)
        # Read before anything is written: other threads of this program reach the gradient sooner.
        at_label = tl.load(row_ptr + label, mask=inside, other=0.0).to(tl.float32)
        at_label, _slope = _logits(at_label, inner, outer, SOFTCAP)
        top = tl.full((BLOCK // LANE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK // LANE,), dtype=tl.float32)
        moment = tl.zeros((BLOCK // LANE,), dtype=tl.float32)  # Σ 2ᶻ·z
        plain = tl.zeros((BLOCK // LANE,), dtype=tl.float32)  # Σ z
        for start in range(0, vocabulary, BLOCK):
            mask = start + col < vocabulary
            products = tl.load(row_ptr + start + col, mask=mask, other=0.0, eviction_policy="evict_last")
            z, _slopes = _logits(products.to(tl.float32), inner, outer, SOFTCAP)
            if SMOOTHING:
                plain += tl.sum(tl.where(mask, z, 0.0), axis=1)
            z = tl.where(mask, z, float("-inf"))
            higher = tl.maximum(top, tl.max(z, axis=1))
            origin = _finite(higher)
            power = tl.exp2(z - origin[:, None])
            shrink = tl.exp2(top - origin)
            total = total * shrink + tl.sum(power, axis=1)
            if ENTROPY:
                moment = moment * shrink + tl.sum(tl.where(power > 0.0, power * z, 0.0), axis=1)
            top = higher
        highest = tl.max(top, axis=0)
        shrink = tl.exp2(top - _finite(highest))
        sum_of_powers = tl.sum(total * shrink, axis=0)
        logsumexp = tl.where(inside, highest + tl.log2(sum_of_powers), float("nan"))
        natural = logsumexp * LN_2
        loss = logsumexp - at_label
        if SMOOTHING:
            loss += smoothing * (at_label - tl.sum(plain, axis=0) / vocabulary)
        tl.store(loss_ptr + row, loss * LN_2 + z_loss * natural * natural)
        tl.store(logsumexp_ptr + row, natural)
        if ENTROPY:
            tl.store(entropy_ptr + row, (logsumexp - tl.sum(moment * shrink, axis=0) / sum_of_powers) * LN_2)
        if GRADIENT:
            factor = slope * (1.0 + 2.0 * z_loss * natural)
            share = slope * smoothing / vocabulary
            whole = slope * (1.0 - smoothing)
            label_col = label.to(tl.int32)
            last = (tl.cdiv(vocabulary, BLOCK) - 1) * BLOCK
            for back in range(0, vocabulary, BLOCK):
                at = last - back + col
                mask = at < vocabulary
                products = tl.load(row_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z, derivative = _logits(products, inner, outer, SOFTCAP)
                gradient = tl.exp2(z - logsumexp) * factor - tl.where(at == label_col, whole + share, share)
                gradient = gradient * derivative
                tl.store(row_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _log_probs_backward(
    logits_ptr, labels_ptr, logsumexp_ptr, entropy_ptr, grad_log_probs_ptr, grad_entropy_ptr,
    vocabulary, stride, ignore_index, inner, outer, slope,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(vocabulary, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    at = (program % blocks) * BLOCK + _columns(BLOCK)
    mask = at < vocabulary
    at_ptr = logits_ptr + row * stride + at
    label = tl.load(labels_ptr + row)
    inside = (label >= 0) & (label < vocabulary)
    products = tl.load(at_ptr, mask=mask, other=0.0).to(tl.float32)
    z, derivative = _logits(products, inner, outer, SOFTCAP)
    log_prob = z * LN_2 - tl.load(logsumexp_ptr + row)
    probability = tl.exp(log_prob)
    upstream = tl.where(inside, tl.load(grad_log_probs_ptr + row), float("nan"))
    gradient = tl.where(at == label.to(tl.int32), upstream, 0.0) - upstream * probability
    if ENTROPY:
        spread = tl.where(probability > 0.0, log_prob + tl.load(entropy_ptr + row), 0.0)
        gradient -= tl.load(grad_entropy_ptr + row) * probability * spread
    gradient = tl.where(label == ignore_index, 0.0, gradient * slope * derivative)
    tl.store(at_ptr, gradient.to(logits_ptr.dtype.element_ty), mask=mask)


_cross_entropy_launcher = Launcher(_cross_entropy)
_log_probs_backward_launcher = Launcher(_log_probs_backward)


def _blocks(vocabulary: int) -> tuple[int, int]:
    """Logits a program takes at a time, and warps."""
    block = min(max(power_of_2(vocabulary), 256), BLOCK)
    return block, min(max(block // (32 * VALUES_PER_THREAD), 4), 32)


def _factors(objective: reference.Objective) -> tuple[float, float, float]:
    """What products are multiplied with inside the softcap and outside of it, in units of log 2, and the slope."""
    if objective.softcap is None:
        return 1.0, objective.slope * LOG2_E, objective.slope
    inner = objective.scale / objective.softcap
    return inner, objective.softcap / objective.temperature * LOG2_E, objective.slope


@reference.cross_entropy_.kernel("cuda", "xpu", rank=2)
def cross_entropy_(
    logits: Tensor, labels: Tensor, objective: reference.Objective, need_gradient: bool, need_entropy: bool
) -> reference.RowLosses:
    reference.check_cross_entropy(logits, labels)
    rows, vocabulary = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    logsumexp = torch.empty_like(loss)
    entropy = torch.empty_like(loss) if need_entropy else None
    losses = reference.RowLosses(loss, logsumexp, entropy)
    if not rows:
        return losses
    spaced, stride = evenly_spaced(logits)
    block, warps = _blocks(vocabulary)
    _cross_entropy_launcher(
        rows, (spaced, labels.contiguous(), loss, logsumexp, loss if entropy is None else entropy),
        (vocabulary, stride, objective.ignore_index, *_factors(objective), objective.label_smoothing, objective.z_loss),
        (block, objective.softcap is not None, objective.label_smoothing > 0, need_gradient, need_entropy), warps,
    )  # fmt: skip
    if need_gradient:
        put_back([logits], [spaced])
    return losses


@reference.log_probs_backward_.kernel("cuda", "xpu")
def log_probs_backward_(
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    objective: reference.Objective,
) -> None:
    reference.check_cross_entropy(logits, labels, logsumexp, entropy, grad_log_probs, grad_entropy)
    rows, vocabulary = logits.shape
    if not rows:
        return
    spaced, stride = evenly_spaced(logits)
    block, warps = _blocks(vocabulary)
    statistics = [
        (logsumexp if tensor is None else tensor).contiguous()
        for tensor in (logsumexp, entropy, grad_log_probs, grad_entropy)
    ]
    _log_probs_backward_launcher(
        rows * ceil_div(vocabulary, block), (spaced, labels.contiguous(), *statistics),
        (vocabulary, stride, objective.ignore_index, *_factors(objective)),
        (block, objective.softcap is not None, grad_entropy is not None), warps,
    )  # fmt: skip
    put_back([logits], [spaced])
