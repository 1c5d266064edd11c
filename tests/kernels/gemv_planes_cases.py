"""Products in bit planes that the small-M kernel is compared on, and how close is close enough."""

from types import SimpleNamespace
from typing import NamedTuple

import torch

from halfbyte.formats import Format, from_spec

SPECS = ("kbit:2:nf", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf", "hqq:2:256", "hqq:3:32", "hqq:4:64", "hqq:8:128")


class Weight(NamedTuple):
    format: Format
    parts: dict
    shape: tuple[int, int]


def weight_of(spec, rows, columns, device="cpu"):
    format_ = from_spec(spec)
    values = torch.randn(rows, columns, device=device) * 0.05
    return Weight(format_, format_.quantize(values), (rows, columns))


def arguments_of(weight):
    """What `gemv_planes.product` takes between x and bias."""
    format_, parts, (rows, _) = weight
    packed, scales = parts["packed"], parts["scales"]
    if weight.format.name == "hqq":
        return packed, scales, parts["zeros"], scales, scales, format_.bits, format_.group, rows
    return packed, scales, scales, parts["factor"], format_.levels(parts), format_.k, 0, rows


def row_arguments(weight):
    """What `gemv_planes_row.product` takes between x and bias."""
    packed, scales, _, factor, codebook, bits, _, rows = arguments_of(weight)
    return packed, scales, factor, codebook, bits, rows


def check(planes, weight, batch, dtype, blocks=None, bias=False):
    """Within the rounding of the codebook, of weights and of the result to `dtype`, of fp64's product."""
    _check(planes, weight, arguments_of(weight), batch, dtype, blocks, bias, 2)


def check_row(row, weight, dtype, blocks=None, bias=False):
    """Within the rounding of the codebook and of the result to `dtype`, of fp64's product."""
    _check(row, weight, row_arguments(weight), 1, dtype, blocks, bias, 1)


def check4(product4, weight, batch, dtype, blocks=None, bias=True):
    """As `check`, for `gemv_planes.product4`."""
    *first, bits, group, rows = arguments_of(weight)
    assert bits == 4
    _check(SimpleNamespace(product=product4), weight, (*first, group, rows), batch, dtype, blocks, bias, 2)


def _check(module, weight, arguments, batch, dtype, blocks, bias, roundings):
    rows, columns = weight.shape
    device = weight.parts["packed"].device
    x = torch.randn(batch, columns, device=device).to(dtype)
    added = torch.randn(rows, device=device).to(dtype) if bias else None
    found = module.product(x, *arguments, added, blocks)
    assert (found.shape, found.dtype) == ((batch, rows), dtype)
    exact = x.double() @ weight.format.dequantize(weight.parts, weight.shape, torch.float32).double().T
    exact = exact if added is None else exact + added.double()
    assert (found.double() - exact).norm() <= roundings * torch.finfo(dtype).eps * exact.norm()
