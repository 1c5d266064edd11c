"""`run_ahead`: the backward uses a recomputation that ran before it, and runs the function only once."""

import pytest
import torch

from halfbyte.autograd.checkpointing import pending_recomputes, recompute, run_ahead


class Counted:
    """x → x + tanh(dropout(x)·W), counting its calls."""

    def __init__(self, p):
        self.weight, self.p, self.runs = torch.randn(6, 6, requires_grad=True), p, 0

    def __call__(self, x, output):
        self.runs += 1
        return x, torch.tanh(torch.nn.functional.dropout(x, self.p) @ self.weight)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradients_are_those_of_a_backward_that_recomputes(p):
    torch.manual_seed(0)
    x, grad, found = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6), []
    counted = Counted(p)
    for ahead in (False, True):
        torch.manual_seed(1)
        with pending_recomputes() as left:
            y = recompute(counted, x, [counted.weight], random=p > 0)
        assert (len(left), counted.runs) == (1, 1)
        state = torch.get_rng_state()
        if ahead:
            run_ahead(left[0])
            assert counted.runs == 2
            torch.testing.assert_close(torch.get_rng_state(), state)
        found.append(torch.autograd.grad(y, [x, counted.weight], grad))
        assert counted.runs == 2
        counted.runs = 0
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_tiles_are_not_collected():
    counted, x = Counted(0.0), torch.randn(2, 3, 6)
    with pending_recomputes() as left:
        recompute(counted, x, [counted.weight], rows=2)
    recompute(counted, x, [counted.weight])
    assert left == []
