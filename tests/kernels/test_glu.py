"""Compare the Triton gated units with their reference, on a GPU and in Triton's interpreter."""

import pytest
import torch

from halfbyte.autograd.lora_mlp import glu
from halfbyte.ops import glu as reference
from tests.helpers.parity import INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import glu as kernels

pytestmark = mark

SIZES = [(13,), (3, 5), (2, 3, 683), (5, 2049)]
if not INTERPRETED:
    SIZES += [(300, 14336), (7, 18944)]
activations = pytest.mark.parametrize("activation", reference.ACTIVATIONS)


def stock(gate, up, activation):
    """Compute as Hugging Face does: activation and product are both rounded."""
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    return (gate, up), reference.activate(gate, activation) * up


def assert_all_close(mine, stocks, truths):
    for tensor, torchs, true in zip(mine, stocks, truths, strict=True):
        assert_as_close_as_torch(tensor, torchs, true)


@dtypes
@pytest.mark.parametrize("shape", SIZES, ids=str)
@activations
def test_values_and_gradients(shape, dtype, activation):
    gate, up, grad = (random(*shape, dtype=dtype, scale=3.0) for _ in range(3))
    stock_inputs, stock_h = stock(gate, up, activation)
    true_inputs, true_h = stock(exact(gate), exact(up), activation)
    stocks = (stock_h.detach(), *torch.autograd.grad(stock_h, stock_inputs, grad))
    truths = (true_h.detach(), *torch.autograd.grad(true_h, true_inputs, exact(grad)))
    h = kernels.glu(gate, up, activation)
    for need_output in (False, True):
        passed, dgate, dup = grad.clone(), gate.clone(), up.clone()
        kernels.glu_backward_(passed, dgate, dup, activation, need_output)
        assert_all_close((h, dgate, dup), stocks, truths)
        assert torch.equal(passed, h if need_output else grad)


@activations
def test_halves_of_a_fused_projection(activation):
    fused, grad = random(2, 3, 2 * 70), random(2, 3, 70)
    before = fused.clone()
    gate, up = fused.chunk(2, dim=-1)
    expected = kernels.glu(gate.contiguous(), up.contiguous(), activation)
    assert torch.equal(kernels.glu(gate, up, activation), expected)
    apart = [gate.contiguous(), up.contiguous()]
    kernels.glu_backward_(grad.clone(), *apart, activation, False)
    kernels.glu_backward_(grad, gate, up, activation, False)
    assert torch.equal(fused, torch.cat(apart, dim=-1))
    assert not torch.equal(fused, before)


def test_any_layout_is_changed_in_place():
    """Rows without a common stride are copied, and the results copied back to the argument."""
    gate, up, grad = (random(4, 3, 6).transpose(1, 2) for _ in range(3))
    expected = [tensor.contiguous() for tensor in (grad, gate, up)]
    assert torch.equal(kernels.glu(gate, up, "silu"), kernels.glu(*expected[1:], "silu"))
    kernels.glu_backward_(*expected, "silu", True)
    kernels.glu_backward_(grad, gate, up, "silu", True)
    assert all(torch.equal(*pair) for pair in zip((grad, gate, up), expected, strict=True))
    gate, up, grad = random(3, 5), random(3, 5), random(1, 1).expand(3, 5)
    apart = [gate.clone(), up.clone()]
    kernels.glu_backward_(grad, gate, up, "silu", False)
    kernels.glu_backward_(grad.contiguous(), *apart, "silu", False)
    assert torch.equal(gate, apart[0])
    assert torch.equal(up, apart[1])


@pytest.mark.skipif(INTERPRETED, reason="dispatch follows the device")
@activations
def test_through_autograd(activation):
    gate, up = (random(5, 33, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    inputs, expected = stock(gate.cpu().float(), up.cpu().float(), activation)
    seed = random(5, 33, dtype=torch.bfloat16)
    mine = torch.autograd.grad(glu(gate * 1, up * 1, activation), (gate, up), seed)
    for tensor, truth in zip(mine, torch.autograd.grad(expected, inputs, seed.cpu().float()), strict=True):
        assert (tensor.float().cpu() - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.large(13)
@pytest.mark.skipif(INTERPRETED, reason="gigabytes")
def test_more_than_2_31_elements():
    gate = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device="cuda")
    up = torch.zeros_like(gate)
    gate[-5000:], up[-5000:] = random(5000, dtype=torch.bfloat16), random(5000, dtype=torch.bfloat16)
    assert torch.equal(kernels.glu(gate, up, "silu")[-5000:], kernels.glu(gate[-5000:], up[-5000:], "silu"))
