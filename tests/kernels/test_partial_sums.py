"""The last pass of a weight's gradient, on a GPU and in Triton's interpreter."""

import pytest
import torch

from tests.helpers.parity import DEVICE, dtypes, mark, poisoned  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton.partial_sums import sum_rows

pytestmark = mark


@dtypes
@pytest.mark.parametrize(("rows", "width", "first"), [(1, 1, None), (264, 70, None), (1055, 20, 844), (3, 2051, 1)])
def test_sum_rows(rows, width, first, dtype):
    partials = torch.randn(rows, width).to(DEVICE)
    parts = partials.split([rows] if first is None else [first, rows - first])
    mine = sum_rows(partials, dtype, first)
    assert mine.dtype == dtype
    expected = torch.stack([part.double().sum(0) for part in parts])
    torch.testing.assert_close(mine.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert torch.equal(mine, sum_rows(partials, dtype, first))
