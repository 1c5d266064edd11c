"""The CUDA kernels of bit planes without a GPU: their own code, on emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from gemv_planes_cases import SPECS, check, weight_of
from plane_cases import check_dequantize

pytest.importorskip("triton")  # whose launcher's arithmetic they share
pytestmark = needs_compiler
PRODUCT = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, const u16 **bias, u16 **out,
                    const float **factor, u32 *batch) {
    launch(blocks, threads, bytes, [&] { planes(*w, *x, *bias, *out, *factor, *batch); });
}
"""
VALUES = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, const u32 **packed, const u8 **scales, const float **factor,
                    const float **codebook, u16 **out, u32 *count) {
    launch(blocks, threads, bytes, [&] { dequantize_planes(*packed, *scales, *factor, *codebook, *out, *count); });
}
"""


@pytest.fixture
def planes(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import gemv_planes

    return emulate(gemv_planes, monkeypatch, tmp_path, PRODUCT)


@pytest.mark.parametrize("spec", ["kbit:2:nf", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf"])
def test_values(monkeypatch, tmp_path, spec):
    """Fewer blocks of 32 than warps; several rounds of some warps, in which their rings come around."""
    from halfbyte.kernels.cuda import bitplane as bitplane_cuda

    def kernel(packed, scales, zeros, *rest):
        return emulate(bitplane_cuda, monkeypatch, tmp_path, VALUES).dequantize(packed, scales, *rest)

    dtype = torch.bfloat16 if spec == "kbit:4:fitted" else torch.float16
    check_dequantize([spec], [dtype], [(3, 1024), (431, 1024)], kernel=kernel)


@pytest.mark.parametrize("spec", SPECS)
def test_products(planes, spec):
    """N that ends within a tile; a warp that has a step more than the other; several tiles for a group."""
    dtype = torch.float16 if spec in ("kbit:3:bnf", "kbit:4:fitted") else torch.bfloat16
    batch = 11 if spec in ("kbit:4:fitted", "hqq:3:32") else 2
    weight = weight_of(spec, 70, 768)
    check(planes, weight, batch, dtype, planes.Blocks(1 + (batch > 8), 1, 2, 2), bias=True)


def test_more_rings_than_fit_before_the_table_and_warps_without_work(planes):
    check(planes, weight_of("kbit:2:nf", 38, 512), 1, torch.bfloat16, planes.Blocks(1, 4, 4, 4))


def test_block_shapes_fit_a_multiprocessor(planes):
    """Warps, which take the shared memory, are as many for all numbers of rows; the largest are compiled."""
    for bits in (2, 3, 4, 5, 8):
        for batch in (1, 2, 4, 8, 16):
            shapes = [planes.blocks_for(bits, rows, batch, 132) for rows in (32, 256, 4096, 14336, 131072)]
            assert {(rt, wr * wk, stages) for rt, wr, wk, stages in shapes} == {
                (1 if batch <= 8 or bits == 8 else 2, 16 if batch <= 8 and bits < 8 else 8, 2)
            }
    for bits, group, batch in ((5, 0, 8), (5, 0, 16), (4, 32, 8), (8, 32, 16)):
        kernel = planes._kernel(planes.blocks_for(bits, 4096, batch, 132), -1, batch, True, bits, group)
        assert kernel.size <= 232448
