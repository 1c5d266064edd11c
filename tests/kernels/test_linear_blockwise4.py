"""Check GEMV and small-batch GEMM with 4-bit weights: every kernel of the op, and the op's dispatch."""

import functools
import importlib
from functools import partial

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats import Blockwise4
from halfbyte.formats.blockwise4 import linear_blockwise4
from halfbyte.formats.linear import PackedProduct
from halfbyte.ops.decode import PackedLinear, packed_linears
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from tests.helpers.kernel_backends import DEVICES, cases, hopper, loaded
from tests.helpers.linear_cases import arguments, check

pytest.importorskip("triton")
from halfbyte.kernels.cuda import gemm4, gemv4, gemv4_row
from halfbyte.kernels.device import HOPPER_SHARED_BYTES

BF16, FP16 = torch.bfloat16, torch.float16
on_gpu = functools.cache(partial(arguments, device="cuda"))
RUN = {
    gemv4_row: """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, const Parts *parts, const u16 **x) {
    launch(blocks, threads, bytes, [&] { row4(*parts, *x); });
}
""",
    gemv4: """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Weight *w, const u16 **x, const u16 **bias, u16 **out,
                    u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemv4(*w, *x, *bias, *out, *batch); });
}
""",
    gemm4: """
extern "C" void run_add(u32 blocks, u32 threads, u32 bytes, const Sums *sums, u32 *columns, u32 *batch) {
    blockDim.x = threads;
    launch(blocks, threads, bytes, [&] { add(*sums, *columns, *batch); });
}
extern "C" void run_gemm4(u32 blocks, u32 threads, u32 bytes, Parts<Weight> *parts, const u16 **x, u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemm4(*parts, *x, *batch); });
}
""",
}


def kernel(module):
    return getattr(module, "gemv", None) or module.gemm


# Several tiles a group, one of them missing; N that ends within a tile; warps with a step more, or none; rows that
# begin within four blocks.
EMULATED = [
    (gemv4_row, (1, 1, 2), 1, 64, (86, 768), BF16, True),
    (gemv4_row, (2, 2, 1), 2, 64, (86, 512), FP16, False),
    (gemv4_row, (1, 1, 4), 1, 32, (86, 768), FP16, True),
    (gemv4_row, (2, 1, 2), 1, 32, (86, 512), BF16, False),
    (gemv4_row, (1, 2, 2), 2, 256, (86, 768), BF16, True),
    (gemv4_row, (1, 1, 2), 1, 128, (86, 768), FP16, False),
    (gemv4_row, (1, 1, 2), 1, 512, (86, 1024), FP16, True),
    (gemv4, (1, 1, 2, 3), 1, 64, (86, 768), BF16, True),
    (gemv4, (2, 2, 1, 2), 3, 64, (86, 768), FP16, False),
    (gemv4, (1, 1, 4, 2), 11, 64, (86, 768), FP16, True),
    (gemm4, (1, 3), 13, 64, (70, 1280), BF16, True),
    (gemm4, (2, 3), 33, 64, (131, 256), FP16, False),
]
SHAPES = [
    *[(gemv4_row, blocks, batch, 64, (5005, 2816), FP16, True) for batch in (1, 2)
      for blocks in ((1, 1, 16), (2, 2, 4), (1, 8, 1), (2, 1, 14), (1, 3, 5))],
    *[(gemv4, (rt, wr, wk, stages), 5, 64, (16 * rt * wr * 140 + 5, 2816), FP16, True) for stages in (2, 3)
      for rt, wr, wk in ((1, 1, 16), (2, 2, 4), (4, 1, 4), (1, 3, 5), (1, 8, 2), (1, 16, 1))],
    *[(gemm4, (groups, stages), batch, 64, (64 * groups * 20 + 5, 2816), FP16, True)
      for groups in (1, 2, 4) for stages in (3, 4) for batch in (16, 40, 64)],
]  # fmt: skip


@pytest.mark.sampled(9)
@cases(("module", "blocks", "batch", "blocksize", "shape", "dtype", "nested"), emulated=EMULATED, hopper=SHAPES)
def test_block_shapes(monkeypatch, backend, module, blocks, batch, blocksize, shape, dtype, nested):
    loaded(module, backend, monkeypatch, RUN[module])
    weight = arguments(*shape, "nf4" if nested else "fp4", blocksize, nested, DEVICES[backend])
    function = partial(kernel(module), blocks=module.Blocks(*blocks))
    check(function, batch, weight, shape[1], dtype, bias=batch != 1)


OF_GPU = {  # batches; block sizes; shapes: N that ends within a tile, warps with a step more or none
    gemv4_row: ((1, 2), (32, 64, 128, 256), ((16, 256), (130, 512), (1000, 4352), (17000, 512))),
    gemv4: ((1, 3, 8, 9, 16), (64,), ((130, 256), (1000, 4352), (4096, 14336))),
    gemm4: ((9, 16, 17, 24, 32, 33, 48, 64), (64,), ((130, 256), (1001, 4352), (4096, 14336))),
}


@cases(
    ("module", "blocksize", "nested", "kind"),
    hopper=[
        (module, blocksize, nested, kind)
        for module, (_, blocksizes, _) in OF_GPU.items()
        for blocksize in blocksizes
        for nested in (True, False)
        for kind in ("nf4", "fp4")
    ],
)
def test_products(backend, module, blocksize, nested, kind):
    batches, _, shapes = OF_GPU[module]
    for shape in shapes:
        weight = on_gpu(*shape, kind, blocksize, nested)
        for batch in batches:
            for dtype in (BF16, FP16):
                check(kernel(module), batch, weight, shape[1], dtype, bias=batch % 2 == 0)


def linear_of(rows, columns, nested, device, bias=None):
    product = PackedProduct(linear_blockwise4, arguments(rows, columns, "nf4", 64, nested, device=device))
    return PackedLinear(product, rows, columns, bias)


@cases(
    ("sizes", "blocks", "batch", "nested"),
    emulated=[((40, 16, 130), (1, 1, 2), 1, True), ((16, 33), (1, 2, 1), 2, False)],
    hopper=[((4096, 512, 512), None, 1, True), ((4096, 4096), None, 2, False), ((16, 16, 5000), None, 1, True)],
)
def test_several_weights(monkeypatch, backend, sizes, blocks, batch, nested):
    """One launch for several weights equals a launch for each; on three multiprocessors each weight has a block."""
    loaded(gemv4_row, backend, monkeypatch, RUN[gemv4_row])
    torch.manual_seed(0)
    x = torch.randn(batch, 512, device=DEVICES[backend]).to(BF16)
    weights = [linear_of(rows, 512, nested, DEVICES[backend]) for rows in sizes]
    terms = [None] * len(weights)
    assert gemv4_row.several_obstacle(x, weights, terms) is None or backend == "emulated"
    mine = gemv4_row.several(x, weights, terms, blocks and gemv4_row.Blocks(*blocks))
    for found, weight in zip(mine, weights, strict=True):
        arguments = weight.product.arguments
        assert torch.equal(found, gemv4_row.gemv(x, *arguments, None, blocks and gemv4_row.Blocks(*blocks)))
        true = linear_blockwise4.reference(x.float(), *arguments, None)
        assert (found.float() - true).norm() <= 4e-3 * true.norm()


@cases(
    ("sizes", "batch", "nested"),
    emulated=[((40, 70, 130), 13, True), ((64, 200), 33, False)],
    hopper=[((4096, 1024, 1024), 32, True), ((14336, 14336), 16, False), ((130, 5000, 64), 64, True)],
)
def test_several_weights_of_more_rows(monkeypatch, backend, sizes, batch, nested):
    """One launch for several weights gives their products; one of them has a bias, and one an adapter's term."""
    loaded(gemm4, backend, monkeypatch, RUN[gemm4])
    torch.manual_seed(0)
    device = DEVICES[backend]
    x = torch.randn(batch, 512, device=device).to(BF16)
    bias = torch.randn(sizes[0], device=device).to(BF16)
    term = torch.randn(batch, 16, device=device).to(BF16), torch.randn(sizes[1], 16, device=device).to(BF16)
    linears = [linear_of(rows, 512, nested, device, bias if i == 0 else None) for i, rows in enumerate(sizes)]
    terms = [term if i == 1 else None for i in range(len(sizes))]
    assert gemm4.several_obstacle(x, linears, terms) is None or backend == "emulated"
    blocks = gemm4.Blocks(1, 3) if backend == "emulated" else None
    expected = packed_linears.reference(x.float(), linears, [t and (t[0].float(), t[1].float()) for t in terms])
    for out, true in zip(gemm4.several(x, linears, terms, blocks), expected, strict=True):
        assert (out.float() - true).norm() <= 4e-3 * true.norm()


def test_blocks_are_shared_by_tiles():
    assert gemv4_row.shares([256, 32, 32], 132) == [106, 13, 13]
    assert gemv4_row.shares([1, 1], 132) == [1, 1]
    assert gemv4_row.shares([1000, 1, 1], 3) == [1, 1, 1]
    assert sum(gemv4_row.shares([7, 90, 3], 20)) == 20


@cases("blocksize", hopper=[512, 2048, 4096])
def test_large_blocks(backend, blocksize):
    """Rows that begin within four blocks, and a number of blocks that is not a multiple of four."""
    for nested in (True, False):
        check(gemv4_row.gemv, 1, on_gpu(131, 4096, "nf4", blocksize, nested), 4096, BF16)


@cases("value", hopper=[1e-30, 1e30, float("inf"), float("nan")])
def test_extreme_inputs(backend, value):
    """One extreme value of x gives the exact product's result; non-finite results may differ but stay non-finite."""
    weight = on_gpu(64, 1024)
    x = torch.zeros(1, 1024, device="cuda", dtype=BF16)
    x[0, 77] = value
    found = gemv4_row.gemv(x, *weight, None).float()
    exact = linear_blockwise4.reference(x.float(), *weight, None)
    if exact.isfinite().all():
        torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    else:
        assert not found.isfinite().any()


RUNS = [(gemv4_row, 1), (gemv4, 1), (gemv4, 4), (gemv4, 16), (gemm4, 17), (gemm4, 64)]


@cases(("module", "batch"), hopper=RUNS)
def test_two_runs_are_equal(backend, module, batch):
    weight, x = on_gpu(4096, 4096), torch.randn(batch, 4096, device="cuda", dtype=BF16)
    results = [kernel(module)(x, *weight, None) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


@cases(("module", "batch"), hopper=[(gemv4_row, 1), (gemv4, 1), (gemm4, 32)])
def test_a_product_waits_for_its_x_in_a_graph_too(backend, module, batch):
    """Kernels may start before their predecessor ends: each product reads the x that the one before wrote."""
    weight, x = on_gpu(4096, 4096), torch.randn(batch, 4096, device="cuda", dtype=BF16)

    def chain(wait):
        y = x
        for _ in range(20):
            y = kernel(module)(y, *weight, None)
            if wait:
                torch.cuda.synchronize()
        return y

    late, early = chain(True), chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(3):
        graph.replay()
    assert torch.equal(early, late)
    assert torch.equal(captured, late)


@pytest.mark.large(6)
@cases(("module", "batch"), hopper=[(gemv4_row, 1), (gemv4, 1), (gemm4, 17)])
def test_a_weight_of_more_than_two_to_the_31_bytes(backend, module, batch):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * columns // 64, device="cuda") + 0.1
    x = torch.randn(batch, columns, device="cuda", dtype=FP16) / (64 if batch > 1 else 1)
    found = kernel(module)(x, packed, absmax, None, 64, "nf4", rows, None)[:, -40:]
    last = packed[-40 * columns // 2 :], absmax[-40 * columns // 64 :], None, 64, "nf4", 40
    expected = linear_blockwise4.reference(x.float(), *last, None)
    assert (found - expected).norm() < 2e-3 * expected.norm()
    if module is not gemm4:  # whose split of a tile depends on N
        torch.testing.assert_close(found, kernel(module)(x, *last, None), rtol=0, atol=0)


@pytest.mark.slow
@cases("module", emulated=list(RUN))
def test_blocks_fit_a_multiprocessor(monkeypatch, backend, module):
    """The largest block of each kernel; as many groups as tiles; the fewest blocks that end at the same time."""
    loaded(module, backend, monkeypatch, RUN[module])
    sizes = (16, 256, 1024, 4096, 14336, 28672, 131072)
    if module is gemv4_row:
        built = [
            module._kernel(module.blocks_for(4096, 132), -1, *key)
            for key in ((1, True, True, 64), (2, True, False, 32))
        ]
        assert {(rt, wr * wk) for rt, wr, wk in (module.blocks_for(rows, 132) for rows in sizes)} == {(1, 16)}
        assert [module.blocks_for(rows, 132).wr for rows in (1024, 4096, 8192, 14336)] == [1, 2, 4, 8]
    elif module is gemv4:
        built = [module._kernel(module.blocks_for(4096, 8 * tiles, 132), -1, tiles, True, False) for tiles in (1, 2)]
        for rows, batch in ((rows, batch) for rows in sizes for batch in (1, 8, 9, 16)):
            blocks = module.blocks_for(rows, batch, 132)
            assert blocks.wr * blocks.wk == (16 if batch <= 8 else 8)
        assert [module.blocks_for(rows, 1, 132).wr for rows in (1024, 4096, 8192, 14336)] == [1, 2, 4, 8]
    else:
        key = True, gemm4.parts_of(gemv4.Weight), (("NESTED", 0),)
        built = [module._kernel("gemm4", module.blocks_for(tiles), -1, tiles, *key)[0] for tiles in (4, 8)]
        for batch in (9, 16, 17, 32, 33, 48, 49, 64):
            tiles = module.tiles_of(batch)
            assert 8 * tiles >= batch
            assert module.blocks_for(tiles) == module.blocks_for(4 if tiles <= 4 else 8)
        grids = [module.grid_for(*size, 132) for size in ((16, 56), (56, 16), (4, 16), (1, 1), (1, 40))]
        assert grids == [128, 128, 64, 1, 14]
    assert all(each.size <= HOPPER_SHARED_BYTES for each in built)


# C


@pytest.fixture(params=["few_rows.blockwise4", "decode4.gemv"])
def native(request):
    """A product in C: with AVX2, and for other processors."""
    module, name = request.param.split(".")
    try:
        return getattr(importlib.import_module(f"halfbyte.kernels.native.{module}"), name)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(37, 320), (5, 64), (3, 100)], ids=str)
def test_on_a_cpu(native, batch, shape):
    for kind, blocksize, nested in (("nf4", 64, True), ("fp4", 32, False)):
        weight = arguments(*shape, kind, blocksize, nested)
        for dtype in (torch.float32, FP16, BF16):
            check(linear_blockwise4, batch, weight, shape[1], dtype, bias=batch % 2 == 1)


def test_result_does_not_depend_on_threads(native):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(native, 1, arguments(1201, 1024), 1024, torch.float32)
    finally:
        torch.set_num_threads(before)


def test_strided_inputs(native):
    weight, x = arguments(8, 64), torch.randn(64, 2).t()
    torch.testing.assert_close(native(x, *weight, None), native(x.contiguous(), *weight, None), rtol=0, atol=0)


def test_a_product_without_gradient_needs_no_dequantized_weight(monkeypatch):
    weight = QuantizedTensor.quantize(torch.randn(48, 128), Blockwise4("nf4", 64, True))
    x = torch.randn(2, 1, 128)
    expected = torch.nn.functional.linear(x, weight.dequantize())
    wanted = torch.nn.functional.linear(x.clone().requires_grad_(), weight)
    monkeypatch.setattr(Blockwise4, "dequantize", lambda *args: pytest.fail("dequantized"))
    found = torch.nn.functional.linear(x, weight)
    assert found.shape == (2, 1, 48)
    for result in (found, wanted.detach()):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# The op on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (130, 448)])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 17, 33, 64, 65])
def test_selected_kernel(batch, shape):
    """Check the kernel that dispatch takes; `test_selection` checks which one it is."""
    for kind, blocksize, nested in (("nf4", 64, True), ("fp4", 32, False)):
        weight = on_gpu(*shape, kind, blocksize, nested)
        for dtype in (torch.float32, FP16, BF16):
            check(linear_blockwise4, batch, weight, shape[1], dtype, bias=batch % 2 == 0)


@pytest.mark.gpu
def test_blocks_that_cross_rows_and_long_ones():
    check(linear_blockwise4, 3, on_gpu(64, 100), 100, BF16)
    check(linear_blockwise4, 3, on_gpu(64, 4096, "nf4", 4096), 4096, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16])
def test_in_a_graph(batch):
    weight, x = on_gpu(4096, 4096), torch.randn(batch, 4096, device="cuda", dtype=BF16)
    linear_blockwise4(x, *weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_blockwise4(x, *weight, None)
    x.normal_()
    graph.replay()
    assert torch.equal(out, linear_blockwise4(x, *weight, None))


@pytest.mark.gpu
@pytest.mark.parametrize("mark", [pytest.param("", marks=hopper)])
def test_falls_back_if_a_kernel_does_not_compile(mark, monkeypatch, request):
    def refuse(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(gemv4, "cubin", refuse)
    monkeypatch.setattr(notices, "_logged", {})
    gemv4._kernel.cache_clear()
    request.addfinalizer(gemv4._kernel.cache_clear)  # it remembers the refusal
    for _ in range(2):
        check(linear_blockwise4, 3, on_gpu(64, 256), 256, BF16)
    assert list(notices.notices_so_far()) == ["kernel-cuda.gemv4.gemm"]
    assert "no NVRTC" in notices.notices_so_far()["kernel-cuda.gemv4.gemm"]
