"""Triton: cross-entropy with one program per row, which reads the row twice and writes it once.

The first pass computes maximum and sum, the second the gradient. A row of 128,256 logits in bf16 is 256 KB. The rows in
flight on an H200 exceed its 50 MB of L2, so the second pass runs backwards and starts with what was read last. The
floor for n logits in 16 bits is between 4n and 6n bytes / bandwidth. On an H200 512 rows take 98 µs and 1,024 rows 183
µs: 96% and 102% of a copy's 4.21 TB/s by 6n, 64% and 68% by 4n. With 16 warps, half as many, 512 rows take 118 µs.

Eight neighbouring logits are one 16-byte load of one thread. Maximum and sum are accumulated per thread, so the loop
over the row needs no barrier and only one more exponential for eight logits; threads reduce once, after the loop.
Logits are in units of log 2: their product with the scale, minus the maximum, is one fused multiply-add before the
hardware's 2ˣ.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import ELSEWHERE
from ...ops import cross_entropy as reference
from ..operands import copy_back, evenly_spaced
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

BLOCK = 16_384  # logits that a program reads at a time
VALUES_PER_THREAD = 16
LANE = tl.constexpr(8)
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(math.log(2))
OF_ANOTHER_SLICE = tl.constexpr(ELSEWHERE)


@triton.jit
def _columns(BLOCK: tl.constexpr):
    return tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def _inside(start, vocabulary, BLOCK: tl.constexpr, SPACED: tl.constexpr):
    """Masks of a block's logits: of the row, to load, and to store in groups of eight.

    With SPACED, rows start at multiples of eight and the last group of eight is loaded entirely, whatever follows the
    row: with one mask for eight neighbours the load remains one instruction.
    """
    mask = start + _columns(BLOCK) < vocabulary
    if SPACED:
        first = start + tl.arange(0, BLOCK // LANE)[:, None] * LANE
        return mask, first < vocabulary, first + LANE <= vocabulary
    else:
        return mask, mask, mask


@triton.jit
def _store(row_ptr, start, values, vocabulary, BLOCK: tl.constexpr, SPACED: tl.constexpr):
    """Store a block of a row, and nothing after the row's end."""
    mask, _load, eights = _inside(start, vocabulary, BLOCK, SPACED)
    to = row_ptr + start + _columns(BLOCK)
    values = values.to(row_ptr.dtype.element_ty)
    tl.store(to, values, mask=eights)
    if SPACED:  # noqa: SIM102  (a constant of the compiler)
        if start + BLOCK > vocabulary:
            tl.store(to, values, mask=mask & (eights == 0))


@triton.jit
def _row_of(logits_ptr, row, stride, SPACED: tl.constexpr):
    """Pointer to a row; with SPACED, `stride` counts groups of eight, which shows the compiler the alignment."""
    return logits_ptr + row.to(tl.int64) * stride * (LANE if SPACED else 1)


@triton.jit
def _logits(products, inner, outer, SOFTCAP: tl.constexpr):
    """Logits in units of log 2, and the softcap's factor of their derivative."""
    if SOFTCAP:
        decay = tl.exp(-2.0 * tl.abs(products * inner))
        denominator = 1.0 + decay
        tanh = (1.0 - decay) / denominator
        # 1 − tanh² without cancellation for tanh near 1.
        return tl.where(products * inner < 0, -tanh, tanh) * outer, 4.0 * decay / (denominator * denominator)
    else:
        return products * outer, 1.0


@triton.jit
def _finite(maximum):
    """A maximum to subtract: −inf becomes 0, since −inf − (−inf) is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _clear(row_ptr, vocabulary, BLOCK: tl.constexpr, SPACED: tl.constexpr):
    zeros = tl.zeros((BLOCK // LANE, LANE), dtype=row_ptr.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        _store(row_ptr, start, zeros, vocabulary, BLOCK, SPACED)


@triton.jit
def _backwards(
    row_ptr, label, vocabulary, logsumexp, factor, share, at_label, inner, outer,
    BLOCK: tl.constexpr, SPACED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Replace a row's logits by their gradient, starting at the end, which was read last.

    The gradient is `factor` times the probability, minus `at_label` at the label and `share` elsewhere."""
    last = (tl.cdiv(vocabulary, BLOCK) - 1) * BLOCK
    for back in range(0, vocabulary, BLOCK):
        at = last - back + _columns(BLOCK)
        _mask, load, _eights = _inside(last - back, vocabulary, BLOCK, SPACED)
        products = tl.load(row_ptr + at, mask=load, other=0.0, eviction_policy="evict_first").to(tl.float32)
        z, derivative = _logits(products, inner, outer, SOFTCAP)
        gradient = tl.exp2(z - logsumexp) * factor - tl.where(at == label, at_label, share)
        _store(row_ptr, last - back, gradient * derivative, vocabulary, BLOCK, SPACED)


@triton.jit
def _cross_entropy(
    logits_ptr, labels_ptr, loss_ptr, logsumexp_ptr, entropy_ptr,
    vocabulary, stride, ignore_index, inner, outer, slope, smoothing, z_loss,
    BLOCK: tl.constexpr, SPACED: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    row_ptr = _row_of(logits_ptr, row, stride, SPACED)
    col = _columns(BLOCK)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(logsumexp_ptr + row, 0.0)
        if ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
        if GRADIENT:
            _clear(row_ptr, vocabulary, BLOCK, SPACED)
    else:
        inside = (label >= 0) & (label < vocabulary)
        # Read before any store: other threads of this program may overwrite the label's logit first.
        at_label = tl.load(row_ptr + label, mask=inside, other=0.0).to(tl.float32)
        at_label, _slope = _logits(at_label, inner, outer, SOFTCAP)
        top = tl.full((BLOCK // LANE,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK // LANE,), dtype=tl.float32)
        moment = tl.zeros((BLOCK // LANE,), dtype=tl.float32)  # Σ 2ᶻ·z
        plain = tl.zeros((BLOCK // LANE,), dtype=tl.float32)  # Σ z
        for start in range(0, vocabulary, BLOCK):
            mask, load, _eights = _inside(start, vocabulary, BLOCK, SPACED)
            products = tl.load(row_ptr + start + col, mask=load, other=0.0, eviction_policy="evict_last")
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
            factor, share = slope * (1.0 + 2.0 * z_loss * natural), slope * smoothing / vocabulary
            _backwards(
                row_ptr, label.to(tl.int32), vocabulary, logsumexp, factor, share, slope * (1.0 - smoothing) + share,
                inner, outer, BLOCK, SPACED, SOFTCAP,
            )  # fmt: skip


@triton.jit
def _log_probs_backward(
    logits_ptr, labels_ptr, logsumexp_ptr, entropy_ptr, grad_log_probs_ptr, grad_entropy_ptr,
    vocabulary, stride, ignore_index, inner, outer, slope,
    BLOCK: tl.constexpr, SPACED: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(vocabulary, BLOCK)
    program = tl.program_id(0)
    row, start = program // blocks, (program % blocks) * BLOCK
    at = start + _columns(BLOCK)
    _mask, load, _eights = _inside(start, vocabulary, BLOCK, SPACED)
    row_ptr = _row_of(logits_ptr, row, stride, SPACED)
    label = tl.load(labels_ptr + row)
    in_vocabulary = ((label >= 0) & (label < vocabulary)) | (label == OF_ANOTHER_SLICE)
    products = tl.load(row_ptr + at, mask=load, other=0.0).to(tl.float32)
    z, derivative = _logits(products, inner, outer, SOFTCAP)
    log_prob = z * LN_2 - tl.load(logsumexp_ptr + row)
    probability = tl.exp(log_prob)
    upstream = tl.where(in_vocabulary, tl.load(grad_log_probs_ptr + row), float("nan"))
    gradient = tl.where(at == label.to(tl.int32), upstream, 0.0) - upstream * probability
    if ENTROPY:
        spread = tl.where(probability > 0.0, log_prob + tl.load(entropy_ptr + row), 0.0)
        gradient -= tl.load(grad_entropy_ptr + row) * probability * spread
    gradient = tl.where(label == ignore_index, 0.0, gradient * slope * derivative)
    _store(row_ptr, start, gradient, vocabulary, BLOCK, SPACED)


_cross_entropy_launcher = Launcher(_cross_entropy)
_log_probs_backward_launcher = Launcher(_log_probs_backward)


def _blocks(vocabulary: int) -> tuple[int, int]:
    """Logits that a program reads at a time, and warps."""
    block = min(max(power_of_2(vocabulary), 256), BLOCK)
    return block, min(max(block // (32 * VALUES_PER_THREAD), 4), 32)


def _spacing(logits: Tensor, stride: int) -> tuple[int, bool]:
    """Row stride, in groups of eight logits if all rows start at such a group (for vector loads), else in logits."""
    eights = stride % 8 == logits.data_ptr() % (8 * logits.element_size()) == 0
    return (stride // 8, True) if eights else (stride, False)


def _factors(objective: reference.Objective) -> tuple[float, float, float]:
    """Factors of the head's outputs inside and outside the softcap, in units of log 2, and the slope."""
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
    (block, warps), (stride, spaced_by_8) = _blocks(vocabulary), _spacing(spaced, stride)
    _cross_entropy_launcher(
        rows, (spaced, labels.contiguous(), loss, logsumexp, loss if entropy is None else entropy),
        (vocabulary, stride, objective.ignore_index, *_factors(objective), objective.label_smoothing, objective.z_loss),
        (block, spaced_by_8, objective.softcap is not None, objective.label_smoothing > 0, need_gradient,
         need_entropy), warps,
    )  # fmt: skip
    if need_gradient:
        copy_back([logits], [spaced])
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
    (block, warps), (stride, spaced_by_8) = _blocks(vocabulary), _spacing(spaced, stride)
    statistics = [
        (logsumexp if tensor is None else tensor).contiguous()
        for tensor in (logsumexp, entropy, grad_log_probs, grad_entropy)
    ]
    _log_probs_backward_launcher(
        rows * ceil_div(vocabulary, block), (spaced, labels.contiguous(), *statistics),
        (vocabulary, stride, objective.ignore_index, *_factors(objective)),
        (block, spaced_by_8, objective.softcap is not None, grad_entropy is not None), warps,
    )  # fmt: skip
    copy_back([logits], [spaced])
