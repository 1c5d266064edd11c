"""Triton: Mamba-2's scan in chunks. States between chunks are made by programs that walk over a row; outputs and
gradients of all chunks are computed in parallel.

Bound by tensor cores: with N = 256 and P = 64 a token and head take 53,000 multiply-adds forward and 144,000 backward,
and 10P bytes of x, y and their gradients. A step of 1×4096 with 48 such heads takes 0.66 ms of an H200 as a graph, the
products alone 0.07 ms at a large matmul's rate, transformers' function 269 ms. A program of `_group_gradients` adds up
the heads of a group in one order, so the bytes of a gradient repeat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import chunk_scan as reference
from ...ops.chunk_scan import CHUNK, ScanGradients
from ..device import device_of
from ..operands import by_token
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

WIDEST = 128  # largest P
STATE_BLOCK = 64  # state values N per step of a loop, and per program of `_states`


@triton.jit
def _factors(step_ptr, decay_ptr, begins_ptr, factors_ptr, rows, tokens, heads, CHUNK: tl.constexpr):
    """`ops.chunk_scan.Factors` of a chunk of a head."""
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    row = program // heads // chunks
    index, inside, begins, visible = _tokens(begins_ptr, row, chunk, tokens, CHUNK)
    first = row * tokens + chunk * CHUNK
    decay = tl.load(decay_ptr + index * heads + head, mask=inside, other=0.0)
    step = tl.load(step_ptr + index * heads + head, mask=inside, other=0.0)
    sums = tl.sum(tl.where(visible, decay[None, :], 0.0), axis=1)
    is_last = tl.arange(0, CHUNK) == CHUNK - 1
    sum_last = tl.sum(tl.where(is_last, sums, 0.0), axis=0)
    begin_last = tl.sum(tl.where(is_last, begins, 0), axis=0)
    end = tl.where(index >= begin_last, tl.exp(sum_last - sums), 0.0)
    through = tl.where(begin_last < first, tl.exp(sum_last), 0.0)
    at = factors_ptr + ((row * heads + head) * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
    factor_size = rows * heads * chunks * CHUNK
    tl.store(at, sums)
    tl.store(at + factor_size, tl.where(begins < first, tl.exp(sums), 0.0))
    tl.store(at + 2 * factor_size, end)
    tl.store(at + 3 * factor_size, through + tl.zeros((CHUNK,), tl.float32))
    tl.store(at + 4 * factor_size, step)
    tl.store(at + 5 * factor_size, end * step)


@triton.jit
def _tokens(begins_ptr, row, chunk, tokens, CHUNK: tl.constexpr):
    """Tokens of a chunk: index over all rows, whether it is inside the row, its document's first token, and whether
    token i reads token j."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = t < tokens
    index = row * tokens + t
    begins = tl.load(begins_ptr + tl.minimum(index, (row + 1) * tokens - 1))  # padding belongs to the last document
    return index, inside, begins, (index[None, :] <= index[:, None]) & (index[None, :] >= begins[:, None])


@triton.jit
def _tile(pointer, index, inside, stride, offset, columns, size):
    """Load [CHUNK, columns] values of tokens, zeros outside."""
    at = index.to(tl.int64)[:, None] * stride + offset + columns[None, :]
    return tl.load(pointer + at, mask=inside[:, None] & (columns < size)[None, :], other=0.0)


@triton.jit
def _states(
    x_ptr, b_ptr, factors_ptr, states_ptr, final_ptr,
    rows, tokens, heads, groups, size, width, x_stride, b_stride,
    BACKWARD: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """States before each chunk; BACKWARD: gradients of the states after each chunk, x and b being grad and c."""
    blocks, chunks = tl.cdiv(size, SIZE), tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, row = program // blocks % heads, program // blocks // heads
    n, p = program % blocks * SIZE + tl.arange(0, SIZE), tl.arange(0, WIDTH)
    group = head // (heads // groups)
    inside = (n < size)[:, None] & (p < width)[None, :]
    factor_size = rows * heads * chunks * CHUNK
    state = tl.zeros((SIZE, WIDTH), tl.float32)
    for turn in range(chunks):
        chunk = chunks - 1 - turn if BACKWARD else turn
        at = ((chunk * rows + row) * heads + head).to(tl.int64) * size * width + n[:, None] * width + p[None, :]
        tl.store(states_ptr + at, state.to(states_ptr.dtype.element_ty), mask=inside)
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        b = _tile(b_ptr, row * tokens + t, t < tokens, b_stride, group * size, n, size)
        x = _tile(x_ptr, row * tokens + t, t < tokens, x_stride, head * width, p, width)
        factors = factors_ptr + ((row * heads + head) * chunks + chunk) * CHUNK
        scale = tl.load(factors + (factor_size if BACKWARD else 5 * factor_size) + tl.arange(0, CHUNK))
        through = tl.load(factors + 3 * factor_size)
        scaled = (x.to(tl.float32) * scale[:, None]).to(b.dtype)
        state = tl.dot(tl.trans(b), scaled, state * through, input_precision="ieee")
    if not BACKWARD:
        at = (row * heads + head).to(tl.int64) * size * width + n[:, None] * width + p[None, :]
        tl.store(final_ptr + at, state, mask=inside)


@triton.jit
def _outputs(
    x_ptr, b_ptr, c_ptr, skip_ptr, begins_ptr, factors_ptr, states_ptr, y_ptr,
    rows, tokens, heads, groups, size, width, x_stride, b_stride, c_stride,
    SKIP: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    row = program // heads // chunks
    p, group = tl.arange(0, WIDTH), head // (heads // groups)
    index, inside, _begins, visible = _tokens(begins_ptr, row, chunk, tokens, CHUNK)
    factors = factors_ptr + ((row * heads + head) * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
    factor_size = rows * heads * chunks * CHUNK
    sums = tl.load(factors)
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
    y *= tl.load(factors + factor_size)[:, None]
    step = tl.load(factors + 4 * factor_size)
    pairs = tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
    x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
    y = tl.dot((scores * pairs * step[None, :]).to(x.dtype), x, y, input_precision="ieee")
    if SKIP:
        y += tl.load(skip_ptr + head).to(tl.float32) * x.to(tl.float32)
    at = (index.to(tl.int64) * heads + head)[:, None] * width + p[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (p < width)[None, :])


@triton.jit
def _head_gradients(
    grad_ptr, x_ptr, b_ptr, c_ptr, skip_ptr, begins_ptr, factors_ptr, states_ptr, after_ptr,
    grad_x_ptr, grad_step_ptr, grad_decay_ptr,
    rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride,
    SKIP: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of x, step and decay of a chunk of a head."""
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    row = program // heads // chunks
    p, group = tl.arange(0, WIDTH), head // (heads // groups)
    index, inside, _begins, visible = _tokens(begins_ptr, row, chunk, tokens, CHUNK)
    factors = factors_ptr + ((row * heads + head) * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
    factor_size = rows * heads * chunks * CHUNK
    sums = tl.load(factors)
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
        state_gradient = _tile(after_ptr + offset, n, n < size, width, 0, p, width)
        scores = tl.dot(c, tl.trans(b), scores, input_precision="ieee")
        read = tl.dot(c, state, read, input_precision="ieee")
        added = tl.dot(b, state_gradient, added, input_precision="ieee")
        overlap += tl.sum(tl.sum(state.to(tl.float32) * state_gradient.to(tl.float32), axis=1), axis=0)
    scores *= tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
    step = tl.load(factors + 4 * factor_size)
    grad = _tile(grad_ptr, index, inside, grad_stride, head * width, p, width)
    x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
    wide_x, wide_grad = x.to(tl.float32), grad.to(tl.float32)
    added *= tl.load(factors + 2 * factor_size)[:, None]
    grad_inputs = tl.dot(tl.trans(scores.to(grad.dtype)), grad, added, input_precision="ieee")
    weights = scores * tl.dot(grad, tl.trans(x), input_precision="ieee") * step[None, :]
    to_state = tl.sum(added * wide_x, axis=1) * step
    grad_sums = tl.sum(weights, axis=1) - tl.sum(weights, axis=0) - to_state
    grad_sums += tl.sum(read * wide_grad, axis=1) * tl.load(factors + factor_size)
    is_last = index == tl.minimum(row * tokens + (chunk + 1) * CHUNK, (row + 1) * tokens) - 1
    grad_sums += tl.where(is_last, tl.sum(to_state, axis=0) + overlap * tl.load(factors + 3 * factor_size), 0.0)
    grad_decay = tl.sum(tl.where(visible, grad_sums[:, None], 0.0), axis=0)
    tl.store(grad_decay_ptr + index * heads + head, grad_decay, mask=inside)
    tl.store(grad_step_ptr + index * heads + head, tl.sum(grad_inputs * wide_x, axis=1), mask=inside)
    grad_x = grad_inputs * step[:, None]
    if SKIP:
        grad_x += tl.load(skip_ptr + head).to(tl.float32) * wide_grad
    at = (index.to(tl.int64) * heads + head)[:, None] * width + p[None, :]
    tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside[:, None] & (p < width)[None, :])


@triton.jit
def _group_gradients(
    grad_ptr, x_ptr, b_ptr, c_ptr, begins_ptr, factors_ptr, states_ptr, after_ptr, grad_b_ptr, grad_c_ptr,
    rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride,
    CHUNK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of SIZE columns of b and c of a chunk, summed over the heads of a group."""
    blocks, chunks = tl.cdiv(size, SIZE), tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    group = program // blocks % groups
    chunk = program // blocks // groups % chunks
    row = program // blocks // groups // chunks
    n, p = program % blocks * SIZE + tl.arange(0, SIZE), tl.arange(0, WIDTH)
    grad_b = tl.zeros((CHUNK, SIZE), tl.float32)
    grad_c = tl.zeros((CHUNK, SIZE), tl.float32)
    products = tl.zeros((CHUNK, CHUNK), tl.float32)
    index, inside, _begins, visible = _tokens(begins_ptr, row, chunk, tokens, CHUNK)
    in_group = heads // groups
    factor_size = rows * heads * chunks * CHUNK
    for head in range(group * in_group, (group + 1) * in_group):
        factors = factors_ptr + ((row * heads + head) * chunks + chunk) * CHUNK + tl.arange(0, CHUNK)
        offset = ((chunk * rows + row) * heads + head).to(tl.int64) * size * width
        state = _tile(states_ptr + offset, n, n < size, width, 0, p, width)
        state_gradient = _tile(after_ptr + offset, n, n < size, width, 0, p, width)
        sums, step = tl.load(factors), tl.load(factors + 4 * factor_size)
        grad = _tile(grad_ptr, index, inside, grad_stride, head * width, p, width)
        x = _tile(x_ptr, index, inside, x_stride, head * width, p, width)
        pairs = tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)
        products += tl.dot(grad, tl.trans(x), input_precision="ieee") * pairs * step[None, :]
        from_state = (grad.to(tl.float32) * tl.load(factors + factor_size)[:, None]).to(state.dtype)
        to_state = (x.to(tl.float32) * tl.load(factors + 5 * factor_size)[:, None]).to(state_gradient.dtype)
        grad_c = tl.dot(from_state, tl.trans(state), grad_c, input_precision="ieee")
        grad_b = tl.dot(to_state, tl.trans(state_gradient), grad_b, input_precision="ieee")
    b = _tile(b_ptr, index, inside, b_stride, group * size, n, size)
    c = _tile(c_ptr, index, inside, c_stride, group * size, n, size)
    grad_c = tl.dot(products.to(b.dtype), b, grad_c, input_precision="ieee")
    grad_b = tl.dot(tl.trans(products).to(c.dtype), c, grad_b, input_precision="ieee")
    at = (index.to(tl.int64) * groups + group)[:, None] * size + n[None, :]
    mask = inside[:, None] & (n < size)[None, :]
    tl.store(grad_b_ptr + at, grad_b, mask=mask)
    tl.store(grad_c_ptr + at, grad_c, mask=mask)


_factors_launcher = Launcher(_factors)
_states_launcher = Launcher(_states)
_outputs_launcher = Launcher(_outputs)
_head_launcher, _group_launcher = Launcher(_head_gradients), Launcher(_group_gradients)
WARPS = 4  # 8 are slower in all kernels; so are chunks of 128 tokens


def _blocks(size: int, width: int) -> tuple[int, int]:
    """SIZE and WIDTH of a kernel: powers of two, at least 16."""
    wide = max(power_of_2(width), 16)
    limit = STATE_BLOCK if wide <= 64 else STATE_BLOCK // 2  # two tiles of states fit 99 KiB of shared memory
    return min(limit, max(power_of_2(size), 16)), wide


def _walk(backward: bool, x: Tensor, factors: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `_states`; returns the states of all chunks, and the final ones (forward only)."""
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (x, x_stride), (b, b_stride) = by_token(x), by_token(b)
    states = torch.empty(ceil_div(tokens, CHUNK), rows, heads, size, width, dtype=x.dtype, device=x.device)
    final = states if backward else torch.empty(states.shape[1:], dtype=torch.float32, device=x.device)
    columns, wide = _blocks(size, width)
    numbers = rows, tokens, heads, groups, size, width, x_stride, b_stride
    constants = backward, CHUNK, columns, wide
    programs = rows * heads * ceil_div(size, columns)
    _states_launcher(programs, (x, b, factors, states, final), numbers, constants, warps=WARPS)
    return states, final


def obstacle(x: Tensor, *_: object) -> str | None:
    """Return why the kernels do not take x [R, T, H, P], or None."""
    if x.element_size() != 2:
        return "takes 16-bit values: without tensor cores, cuBLAS is faster and Triton compiles for minutes"
    device = device_of(x)
    if device.backend == "cuda" and not device.at_least((8, 0)):
        return "spills registers on Turing"
    return f"takes heads of up to {WIDEST}" if x.shape[3] > WIDEST else None


def factors_obstacle(step: Tensor, *_: object) -> str | None:
    """Return why the kernel does not take step [R, T, H], or None."""
    return "takes fp32" if step.dtype is not torch.float32 else None


@reference.chunk_factors.kernel("cuda", "xpu", unless=factors_obstacle)
def chunk_factors(step: Tensor, decay: Tensor, begins: Tensor) -> Tensor:
    rows, tokens, heads = step.shape
    chunks = ceil_div(tokens, CHUNK)
    factors = torch.empty(6, rows, heads, chunks, CHUNK, dtype=torch.float32, device=step.device)
    tensors = step.contiguous(), decay.contiguous(), begins.contiguous(), factors
    _factors_launcher(rows * heads * chunks, tensors, (rows, tokens, heads), (CHUNK,), warps=WARPS)
    return factors


@reference.chunk_states.kernel("cuda", "xpu", unless=obstacle)
def chunk_states(x: Tensor, factors: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _walk(False, x, factors, b)


@reference.chunk_state_gradients.kernel("cuda", "xpu", unless=obstacle)
def chunk_state_gradients(grad: Tensor, factors: Tensor, c: Tensor) -> Tensor:
    return _walk(True, grad, factors, c)[0]


@reference.chunk_outputs.kernel("cuda", "xpu", unless=obstacle)
def chunk_outputs(
    x: Tensor, factors: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, begins: Tensor, states: Tensor
) -> Tensor:
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (x, x_stride) = by_token(x)
    (b, b_stride) = by_token(b)
    (c, c_stride) = by_token(c)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    skip_or_y = y if skip is None else skip.contiguous()
    _outputs_launcher(
        rows * heads * ceil_div(tokens, CHUNK), (x, b, c, skip_or_y, begins.contiguous(), factors, states, y),
        (rows, tokens, heads, groups, size, width, x_stride, b_stride, c_stride),
        (skip is not None, CHUNK, *_blocks(size, width)), warps=WARPS,
    )  # fmt: skip
    return y


@reference.chunk_gradients.kernel("cuda", "xpu", unless=obstacle)
def chunk_gradients(
    grad: Tensor,
    x: Tensor,
    factors: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    begins: Tensor,
    states: Tensor,
    state_gradients: Tensor,
) -> ScanGradients:
    (rows, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    (grad, grad_stride), (x, x_stride), (b, b_stride), (c, c_stride) = map(by_token, (grad, x, b, c))
    begins = begins.contiguous()
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_step, grad_decay = torch.empty(2, rows, tokens, heads, dtype=torch.float32, device=x.device)
    grad_b, grad_c = torch.empty(2, *b.shape, dtype=torch.float32, device=x.device)
    numbers = rows, tokens, heads, groups, size, width, grad_stride, x_stride, b_stride, c_stride
    (columns, wide), chunks = _blocks(size, width), ceil_div(tokens, CHUNK)
    skip_or_grad = grad_step if skip is None else skip.contiguous()
    _head_launcher(
        rows * heads * chunks,
        (grad, x, b, c, skip_or_grad, begins, factors, states, state_gradients, grad_x, grad_step, grad_decay),
        numbers, (skip is not None, CHUNK, columns, wide), warps=WARPS,
    )  # fmt: skip
    _group_launcher(
        rows * groups * chunks * ceil_div(size, columns),
        (grad, x, b, c, begins, factors, states, state_gradients, grad_b, grad_c),
        numbers, (CHUNK, columns, wide), warps=WARPS,
    )  # fmt: skip
    return ScanGradients(grad_x, grad_step, grad_decay, grad_b, grad_c)
