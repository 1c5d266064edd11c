"""Triton: Mamba-2's scan in chunks. States between chunks are made by programs that walk over a row; outputs and
gradients of all chunks are computed in parallel.

Bound by tensor cores: with N = 256 and P = 64 a token and head take 53,000 multiply-adds forward and 127,000 backward,
and 4P bytes of x, y and their gradients each way. A program of `_group_gradients` adds up the heads of a group in one
order, so the bytes of a gradient repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import chunk_scan as reference
from ...ops.chunk_scan import CHUNK, ScanGradients
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

WIDEST = 128  # largest P
STATE_BLOCK = 64  # state values N per step of a loop, and per program of `_states`


@triton.jit
def _chunk_decays(decay_ptr, begins_ptr, row, head, chunk, tokens, heads, CHUNK: tl.constexpr):
    """Decays of a chunk of a head: A_i, whether i reads j, and the factors start, end and through in `ops`."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = t < tokens
    first = row * tokens + chunk * CHUNK
    index = row * tokens + t
    begins = tl.load(begins_ptr + index, mask=inside, other=2147483647)  # no token is visible to padding
    decay = tl.load(decay_ptr + index * heads + head, mask=inside, other=0.0)
    visible = (index[None, :] <= index[:, None]) & (index[None, :] >= begins[:, None])
    sums = tl.sum(tl.where(visible, decay[None, :], 0.0), axis=1)
    last = tl.minimum(tokens - chunk * CHUNK, CHUNK) - 1
    is_last = tl.arange(0, CHUNK) == last
    sum_last = tl.sum(tl.where(is_last, sums, 0.0), axis=0)
    begin_last = tl.sum(tl.where(is_last, begins, 0), axis=0)
    start = tl.where(inside & (begins < first), tl.exp(sums), 0.0)
    end = tl.where(inside & (index >= begin_last), tl.exp(sum_last - sums), 0.0)
    through = tl.where(begin_last < first, tl.exp(sum_last), 0.0)
    return index, inside, sums, visible, start, end, through, is_last


@triton.jit
def _tile(pointer, index, inside, stride, offset, columns, size):
    """Load [CHUNK, columns] values of tokens, zeros outside."""
    at = index.to(tl.int64)[:, None] * stride + offset + columns[None, :]
    return tl.load(pointer + at, mask=inside[:, None] & (columns < size)[None, :], other=0.0)


@triton.jit
def _states(
    x_ptr, step_ptr, decay_ptr, b_ptr, begins_ptr, states_ptr, final_ptr,
    rows, tokens, heads, groups, size, width, x_stride, b_stride,
    BACKWARD: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """States before each chunk; BACKWARD: gradients of the states after each chunk, x and b being grad and c."""
    blocks, chunks = tl.cdiv(size, SIZE), tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, row = program // blocks % heads, program // blocks // heads
    n, p = program % blocks * SIZE + tl.arange(0, SIZE), tl.arange(0, WIDTH)
    group = head // (heads // groups)
    known = (n < size)[:, None] & (p < width)[None, :]
    state = tl.zeros((SIZE, WIDTH), tl.float32)
    for turn in range(chunks):
        chunk = chunks - 1 - turn if BACKWARD else turn
        at = ((chunk * rows + row) * heads + head).to(tl.int64) * size * width + n[:, None] * width + p[None, :]
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=known)
        index, inside, _sums, _visible, start, end, through, _last = _chunk_decays(
            decay_ptr, begins_ptr, row, head, chunk, tokens, heads, CHUNK
        )
        b = _tile(b_ptr, index, inside, b_stride, group * size, n, size)
        x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
        if BACKWARD:
            scaled = x.to(tl.float32) * start[:, None]
        else:
            step = tl.load(step_ptr + index * heads + head, mask=inside, other=0.0)
            scaled = x.to(tl.float32) * (step * end)[:, None]
        state = tl.dot(tl.trans(b), scaled.to(b.dtype), state * through, input_precision="ieee")
    if not BACKWARD:
        at = (row * heads + head).to(tl.int64) * size * width + n[:, None] * width + p[None, :]
        tl.store(final_ptr + at, state, mask=known)


@triton.jit
def _outputs(
    x_ptr, step_ptr, decay_ptr, b_ptr, c_ptr, skip_ptr, begins_ptr, states_ptr, y_ptr,
    rows, tokens, heads, groups, size, width, x_stride, b_stride, c_stride,
    SKIP: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, chunk, row = program % heads, program // heads % chunks, program // heads // chunks
    p, group = tl.arange(0, WIDTH), head // (heads // groups)
    index, inside, sums, visible, start, _end, _through, _last = _chunk_decays(
        decay_ptr, begins_ptr, row, head, chunk, tokens, heads, CHUNK
    )
    state_ptr = states_ptr + ((chunk * rows + row) * heads + head).to(tl.int64) * size * width
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    y = tl.zeros((CHUNK, WIDTH), tl.float32)
    for block in range(0, size, SIZE):
        n = block + tl.arange(0, SIZE)
        b = _tile(b_ptr, index, inside, b_stride, group * size, n, size)
        c = _tile(c_ptr, index, inside, c_stride, group * size, n, size)
        state = _tile(state_ptr, n, n < size, width, 0, p, width)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
        y = tl.dot(c, state, y, input_precision="ieee")
    y *= start[:, None]
    step = tl.load(step_ptr + index * heads + head, mask=inside, other=0.0)
    pairs = tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
    x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
    y = tl.dot((scores * pairs * step[None, :]).to(x.dtype), x, y, input_precision="ieee")
    if SKIP:
        y += tl.load(skip_ptr + head).to(tl.float32) * x.to(tl.float32)
    at = (index.to(tl.int64) * heads + head)[:, None] * width + p[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (p < width)[None, :])


@triton.jit
def _head_gradients(
    grad_ptr, x_ptr, step_ptr, decay_ptr, b_ptr, c_ptr, skip_ptr, begins_ptr, states_ptr, after_ptr,
    grad_x_ptr, grad_step_ptr, grad_decay_ptr,
    rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride,
    SKIP: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of x, step and decay of a chunk of a head."""
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, chunk, row = program % heads, program // heads % chunks, program // heads // chunks
    p, group = tl.arange(0, WIDTH), head // (heads // groups)
    index, inside, sums, visible, start, end, through, is_last = _chunk_decays(
        decay_ptr, begins_ptr, row, head, chunk, tokens, heads, CHUNK
    )
    offset = ((chunk * rows + row) * heads + head).to(tl.int64) * size * width
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    read = tl.zeros((CHUNK, WIDTH), tl.float32)
    added = tl.zeros((CHUNK, WIDTH), tl.float32)
    overlap = 0.0
    for block in range(0, size, SIZE):
        n = block + tl.arange(0, SIZE)
        b = _tile(b_ptr, index, inside, b_stride, group * size, n, size)
        c = _tile(c_ptr, index, inside, c_stride, group * size, n, size)
        state = _tile(states_ptr + offset, n, n < size, width, 0, p, width)
        after = _tile(after_ptr + offset, n, n < size, width, 0, p, width)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
        read = tl.dot(c, state, read, input_precision="ieee")
        added = tl.dot(b, after, added, input_precision="ieee")
        overlap += tl.sum(tl.sum(state.to(tl.float32) * after.to(tl.float32), axis=1), axis=0)
    scores *= tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
    step = tl.load(step_ptr + index * heads + head, mask=inside, other=0.0)
    grad = _tile(grad_ptr, index, inside, grad_stride, head * width, p, width)
    x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
    added *= end[:, None]
    grad_inputs = tl.dot(tl.trans(scores.to(grad.dtype)), grad, added, input_precision="ieee")
    weights = scores * tl.dot(grad, tl.trans(x), input_precision="ieee") * step[None, :]
    wide, wide_grad = x.to(tl.float32), grad.to(tl.float32)
    kept = tl.sum(added * wide, axis=1) * step
    grad_sums = tl.sum(weights, axis=1) - tl.sum(weights, axis=0) - kept
    grad_sums += tl.sum(read * wide_grad, axis=1) * start
    grad_sums += tl.where(is_last, tl.sum(kept, axis=0) + overlap * through, 0.0)
    grad_decay = tl.sum(tl.where(visible, grad_sums[:, None], 0.0), axis=0)
    tl.store(grad_decay_ptr + index * heads + head, grad_decay, mask=inside)
    tl.store(grad_step_ptr + index * heads + head, tl.sum(grad_inputs * wide, axis=1), mask=inside)
    grad_x = grad_inputs * step[:, None]
    if SKIP:
        grad_x += tl.load(skip_ptr + head).to(tl.float32) * wide_grad
    at = (index.to(tl.int64) * heads + head)[:, None] * width + p[None, :]
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside[:, None] & (p < width)[None, :])


@triton.jit
def _group_gradients(
    grad_ptr, x_ptr, step_ptr, decay_ptr, b_ptr, c_ptr, begins_ptr, states_ptr, after_ptr, grad_b_ptr, grad_c_ptr,
    rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride,
    CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of SIZE columns of b and c of a chunk, summed over the heads of a group."""
    blocks, chunks = tl.cdiv(size, SIZE), tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    group, chunk, row = (
        program // blocks % groups, program // blocks // groups % chunks, program // blocks // groups // chunks
    )  # fmt: skip
    n, p = program % blocks * SIZE + tl.arange(0, SIZE), tl.arange(0, WIDTH)
    grad_b = tl.zeros((CHUNK, SIZE), tl.float32)
    grad_c = tl.zeros((CHUNK, SIZE), tl.float32)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    in_group = heads // groups
    for head in range(group * in_group, (group + 1) * in_group):
        index, inside, sums, visible, start, end, _through, _last = _chunk_decays(
            decay_ptr, begins_ptr, row, head, chunk, tokens, heads, CHUNK
        )
        offset = ((chunk * rows + row) * heads + head).to(tl.int64) * size * width
        state = _tile(states_ptr + offset, n, n < size, width, 0, p, width)
        after = _tile(after_ptr + offset, n, n < size, width, 0, p, width)
        step = tl.load(step_ptr + index * heads + head, mask=inside, other=0.0)
        grad = _tile(grad_ptr, index, inside, grad_stride, head * width, p, width)
        x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
        pairs = tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
        products += tl.dot(grad, tl.trans(x), input_precision="ieee") * pairs * step[None, :]
        read = (grad.to(tl.float32) * start[:, None]).to(state.dtype)
        kept = (x.to(tl.float32) * (step * end)[:, None]).to(after.dtype)
        grad_c = tl.dot(read, tl.trans(state), grad_c, input_precision="ieee")
        grad_b = tl.dot(kept, tl.trans(after), grad_b, input_precision="ieee")
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    index, inside = row * tokens + t, t < tokens
    b = _tile(b_ptr, index, inside, b_stride, group * size, n, size)
    c = _tile(c_ptr, index, inside, c_stride, group * size, n, size)
    grad_c = tl.dot(products.to(b.dtype), b, grad_c, input_precision="ieee")
    grad_b = tl.dot(tl.trans(products).to(c.dtype), c, grad_b, input_precision="ieee")
    at = (index.to(tl.int64) * groups + group)[:, None] * size + n[None, :]
    mask = inside[:, None] & (n < size)[None, :]
    tl.store(grad_b_ptr + at, grad_b, mask=mask)
    tl.store(grad_c_ptr + at, grad_c, mask=mask)


_states_launcher, _outputs_launcher = Launcher(_states), Launcher(_outputs)
_head_launcher, _group_launcher = Launcher(_head_gradients), Launcher(_group_gradients)


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """Return x [R, T, ·, ·] with contiguous tokens and the distance of two tokens; copies only where that is needed."""
    stride = x.stride(1)
    if x.stride() != (x.shape[1] * stride, stride, x.shape[3], 1):
        x = x.contiguous()
    return x, x.stride(1)


def _blocks(size: int, width: int) -> tuple[int, int]:
    """SIZE and WIDTH of a kernel: powers of two, at least 16."""
    return min(STATE_BLOCK, max(power_of_2(size), 16)), max(power_of_2(width), 16)


def obstacle(x: Tensor, *_: object) -> str | None:
    """Return why the kernels do not take heads of x [R, T, H, P], or None."""
    if x.dtype is torch.float64:
        return "takes no fp64"
    return f"takes heads of up to {WIDEST}" if x.shape[3] > WIDEST else None


def _walk(backward: bool, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `_states`; returns the states of all chunks, and the final ones (forward only)."""
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (x, x_stride), (b, b_stride) = _by_token(x), _by_token(b)
    states = torch.empty(ceil_div(tokens, CHUNK), rows, heads, size, width, dtype=x.dtype, device=x.device)
    final = states if backward else torch.empty(states.shape[1:], dtype=torch.float32, device=x.device)
    columns, wide = _blocks(size, width)
    _states_launcher(
        rows * heads * ceil_div(size, columns), (x, step, decay.contiguous(), b, begins, states, final),
        (rows, tokens, heads, groups, size, width, x_stride, b_stride), (backward, CHUNK, columns, wide), warps=4,
    )  # fmt: skip
    return states, final


@reference.chunk_states.kernel("cuda", "xpu", unless=obstacle)
def chunk_states(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    return _walk(False, x, step.contiguous(), decay, b, begins.contiguous())


@reference.chunk_state_gradients.kernel("cuda", "xpu", unless=obstacle)
def chunk_state_gradients(grad: Tensor, decay: Tensor, c: Tensor, begins: Tensor) -> Tensor:
    return _walk(True, grad, decay, decay, c, begins.contiguous())[0]


@reference.chunk_outputs.kernel("cuda", "xpu", unless=obstacle)
def chunk_outputs(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, begins: Tensor, states: Tensor
) -> Tensor:
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (x, x_stride), (b, b_stride), (c, c_stride) = _by_token(x), _by_token(b), _by_token(c)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    beside = y if skip is None else skip.contiguous()
    _outputs_launcher(
        rows * heads * ceil_div(tokens, CHUNK),
        (x, step.contiguous(), decay.contiguous(), b, c, beside, begins.contiguous(), states, y),
        (rows, tokens, heads, groups, size, width, x_stride, b_stride, c_stride),
        (skip is not None, CHUNK, *_blocks(size, width)), warps=4,
    )  # fmt: skip
    return y


@reference.chunk_gradients.kernel("cuda", "xpu", unless=obstacle)
def chunk_gradients(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    begins: Tensor,
    states: Tensor,
    state_gradients: Tensor,
) -> ScanGradients:
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (grad, grad_stride), (x, x_stride), (b, b_stride), (c, c_stride) = map(_by_token, (grad, x, b, c))
    step, decay, begins = step.contiguous(), decay.contiguous(), begins.contiguous()
    empty = lambda like, dtype: torch.empty(like.shape, dtype=dtype, device=like.device)  # noqa: E731
    grad_x, grad_step, grad_decay = empty(x, x.dtype), empty(step, step.dtype), empty(decay, decay.dtype)
    grad_b, grad_c = empty(b, torch.float32), empty(c, torch.float32)
    numbers = rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride
    (columns, wide), chunks = _blocks(size, width), ceil_div(tokens, CHUNK)
    beside = step if skip is None else skip.contiguous()
    read = states, state_gradients
    _head_launcher(
        rows * heads * chunks,
        (grad, x, step, decay, b, c, beside, begins, *read, grad_x, grad_step, grad_decay),
        numbers, (skip is not None, CHUNK, columns, wide), warps=8,
    )  # fmt: skip
    _group_launcher(
        rows * groups * chunks * ceil_div(size, columns),
        (grad, x, step, decay, b, c, begins, *read, grad_b, grad_c), numbers, (CHUNK, columns, wide), warps=8,
    )  # fmt: skip
    return ScanGradients(grad_x, grad_step, grad_decay, grad_b, grad_c)
