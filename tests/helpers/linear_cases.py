"""Cases and tolerances for the small-M linear kernels."""

import torch

from halfbyte.formats import Blockwise4
from halfbyte.formats.blockwise4 import linear_blockwise4


def arguments(rows, columns, kind="nf4", blocksize=64, nested=True, device="cpu"):
    """Return the arguments of `linear_blockwise4` between x and bias."""
    format_ = Blockwise4(kind, blocksize, nested)
    parts = format_.quantize(torch.randn(rows, columns) * 0.05)
    parts = {name: part.to(device) for name, part in parts.items()}
    second = (parts["nested_absmax"], parts["nested_code"], parts["nested_offset"]) if nested else None
    return parts["packed"], parts["absmax"], second, blocksize, kind, rows


def check(function, batch, weight, columns, dtype, bias=True):
    """Compare with an fp64 product, up to rounding of the weights and of the result to `dtype`."""
    rows = weight[-1]
    x = torch.randn(batch, columns).to(dtype).to(weight[0].device)
    added = torch.randn(rows).to(dtype).to(weight[0].device) if bias else None
    found = function(x, *weight, added)
    assert (found.shape, found.dtype) == ((batch, rows), dtype)
    exact = linear_blockwise4.reference(x.float(), *weight, None if added is None else added.float()).double()
    tolerance = 2e-6 + 2 * torch.finfo(dtype).eps
    assert (found.double() - exact).norm() <= tolerance * exact.norm(), (batch, rows, columns, dtype)
