"""The CUDA kernel of small products in bit planes, on a GPU, and what surrounds it."""

import pytest
import torch
from gemv_planes_cases import SPECS, arguments_of, check, weight_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"
    ),
]
pytest.importorskip("triton")
specs = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture
def planes():
    from halfbyte.kernels.cuda import gemv_planes

    return gemv_planes


@specs
@pytest.mark.parametrize("batch", [1, 2, 5, 8, 9, 16])
def test_products(planes, spec, batch):
    """N that ends within a tile, K that gives some warps one step more than others, or none."""
    for shape in ((16, 256), (130, 256), (1000, 4352), (4096, 14336)):
        weight = weight_of(spec, *shape, "cuda")
        for dtype in (torch.bfloat16,) if spec[0] == "h" else (torch.bfloat16, torch.float16):
            check(planes, weight, batch, dtype, bias=batch % 2 == 0)


@pytest.mark.parametrize("blocks", [(1, 1, 16, 3), (2, 2, 4, 2), (1, 3, 4, 3), (1, 8, 2, 2), (1, 2, 1, 4)], ids=str)
def test_block_shapes(planes, blocks):
    for spec in ("kbit:2:nf", "kbit:3:bnf", "hqq:4:64"):
        shape = planes.Blocks(*blocks)
        check(planes, weight_of(spec, 16 * blocks[0] * blocks[1] * 140 + 5, 2816, "cuda"), 5, torch.bfloat16, shape)


@pytest.mark.parametrize("spec", ["kbit:2:nf", "kbit:5:nf", "hqq:8:128"])
def test_a_product_waits_for_its_x(planes, spec):
    """Kernels that begin early: each product's x is what the one before wrote, where the one before that read."""
    weight = arguments_of(weight_of(spec, 4096, 4096, "cuda"))
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    early, late = [x.clone() for _ in range(2)]
    for _ in range(20):
        early = planes.product(early, *weight, None)
    for _ in range(20):
        late = planes.product(late, *weight, None)
        torch.cuda.synchronize()
    assert torch.equal(early, late)


@specs
@pytest.mark.parametrize("batch", [1, 16, 17])
def test_through_the_format(spec, batch):
    weight = weight_of(spec, 512, 1024, "cuda")
    x = torch.randn(batch, 1024, device="cuda", dtype=torch.bfloat16)
    expected = weight.format.dequantize(weight.parts, weight.shape, torch.float32)
    found = weight.format.linear(x, weight.parts, weight.shape, None)
    exact = x.float() @ expected.T
    assert (found.float() - exact).norm() <= 2 * torch.finfo(torch.bfloat16).eps * exact.norm()


@pytest.mark.large(6)
def test_a_weight_of_more_than_two_to_the_31_bytes(planes):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(-(2**31), 2**31, (rows * columns // 32 * 5,), dtype=torch.int32, device="cuda")
    scales = torch.randint(0, 256, (rows * columns // 32,), dtype=torch.uint8, device="cuda")
    factor, codebook = torch.ones((), device="cuda"), torch.linspace(-1, 1, 32, device="cuda")
    x = torch.randn(1, columns, device="cuda", dtype=torch.bfloat16)
    found = planes.linear(x, packed, scales, factor, codebook, rows, None)
    last = packed[-40 * columns // 32 * 5 :], scales[-40 * columns // 32 :], factor, codebook, 40
    alone = planes.linear(x, *last, None)  # whose warps add in another order
    torch.testing.assert_close(found[:, -40:], alone, rtol=0.01, atol=0.01 * float(alone.abs().max()))


def test_dequantizes_where_it_does_not_compile(planes, monkeypatch):
    from halfbyte import notices
    from halfbyte.dispatch import Unavailable

    def refuse(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(planes, "_kernel", refuse)
    monkeypatch.setattr(notices, "_said", {})
    weight = weight_of("kbit:4:nf", 64, 256, "cuda")
    x = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        found = weight.format.linear(x, weight.parts, weight.shape, None)
        expected = x @ weight.format.dequantize(weight.parts, weight.shape, torch.bfloat16).T
        torch.testing.assert_close(found, expected)
    assert "no NVRTC" in notices.said()["gemv-planes-cuda"]
