"""An adapter's first product without a GPU: the CUDA kernel's own code, on emulated warps and clusters."""

import pytest
import torch
from emulated import emulate, needs_compiler
from low_rank_cases import check

pytest.importorskip("triton")  # whose launcher's arithmetic it shares
pytestmark = needs_compiler
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, const u16 **x, const u16 **a, const u16 **mask, u16 **out,
                    u32 *batch, u32 *columns, u32 *rank) {
    launch(blocks, threads, bytes, [&] { low_rank(*x, *a, *mask, *out, *batch, *columns, *rank); }, true);
}
"""


@pytest.fixture
def low_rank(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import low_rank

    monkeypatch.setattr(low_rank, "SPLIT", 4)
    monkeypatch.setattr(low_rank, "WARPS", 2)
    return emulate(low_rank, monkeypatch, tmp_path, RUN)


@pytest.mark.parametrize(
    ("batch", "columns", "rank", "dtype", "masked"),
    [(5, 32, 32, torch.bfloat16, False), (17, 864, 16, torch.float16, True), (64, 288, 16, torch.bfloat16, True)],
    ids=str,
)
def test_products(low_rank, batch, columns, rank, dtype, masked):
    check(low_rank.product, batch, columns, rank, dtype, masked)
