"""The CUDA kernels of products of up to 64 rows without a GPU: their own code, on emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from gemv4_cases import arguments, check
from gemv_planes_cases import check4, weight_of

from halfbyte.kernels.cuda.gemv4 import Weight
from halfbyte.kernels.device import HOPPER_SHARED_BYTES

pytest.importorskip("triton")  # whose launcher's arithmetic they share
pytestmark = needs_compiler
ADD = """
extern "C" void run_add(u32 blocks, u32 threads, u32 bytes, const float4 **parts, const u16 **bias, u16 **out,
                        const float **factor, u32 *rows, u32 *columns, u32 *batch, u32 *product, Term *term) {
    blockDim.x = threads;
    launch(blocks, threads, bytes,
           [&] { add(*parts, *bias, *out, *factor, *rows, *columns, *batch, *product, *term); });
}
"""
GEMM4 = """
extern "C" void run_gemm4(u32 blocks, u32 threads, u32 bytes, Weight *w, const u16 **x, float4 **parts, u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemm4(*w, *x, *parts, *batch); });
}
"""
PLANES = """
extern "C" void run_gemm_planes(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, float4 **parts,
                                u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemm_planes(*w, *x, *parts, *batch); });
}
"""


@pytest.fixture
def gemm(request, monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import gemm4 as gemm_cuda

    return emulate(gemm_cuda, monkeypatch, tmp_path, request.param + ADD)


@pytest.mark.parametrize("gemm", [GEMM4], indirect=True, ids=[""])
@pytest.mark.parametrize(
    ("blocks", "batch", "dtype", "nested", "shape", "rank"),
    [
        ((1, 3), 13, torch.bfloat16, True, (70, 1280), 24),
        ((2, 3), 33, torch.float16, False, (131, 256), 0),
    ],
    ids=str,
)
def test_products(gemm, blocks, batch, dtype, nested, shape, rank):
    def function(x, packed, absmax, second, blocksize, kind, rows, bias, term=None):
        assert gemm.adds(term)
        return gemm.product(x, packed, absmax, second, kind, rows, bias, gemm.Blocks(*blocks), term)

    weight = arguments(*shape, "nf4" if nested else "fp4", 64, nested)
    check(function, batch, weight, shape[1], dtype, bias=batch > 20, rank=rank)


@pytest.mark.parametrize("gemm", [PLANES], indirect=True, ids=[""])
@pytest.mark.parametrize(
    ("spec", "batch", "dtype"),
    [
        ("kbit:4:nf", 16, torch.bfloat16),
        ("kbit:4:fitted", 50, torch.float16),
        ("hqq:4:32", 2, torch.bfloat16),
        ("hqq:4:64", 2, torch.bfloat16),
        ("hqq:4:128", 2, torch.bfloat16),
        ("hqq:4:256", 2, torch.bfloat16),
    ],
)
def test_bit_planes(gemm, spec, batch, dtype):
    from halfbyte.kernels.cuda import gemv_planes

    check4(gemv_planes.product4, weight_of(spec, 70, 768), batch, dtype, gemm.Blocks(1, 4))


@pytest.mark.parametrize("gemm", [GEMM4], indirect=True, ids=[""])
@pytest.mark.parametrize("tiles", [4, 8])
def test_blocks_fit_a_multiprocessor(gemm, tiles):
    """The most tiles that share a number of stages."""
    product, _ = gemm._kernel("gemm4", gemm.blocks_for(tiles), -1, tiles, True, Weight, (("NESTED", 0),))
    assert product.size <= HOPPER_SHARED_BYTES


def test_shapes():
    """As few as end at the same time, and at most some 16 parts to a tile."""
    from halfbyte.kernels.cuda import gemm4 as gemm_cuda

    for batch in (9, 16, 17, 32, 33, 48, 49, 64):
        tiles = gemm_cuda.tiles_of(batch)
        assert 8 * tiles >= batch
        assert gemm_cuda.blocks_for(tiles) == gemm_cuda.blocks_for(4 if tiles <= 4 else 8)
    assert [gemm_cuda.grid_for(*sizes, 132) for sizes in ((16, 56), (56, 16), (4, 16), (1, 1), (1, 40))] == [
        128, 128, 64, 1, 14,
    ]  # fmt: skip
