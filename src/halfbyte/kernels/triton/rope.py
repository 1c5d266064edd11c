"""Triton: RoPE of q and k in one launch, one program per token.

All heads of a token have the same angles. A program reads cos and sin once and holds every head of q and k in registers
as two tiles [heads, R/2], so that the pairs that rotate together are at the same place of both. The floor is 4 bytes
per value in 16 bits, in each direction; the fused norm's backward also reads x, 6 bytes, and recomputes r.

With gradients of the norms' weights, which are sums over all tokens and heads, that backward uses `PROGRAMS` programs.
Each iterates over its tokens one group of heads at a time, with sums for one group: 16 values per thread. The next
heads are prefetched, as in `triton.norms`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.float8 import FP8_MAX
from ...ops import rope as reference
from ...ops.checks import check_same
from ...ops.norms import sum_rows
from ...ops.paged_attention import rope_store_paged_
from ..operands import all_same, bump_versions, copy_back
from ..tiling import ceil_div, power_of_2
from .cached_attention import conversion_obstacle
from .float8 import to_float8
from .launch import Launcher, layouts

VALUES_PER_THREAD = 32
PROGRAMS = 528  # programs with partial sums of a weight's gradient: four for each of 132 multiprocessors
# of such a program; the best of a sweep on an H200
GROUP_VALUES = 2048
GROUP_WARPS = 4
STAGES = 3


@triton.jit
def _angles(cos_ptr, sin_ptr, start, col, HALF: tl.constexpr, BACKWARD: tl.constexpr):
    """cos and sin of the two halves, [1, HALF]; for backward, sin is negative and its halves are exchanged."""
    mask = col < HALF
    cos1 = tl.load(cos_ptr + start + col, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + start + HALF + col, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + start + col, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + start + HALF + col, mask=mask, other=0.0).to(tl.float32)[None, :]
    return cos1, cos2, -sin2 if BACKWARD else sin1, -sin1 if BACKWARD else sin2


@triton.jit
def _heads(start, head_stride, col, HALF: tl.constexpr, HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr):
    """Offsets of the first halves of a token's heads, and their mask."""
    head = tl.arange(0, HEADS_BLOCK)
    offset = start + head[:, None].to(tl.int64) * head_stride + col[None, :]
    return offset, (head < HEADS)[:, None] & (col < HALF)[None, :]


@triton.jit
def _load(pointer, offset, mask, HALF: tl.constexpr):
    first = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store(pointer, offset, first, second, mask, HALF: tl.constexpr):
    tl.store(pointer + offset, first.to(pointer.dtype.element_ty), mask=mask)
    tl.store(pointer + offset + HALF, second.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(x1, x2, cos1, cos2, sin1, sin2):
    return x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2


@triton.jit
def _rope(
    q_ptr, k_ptr, cos_ptr, sin_ptr, tokens, qb, qh, qt, kb, kh, kt, cb, ct,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    col = tl.arange(0, BLOCK)
    q_offset, q_mask = _heads(batch * qb + token * qt, qh, col, HALF, Q_HEADS, Q_BLOCK)
    k_offset, k_mask = _heads(batch * kb + token * kt, kh, col, HALF, K_HEADS, K_BLOCK)
    cos1, cos2, sin1, sin2 = _angles(cos_ptr, sin_ptr, batch * cb + token * ct, col, HALF, BACKWARD)
    q1, q2 = _load(q_ptr, q_offset, q_mask, HALF)
    k1, k2 = _load(k_ptr, k_offset, k_mask, HALF)
    q1, q2 = _rotate(q1, q2, cos1, cos2, sin1, sin2)
    _store(q_ptr, q_offset, q1, q2, q_mask, HALF)
    k1, k2 = _rotate(k1, k2, cos1, cos2, sin1, sin2)
    _store(k_ptr, k_offset, k1, k2, k_mask, HALF)


@triton.jit
def _rope_store(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, pages_ptr, slots_ptr,
    tokens, qb, qh, qt, kb, kh, kt, vb, vh, vt, cb, ct, page,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """LIMIT: largest value of an FP8 cache; 0 for other caches."""
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    col = tl.arange(0, BLOCK)
    q_offset, q_mask = _heads(batch * qb + token * qt, qh, col, HALF, Q_HEADS, Q_BLOCK)
    k_offset, mask = _heads(batch * kb + token * kt, kh, col, HALF, K_HEADS, K_BLOCK)
    v_offset, _ = _heads(batch * vb + token * vt, vh, col, HALF, K_HEADS, K_BLOCK)
    cos1, cos2, sin1, sin2 = _angles(cos_ptr, sin_ptr, batch * cb + token * ct, col, HALF, False)
    first = tl.load(pages_ptr + program) * (K_HEADS * page * 2 * HALF) + tl.load(slots_ptr + program) * (2 * HALF)
    to, _ = _heads(first, page * 2 * HALF, col, HALF, K_HEADS, K_BLOCK)
    q1, q2 = _load(q_ptr, q_offset, q_mask, HALF)
    k1, k2 = _load(k_ptr, k_offset, mask, HALF)
    v1, v2 = _load(v_ptr, v_offset, mask, HALF)
    q1, q2 = _rotate(q1, q2, cos1, cos2, sin1, sin2)
    _store(q_ptr, q_offset, q1, q2, q_mask, HALF)
    k1, k2 = _rotate(k1, k2, cos1, cos2, sin1, sin2)
    k1, k2 = k1.to(k_ptr.dtype.element_ty), k2.to(k_ptr.dtype.element_ty)
    _store(k_ptr, k_offset, k1, k2, mask, HALF)
    if LIMIT > 0:
        k1, k2 = to_float8(k1.to(tl.float32), 1.0, LIMIT), to_float8(k2.to(tl.float32), 1.0, LIMIT)
        v1, v2 = to_float8(v1, 1.0, LIMIT), to_float8(v2, 1.0, LIMIT)
    _store(keys_ptr, to, k1, k2, mask, HALF)
    _store(values_ptr, to, v1, v2, mask, HALF)


@triton.jit
def _factor(weight_ptr, col, HALF: tl.constexpr, OFFSET: tl.constexpr):
    first = tl.load(weight_ptr + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    second = tl.load(weight_ptr + HALF + col, mask=col < HALF, other=0.0).to(tl.float32)[None, :]
    return first + 1.0 if OFFSET else first, second + 1.0 if OFFSET else second


@triton.jit
def _normal(x1, x2, eps, HALF: tl.constexpr):
    """x̂ of each head in two halves, and r [heads, 1]."""
    rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
    return x1 * rstd, x2 * rstd, rstd


@triton.jit
def _qk_norm_rope(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    tokens, qb, qh, qt, kb, kh, kt, qob, qoh, qot, kob, koh, kot, cb, ct, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    col = tl.arange(0, BLOCK)
    q_offset, q_mask = _heads(batch * qb + token * qt, qh, col, HALF, Q_HEADS, Q_BLOCK)
    k_offset, k_mask = _heads(batch * kb + token * kt, kh, col, HALF, K_HEADS, K_BLOCK)
    q1, q2 = _load(q_ptr, q_offset, q_mask, HALF)
    k1, k2 = _load(k_ptr, k_offset, k_mask, HALF)
    cos1, cos2, sin1, sin2 = _angles(cos_ptr, sin_ptr, batch * cb + token * ct, col, HALF, False)
    factor1, factor2 = _factor(q_weight_ptr, col, HALF, OFFSET)
    q1, q2, _ = _normal(q1, q2, eps, HALF)
    q1, q2 = _rotate(q1 * factor1, q2 * factor2, cos1, cos2, sin1, sin2)
    q_offset, q_mask = _heads(batch * qob + token * qot, qoh, col, HALF, Q_HEADS, Q_BLOCK)
    _store(q_out_ptr, q_offset, q1, q2, q_mask, HALF)
    factor1, factor2 = _factor(k_weight_ptr, col, HALF, OFFSET)
    k1, k2, _ = _normal(k1, k2, eps, HALF)
    k1, k2 = _rotate(k1 * factor1, k2 * factor2, cos1, cos2, sin1, sin2)
    k_offset, k_mask = _heads(batch * kob + token * kot, koh, col, HALF, K_HEADS, K_BLOCK)
    _store(k_out_ptr, k_offset, k1, k2, k_mask, HALF)


@triton.jit
def _heads_backward(
    grad_ptr, grad_offset, x_ptr, x_offset, mask, factor1, factor2, cos1, cos2, sin1, sin2, eps, HALF: tl.constexpr,
):  # fmt: skip
    """Overwrite `grad` of one tile of heads by the gradient of x; return the two halves of g·x̂, [heads, BLOCK] each."""
    g1, g2 = _load(grad_ptr, grad_offset, mask, HALF)
    x1, x2 = _load(x_ptr, x_offset, mask, HALF)
    x1, x2, rstd = _normal(x1, x2, eps, HALF)
    g1, g2 = _rotate(g1, g2, cos1, cos2, sin1, sin2)
    h1, h2 = g1 * factor1, g2 * factor2
    mean = tl.sum(h1 * x1 + h2 * x2, axis=1)[:, None] / (2 * HALF)
    _store(grad_ptr, grad_offset, (h1 - x1 * mean) * rstd, (h2 - x2 * mean) * rstd, mask, HALF)
    return g1 * x1, g2 * x2


@triton.jit
def _qk_norm_rope_backward(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    tokens, qgb, qgh, qgt, kgb, kgh, kgt, qb, qh, qt, kb, kh, kt, cb, ct, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, Q_BLOCK: tl.constexpr, K_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    col = tl.arange(0, BLOCK)
    cos1, cos2, sin1, sin2 = _angles(cos_ptr, sin_ptr, batch * cb + token * ct, col, HALF, True)
    grad_offset, mask = _heads(batch * qgb + token * qgt, qgh, col, HALF, Q_HEADS, Q_BLOCK)
    offset, _ = _heads(batch * qb + token * qt, qh, col, HALF, Q_HEADS, Q_BLOCK)
    factor1, factor2 = _factor(q_weight_ptr, col, HALF, OFFSET)
    _heads_backward(
        q_grad_ptr, grad_offset, q_ptr, offset, mask, factor1, factor2, cos1, cos2, sin1, sin2, eps, HALF
    )  # fmt: skip
    grad_offset, mask = _heads(batch * kgb + token * kgt, kgh, col, HALF, K_HEADS, K_BLOCK)
    offset, _ = _heads(batch * kb + token * kt, kh, col, HALF, K_HEADS, K_BLOCK)
    factor1, factor2 = _factor(k_weight_ptr, col, HALF, OFFSET)
    _heads_backward(
        k_grad_ptr, grad_offset, k_ptr, offset, mask, factor1, factor2, cos1, cos2, sin1, sin2, eps, HALF
    )  # fmt: skip


@triton.jit
def _norm_rope_backward(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dw_ptr,
    first, step, all_tokens, tokens, gb, gh, gt, xb, xh, xt, cb, ct, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Overwrite `grad` of every `step`th token from `first` on, one group of heads at a time.

    Each thread accumulates its part of the weight's gradient; threads reduce once, at the end.
    """
    col = tl.arange(0, BLOCK)
    head = tl.arange(0, GROUP)
    factor1, factor2 = _factor(weight_ptr, col, HALF, OFFSET)
    dw1, dw2 = tl.zeros((GROUP, BLOCK), dtype=tl.float32), tl.zeros((GROUP, BLOCK), dtype=tl.float32)
    groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    for i in tl.range(tl.cdiv(all_tokens - first, step) * groups, num_stages=STAGES):
        position = first + (i // groups) * step
        batch = position // tokens
        token = position % tokens
        cos1, cos2, sin1, sin2 = _angles(cos_ptr, sin_ptr, batch * cb + token * ct, col, HALF, True)
        mine = (i % groups) * GROUP + head
        mask = (mine < HEADS)[:, None] & (col < HALF)[None, :]
        mine = mine[:, None].to(tl.int64)
        grad_offset = batch * gb + token * gt + mine * gh + col[None, :]
        offset = batch * xb + token * xt + mine * xh + col[None, :]
        part1, part2 = _heads_backward(
            grad_ptr, grad_offset, x_ptr, offset, mask, factor1, factor2, cos1, cos2, sin1, sin2, eps, HALF
        )  # fmt: skip
        dw1 += part1
        dw2 += part2
    tl.store(dw_ptr + col, tl.sum(dw1, axis=0), mask=col < HALF)
    tl.store(dw_ptr + HALF + col, tl.sum(dw2, axis=0), mask=col < HALF)


@triton.jit
def _qk_norm_rope_backward_sums(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dw_ptr,
    all_tokens, tokens, share, qgb, qgh, qgt, kgb, kgh, kgt, qb, qh, qt, kb, kh, kt, cb, ct, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, GROUP: tl.constexpr,
    OFFSET: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Use `share` programs for each group of heads: those of q first, then those of k."""
    program = tl.program_id(0).to(tl.int64)
    dw_ptr += program * 2 * HALF
    q_programs = share * ((Q_HEADS + GROUP - 1) // GROUP)
    if program < q_programs:
        _norm_rope_backward(
            q_grad_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dw_ptr, program, q_programs, all_tokens, tokens,
            qgb, qgh, qgt, qb, qh, qt, cb, ct, eps, HALF, BLOCK, Q_HEADS, GROUP, OFFSET, STAGES,
        )  # fmt: skip
    else:
        _norm_rope_backward(
            k_grad_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dw_ptr, program - q_programs,
            tl.num_programs(0) - q_programs, all_tokens, tokens,
            kgb, kgh, kgt, kb, kh, kt, cb, ct, eps, HALF, BLOCK, K_HEADS, GROUP, OFFSET, STAGES,
        )  # fmt: skip


_rope_launcher = Launcher(_rope)
_rope_store_launcher = Launcher(_rope_store)
_qk_norm_rope_launcher = Launcher(_qk_norm_rope)
_qk_norm_rope_backward_launcher = Launcher(_qk_norm_rope_backward)
_qk_norm_rope_backward_sums_launcher = Launcher(_qk_norm_rope_backward_sums)


def _shape(q: Tensor, k: Tensor, rotated: int) -> tuple[tuple[int, ...], int]:
    """The kernels' constants (half, heads of q and k, each with its power of two), and warps."""
    half = rotated // 2
    block = power_of_2(half)
    q_heads = q.shape[1]
    k_heads = k.shape[1]
    q_block, k_block = power_of_2(q_heads), power_of_2(k_heads)
    warps = max(q_block, k_block) * block * 2 // (32 * VALUES_PER_THREAD)
    return (half, block, q_heads, q_block, k_heads, k_block), min(max(warps, 2), 16)


def _angle_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin with one layout, and its strides over batch (0: one table for all) and tokens."""
    strides = cos.stride()
    if strides[2] != 1 or sin.stride() != strides:
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    return cos, sin, strides[0] if cos.shape[0] > 1 else 0, strides[1]


def _with_unit_stride(*tensors: Tensor) -> list[Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


@functools.lru_cache
def _division(q_shape: torch.Size, k_heads: int) -> tuple[int, int, int, int]:
    """Heads per iteration, programs per group of heads, programs of q, and all programs, for the weights' gradients."""
    batch, q_heads, tokens, size = q_shape
    group = min(max(GROUP_VALUES // power_of_2(size), 1), power_of_2(max(q_heads, k_heads)))
    q_groups, k_groups = ceil_div(q_heads, group), ceil_div(k_heads, group)
    share = min(max(PROGRAMS // (q_groups + k_groups), 1), batch * tokens)
    return group, share, share * q_groups, share * (q_groups + k_groups)


@reference.rope_.kernel("cuda", "xpu")
def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> None:
    operands = (q, k, cos, sin)
    key = (backward, *layouts(*operands))
    if _rope_launcher.repeat(key, operands):
        bump_versions(q, k)
        return
    reference.check_rope(*operands)
    batch, _, tokens, _ = q.shape
    constants, warps = _shape(q, k, cos.shape[2])
    if not batch * tokens * constants[0]:
        return
    cos, sin, *angle_strides = _angle_tables(cos, sin)
    used = _with_unit_stride(q, k)
    _rope_launcher(
        batch * tokens, (*used, cos, sin),
        (tokens, *used[0].stride()[:3], *used[1].stride()[:3], *angle_strides),
        (*constants, backward), warps, key if all_same((*used, cos, sin), operands) else None,
    )  # fmt: skip
    copy_back((q, k), used)


def _store_obstacle(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, *_: object) -> str | None:
    if cos.shape[2] != q.shape[3]:
        return "rotates heads whole"
    return conversion_obstacle(keys)


@rope_store_paged_.kernel("cuda", "xpu", unless=_store_obstacle)
def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    slots: Tensor,
) -> None:
    reference.check_rope(q, k, cos, sin)
    batch, _, tokens, _ = q.shape
    constants, warps = _shape(q, k, cos.shape[2])
    cos, sin, *angle_strides = _angle_tables(cos, sin)
    used = _with_unit_stride(q, k, v)
    strides = [step for tensor in used for step in tensor.stride()[:3]]
    limit = FP8_MAX[keys.dtype] if keys.dtype.itemsize == 1 else 0.0
    _rope_store_launcher(
        batch * tokens, (*used, cos, sin, keys, values, pages.contiguous(), slots.contiguous()),
        (tokens, *strides, *angle_strides, keys.shape[2]), (*constants, limit), warps,
    )  # fmt: skip
    copy_back((q, k), used[:2])


@reference.qk_norm_rope.kernel("cuda", "xpu")
def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: bool
) -> tuple[Tensor, Tensor]:
    operands = (q, k, q_weight, k_weight, cos, sin)
    key = (eps, offset, *layouts(*operands))
    results = torch.empty_like(q), torch.empty_like(k)
    if _qk_norm_rope_launcher.repeat(key, (q, k, *results, q_weight, k_weight, cos, sin)):
        return results
    reference.check_qk_norm_rope(*operands)
    q, k = _with_unit_stride(q, k)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, _, tokens, _ = q.shape
    constants, warps = _shape(q, k, cos.shape[2])
    if not batch * tokens * constants[0]:
        return q_out, k_out
    cos, sin, *angle_strides = _angle_tables(cos, sin)
    _qk_norm_rope_launcher(
        batch * tokens, (q, k, q_out, k_out, q_weight, k_weight, cos, sin),
        (tokens, *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3], *angle_strides, eps),
        (*constants, offset), warps, key if all_same((q, k, q_weight, k_weight, cos, sin), operands) else None,
    )  # fmt: skip
    return q_out, k_out


@reference.qk_norm_rope_backward_.kernel("cuda", "xpu")
def qk_norm_rope_backward_(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor] | None:
    operands = (grad_q, grad_k, q, k, q_weight, k_weight, cos, sin)
    key = (eps, offset, *layouts(*operands))
    if not need_weight and _qk_norm_rope_backward_launcher.repeat(key, operands):
        bump_versions(grad_q, grad_k)
        return None
    reference.check_qk_norm_rope(*operands[2:])
    check_same("qk_norm_rope_backward", "grad_q", grad_q, "q", q)
    check_same("qk_norm_rope_backward", "grad_k", grad_k, "k", k)
    batch, _, tokens, size = q.shape
    if not batch * tokens * size:
        return (torch.zeros_like(q_weight), torch.zeros_like(k_weight)) if need_weight else None
    cos, sin, *angle_strides = _angle_tables(cos, sin)
    used = (*_with_unit_stride(grad_q, grad_k, q, k), q_weight, k_weight, cos, sin)
    strides = [step for tensor in used[:4] for step in tensor.stride()[:3]] + angle_strides
    (half, block, q_heads, q_block, k_heads, k_block), warps = _shape(q, k, size)
    warps = min(2 * warps, 16)  # two tensors: half the values per thread leave registers for more programs
    if not need_weight:
        _qk_norm_rope_backward_launcher(
            batch * tokens, used, (tokens, *strides, eps), (half, block, q_heads, q_block, k_heads, k_block, offset),
            warps, key if all_same(used, operands) else None,
        )  # fmt: skip
        copy_back((grad_q, grad_k), used[:2])
        return None
    group, share, q_programs, programs = _division(q.shape, k_heads)
    sums = torch.empty(programs, size, dtype=torch.float32, device=q.device)
    _qk_norm_rope_backward_sums_launcher(
        programs, (*used, sums), (batch * tokens, tokens, share, *strides, eps),
        (half, block, q_heads, k_heads, group, offset, STAGES), GROUP_WARPS,
    )  # fmt: skip
    copy_back((grad_q, grad_k), used[:2])
    dwq, dwk = sum_rows(sums, torch.promote_types(q_weight.dtype, k_weight.dtype), q_programs)
    return dwq.to(q_weight.dtype), dwk.to(k_weight.dtype)
