"""The CUDA kernel of small products without a GPU: its own code, compiled for the CPU against emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from gemv4_cases import arguments, check

from halfbyte.kernels.device import HOPPER_SHARED_BYTES

pytest.importorskip("triton")  # whose launcher's arithmetic it shares
pytestmark = needs_compiler
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Weight *w, const u16 **x, const u16 **bias, u16 **out,
                    u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemv4(*w, *x, *bias, *out, *batch); });
}
"""


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import gemv4 as gemv4_cuda

    return emulate(gemv4_cuda, monkeypatch, tmp_path, RUN)


@pytest.mark.parametrize(
    ("blocks", "batch", "dtype", "nested"),
    [
        ((1, 1, 2, 3), 1, torch.bfloat16, True),  # a warp has one step more than the other
        ((2, 2, 1, 2), 3, torch.float16, False),  # of a block's two groups, one has a tile less
        ((1, 1, 4, 2), 11, torch.float16, True),  # a warp has nothing
    ],
    ids=str,
)
def test_products(cuda, blocks, batch, dtype, nested):
    """Several tiles for each cluster; N that ends within a tile."""

    def function(x, packed, absmax, second, blocksize, kind, rows, bias):
        return cuda.product(x, packed, absmax, second, kind, rows, bias, cuda.Blocks(*blocks))

    weight = arguments(86, 768, "nf4" if nested else "fp4", 64, nested)
    check(function, batch, weight, 768, dtype, bias=batch > 1)


def test_block_shapes_fit_a_multiprocessor(cuda):
    for rows in (16, 256, 1024, 4096, 14336, 28672, 131072):
        for batch in (1, 8, 9, 16):
            blocks = cuda.blocks_for(rows, batch, 132)
            assert blocks.wr * blocks.wk == (16 if batch <= 8 else 8)
    for tiles in (1, 2):
        kernel = cuda._kernel(cuda.blocks_for(4096, 8 * tiles, 132), -1, tiles, True, False)
        assert kernel.size <= HOPPER_SHARED_BYTES
    assert [cuda.blocks_for(rows, 1, 132).wr for rows in (1024, 4096, 8192, 14336)] == [1, 2, 4, 8]
