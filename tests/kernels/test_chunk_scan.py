"""Compare the kernels of Mamba-2's scan with the reference in fp64, forward and backward, over packed documents."""

import pytest
import torch

from halfbyte.ops import chunk_scan as ops
from tests.helpers.parity import DEVICE, DTYPES, INTERPRETED, assert_as_close_as_torch, exact, mark, random

pytest.importorskip("triton")
from halfbyte.kernels.triton import chunk_scan as kernels

pytestmark = mark
SIZES = [(2, 70, 4, 2, 24, 12), (1, 130, 3, 1, 80, 40)]  # rows, tokens, heads, groups, N, P


def inputs(rows, tokens, heads, groups, size, width, dtype, packed=True):
    """The arguments of the scan, x and b as views into one projection, as models make them."""
    mixed = random(rows, tokens, heads * width + 2 * groups * size, dtype=dtype)
    x, b, c = mixed.split([heads * width, groups * size, groups * size], -1)
    step = random(rows, tokens, heads).abs() * 0.1
    begins = torch.arange(rows * tokens, dtype=torch.int32, device=DEVICE)
    begins = (begins // 33 * 33).maximum(begins // tokens * tokens) if packed else begins // tokens * tokens
    return (x.unflatten(-1, (heads, width)), step, -step * random(heads).abs() * 4, b.unflatten(-1, (groups, size)),
            c.unflatten(-1, (groups, size)), random(heads), begins.view(rows, tokens))  # fmt: skip


def computed(functions, grad, x, step, decay, b, c, skip, begins):
    """States, y and gradients by the kernels or by the references."""
    factors = functions.chunk_factors(step, decay, begins)
    states, final = functions.chunk_states(x, factors, b)
    y = functions.chunk_outputs(x, factors, b, c, skip, begins, states)
    after = functions.chunk_state_gradients(grad, factors, c)
    return factors, final, y, *functions.chunk_gradients(grad, x, factors, b, c, skip, begins, states, after)


class References:
    def __getattr__(self, name):
        return getattr(ops, name).reference


@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])  # GPUs compute fp32 by the reference
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernels(sizes, skipped, dtype):
    given = inputs(*sizes, dtype)
    given = given if skipped else (*given[:5], None, given[6])
    grad = random(*given[0].shape, dtype=dtype)
    truth = computed(References(), *(exact(x) if x is not None and x.is_floating_point() else
                                     (x if x is None else x.cpu()) for x in (grad, *given)))  # fmt: skip
    torchs, mine = computed(References(), grad, *given), computed(kernels, grad, *given)
    for left, right, true in zip(mine, torchs, truth, strict=True):
        if dtype is torch.float32:
            assert_as_close_as_torch(left, right, true)
        else:  # operands of tensor cores are rounded to 16 bits
            assert (exact(left) - true).norm() / true.norm() < 4 * torch.finfo(dtype).eps


@pytest.mark.skipif(INTERPRETED, reason="many programs")
@pytest.mark.parametrize("sizes", [(1, 4096, 48, 1, 256, 64), (2, 1000, 64, 8, 128, 128)])
def test_sizes_of_real_models(sizes):
    given = inputs(*sizes, torch.bfloat16, packed=False)
    grad = random(*given[0].shape, dtype=torch.bfloat16)
    for left, right in zip(computed(kernels, grad, *given), computed(References(), grad, *given), strict=True):
        assert (left.float() - right.float()).norm() / right.float().norm() < 2**-6


def test_references_read_the_kernels_factors():
    """A GPU computes fp32 that way; factors of padding must not overflow under strong decay."""
    grad, (x, step, _, b, c, skip, begins) = random(1, 70, 2, 16), inputs(1, 70, 2, 1, 16, 16, torch.float32)
    decay = torch.full_like(step, -9.0)
    factors = kernels.chunk_factors(step, decay, begins)
    torch.testing.assert_close(factors, ops.chunk_factors.reference(step, decay, begins))
    states, _ = ops.chunk_states.reference(x, factors, b)
    after = ops.chunk_state_gradients.reference(grad, factors, c)
    gradients = ops.chunk_gradients.reference(grad, x, factors, b, c, skip, begins, states, after)
    assert all(gradient.isfinite().all() for gradient in gradients)
