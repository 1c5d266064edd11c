"""Check an adapter's first product, computed by clusters of blocks."""

import pytest
import torch

from halfbyte.ops.decode import low_rank_rows
from tests.helpers.kernel_backends import DEVICES, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import low_rank

BF16, FP16 = torch.bfloat16, torch.float16
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, const u16 **x, const u16 **a, const u16 **mask, u16 **out,
                    u32 *batch, u32 *columns, u32 *rank) {
    launch(blocks, threads, bytes, [&] { low_rank(*x, *a, *mask, *out, *batch, *columns, *rank); }, true);
}
"""


def check(function, batch, columns, rank, dtype, masked, device="cpu"):
    """Check that fp32 sums are rounded once; rows without the adapter are zero."""
    x, a = (torch.randn(n, columns).to(dtype).to(device) for n in (batch, rank))
    mask = (torch.arange(rank) // 8 % 2 == torch.arange(batch).unsqueeze(1) % 2).to(dtype).to(device)
    found = function(x, a, mask if masked else None)
    exact = x.double() @ a.double().t() * (mask.double() if masked else 1)
    assert (found.shape, found.dtype) == ((batch, rank), dtype)
    assert (found.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm(), (batch, columns, rank, dtype)
    if masked:
        assert bool((found[mask == 0] == 0).all())


@cases(
    ("batches", "sizes", "dtype", "masked"),
    emulated=[((5,), [(32, 32)], BF16, False), ((17,), [(864, 16)], FP16, True), ((64,), [(288, 16)], BF16, True)],
    hopper=[
        ((1, 2, 9, 16, 17, 33, 48, 64), [(32, 16), (4096, 48), (14336, 16), (2080, 128)], dtype, masked)
        for dtype in (BF16, FP16) for masked in (False, True)
    ],
)  # fmt: skip
def test_products(monkeypatch, backend, batches, sizes, dtype, masked):
    if backend == "emulated":
        monkeypatch.setattr(low_rank, "SPLIT", 4)
        monkeypatch.setattr(low_rank, "WARPS", 2)
    loaded(low_rank, backend, monkeypatch, RUN)
    for batch in batches:
        for columns, rank in sizes:
            check(low_rank.gemm, batch, columns, rank, dtype, masked, DEVICES[backend])


@cases("size", hopper=[(65, 64, 16), (4, 40, 16), (4, 64, 8)])
def test_unsupported_cases(backend, size):
    check(low_rank_rows, *size, BF16, True, "cuda")


@cases("rows", hopper=[32])
def test_two_runs_are_equal_in_a_graph(backend, rows):
    x, a = (torch.randn(n, 4096, device="cuda", dtype=BF16) for n in (rows, 48))
    first = low_rank_rows(x, a, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = low_rank_rows(x, a, None)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, first)
