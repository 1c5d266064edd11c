"""Cases of `lora_read`, and how results are compared, on a GPU and off it."""

import torch
from lora_glu_cases import assert_cast
from parity import assert_as_close_as_torch, exact

from halfbyte.ops.lora_read import lora_read

# Rows, widths and ranks (0: no adapter): an end inside a step and a strip, parts of one step and of several.
SIZES = [(37, (136,), (16,)), (50, (40, 264, 72), (8, 0, 16)), (16, (512, 256), (16, 8))]


def case(size, dtype, device, turned=False):
    """Tensors, factors, scalings and low of a size; the first tensor is a part of a wider one."""
    rows, widths, ranks = size

    def random(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(dtype).to(device)

    tensors = [random(rows, width + 16 * (i == 0))[:, :width] for i, width in enumerate(widths)]
    pairs = zip(widths, ranks, strict=True)
    factors = [random(width, rank, scale=width**-0.5) if rank else None for width, rank in pairs]
    if turned:
        factors = [factor.t().contiguous().t() for factor in factors]
    scalings = [1.5, 0.7, 2.0][: sum(rank > 0 for rank in ranks)]
    return tensors, factors, scalings, random(rows, sum(ranks), scale=rows**-0.5)


def check(found, tensors, factors, scalings, low, slot, columns):
    """v and gradients are as close as torch's, and codes are what slot casts."""

    def reference(change):
        x, *more = map(change, tensors)
        changed = [None if factor is None else change(factor) for factor in factors]
        given = None if low is None else change(low)
        return lora_read.reference(x, more, changed, scalings, given, torch.float32, None, None)

    torchs, truths = reference(lambda tensor: tensor.cpu()), reference(lambda tensor: exact(tensor.cpu()))
    assert len(found.gradients) == len(truths.gradients)
    for mine, other, truth in zip(
        (found.low, *found.gradients), (torchs.low, *torchs.gradients), (truths.low, *truths.gradients), strict=True
    ):
        assert mine.shape == truth.shape
        assert_as_close_as_torch(mine.cpu(), other, truth)
    if slot is None:
        assert found.codes is None
    else:
        both = torch.cat(list(tensors), dim=1).float()
        assert_cast(found.codes, slot, both if columns is None else both * columns)
