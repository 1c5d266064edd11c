"""A cache in 4 bits: what is stored, attention over it, and the Triton kernels against the specification."""

import pytest
import torch

from halfbyte.ops.paged_attention import PAGE, paged_attention
from halfbyte.ops.paged_attention4 import (
    Cache4,
    Prompts,
    append4_,
    dequantize4,
    packed4,
    paged_attention4,
    quantize4,
    store_prompts4_,
)
from tests.helpers import parity
from tests.helpers.paged_cases import VARIANTS, shared_case
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes

LENGTHS = (1, 64, 150)


def test_an_error_is_at_most_half_a_step():
    x = torch.randn(3, 2, PAGE, 24) * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    x[0, 0, :, 3] = 7.0  # a channel without a range
    for dim in (2, 3):
        codes, ranges = quantize4(x, dim)
        error = (dequantize4(packed4(codes), ranges) - x).abs()
        assert (error <= ranges[0].float() * 0.5 + x.abs() * 2**-10).all()
    assert not (dequantize4(packed4(quantize4(x, 2)[0]), quantize4(x, 2)[1]) - x)[0, 0, :, 3].any()


def filled(dtype, heads, size, lengths, device="cpu"):
    """A cache with sequences of `lengths`, their tables, and their keys and values [tokens, H, D]."""
    counts = [length // PAGE + 1 for length in lengths]
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)])
    cache = Cache4.zeros(sum(counts) + 1, len(lengths) + 1, heads, size, dtype, torch.device(device))
    k, v = torch.randn(2, sum(lengths), heads, size).to(dtype).to(device)
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    documents = [(begins[i], n, tables[i].tolist(), i + 1) for i, n in enumerate(lengths)]
    store_prompts4_(cache, Prompts.of(documents, torch.device(device)), k, v)
    return cache, tables.to(device), [(k[b : b + n], v[b : b + n]) for b, n in zip(begins, lengths, strict=True)]


@dtypes
def test_a_page_filled_token_by_token_is_that_of_a_prompt(dtype):
    at_once, tables, tokens = filled(dtype, 3, 16, (PAGE + 5,))
    keys, values = tokens[0]
    cache = Cache4(*(torch.zeros_like(tensor) for tensor in at_once))
    for at in range(PAGE + 5):
        place = tables[:, at // PAGE].long(), torch.tensor([at % PAGE]), torch.tensor([1])
        append4_.reference(keys[at : at + 1], values[at : at + 1], cache, *place)
    for tensor, expected in zip(cache.of_pages, at_once.of_pages, strict=True):
        assert torch.equal(tensor, expected)
    for tensor, expected in zip(cache.of_sequences, at_once.of_sequences, strict=True):
        assert torch.equal(tensor[:, :, :5], expected[:, :, :5])


@VARIANTS
def test_attention_is_near_that_of_16_bits(window, softcap):
    cache, tables, tokens = filled(torch.float32, 2, 32, LENGTHS)
    q, lengths = torch.randn(3, 4, 32), torch.tensor(LENGTHS, dtype=torch.int32)
    out = paged_attention4.reference(q, cache, tables, lengths, torch.arange(1, 4), 0.2, window, softcap)
    for row, (keys, values) in enumerate(tokens):
        pages = torch.zeros(2, 4, 2, PAGE, 32)
        for target, source in zip(pages, (keys, values), strict=True):
            padded = torch.cat([source, torch.zeros(4 * PAGE - len(source), 2, 32)])
            target.copy_(padded.unflatten(0, (4, PAGE)).transpose(1, 2))
        own = torch.arange(4, dtype=torch.int32).view(1, 4)
        truth = paged_attention.reference(q[row : row + 1], *pages, own, lengths[row : row + 1], 0.2, window, softcap)
        error = (out[row] - truth[0]).norm() / truth.norm()
        assert error < (1e-5 if LENGTHS[row] < PAGE else 0.2)


pytest.importorskip("triton")
triton_only = parity.mark


def on(device, cache):
    return Cache4(*(tensor.to(device) for tensor in cache))


CALLS = [((4, 2), 24, 3, None, None), ((4, 2), 24, 1, 70, 3.0)]
if not INTERPRETED:
    CALLS += [((32, 8), 128, splits, None, None) for splits in (1, 3)] + [((8, 8), 80, 2, 70, None)]
    CALLS += [((16, 8), 256, 3, None, 3.0), ((9, 3), 64, 2, None, None)]


@triton_only
@dtypes
@pytest.mark.parametrize(("heads", "size", "splits", "window", "softcap"), CALLS)
def test_the_kernel_is_the_references(monkeypatch, dtype, heads, size, splits, window, softcap):
    from halfbyte.kernels.triton import cached_attention as module

    lengths = LENGTHS if INTERPRETED else (1, 63, 64, 65, 200, 320)
    cache, tables, _ = filled(dtype, heads[1], size, lengths)
    q, counts = torch.randn(len(lengths), heads[0], size).to(dtype), torch.tensor(lengths, dtype=torch.int32)
    sequences, sinks = torch.arange(1, len(lengths) + 1), torch.randn(heads[0]).to(dtype) if window else None
    options = 0.3, window, softcap, None
    exact = Cache4(*(t.double() if t.dtype is dtype else t for t in cache))
    truth = paged_attention4.reference(q.double(), exact, tables, counts, sequences, *options, sinks)
    monkeypatch.setattr(module, "page_splits", lambda *_: splits)
    on_device = (tensor.to(DEVICE) for tensor in (tables, counts, sequences))
    out = module.attend_paged4(
        q.to(DEVICE), on(DEVICE, cache), *on_device, *options, None if sinks is None else sinks.to(DEVICE)
    )
    assert (out.shape, out.dtype) == (truth.shape, dtype)
    allowed = 40 if dtype is torch.float32 else 6
    assert (out.cpu().double() - truth).norm() <= allowed * torch.finfo(dtype).eps * truth.norm()


@triton_only
def test_shared_pages_of_4_bits_are_read_once_for_all_rows():
    from halfbyte.kernels.triton import cached_attention as module

    bundles = [(2, [129, 160]), (0, [70])] if INTERPRETED else [(2, [129, 160, 193]), (0, [70]), (3, [250] * 16)]
    dtype, (heads, key_heads), size = torch.float16, (4, 2), 24
    *_, tables, counts, shared = shared_case(dtype, (heads, key_heads), size, bundles)
    rows = len(counts)
    cache = Cache4.zeros(int(tables.max()) + 1, rows, key_heads, size, dtype, torch.device("cpu"))
    cache.keys.random_(0, 256)
    cache.values.random_(0, 256)
    cache.key_ranges.uniform_(0.05, 0.1)
    cache.value_ranges.uniform_(0.05, 0.1)
    for open_pages in cache.of_sequences:
        open_pages.normal_()
    q, sequences = torch.randn(rows, heads, size).to(dtype), torch.arange(rows)
    exact = Cache4(*(t.double() if t.dtype is dtype else t for t in cache))
    truth = paged_attention4.reference(q.double(), exact, tables, counts, sequences, 0.3, None, None)
    for begin, count, pages in shared.bundles.tolist():
        tables[begin + 1 : begin + count, :pages] = 0  # the kernel reads the first row's table
    on_device = (tensor.to(DEVICE) for tensor in (tables, counts, sequences))
    shared = type(shared)(*(tensor.to(DEVICE) for tensor in shared))
    out = module.attend_paged4(q.to(DEVICE), on(DEVICE, cache), *on_device, 0.3, None, None, shared)
    assert (out.cpu().double() - truth).norm() <= 6 * torch.finfo(dtype).eps * truth.norm()


@triton_only
@dtypes
@pytest.mark.parametrize("size", [24, 64])
def test_the_kernel_stores_what_the_reference_stores(dtype, size):
    expected, tables, _ = filled(dtype, 2, size, (2 * PAGE - 1, 30))
    result = on(DEVICE, expected)
    k, v = torch.randn(2, 2, 2, size).to(dtype)
    places = torch.tensor([tables[0, 1], tables[1, 0]]), torch.tensor([PAGE - 1, 30]), torch.tensor([1, 2])
    append4_.reference(k, v, expected, *places)
    append4_.on("cuda")(k.to(DEVICE), v.to(DEVICE), result, *(place.to(DEVICE) for place in places))
    page = tables[0, 1]
    for tensor, other in zip(result[2:], expected[2:], strict=True):
        torch.testing.assert_close(tensor.cpu(), other, rtol=1e-3, atol=1e-6)
    for codes, other in ((result.keys, expected.keys), (result.values, expected.values)):
        assert (codes.cpu()[page] == other[page]).float().mean() > 0.99  # a quotient is rounded in another way
        other[page] = codes.cpu()[page]
        assert torch.equal(codes.cpu(), other)
