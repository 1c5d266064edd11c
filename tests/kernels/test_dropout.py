"""Compare dropout and its low-rank GEMMs with the reference: C, and Triton."""

import pytest
import torch

from halfbyte.ops import dropout as ops
from halfbyte.ops.dropout import Dropout
from tests.helpers.kernel_backends import DEVICES, cases
from tests.helpers.parity import INTERPRETED, assert_as_close_as_torch, poisoned  # noqa: F401

DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Rows, columns, ranks: less than a tile; several tiles and stripes with ends inside a tile.
SMALL = [(5, 7, (3,)), (70, 300, (4, 16, 2))]
LARGE = [(1100, 1032, (16, 16)), (8192, 4096, (16, 16, 16)), (257, 640, (64,))]


def module_of(backend):
    """The kernels of a backend: elementwise dropout; the GEMMs, or None."""
    if backend == "cpu":
        from halfbyte.kernels.native import dropout

        return dropout.forward, None
    pytest.importorskip("triton")
    from halfbyte.kernels.triton import dropout, dropped_lora

    return dropout.drop, dropped_lora


def masks(probability, count, device, first_column=0):
    return Dropout(probability, torch.randint(2**63 - 1, (count,)).to(device), first_column)


def on_cpu(dropout):
    return dropout._replace(seeds=dropout.seeds.cpu())


@cases(
    "probability",
    cpu=[0.0, 0.05, 0.5, 1.0],
    interpret=[0.05, 0.6, 1.0],
    gpu=[0.0, 0.05, 0.5, 1.0],
)
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (19, 700)], ids=str)
def test_values_are_bit_equal(backend, probability, shape):
    device, (drop, _) = DEVICES[backend], module_of(backend)
    dropout = masks(probability, 2, device, first_column=13)
    for dtype in DTYPES:
        x = torch.randn(*shape).to(dtype).to(device)
        rows = torch.randint(5000, shape[:1], device=device)
        for indices in (None, rows, rows.int()):
            expected = ops.drop.reference(x.cpu(), on_cpu(dropout), None if indices is None else indices.cpu())
            assert torch.equal(drop(x, dropout, indices).cpu(), expected)
            assert torch.equal(drop(x[:, ::1][::2], dropout).cpu(), ops.drop.reference(x[::2].cpu(), on_cpu(dropout)))


@cases("size", interpret=SMALL, gpu=SMALL + LARGE)
@pytest.mark.parametrize("first_column", [0, 640])
def test_products_and_gradients(backend, size, first_column):
    device, (_, kernels) = DEVICES[backend], module_of(backend)
    rows, columns, ranks = size
    dropout = masks(0.3, len(ranks), device, first_column)
    for dtype in DTYPES:
        x, dx, v, a = (
            torch.randn(*shape).to(dtype).to(device)
            for shape in ((rows, columns), (rows, columns), (rows, sum(ranks)), (sum(ranks), columns))
        )

        def reference(change, a=a, x=x, v=v, dx=dx):
            factors, added, written = change(a).split(ranks), change(dx).clone(), torch.empty_like(change(dx))
            u = ops.dropped_products.reference(change(x), factors, dropout)
            gradients = ops.dropped_gradients.reference(change(v), factors, dropout, change(x), added, True)
            ops.dropped_gradients.reference(change(v), factors, dropout, None, written, False)
            return [u, *gradients, *gradients, added, written]

        factors, added, written = a.split(ranks), dx.clone(), torch.empty_like(dx)
        u = kernels.products(x, factors, dropout)
        gradients = kernels.gradients(v, factors, dropout, x, added, True)
        alone = kernels.gradients(v, factors, dropout, x, None, False)
        assert kernels.gradients(v, factors, dropout, None, written, False) == [None] * len(ranks)
        found = [u, *gradients, *alone, added, written]
        for mine, torchs, truth in zip(found, reference(torch.clone), reference(torch.Tensor.double), strict=True):
            assert_as_close_as_torch(mine.cpu(), torchs.cpu(), truth.cpu())
