"""Check the uniform row stride of tensors."""

import pytest
import torch

from halfbyte.ops.checks import row_stride

WIDE = torch.arange(240.0).view(6, 40)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3, 8), 8),
        (torch.zeros(8), 8),
        (WIDE[0, :8], 8),
        (WIDE[:, :8], 40),
        (WIDE[:, :8].unflatten(0, (6, 1)), 40),  # a dimension of one has an arbitrary stride
        (WIDE[:, :8].unflatten(0, (1, 6)), 40),
        (WIDE[:, :8].unflatten(0, (2, 3)), 40),
        (WIDE[::2, :8], 80),
        (WIDE[:1, :8].expand(3, 8), 0),
        (WIDE[:, ::2], None),
        (WIDE.unflatten(0, (2, 3))[:, :2], None),
        (WIDE[:2, None, :8].expand(2, 3, 8), None),
        (torch.zeros(3, 1)[:, :1].expand(3, 1), 1),
    ],
)
def test_uniform_row_stride(tensor, expected):
    assert row_stride(tensor) == expected
    if expected:
        rows = tensor.numel() // tensor.shape[-1]
        found = torch.as_strided(tensor, (rows, tensor.shape[-1]), (expected, 1))
        assert found.data_ptr() == tensor.data_ptr()
        assert torch.equal(found.reshape(tensor.shape), tensor)
