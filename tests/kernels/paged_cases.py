"""Rows whose keys and values lie in pages, for the tests of attention over them."""

import pytest
import torch

from halfbyte.ops.paged_attention import PAGE

LENGTHS = [1, 63, 64, 65, 200, 320]
WINDOWS_AND_CAPS = [(None, None), (70, None), (3, None), (None, 3.0), (100, 5.0)]
VARIANTS = pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)


def case(dtype, heads=(4, 2), size=32, lengths=LENGTHS, device="cpu"):
    """Tables of pages in any order, the first of two rows shared; what belongs to nobody is NaN."""
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


def exact(arguments):
    return tuple(each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in arguments)
