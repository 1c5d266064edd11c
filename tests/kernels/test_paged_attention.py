"""Compare the specification of paged attention with attention page by page, and C with the specification."""

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.ops.decode import decode_attention
from halfbyte.ops.paged_attention import paged_attention, store_paged
from tests.helpers.paged_cases import LENGTHS, VARIANTS, case, check_store, exact


@VARIANTS
def test_the_specification_is_attention_over_the_rows_tokens(window, softcap):
    q, keys, values, tables, lengths = exact(case(torch.float32))
    found = paged_attention.reference(q, keys, values, tables, lengths, 0.3, window, softcap)
    for row, length in enumerate(lengths.tolist()):
        own = [each[tables[row].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for each in (keys, values)]
        first, last = torch.zeros(1, dtype=torch.int32), torch.tensor([length - 1])
        alone = decode_attention.reference(q[row][None, :, None], *own, first, last, 0.3, window, softcap)
        torch.testing.assert_close(found[row], alone[0, :, 0])


def test_a_sink_is_one_more_score():
    """A sink equals a key in the row's first place with that score, and a value of zeros."""
    q, keys, values, tables, lengths = exact(case(torch.float32, (2, 2), 8, [40]))
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64)
    found = paged_attention.reference(q, keys, values, tables, lengths, 1.0, None, None, None, sinks)
    page = keys[tables[0, 0]], values[tables[0, 0]]
    for head, sink in enumerate(sinks):
        scores = torch.cat([sink[None], page[0][head, :40] @ q[0, head]]).softmax(-1)
        torch.testing.assert_close(found[0, head], scores[1:] @ page[1][head, :40])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sinks", [False, True])
@VARIANTS
@pytest.mark.parametrize(
    ("dtype", "heads", "size"),
    [
        (torch.float32, (4, 2), 16),
        (torch.float32, (8, 8), 80),
        (torch.float32, (6, 1), 64),
        (torch.bfloat16, (4, 2), 96),
        (torch.bfloat16, (8, 2), 128),
    ],
)
def test_c(dtype, heads, size, window, softcap, sinks):
    try:
        from halfbyte.kernels.native.paged_attention import attend
    except Unavailable as reason:
        pytest.skip(str(reason))
    arguments = (*case(dtype, heads, size), 0.3, window, softcap, None, torch.randn(heads[0]) if sinks else None)
    found, truth = attend(*arguments), paged_attention.reference(*exact(arguments))
    assert (found.shape, found.dtype) == (truth.shape, dtype)
    assert (found.double() - truth).norm() <= 4 * torch.finfo(dtype).eps * truth.norm()
    for row in range(len(LENGTHS)):  # the same bits alone
        own = [each[row : row + 1] for each in (arguments[0], arguments[3], arguments[4])]
        alone = attend(own[0], *arguments[1:3], own[1], own[2], *arguments[5:])
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_new_tokens_are_stored_where_they_belong(dtype):
    check_store(store_paged, torch.float32, dtype)
