"""Products that the small-M kernels are compared on, and how close is close enough."""

import torch
from parity import DEVICE

from halfbyte.formats import Blockwise4
from halfbyte.ops.gemv4 import linear_blockwise4


def arguments(rows, columns, kind="nf4", blocksize=64, nested=True):
    """What `linear_blockwise4` takes between x and bias."""
    format_ = Blockwise4(kind, blocksize, nested)
    parts = format_.quantize(torch.randn(rows, columns) * 0.05)
    parts = {name: part.to(DEVICE) for name, part in parts.items()}
    second = (parts["nested_absmax"], parts["nested_code"], parts["nested_offset"]) if nested else None
    return parts["packed"], parts["absmax"], second, blocksize, kind


def check(function, batch, weight, columns, dtype, bias=True):
    """Within the rounding of the weights and of the result to `dtype`, of fp64's product."""
    rows = 2 * weight[0].numel() // columns
    x = torch.randn(batch, columns).to(dtype).to(DEVICE)
    added = torch.randn(rows).to(dtype).to(DEVICE) if bias else None
    found = function(x, *weight, added)
    assert (found.shape, found.dtype) == ((batch, rows), dtype)
    exact = linear_blockwise4.reference(x.float(), *weight, None if added is None else added.float()).double()
    tolerance = 2e-6 + 2 * torch.finfo(dtype).eps
    assert (found - exact).norm() <= tolerance * exact.norm(), (batch, rows, columns, dtype)
