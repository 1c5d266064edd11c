"""Compare a Gated DeltaNet's chunks of a prompt and single steps with the recurrence, in fp64."""

import pytest
import torch

from halfbyte.ops import delta_rule
from halfbyte.ops.causal_conv import causal_conv
from halfbyte.ops.delta_net import conv_step_, delta_rows, delta_step_, gates

# Key heads, value heads, Dk, Dv.
SHAPES = pytest.mark.parametrize("shape", [(2, 4, 8, 8), (1, 3, 24, 40)])


def inputs(shape, *tokens):
    """mixed, a and b of random tokens, and the layer's parameters."""
    key_heads, heads, key_size, value_size = shape
    channels = 2 * key_heads * key_size + heads * value_size
    return (
        torch.randn(*tokens, channels), torch.randn(*tokens, heads), torch.randn(*tokens, heads),
        torch.randn(heads) * 0.5, torch.randn(heads) * 0.5,
    )  # fmt: skip


def naive(mixed, a, b, a_log, dt_bias, states, key_heads):
    """Compute the recurrence token by token and head by head, in fp64: out, and the state after each row."""
    rows, length, _ = mixed.shape
    _, heads, key_size, value_size = states.shape
    query, key, value = mixed.double().split([key_heads * key_size, key_heads * key_size, heads * value_size], dim=-1)
    out = torch.zeros(rows, length, heads, value_size, dtype=torch.float64)
    behind = states[:rows].double().clone()
    for row in range(rows):
        for head in range(heads):
            at, state = slice(head * key_heads // heads * key_size, (head * key_heads // heads + 1) * key_size), None
            state = behind[row, head]
            for t in range(length):
                q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (query[row, t, at], key[row, t, at]))
                v = value[row, t, head * value_size : (head + 1) * value_size]
                step = torch.nn.functional.softplus(a[row, t, head].double() + dt_bias[head].double())
                state = state * (-a_log[head].double().exp() * step).exp()
                state = state + torch.outer(k, b[row, t, head].double().sigmoid() * (v - state.T @ k))
                out[row, t, head] = state.T @ q / key_size**0.5
            behind[row, head] = state
    return out, behind


@SHAPES
@pytest.mark.parametrize("lengths", [[1, 5], [64, 63, 65], [130]])
def test_chunks_are_the_recurrence(shape, lengths, monkeypatch):
    """Padding has no effect, even if it is NaN. A row has the same result alone."""
    torch.manual_seed(len(lengths))
    key_heads, heads, key_size, value_size = shape
    rows, length = len(lengths), max(lengths)
    mixed, a, b, a_log, dt_bias = inputs(shape, rows, length)
    states = torch.zeros(rows, heads, key_size, value_size)
    monkeypatch.setattr(delta_rule, "AT_ONCE", 2 * rows * length)  # some of the heads at a time
    real = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    decay, beta = gates(a, b, a_log, dt_bias)
    out, behind = delta_rows(mixed, decay.where(real[..., None], torch.nan), beta, real, states, key_heads)
    for row, own in enumerate(lengths):
        alone = slice(row, row + 1), slice(0, own)
        truth, state = naive(mixed[alone], a[alone], b[alone], a_log, dt_bias, states, key_heads)
        torch.testing.assert_close(out[alone].double(), truth, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(behind[alone[0]].double(), state, rtol=1e-4, atol=1e-5)


@SHAPES
def test_the_step_is_the_recurrence(shape):
    torch.manual_seed(1)
    key_heads, heads, key_size, value_size = shape
    mixed, a, b, *own = inputs(shape, 3, 5)
    states, seats = torch.randn(6, heads, key_size, value_size), torch.tensor([4, 1, 3])
    truth, behind = naive(mixed, a, b, *own, states[seats], key_heads)
    untouched = states[[0, 2, 5]].clone()
    for t in range(5):
        out = delta_step_.reference(mixed[:, t], a[:, t], b[:, t], *own, states, seats, key_heads)
        torch.testing.assert_close(out.double(), truth[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[seats].double(), behind, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[[0, 2, 5]], untouched)


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_of_rows_and_of_steps(bias):
    torch.manual_seed(2)
    x, weight, added = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6) if bias else None
    begins = torch.tensor([0, 9], dtype=torch.int32).repeat_interleave(9)
    whole, states = causal_conv(x.flatten(0, 1), weight, added, begins, True).view_as(x), torch.zeros(3, 6, 3)
    for t in range(9):
        y = conv_step_.reference(x[:, t], weight, added, states, torch.tensor([2, 0]))
        torch.testing.assert_close(y, whole[:, t], rtol=1e-5, atol=1e-6)
    assert torch.equal(states[[2, 0]], x[:, -3:].mT)
