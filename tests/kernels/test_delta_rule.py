"""Compare the kernels of the gated delta rule with the specification in fp64, forward and backward."""

import pytest
import torch

from halfbyte.ops import delta_rule as ops
from tests.helpers.parity import DEVICE, DTYPES, INTERPRETED, exact, mark, random

pytest.importorskip("triton")
from halfbyte.kernels.triton import delta_rule as kernels

pytestmark = mark


def inputs(rows, tokens, key_heads, heads, key_size, value_size, dtype, packed=True):
    """The rule's arguments, q, k and v as views into one projection, as models make them."""
    sizes = [key_heads * key_size, key_heads * key_size, heads * value_size]
    mixed = random(rows, tokens, sum(sizes), dtype=dtype)
    query, key, value = (
        x.unflatten(-1, (n, -1)) for x, n in zip(mixed.split(sizes, -1), (key_heads, key_heads, heads), strict=True)
    )
    decay, beta = -random(rows, tokens, heads).abs(), random(rows, tokens, heads).sigmoid()
    first = torch.zeros(rows, tokens, dtype=torch.bool, device=DEVICE)
    first[:, ::41] = True
    first[0, 63:66] = True
    return query, key, value, decay, beta, first if packed else None


def computed(functions, grad, given):
    """Out, the final states and the gradients by the kernels or by the references."""
    return *functions.delta_rule(*given), *functions.delta_rule_backward(grad, *given)


class References:
    delta_rule = ops.delta_rule.reference
    delta_rule_backward = ops.delta_rule_backward.reference


def in_fp64(tensors):
    return [exact(x) if x is not None and x.is_floating_point() else x if x is None else x.cpu() for x in tensors]


def tolerance(dtype):
    """Relative error: fp32 sums and one rounding of results in the interpreter, TF32 products on a GPU."""
    return (5e-6 if dtype is torch.float32 else torch.finfo(dtype).eps / 2) if INTERPRETED else 4e-3


# rows, tokens, key heads, value heads, Dk, Dv
@pytest.mark.parametrize("dtype", DTYPES if INTERPRETED else DTYPES[1:])  # GPUs compute fp32 by the reference
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(1, 70, 1, 3, 24, 40), (2, 66, 1, 1, 80, 16)])
def test_values_and_gradients(sizes, packed, dtype):
    given = inputs(*sizes, dtype, packed)
    grad = random(*given[2].shape, dtype=dtype)
    truth = computed(References, exact(grad), in_fp64(given))
    for mine, true in zip(computed(kernels, grad, given), truth, strict=True):
        assert (exact(mine) - true).norm() / true.norm() < tolerance(dtype)


def test_documents_do_not_change_each_other():
    """Replacing one document leaves all bits of the others' results."""
    given = inputs(1, 130, 1, 1, 16, 16, torch.float16)
    changed = [x.clone() for x in given]
    begin, end = 41, 63  # a document of row 0
    for x in changed[:5]:
        x[:, begin:end] *= -3 if x.shape[-1] == 16 else 0.5
    grad = random(*given[2].shape, dtype=torch.float16)
    same = torch.ones(130, dtype=torch.bool, device=DEVICE)
    same[begin:end] = False
    for left, right in zip(computed(kernels, grad, given), computed(kernels, grad, changed), strict=True):
        by_token = left.shape[1] == 130
        assert torch.equal(left[:, same], right[:, same]) if by_token else torch.equal(left, right)


def test_some_heads_at_a_time(monkeypatch):
    """On a GPU up to rounding: Triton compiles one head, and views of heads, on their own."""
    given = inputs(1, 66, 2, 2, 16, 16, torch.float16, packed=False)
    grad = random(*given[2].shape, dtype=torch.float16)
    whole = computed(kernels, grad, given)
    monkeypatch.setattr(kernels, "AT_ONCE", 66)
    for left, right in zip(computed(kernels, grad, given), whole, strict=True):
        if INTERPRETED:
            assert torch.equal(left, right)
        assert (exact(left) - exact(right)).norm() <= tolerance(torch.float16) * exact(right).norm()


@pytest.mark.skipif(INTERPRETED, reason="many programs")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(4, 1280, 16, 32, 128, 128), (1, 500, 4, 4, 96, 192), (1, 300, 2, 4, 256, 256)])
def test_sizes_of_real_models(sizes, packed):
    """Results repeat."""
    given = inputs(*sizes, torch.bfloat16, packed)
    grad = random(*given[2].shape, dtype=torch.bfloat16)
    mine, again = computed(kernels, grad, given), computed(kernels, grad, given)
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    for left, right, true in zip(mine, again, computed(References, grad.double(), wide), strict=True):
        assert torch.equal(left, right)
        assert (left.double() - true).norm() / true.norm() < tolerance(torch.bfloat16)
