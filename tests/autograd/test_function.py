"""OnceFunction behaves like torch's Function."""

import pytest
import torch

from halfbyte.autograd.function import OnceFunction


class Square(OnceFunction):
    @staticmethod
    def forward(ctx, x, times):
        ctx.save_for_backward(x)
        ctx.times = times
        return times * x * x

    @staticmethod
    def backward(ctx, grad):
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return 2 * ctx.times * x * grad, None


def test_values_and_gradients():
    x = torch.randn(5, requires_grad=True)
    y = Square.apply(x, 3)
    assert type(y.grad_fn).__name__ == "SquareBackward"
    assert torch.equal(y, 3 * x * x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 6 * x)
    with torch.no_grad():
        assert not Square.apply(x, 3).requires_grad


def test_a_second_derivative_is_an_error():
    x = torch.randn(5, requires_grad=True)
    (first,) = torch.autograd.grad(Square.apply(x, 3), x, torch.ones(5, requires_grad=True), create_graph=True)
    assert torch.equal(first, 6 * x)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_transforms_are_an_error():
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda x: Square.apply(x, 3))(torch.randn(5))
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: Square.apply(x, 3).sum())(torch.randn(5))
