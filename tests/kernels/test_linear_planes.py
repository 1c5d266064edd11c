"""Check linears with weights in bit planes: every kernel of the ops, and the formats' linears."""

import contextlib
from typing import NamedTuple

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats import Format, from_spec
from halfbyte.formats.bitplane import linear_bitplane
from halfbyte.utils import notices
from tests.helpers.kernel_backends import DEVICES, cases, loaded

pytest.importorskip("triton")
from halfbyte.kernels.cuda import few_rows, gemm4, linear_planes
from halfbyte.kernels.device import HOPPER_SHARED_BYTES

BF16, FP16 = torch.bfloat16, torch.float16
ROW = ("kbit:2:bnf", "kbit:2:fitted", "kbit:3:nf", "kbit:4:fitted", "kbit:5:bnf")
SMALL = ("kbit:2:nf", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf", "hqq:2:256", "hqq:3:32", "hqq:4:64", "hqq:8:128")
FOUR = ("kbit:4:nf", "hqq:4:32", "hqq:4:64", "hqq:4:128", "hqq:4:256")
RUN = {
    "row_planes": """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, const u16 **bias, u16 **out,
                    const float **factor) {
    launch(blocks, threads, bytes, [&] { row_planes(*w, *x, *bias, *out, *factor); });
}
""",
    "planes": """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, const u16 **bias, u16 **out,
                    const float **factor, u32 *batch) {
    launch(blocks, threads, bytes, [&] { planes(*w, *x, *bias, *out, *factor, *batch); });
}
""",
    "gemm_planes": """
extern "C" void run_add(u32 blocks, u32 threads, u32 bytes, const Sums *sums, u32 *columns, u32 *batch) {
    blockDim.x = threads;
    launch(blocks, threads, bytes, [&] { add(*sums, *columns, *batch); });
}
extern "C" void run_gemm_planes(u32 blocks, u32 threads, u32 bytes, Parts<Weight> *parts, const u16 **x, u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemm_planes(*parts, *x, *batch); });
}
""",
}


BLOCKS = {"gemv": linear_planes.GemvBlocks, "gemm16": linear_planes.Gemm16Blocks, "gemm64": gemm4.Blocks}


class Weight(NamedTuple):
    format: Format
    parts: dict
    shape: tuple[int, int]


def weight_of(spec, rows, columns, device="cpu"):
    format_ = from_spec(spec)
    return Weight(format_, format_.quantize(torch.randn(rows, columns, device=device) * 0.05), (rows, columns))


def arguments_of(weight):
    """packed, scales, zeros, factor, codebook, bits, group, rows."""
    format_, parts, (rows, _) = weight
    packed, scales = parts["packed"], parts["scales"]
    if format_.name == "hqq":
        return packed, scales, parts["zeros"], scales, scales, format_.bits, format_.group, rows
    return packed, scales, scales, parts["factor"], format_.levels(parts), format_.k, 0, rows


def check(kernel, weight, batch, dtype, blocks=None, bias=False):
    """Compare with fp64 up to one rounding to `dtype` for gemv, and two (codebook and result) for the others."""
    packed, scales, zeros, factor, codebook, bits, group, rows = arguments_of(weight)

    def run(x, added):
        shape = None if blocks is None else BLOCKS[kernel](*blocks)
        if kernel == "gemv":
            return linear_planes.gemv_bitplane(x, packed, scales, factor, codebook, rows, added, shape)
        parts = x, packed, scales, zeros, factor, codebook
        if kernel == "gemm16":
            return linear_planes.gemm16(*parts, bits, group, rows, added, shape)
        if group:
            product = linear_planes.hqq_product(x, packed, scales, zeros, bits, group, rows, added)
        else:
            product = linear_planes.bitplane_product(x, packed, scales, factor, codebook, rows, added)
        return linear_planes.gemm64(x, [product], group, shape)[0]

    rows, columns = weight.shape
    device = weight.parts["packed"].device
    x = torch.randn(batch, columns, device=device).to(dtype)
    added = torch.randn(rows, device=device).to(dtype) if bias else None
    found = run(x, added)
    assert (found.shape, found.dtype) == ((batch, rows), dtype)
    exact = x.double() @ weight.format.dequantize(weight.parts, weight.shape, torch.float32).double().T
    exact = exact if added is None else exact + added.double()
    roundings = 1 if kernel == "gemv" else 2
    assert (found.double() - exact).norm() <= roundings * torch.finfo(dtype).eps * exact.norm()


def dtypes(spec):
    return (BF16,) if spec.startswith("hqq") else (BF16, FP16)


# N that ends within a tile; warps with a step more than others, or none; groups with one tile of two; more rings than
# fit in shared memory before the table.
EMULATED = [
    *[("gemv", spec, (70, 1536), 1, dtype, (1, 1, 2), True)
      for spec, dtype in zip(("kbit:2:nf", "kbit:2:fitted", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf"),
                             (BF16, FP16, FP16, FP16, BF16), strict=True)],
    *[("gemv", spec, (70, 512), 1, BF16, (2, 1, 2), False)
      for spec in ("kbit:2:nf", "kbit:2:fitted", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf")],
    ("gemv", "kbit:2:bnf", (150, 2560), 1, FP16, (2, 2, 2), False),
    ("gemv", "kbit:3:nf", (150, 2560), 1, BF16, (1, 4, 1), False),
    *[("gemm16", spec, (70, 768), 11 if spec in ("kbit:4:fitted", "hqq:3:32") else 2,
       FP16 if spec in ("kbit:3:bnf", "kbit:4:fitted") else BF16,
       (2 if spec in ("kbit:4:fitted", "hqq:3:32") else 1, 1, 2, 2), True)
      for spec in SMALL],
    ("gemm16", "kbit:2:nf", (38, 512), 1, BF16, (1, 4, 4, 4), False),
    ("gemm64", "kbit:4:nf", (70, 768), 16, BF16, (1, 4), True),
    ("gemm64", "kbit:4:fitted", (70, 768), 50, FP16, (1, 4), True),
    *[("gemm64", spec, (70, 768), 2, BF16, (1, 4), True) for spec in FOUR[1:]],
]  # fmt: skip
HOPPER = [
    *[("gemv", spec, (5005, 2560), 1, BF16, blocks, False)
      for spec in ROW for blocks in ((1, 1, 16), (2, 2, 4), (1, 8, 1), (2, 1, 3))],
    *[("gemm16", spec, (16 * blocks[0] * blocks[1] * 140 + 5, 2816), 5, BF16, blocks, False)
      for spec in ("kbit:2:nf", "kbit:3:bnf", "hqq:4:64")
      for blocks in ((1, 1, 16, 3), (2, 2, 4, 2), (1, 3, 4, 3), (1, 8, 2, 2), (1, 2, 1, 4))],
]  # fmt: skip


@pytest.mark.sampled(14)
@cases(("kernel", "spec", "shape", "batch", "dtype", "blocks", "bias"), emulated=EMULATED, hopper=HOPPER)
def test_block_shapes(monkeypatch, backend, kernel, spec, shape, batch, dtype, blocks, bias):
    loaded(gemm4 if kernel == "gemm64" else linear_planes, backend, monkeypatch, RUN)
    too_large = kernel == "gemv" and backend == "hopper"  # one of these cases for 5 bits
    with contextlib.suppress(Unavailable) if too_large else contextlib.nullcontext():
        check(kernel, weight_of(spec, *shape, DEVICES[backend]), batch, dtype, blocks, bias)


@cases(
    ("kernel", "spec"),
    hopper=[(kernel, spec) for kernel, specs in (("gemv", ROW), ("gemm16", SMALL), ("gemm64", FOUR)) for spec in specs],
)  # fmt: skip
def test_products(backend, kernel, spec):
    """N ends within a tile, and K gives some warps more steps than others, or none; several rounds of tiles."""
    shapes, batches = {
        "gemv": (((16, 512), (130, 512), (1000, 4608), (14336, 4096), (40010, 1024)), (1,)),
        "gemm16": (((16, 256), (130, 256), (1000, 4352), (4096, 14336)), (1, 2, 5, 8, 9, 16)),
        "gemm64": (((130, 256), (1001, 4352), (4096, 14336)), (9, 16, 17, 24, 32, 33, 48, 64)),
    }[kernel]
    for shape in shapes:
        weight = weight_of(spec, *shape, device="cuda")
        for batch in batches:
            bias = shape[0] % 3 == 0 if kernel == "gemv" else batch % 2 == 0
            for dtype in dtypes(spec):
                check(kernel, weight, batch, dtype, bias=bias)


@cases("value", hopper=[1e-30, 1e30, float("inf"), float("nan")])
def test_extreme_inputs(backend, value):
    """One extreme value of x gives the exact product's result; non-finite results may differ but stay non-finite."""
    weight = weight_of("kbit:2:nf", 64, 1024, "cuda")
    x = torch.zeros(1, 1024, device="cuda", dtype=BF16)
    x[0, 77] = value
    packed, scales, _, factor, codebook, _, _, rows = arguments_of(weight)
    found = linear_planes.gemv_bitplane(x, packed, scales, factor, codebook, rows, None).float()
    exact = x.float() @ weight.format.dequantize(weight.parts, weight.shape, torch.float32).T
    if exact.isfinite().all():
        torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    else:
        assert not found.isfinite().any()


@cases("spec", hopper=["kbit:2:nf", "kbit:5:nf", "hqq:8:128"])
def test_a_product_waits_for_its_x(backend, spec):
    """Kernels may start before their predecessor ends: each reads x from the one before."""
    weight = weight_of(spec, 4096, 4096, "cuda")
    x = torch.randn(1, 4096, device="cuda", dtype=BF16)
    early, late = [x.clone() for _ in range(2)]
    for _ in range(20):
        early = weight.format.linear(early, weight.parts, weight.shape, None)
    for _ in range(20):
        late = weight.format.linear(late, weight.parts, weight.shape, None)
        torch.cuda.synchronize()
    assert torch.equal(early, late)


@cases(("spec", "batch"), hopper=[(spec, batch) for spec in SMALL for batch in (1, 16, 17)])
def test_through_the_format(backend, spec, batch):
    weight = weight_of(spec, 512, 1024, "cuda")
    x = torch.randn(batch, 1024, device="cuda", dtype=BF16)
    expected = weight.format.dequantize(weight.parts, weight.shape, torch.float32)
    found = weight.format.linear(x, weight.parts, weight.shape, None)
    exact = x.float() @ expected.T
    assert (found.float() - exact).norm() <= 2 * torch.finfo(BF16).eps * exact.norm()


@pytest.mark.large(6)
@cases("kernel", hopper=["gemv"])
def test_a_weight_of_more_than_two_to_the_31_bytes(backend, kernel):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(-(2**31), 2**31, (rows * columns // 32 * 5,), dtype=torch.int32, device="cuda")
    scales = torch.randint(0, 256, (rows * columns // 32,), dtype=torch.uint8, device="cuda")
    factor, codebook = torch.ones((), device="cuda"), torch.linspace(-1, 1, 32, device="cuda")
    x = torch.randn(1, columns, device="cuda", dtype=BF16)
    found = linear_bitplane(x, packed, scales, factor, codebook, rows, None)
    last = packed[-40 * columns // 32 * 5 :], scales[-40 * columns // 32 :], factor, codebook, 40
    alone = linear_bitplane(x, *last, None)  # its warps add in another order
    torch.testing.assert_close(found[:, -40:], alone, rtol=0.01, atol=0.01 * float(alone.abs().max()))


@pytest.mark.slow
@cases("kernel", emulated=["gemm16"])
def test_blocks_fit_a_multiprocessor(monkeypatch, backend, kernel):
    """The number of warps, which take the shared memory, is the same for all rows; the largest are compiled."""
    loaded(linear_planes, backend, monkeypatch, RUN)
    for bits in (2, 3, 4, 5, 8):
        for batch in (1, 2, 4, 8, 16):
            shapes = [linear_planes.gemm16_blocks(bits, rows, batch, 132) for rows in (32, 256, 4096, 14336, 131072)]
            assert {(rt, wr * wk, stages) for rt, wr, wk, stages in shapes} == {
                (1 if batch <= 8 or bits == 8 else 2, 16 if batch <= 8 and bits < 8 else 8, 2)
            }
    for bits, group, batch in ((5, 0, 8), (5, 0, 16), (4, 32, 8), (8, 32, 16)):
        blocks = linear_planes.gemm16_blocks(bits, 4096, batch, 132)
        built = linear_planes._gemm16_kernel(blocks, -1, batch, True, bits, group)
        assert built.size <= HOPPER_SHARED_BYTES


@cases("spec", hopper=["kbit:4:nf"])
def test_dequantizes_where_it_does_not_compile(backend, spec, monkeypatch):
    def refuse(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(linear_planes, "_gemm16_kernel", refuse)
    monkeypatch.setattr(few_rows, "_kernel", refuse)
    monkeypatch.setattr(notices, "_logged", {})
    weight = weight_of(spec, 64, 256, "cuda")
    x = torch.randn(2, 256, device="cuda", dtype=BF16)
    for _ in range(2):
        found = weight.format.linear(x, weight.parts, weight.shape, None)
        expected = x @ weight.format.dequantize(weight.parts, weight.shape, BF16).T
        torch.testing.assert_close(found, expected)
    assert "no NVRTC" in notices.notices_so_far()["kernel-cuda.linear_planes.gemm16_bitplane"]
