"""The CUDA kernel of one row and bit planes without a GPU: its own code, on emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from gemv_planes_cases import check_row, weight_of

pytest.importorskip("triton")
pytestmark = needs_compiler
PRODUCT = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, const u16 **bias, u16 **out,
                    const float **factor) {
    launch(blocks, threads, bytes, [&] { row_planes(*w, *x, *bias, *out, *factor); });
}
"""


@pytest.fixture
def row(monkeypatch, tmp_path):
    from halfbyte.kernels.cuda import gemv_planes_row

    return emulate(gemv_planes_row, monkeypatch, tmp_path, PRODUCT)


@pytest.mark.parametrize("spec", ["kbit:2:nf", "kbit:2:fitted", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf"])
def test_products(row, spec):
    """N that ends within a tile; warps that have a step more than others, or none; groups with one tile of two."""
    dtype = torch.float16 if spec in ("kbit:2:fitted", "kbit:3:bnf", "kbit:4:fitted") else torch.bfloat16
    check_row(row, weight_of(spec, 70, 1536), dtype, row.Blocks(1, 1, 2), bias=True)
    check_row(row, weight_of(spec, 70, 512), torch.bfloat16, row.Blocks(2, 1, 2))


def test_groups(row):
    check_row(row, weight_of("kbit:2:bnf", 150, 2560), torch.float16, row.Blocks(2, 2, 2))
    check_row(row, weight_of("kbit:3:nf", 150, 2560), torch.bfloat16, row.Blocks(1, 4, 1))
