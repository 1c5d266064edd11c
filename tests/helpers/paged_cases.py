"""Cases of attention over paged keys and values."""

import pytest
import torch

from halfbyte.ops.paged_attention import PAGE, Shared

LENGTHS = [1, 63, 64, 65, 200, 320]
WINDOWS_AND_CAPS = [(None, None), (70, None), (3, None), (None, 3.0), (100, 5.0)]
VARIANTS = pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)


def case(dtype, heads=(4, 2), size=32, lengths=LENGTHS, device="cpu"):
    """Page tables in arbitrary order, whose first page two rows share; unused slots are NaN."""
    count = 3 + sum(-(-length // PAGE) for length in lengths)
    free = (torch.randperm(count - 1) + 1).tolist()
    q = torch.randn(len(lengths), heads[0], size).to(dtype)
    keys, values = (torch.full((count, heads[1], PAGE, size), torch.nan, dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(-(-length // PAGE) for length in lengths) + 1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for at in range(0, length, PAGE):
            page = tables[row, at // PAGE] = free.pop()
            used = min(PAGE, length - at)
            for cache in (keys, values):
                cache[page, :, :used] = torch.randn(heads[1], used, size).to(dtype)
    if len(lengths) > 5:
        tables[5, 0] = tables[4, 0]
    own = q, keys, values, tables, torch.tensor(lengths, dtype=torch.int32)
    return tuple(each.to(device) for each in own)


# Bundles of adjacent rows: pages that the bundle shares, and each row's tokens. One row is alone and shares nothing.
BUNDLES = [(2, [129, 160, 193]), (0, [70]), (1, [65, 65]), (3, [250] * 16)]


def shared_case(dtype, heads=(4, 2), size=32, bundles=BUNDLES, device="cpu"):
    """Like `case`, with the rows' shared prefixes; the last bundle comes first, and one bundle has no rows."""
    *own, tables, lengths = case(dtype, heads, size, [length for _, rows in bundles for length in rows])
    found, pages, begin = [[0, 0, 0]], [], 0
    for common, rows in bundles:
        tables[begin : begin + len(rows), :common] = tables[begin, :common].clone()
        found.insert(0, [begin, len(rows), common] if common else [0, 0, 0])
        pages += [common] * len(rows)
        begin += len(rows)
    shared = Shared(*(torch.tensor(each, dtype=torch.int32, device=device) for each in (found, pages)))
    return (*(each.to(device) for each in (*own, tables, lengths)), shared)


def exact(arguments):
    return tuple(each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in arguments)


def check_store(store, dtype, cache_dtype, heads=2, size=8, device="cpu"):
    """Check the values and places that `store` writes, for keys and values that are slices of one projection."""
    caches = [torch.zeros(5, heads, PAGE, size, dtype=cache_dtype, device=device) for _ in range(2)]
    new = (torch.randn(3, 2 * heads, size) * 1000).to(dtype).to(device).split(heads, dim=1)
    places = [(4, 0), (1, 63), (4, 7)]
    store(*caches, *torch.tensor(places, device=device).unbind(1), *new)
    limit = torch.finfo(cache_dtype).max
    for cache, own in zip(caches, new, strict=True):
        for row, (page, slot) in enumerate(places):
            expected = own[row].float().clamp(-limit, limit).to(cache_dtype).float()
            assert torch.equal(cache[page, :, slot].float(), expected)
        assert cache.float().count_nonzero() <= 3 * heads * size
