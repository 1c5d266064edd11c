"""Check cuDNN's deterministic backward: its split into parts anywhere, the library on a Hopper GPU that has it."""

import pytest
import torch

from halfbyte.kernels import device
from halfbyte.kernels.cuda import cudnn_attention
from halfbyte.ops import attention
from halfbyte.ops.attention import rows_backward
from halfbyte.utils import notices

SHAPE = {"rows": 4, "heads": 4, "keys": 2, "length": 24}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == cudnn_attention.HOPPER
with_cudnn = pytest.mark.skipif(not (HOPPER and attention.cudnn()), reason="needs Hopper and nvidia-cudnn-frontend")


def drawn(rows, heads, keys, length, width=16, dtype=torch.float32, device="cpu"):
    """dout, query, key, value, the result and the logsumexp, in the layout of a model's projections."""
    dout, query, key, value = (
        torch.randn(rows, length, count, width).to(device, dtype).transpose(1, 2)
        for count in (heads, heads, keys, keys)
    )
    k, v = (x.float().repeat_interleave(heads // keys, 1) for x in (key, value))
    scores = query.float() @ k.mT * 0.2
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool, device=device).tril(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).to(dtype).contiguous().transpose(1, 2)
    return dout, query, key, value, out, scores.logsumexp(-1, keepdim=True)


@pytest.fixture
def executed(monkeypatch):
    """A fake library that supports every shape and computes the reference; records the shapes of the queries."""
    given = []

    def execute(plan, part):
        given.append(tuple(part[1].shape))
        for result, gradient in zip(part[6:], rows_backward.reference(*part[:6], 0.2), strict=True):
            result.copy_(gradient)

    monkeypatch.setattr(cudnn_attention, "cudnn", lambda: object())
    monkeypatch.setattr(cudnn_attention, "_plan", lambda *_: object())
    monkeypatch.setattr(cudnn_attention, "_execute", execute)
    monkeypatch.setattr(device, "_assumed", device.KNOWN["h100"])
    return given


@pytest.mark.parametrize(
    ("fitting", "parts"),
    [
        (8, [(4, 4, 24, 16)]),
        (7, [(2, 4, 24, 16)] * 2),  # 3 key heads of all rows would fit, but 3 does not divide 4
        (2, [(1, 4, 24, 16)] * 4),
        (1, [(1, 2, 24, 16)] * 8),
    ],
)
def test_rows_and_heads_are_split_into_parts(executed, monkeypatch, fitting, parts):
    monkeypatch.setattr(cudnn_attention, "SCRATCH", fitting * 2 * 2 * 24 * 24)
    operands = drawn(**SHAPE)
    found = cudnn_attention.backward(*operands, 0.2)
    assert executed == parts
    for mine, reference in zip(found, rows_backward.reference(*operands, 0.2), strict=True):
        torch.testing.assert_close(mine, reference)


def test_rows_that_are_too_long_or_have_no_plan_take_two_passes(executed, monkeypatch):
    operands = drawn(**SHAPE)
    expected = rows_backward.reference(*operands, 0.2)
    with monkeypatch.context() as changed:
        changed.setattr(cudnn_attention, "SCRATCH", 2 * 2 * 24 * 24 - 1)
        found = rows_backward.on("cuda")(*operands, 0.2)
    monkeypatch.setattr(cudnn_attention, "_plan", lambda *_: "no such graph")
    again = rows_backward.on("cuda")(*operands, 0.2)
    assert not executed
    assert "kernel-cuda.cudnn_attention.backward" in notices.notices_so_far()
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again, strict=True))


@pytest.mark.gpu
@with_cudnn
@pytest.mark.parametrize("mib", [512, 1])
def test_on_hopper_cudnn_repeats_and_agrees_with_two_passes(monkeypatch, mib):
    monkeypatch.setattr(cudnn_attention, "SCRATCH", mib << 20)
    operands = drawn(2, 16, 8, 512, 128, torch.bfloat16, "cuda")
    expected = rows_backward.reference(*operands, 0.2)
    first = cudnn_attention.backward(*operands, 0.2)
    for mine, theirs in zip(first, expected, strict=True):
        assert (mine.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cudnn_attention.backward(*operands, 0.2)
    for _ in range(10):
        graph.replay()
        again = cudnn_attention.backward(*operands, 0.2)
        for a, b, c in zip(first, again, captured, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
