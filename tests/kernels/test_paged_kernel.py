"""Compare the engine's Triton kernels with their specifications: attention over pages, and the sampler."""

import pytest
import torch

from halfbyte.ops.paged_attention import PAGE, paged_attention, rope_store_paged_, store_paged
from halfbyte.ops.sample import draw_tokens
from tests.helpers import parity
from tests.helpers.paged_cases import BUNDLES, LENGTHS, WINDOWS_AND_CAPS, case, check_store, exact, shared_case
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes

pytestmark = parity.mark
pytest.importorskip("triton")

# Heads, head size, splits of a row, window and cap: each value in one case, since every combination is compiled.
CALLS = [((4, 2), 24, 3, *variant) for variant in WINDOWS_AND_CAPS]
FEW = (1, 64, 150) if INTERPRETED else LENGTHS
if not INTERPRETED:
    CALLS += [((32, 8), 128, splits, None, None) for splits in (1, 3, 8)]
    CALLS += [((8, 8), 80, 1, None, None), ((6, 1), 64, 8, 70, None), ((16, 8), 256, 3, None, 3.0)]


SHARED = [((4, 2), 24, 2, *variant) for variant in WINDOWS_AND_CAPS] + [((3, 1), 16, 1, None, None)]
if not INTERPRETED:
    SHARED += [((32, 8), 128, splits, None, None) for splits in (1, 4)] + [((8, 8), 80, 3, 150, None)]
    SHARED += [((32, 4), 128, 1, None, None), ((32, 2), 64, 1, None, None), ((16, 8), 256, 3, None, 3.0)]


def attend(arguments, splits=None):
    from halfbyte.kernels.triton import cached_attention as module

    if splits is None:
        return module.attend_paged(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "page_splits", lambda *_: splits)
        return module.attend_paged(*arguments)


def close(found, truth, dtype):
    assert (found.shape, found.dtype) == (truth.shape, dtype)
    # in fp32 the rounding of the scores dominates: they reach 12 here, and are exponentiated
    allowed = 20 if dtype is torch.float32 else 4
    assert (found.double() - truth).norm() <= allowed * torch.finfo(dtype).eps * truth.norm()


@dtypes
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "size", "splits", "window", "softcap"), CALLS)
def test_attention_is_the_references(dtype, heads, size, splits, window, softcap, sinks):
    """With the fewest splits programs have many pages, with the most some have none."""
    on_cpu, sinks = case(dtype, heads, size, FEW), torch.randn(heads[0]).to(dtype) if sinks else None
    options, on_device = (0.3, window, softcap, None), [each.to(DEVICE) for each in on_cpu]
    found = attend((*on_device, *options, None if sinks is None else sinks.to(DEVICE)), splits)
    close(found.cpu(), paged_attention.reference(*exact(on_cpu), *options, sinks), dtype)


@dtypes
@pytest.mark.parametrize(("heads", "size", "parts", "window", "softcap"), SHARED)
def test_shared_pages_are_read_once_for_all_rows(dtype, heads, size, parts, window, softcap):
    """The kernel must read only the first row's table: the other rows' tables point elsewhere."""
    bundles = [(common, rows[:2]) for common, rows in BUNDLES] if INTERPRETED else BUNDLES
    *on_cpu, shared = shared_case(dtype, heads, size, bundles)
    sinks = torch.randn(heads[0]).to(dtype) if window else None
    truth = paged_attention.reference(*exact(on_cpu), 0.3, window, softcap, None, sinks)
    other = on_cpu[3].clone()
    for begin, count, pages in shared.bundles.tolist():
        if dtype is not torch.float32 and 16 * heads[0] // heads[1] <= 128:  # else each row reads its own table
            other[begin + 1 : begin + count, :pages] = 0
    on_device = [each.to(DEVICE) for each in (*on_cpu[:3], other, on_cpu[4])]
    shared = type(shared)(*(each.to(DEVICE) for each in shared))
    wide = torch.randn(len(other), heads[0] + 3, size).to(dtype).to(DEVICE)  # q as a slice of a projection
    wide[:, : heads[0]] = on_device[0]
    sinks = None if sinks is None else sinks.to(DEVICE)
    arguments = (wide[:, : heads[0]], *on_device[1:], 0.3, window, softcap, shared, sinks)
    close(attend(arguments, parts).cpu(), truth, dtype)
    close(attend(arguments).cpu(), truth, dtype)


@dtypes
@pytest.mark.parametrize(("heads", "size"), [(2, 24), (3, 8), (8, 128)])
@pytest.mark.parametrize("eight", [False, True])
def test_new_tokens_are_stored_where_they_belong(dtype, heads, size, eight):
    if eight and INTERPRETED:
        pytest.skip("needs FP8 conversions")
    check_store(store_paged.on("cuda"), dtype, torch.float8_e4m3fn if eight else dtype, heads, size, DEVICE)


@dtypes
@pytest.mark.parametrize(("heads", "size", "eight"), [((4, 2), 24, False), ((3, 3), 16, True), ((32, 8), 128, True)])
@pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=["a token of each row", "a prompt"])
def test_rotated_keys_are_stored(dtype, heads, size, eight, shape):
    """One launch equals rotation and storing in two, for q, k and v as slices of one projection."""
    if INTERPRETED and (eight or heads[0] > 8):
        pytest.skip("needs FP8 conversions")
    batch, tokens = shape
    whole = torch.randn(batch, tokens, heads[0] + 2 * heads[1] + 1, size).to(dtype).to(DEVICE)
    cos, sin = torch.randn(2, batch, tokens, size).to(dtype).to(DEVICE)
    pages, slots = torch.tensor([[4, 1, 4], [0, 63, 7]], device=DEVICE)
    page = PAGE if tokens == 1 else 192  # a row of a static cache is a page of its slots
    results = []
    for function in (rope_store_paged_.on("cuda"), rope_store_paged_.reference):
        own = whole.clone()
        cache_dtype = torch.float8_e4m3fn if eight else dtype
        caches = [torch.zeros(5, heads[1], page, size, dtype=cache_dtype, device=DEVICE) for _ in range(2)]
        q, k, v, _ = (each.transpose(1, 2) for each in own.split([heads[0], heads[1], heads[1], 1], dim=2))
        function(q, k, v, cos, sin, *caches, pages, slots)
        results.append((own, *(each.float() for each in caches)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
    for cache in results[0][1:]:  # small numbers are zero in 8 bits
        assert 0.9 <= cache.count_nonzero() / (3 * heads[1] * size) <= 1


@pytest.mark.skipif(INTERPRETED, reason="needs FP8 conversions")
def test_an_8_bit_cache():
    q, keys, values, tables, lengths, shared = shared_case(torch.bfloat16, (32, 8), 128)
    keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    on_device = tuple(each.to(DEVICE) for each in (q, keys, values, tables, lengths))
    own = q.double(), keys.float().double(), values.float().double(), tables, lengths
    truth = paged_attention.reference(*own, 0.1, None, None)
    for common in (None, type(shared)(*(each.to(DEVICE) for each in shared))):
        found = attend((*on_device, 0.1, None, None, common)).cpu()
        assert (found.double() - truth).norm() <= 0.02 * truth.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("rows", [1, 6])
def test_a_graph_follows_lengths_and_tables(rows):
    arguments = case(torch.bfloat16, (32, 8), 128, LENGTHS[:rows], device=DEVICE)
    _, _, _, tables, lengths = arguments
    attend((*arguments, 0.1, None, None))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend((*arguments, 0.1, None, None))
    lengths.copy_(torch.ones_like(lengths))
    tables[:, 0] = tables[:, 0].flip(0)
    graph.replay()
    assert torch.equal(out, attend((*arguments, 0.1, None, None)))


@pytest.mark.parametrize("vocabulary", [1, 1000, 4096, 4099] if INTERPRETED else [1, 1000, 4096, 4099, 128_256])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
@dtypes
def test_draws_equal_the_reference(dtype, vocabulary, temperature):
    """Tokens are equal, except where two scores differ by less than the rounding of a logarithm."""
    rows = 3 if INTERPRETED else 200
    logits = (torch.randn(rows, vocabulary) * 4).to(dtype)
    logits[2, :-1] = -torch.inf
    places = torch.randint(-(2**31), 2**31, (rows, 3))
    kept = torch.rand(rows, vocabulary) > 0.5
    kept[:, -1] = True
    seed = torch.tensor([-81985529216486896])
    for mask in (None, kept):
        from halfbyte.kernels.triton.sample import draw

        on_device = (each.to(DEVICE) for each in (logits, places, seed))
        tokens, log_probs = (
            each.cpu() for each in draw(*on_device, temperature, None if mask is None else mask.to(DEVICE))
        )
        expected, log_probs_of_it = draw_tokens.reference(logits, places, seed, temperature, mask)
        same = tokens == expected
        assert same.float().mean() >= (1 if INTERPRETED or not temperature else 0.99)
        assert mask is None or mask.gather(1, tokens.unsqueeze(1)).all()
        torch.testing.assert_close(log_probs[same], log_probs_of_it[same], rtol=1e-5, atol=1e-5)


def test_nan_is_reported():
    from halfbyte.kernels.triton.sample import draw

    logits = torch.randn(3, 200)
    logits[1, 77] = torch.nan
    on_device = (each.to(DEVICE) for each in (logits, torch.zeros(3, 3, dtype=torch.int64), torch.tensor([5])))
    _, log_probs = draw(*on_device, 1.0, None)
    assert log_probs.isnan().tolist() == [False, True, False]
