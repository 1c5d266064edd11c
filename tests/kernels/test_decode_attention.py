"""Compare attention over a static cache with the reference: padding, windows, caps, 8 bits, a changing last slot."""

import pytest
import torch

from halfbyte.ops.decode import decode_attention, store_both_
from tests.helpers import parity
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes, random

pytestmark = parity.mark
pytest.importorskip("triton")


def attend(*arguments):
    from halfbyte.kernels.triton.cached_attention import attend_static as kernel

    return kernel(*arguments)


def tensors(dtype, heads=(4, 2), size=24, slots=192, rows=2):
    q = random(rows, heads[0], 1, size, dtype=dtype)
    keys, values = (random(rows, heads[1], slots, size, dtype=dtype) for _ in range(2))
    first = torch.tensor([0, 70][:rows], dtype=torch.int32, device=DEVICE)
    return q, keys, values, first, torch.tensor([130], device=DEVICE)


@dtypes
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (40, None, False), (None, 5.0, False), (40, None, True)]
)
def test_the_reference(dtype, window, softcap, sinks):
    arguments = (*tensors(dtype), 0.2, window, softcap, random(4, dtype=dtype) if sinks else None)
    expected = decode_attention.reference(*(x.float() if torch.is_tensor(x) and x.is_floating_point() else x
                                            for x in arguments))  # fmt: skip
    found = attend(*arguments)
    assert (found.shape, found.dtype) == (arguments[0].shape, dtype)
    assert (found.float() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs FP8 conversions")
def test_an_8_bit_cache():
    q, keys, values, *rest = tensors(torch.bfloat16, (32, 8), 128)
    keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    expected = decode_attention.reference(q.float(), keys.float(), values.float(), *rest, 0.1, None, None)
    found = attend(q, keys, values, *rest, 0.1, None, None)
    assert (found.float() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_a_graph_follows_the_last_slot():
    q, keys, values, first, last = tensors(torch.bfloat16, (32, 8), 128)
    call = (q, keys, values, first, last, 0.1, None, None)
    attend(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*call)
    last.add_(7)
    graph.replay()
    assert torch.equal(out, attend(*call))


@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 4, 128), (3, 2, 40)])
def test_keys_and_values_are_stored(batch, heads, size):
    """Only the new slot is written, from slices of a projection."""
    from halfbyte.kernels.triton import cached_attention as module

    slot = torch.tensor([5], device=DEVICE)
    kept = [random(batch, heads, 9, size, dtype=torch.float32) for _ in range(2)]
    both = random(batch, 1, 2 * heads, size, dtype=torch.float32).transpose(1, 2)
    k, v = both[:, :heads], both[:, heads:]
    mine, theirs = ([each.clone() for each in kept] for _ in range(2))
    assert module.store_static_obstacle(k, v, *mine, slot) is None
    module.store_static(k, v, *mine, slot)
    store_both_.reference(k, v, *theirs, slot)
    assert all(map(torch.equal, mine, theirs))
    assert "dtype" in module.store_static_obstacle(k.half(), v.half(), *mine, slot)
    assert "one token's" in module.store_static_obstacle(k.expand(-1, -1, 2, -1), v, *mine, slot)
