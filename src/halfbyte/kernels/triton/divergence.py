"""Triton: the generalised Jensen-Shannon divergence, one program per row of both heads' logits.

Three passes: maxima and sums of both rows; the divergence; the gradient, which needs it. As in `cross_entropy`, rows
are read in groups of eight, sums are per thread, and logits are in units of log 2. On an H200 512 rows of 151,936 in
bf16 take 449 µs, and 264 at β = 1, where two reads and a write of as many bytes take 113: exponentials are the bound.
8,192 positions with both heads (2,048 and 4,096 wide) take 37.5 ms, of which the three GEMMs 26.1; with torch's
operations instead of this kernel they take 115.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import divergence as reference
from ...ops.cross_entropy import Objective
from ..operands import copy_back, evenly_spaced
from ..tiling import power_of_2
from .cross_entropy import LN_2, _columns, _factors, _finite, _inside, _logits, _row_of, _spacing, _store
from .launch import Launcher

BLOCK = 4096  # logits of each model that a program reads at a time
VALUES_PER_THREAD = 8
LANE = tl.constexpr(8)


@triton.jit
def _load(row_ptr, start, inner, outer, vocabulary, BLOCK: tl.constexpr, SPACED: tl.constexpr, SOFTCAP: tl.constexpr):
    """Load a block of a row's logits (−inf after the row's end), and the softcap's factor of their derivative."""
    mask, load, _eights = _inside(start, vocabulary, BLOCK, SPACED)
    products = tl.load(row_ptr + start + _columns(BLOCK), mask=load, other=0.0, eviction_policy="evict_last")
    z, derivative = _logits(products.to(tl.float32), inner, outer, SOFTCAP)
    return tl.where(mask, z, float("-inf")), derivative


@triton.jit
def _accumulate(z, top, total, moment):
    """Accumulate a block into the maximum, Σ 2ᶻ and Σ 2ᶻ·z of each thread."""
    higher = tl.maximum(top, tl.max(z, axis=1))
    power = tl.exp2(z - _finite(higher)[:, None])
    shrink = tl.exp2(top - _finite(higher))
    moment = moment * shrink + tl.sum(tl.where(power > 0.0, power * z, 0.0), axis=1)
    return higher, total * shrink + tl.sum(power, axis=1), moment


@triton.jit
def _reduce(top, total, moment):
    """Reduce threads to logsumexp and entropy, both in units of log 2."""
    highest = tl.max(top, axis=0)
    shrink = tl.exp2(top - _finite(highest))
    powers = tl.sum(total * shrink, axis=0)
    logsumexp = highest + tl.log2(powers)
    return logsumexp, logsumexp - tl.sum(moment * shrink, axis=0) / powers


@triton.jit
def _log_ratios(student, teacher, near, far, MIXED: tl.constexpr):
    """log p_s/m and log p_t/m; at β = 0 or 1, where m is one of the two, log p_s/p_t and its negative."""
    if MIXED:
        student_term, teacher_term = student + near, teacher + far
        higher = _finite(tl.maximum(student_term, teacher_term))
        mixed = higher + tl.log2(tl.exp2(student_term - higher) + tl.exp2(teacher_term - higher))
        return student - mixed, teacher - mixed
    else:
        return student - teacher, teacher - student


@triton.jit
def _divergence(
    student_ptr, teacher_ptr, divergence_ptr, entropy_ptr,
    vocabulary, student_stride, teacher_stride, inner, outer, slope, teacher_inner, teacher_outer,
    near, far, weight, teacher_weight,
    BLOCK: tl.constexpr, SPACED: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr,
    MIXED: tl.constexpr, OF_STUDENT: tl.constexpr, OF_TEACHER: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    own_ptr = _row_of(student_ptr, row, student_stride, SPACED)
    other_ptr = _row_of(teacher_ptr, row, teacher_stride, SPACED)
    top = tl.full((BLOCK // LANE,), float("-inf"), dtype=tl.float32)
    total, moment = tl.zeros_like(top), tl.zeros_like(top)
    other_top = top
    other_total = total
    other_moment = moment
    for start in range(0, vocabulary, BLOCK):
        z, _slope = _load(own_ptr, start, inner, outer, vocabulary, BLOCK, SPACED, SOFTCAP)
        top, total, moment = _accumulate(z, top, total, moment)
        z, _slope = _load(other_ptr, start, teacher_inner, teacher_outer, vocabulary, BLOCK, SPACED, TEACHER_SOFTCAP)
        other_top, other_total, other_moment = _accumulate(z, other_top, other_total, other_moment)
    logsumexp, entropy = _reduce(top, total, moment)
    other_logsumexp, _entropy = _reduce(other_top, other_total, other_moment)
    tl.store(entropy_ptr + row, entropy * LN_2)

    of_student, of_teacher = tl.zeros_like(top), tl.zeros_like(top)
    for start in range(0, vocabulary, BLOCK):
        z, _slope = _load(own_ptr, start, inner, outer, vocabulary, BLOCK, SPACED, SOFTCAP)
        student_log2 = z - logsumexp
        z, _slope = _load(other_ptr, start, teacher_inner, teacher_outer, vocabulary, BLOCK, SPACED, TEACHER_SOFTCAP)
        teacher_log2 = z - other_logsumexp
        from_own, from_other = _log_ratios(student_log2, teacher_log2, near, far, MIXED)
        if OF_STUDENT:
            p = tl.exp2(student_log2)
            of_student += tl.sum(tl.where(p > 0.0, p * from_own, 0.0), axis=1)
        if OF_TEACHER:
            q = tl.exp2(teacher_log2)
            of_teacher += tl.sum(tl.where(q > 0.0, q * from_other, 0.0), axis=1)
    mean_ratio = tl.sum(of_student, axis=0)
    tl.store(divergence_ptr + row, (weight * mean_ratio + teacher_weight * tl.sum(of_teacher, axis=0)) * LN_2)

    if GRADIENT:
        for start in range(0, vocabulary, BLOCK):
            z, derivative = _load(own_ptr, start, inner, outer, vocabulary, BLOCK, SPACED, SOFTCAP)
            student_log2 = z - logsumexp
            z, _slope = _load(
                other_ptr, start, teacher_inner, teacher_outer, vocabulary, BLOCK, SPACED, TEACHER_SOFTCAP
            )
            teacher_log2 = z - other_logsumexp
            p = tl.exp2(student_log2)
            if OF_STUDENT:
                from_own, _from_other = _log_ratios(student_log2, teacher_log2, near, far, MIXED)
                gradient = tl.where(p > 0.0, p * (from_own - mean_ratio), 0.0) * (weight * LN_2)
            else:
                gradient = p - tl.exp2(teacher_log2)
            _store(own_ptr, start, gradient * slope * derivative, vocabulary, BLOCK, SPACED)


_launcher = Launcher(_divergence)


@reference.divergence_.kernel("cuda", "xpu")
def divergence_(
    student: Tensor, teacher: Tensor, objectives: tuple[Objective, Objective], beta: float, need_gradient: bool
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = student.shape
    divergence = torch.empty(rows, dtype=torch.float32, device=student.device)
    entropy = torch.empty_like(divergence)
    if not rows:
        return divergence, entropy
    (student_logits, stride), (teacher_logits, other_stride) = evenly_spaced(student), evenly_spaced(teacher)
    block = min(max(power_of_2(vocabulary), 256), BLOCK)
    (in_eights, spaced), (others_in_eights, other_spaced) = (
        _spacing(student_logits, stride),
        _spacing(teacher_logits, other_stride),
    )
    strides = (in_eights, others_in_eights) if spaced and other_spaced else (stride, other_stride)
    mixed = 0 < beta < 1
    log_weights = (math.log2(1 - beta), math.log2(beta)) if mixed else (0.0, 0.0)
    inner, outer, _slope = _factors(objectives[1])
    _launcher(
        rows, (student_logits, teacher_logits, divergence, entropy),
        (vocabulary, *strides, *_factors(objectives[0]), inner, outer, *log_weights,
         1 - beta if mixed else float(beta == 1), beta if mixed else float(beta == 0)),
        (block, spaced and other_spaced, *(objective.softcap is not None for objective in objectives), mixed,
         beta > 0, beta < 1, need_gradient), min(max(block // (32 * VALUES_PER_THREAD), 4), 32),
    )  # fmt: skip
    if need_gradient:
        copy_back([student], [student_logits])
    return divergence, entropy
