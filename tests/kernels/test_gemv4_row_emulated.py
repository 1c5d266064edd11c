"""The CUDA kernel of one row and 4-bit weights without a GPU: its own code, on emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from gemv4_cases import arguments, check

pytest.importorskip("triton")
pytestmark = needs_compiler
PRODUCT = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Table4 *w, const u16 **x, const u16 **bias, u16 **out) {
    launch(blocks, threads, bytes, [&] { row4(*w, *x, *bias, *out); });
}
"""


@pytest.fixture
def row(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import gemv4_row

    return emulate(gemv4_row, monkeypatch, tmp_path, PRODUCT)


@pytest.mark.parametrize(
    ("blocks", "batch", "blocksize", "columns", "dtype", "nested"),
    [
        ((1, 1, 2), 1, 64, 768, torch.bfloat16, True),  # a warp has one step more than the other
        ((2, 2, 1), 2, 64, 512, torch.float16, False),  # of a group's two tiles, one is not there
        ((1, 1, 4), 1, 32, 768, torch.float16, True),  # a warp has nothing
        ((2, 1, 2), 1, 32, 512, torch.bfloat16, False),
        ((1, 2, 2), 2, 256, 768, torch.bfloat16, True),  # a row begins within four blocks
        ((1, 1, 2), 1, 128, 768, torch.float16, False),
        ((1, 1, 2), 1, 512, 1024, torch.float16, True),
    ],
    ids=str,
)
def test_products(row, blocks, batch, blocksize, columns, dtype, nested):
    """Several tiles for each group; N that ends within a tile."""

    def function(*args):
        return row.product(*args, row.Blocks(*blocks))

    weight = arguments(86, columns, "nf4" if nested else "fp4", blocksize, nested)
    check(function, batch, weight, columns, dtype, bias=nested)


def test_block_shapes_fit_a_multiprocessor(row):
    from halfbyte.kernels.device import HOPPER_SHARED_BYTES

    for batch, nested, blocksize in ((1, True, 64), (2, False, 32)):
        kernel = row._kernel(row.blocks_for(4096, 132), -1, batch, True, nested, blocksize)
        assert kernel.size <= HOPPER_SHARED_BYTES
    for rows in (16, 256, 1024, 4096, 14336, 28672, 131072):
        rt, wr, wk = row.blocks_for(rows, 132)
        assert (rt, wr * wk) == (1, 16)
    assert [row.blocks_for(rows, 132).wr for rows in (1024, 4096, 8192, 14336)] == [1, 2, 4, 8]
