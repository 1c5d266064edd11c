"""Check products of few rows with 4-bit weights, on a CPU and on a GPU, and the formats that use them."""

from dataclasses import replace

import pytest
import torch

from halfbyte.formats import from_spec, named
from halfbyte.formats.e2m1 import linear_e2m1
from halfbyte.formats.int4 import Gptq, PackQuantized, linear_int4
from halfbyte.formats.linear import PackedProduct
from halfbyte.ops.decode import PackedLinear, packed_linears
from tests.helpers import linear_cases
from tests.helpers.emulated import emulate, needs_compiler

pytest.importorskip("triton")
from halfbyte.kernels.cuda import few_rows
from halfbyte.kernels.cuda.few_rows import Blocks
from halfbyte.kernels.device import KNOWN, assumed

BF16, FP16 = torch.bfloat16, torch.float16
RUN = """
#if SPLIT
extern "C" void run_NAME(u32 blocks, u32 threads, u32 bytes, Parts<Weight> *all, const u16 **x, u32 *batch) {
    launch(blocks, threads, bytes, [&] { NAME(*all, *x, *batch); });
}
extern "C" void run_add(u32 blocks, u32 threads, u32 bytes, const Sums *sums, u32 *columns, u32 *batch) {
    launch(blocks, threads, bytes, [&] { add(*sums, *columns, *batch); });
}
#else
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Weight *w, const u16 **x, const u16 **bias, u16 **out,
                    u32 *batch) {
    launch(blocks, threads, bytes, [&] { NAME(*w, *x, *bias, *out, *batch); });
}
#endif
"""
NAMES = ("few_rows4", "few_rows_e2m1", "few_rows_int4", "few_rows_planes")
SOURCES = {name: RUN.replace("NAME", name) for name in NAMES}
DEVICES = [pytest.param("cpu", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        emulate(few_rows, monkeypatch, SOURCES)
    return request.param


def int4_weight(rows, columns, group, dtype, device):
    """Random parts of an int4 weight of `rows` outputs: qweight, qzeros, scales."""
    words = torch.iinfo(torch.int32)
    qweight = torch.randint(words.min, words.max, (columns // 8, rows), dtype=torch.int32)
    qzeros = torch.randint(words.min, words.max, (columns // group, rows // 8), dtype=torch.int32)
    scales = (torch.rand(columns // group, rows) * 0.01 + 0.001).to(dtype)
    return [tensor.to(device) for tensor in (qweight, qzeros, scales)]


def compare(out, exact, dtype):
    """Compare with the product in fp64, up to rounding of the weights and of the result to `dtype`."""
    assert out.dtype is dtype
    assert (out.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


PAIRS = Blocks(2, 1, 4)  # two tiles at a time
FLAT = Blocks(2, 2, 1)  # two warps share x


@pytest.mark.parametrize(
    ("group", "scale_dtype", "shift", "batch", "dtype", "blocks"),
    [(32, FP16, 1, 1, BF16, None), (64, BF16, 0, 11, FP16, FLAT), slow(128, FP16, 1, 37, BF16, FLAT),
     slow(1280, FP16, 0, 5, BF16, PAIRS), (40, FP16, 1, 2, BF16, None), slow(160, BF16, 0, 9, FP16, FLAT)],
)  # fmt: skip
def test_int4_equals_the_reference(group, scale_dtype, shift, batch, dtype, blocks, device):
    rows, columns = 112, 1280
    weight = int4_weight(rows, columns, group, scale_dtype, device)
    x = torch.randn(batch, columns, dtype=dtype, device=device)
    bias = torch.randn(rows, dtype=dtype, device=device)
    out = few_rows.few_rows_int4(x, *weight, None, None, shift, bias, blocks)
    compare(out, linear_int4.reference(x.float(), *weight, None, None, shift, bias.float()).double(), dtype)


def test_int4_with_inputs_in_another_order(device):
    rows, columns = 64, 512
    weight = int4_weight(rows, columns, 64, FP16, device)
    order = torch.randperm(columns)
    order = torch.stack([order, order.argsort()]).int().to(device)
    x = torch.randn(3, columns, dtype=BF16, device=device)
    out = few_rows.few_rows_int4(x, *weight, None, order, 1, None)
    compare(out, linear_int4.reference(x.float(), *weight, None, order, 1, None).double(), BF16)


def test_several_weights(device):
    """Two launches for weights with one order of inputs; one has a bias, one an adapter's term."""
    columns, dtype, sizes = 512, BF16, (64, 96, 32)
    order = torch.randperm(columns)
    order = torch.stack([order, order.argsort()]).int().to(device)
    bias, linears = torch.randn(sizes[0], dtype=dtype, device=device), []
    for rows in sizes:
        product = PackedProduct(linear_int4, (*int4_weight(rows, columns, 64, FP16, device), None, None, 1), order)
        linears.append(PackedLinear(product, rows, columns, None if linears else bias))
    term = torch.randn(11, 16, dtype=dtype, device=device), torch.randn(sizes[1], 16, dtype=dtype, device=device)
    terms = [None, term, None]
    x = torch.randn(11, columns, dtype=dtype, device=device)
    assert few_rows.several_obstacle(x, linears, terms) is None
    expected = packed_linears.reference(x.float(), linears, [t and (t[0].float(), t[1].float()) for t in terms])
    for out, exact in zip(few_rows.several(x, linears, terms), expected, strict=True):
        compare(out, exact.double(), dtype)
    alike = replace(linears[0], product=linears[0].product._replace(order=order.clone()))
    assert few_rows.several_obstacle(x, [alike, *linears[1:]], terms)


@pytest.mark.parametrize(
    ("spec", "batch", "dtype", "blocks"),
    [
        ("nvfp4", 1, BF16, None),
        slow("nvfp4-1d", 9, FP16, FLAT),
        slow("nvfp4-46", 8, FP16, None),
        ("mxfp4", 33, BF16, FLAT),
        ("mxfp4", 2, FP16, None),
    ],
)
def test_e2m1_equals_the_reference(spec, batch, dtype, blocks, device):
    format_, shape = named(spec), (80, 768)
    parts = {name: part.to(device) for name, part in format_.quantize(torch.randn(shape) * 0.05).items()}
    stored = parts["packed"], parts["scale"], parts.get("factor"), getattr(format_, "tile", (1, 32))
    x = torch.randn(batch, shape[1], dtype=dtype, device=device)
    out = few_rows.few_rows_e2m1(x, *stored, None, blocks)
    compare(out, linear_e2m1.reference(x.float(), *stored, None).double(), dtype)


@pytest.mark.parametrize(
    ("kind", "blocksize", "nested", "batch", "dtype", "blocks"),
    [("nf4", 64, True, 7, BF16, None), slow("fp4", 64, False, 16, FP16, FLAT), slow("nf4", 32, True, 2, FP16, None),
     ("nf4", 32, True, 64, BF16, FLAT), slow("fp4", 128, True, 1, BF16, None), slow("nf4", 256, False, 3, BF16, None),
     ("nf4", 512, True, 9, BF16, FLAT), slow("nf4", 2048, False, 1, FP16, None)],
)  # fmt: skip
def test_blockwise4_equals_the_reference(kind, blocksize, nested, batch, dtype, blocks, device):
    """Blocks of 512 and more cross rows of 768 columns."""
    weight = linear_cases.arguments(96, 768, kind, blocksize, nested, device)

    def linear(x, *arguments):
        return few_rows.few_rows_blockwise4(x, *arguments, blocks=blocks)

    linear_cases.check(linear, batch, weight, 768, dtype)


@pytest.mark.parametrize(
    ("spec", "batch", "dtype", "blocks"),
    [("kbit:2:nf", 1, BF16, None), ("kbit:3:bnf", 9, FP16, FLAT), slow("kbit:4:fitted", 3, BF16, PAIRS),
     slow("kbit:5:nf", 2, FP16, None), slow("hqq:2:256", 1, BF16, None), slow("hqq:3:32", 4, BF16, PAIRS),
     ("hqq:4:64", 17, BF16, FLAT), slow("hqq:8:128", 1, BF16, None), ("hqq:8:32:range:float16", 2, FP16, None)],
)  # fmt: skip
def test_bit_planes_equal_the_reference(spec, batch, dtype, blocks, device):
    format_, shape = from_spec(spec), (80, 768)
    parts = {name: part.to(device) for name, part in format_.quantize(torch.randn(shape) * 0.05).items()}
    x = torch.randn(batch, shape[1], dtype=dtype, device=device)
    if format_.name == "hqq":
        stored = parts["packed"], parts["scales"], parts["zeros"], format_.bits, format_.group, shape[0]
        out = few_rows.few_rows_hqq(x, *stored, None, blocks)
    else:
        stored = parts["packed"], parts["scales"], parts["factor"], format_.levels(parts), shape[0]
        out = few_rows.few_rows_bitplane(x, *stored, None, blocks)
    exact = x.double() @ format_.dequantize(parts, shape, torch.float32).double().T
    # scale · zero and the codebook are rounded, too
    assert (out.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


@needs_compiler
@pytest.mark.parametrize("spec", ["kbit:5:nf", slow("kbit:2:nf"), slow("kbit:3:nf")])
def test_tables_that_fit_turing(spec, monkeypatch):
    emulate(few_rows, monkeypatch, SOURCES)
    format_, shape = from_spec(spec), (48, 512)
    parts = format_.quantize(torch.randn(shape) * 0.05)
    x = torch.randn(3, shape[1], dtype=FP16)
    with assumed(KNOWN["t4"]):
        stored = parts["packed"], parts["scales"], parts["factor"], format_.levels(parts), shape[0]
        out = few_rows.few_rows_bitplane(x, *stored, None)
    exact = x.double() @ format_.dequantize(parts, shape, torch.float32).double().T
    assert (out.double() - exact).norm() <= 4 * torch.finfo(FP16).eps * exact.norm()


@needs_compiler
def test_small_weights_in_fp16(monkeypatch):
    """Scales of 1e-7 are below fp16's normal numbers."""
    emulate(few_rows, monkeypatch, SOURCES)
    format_, shape = from_spec("hqq:8:32"), (32, 256)
    parts = format_.quantize(torch.randn(shape) * 1e-5)
    x = torch.randn(2, shape[1], dtype=FP16) * 1000
    out = few_rows.few_rows_hqq(x, parts["packed"], parts["scales"], parts["zeros"], 8, 32, 32, None)
    exact = x.double() @ format_.dequantize(parts, shape, torch.float32).double().T
    assert (out.double() - exact).norm() <= 4 * torch.finfo(FP16).eps * exact.norm()


@needs_compiler
def test_extreme_scales_of_mxfp4(monkeypatch):
    """Powers of two down to 2^-127, and products far from 1."""
    emulate(few_rows, monkeypatch, SOURCES)
    packed = torch.randint(0, 256, (32, 128), dtype=torch.uint8)
    scales = torch.full((32, 8), 127, dtype=torch.uint8)
    scales[0], scales[1], scales[2] = 0, 60, 200
    x = torch.randn(2, 256, dtype=BF16)
    out = few_rows.few_rows_e2m1(x, packed, scales, None, (1, 32), None)
    exact = linear_e2m1.reference(x.float(), packed, scales, None, (1, 32), None)
    torch.testing.assert_close(out[:, 1:].float(), exact[:, 1:], rtol=1e-2, atol=1e-2 * exact[:, 1].abs().max().item())
    assert (out[:, 0].float() - exact[:, 0]).abs().max() < 2.0**-120


def test_which_calls_are_refused():
    int4 = int4_weight(64, 512, 128, FP16, "cpu")
    x = torch.zeros(1, 512, dtype=BF16)

    def obstacle(x=x, weight=int4, index=None):
        return few_rows.int4_obstacle(x, *weight, index, None, 1, None)

    with assumed(KNOWN["rtx3090"]):
        assert obstacle() is None
        assert obstacle(x.expand(65, -1))
        assert obstacle(x.float())
        assert obstacle(index=torch.zeros(512, dtype=torch.int32))
        assert obstacle(weight=int4_weight(24, 512, 128, FP16, "cpu"))
        assert obstacle(weight=int4_weight(64, 512, 4, FP16, "cpu"))
        assert obstacle(weight=int4_weight(64, 512, 128, torch.float32, "cpu"))
        assert obstacle(torch.zeros(1, 384, dtype=BF16), int4_weight(64, 384, 128, FP16, "cpu"))
    with assumed(KNOWN["t4"]):
        assert obstacle()
        assert obstacle(x.half()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("format_", [Gptq(128), PackQuantized(64, "bfloat16")])
def test_the_linear_of_a_format_runs_on_the_kernel(format_, monkeypatch):
    calls = []
    launch = few_rows._launch
    monkeypatch.setattr(
        few_rows, "_launch", lambda operand, *args: calls.append(operand.source) or launch(operand, *args)
    )
    scale_dtype = getattr(torch, format_.scale_dtype)
    weight = int4_weight(256, 512, format_.group_size, scale_dtype, "cuda")
    parts = dict(zip(("qweight", "qzeros", "scales"), weight, strict=True))
    x = torch.randn(3, 512, dtype=BF16, device="cuda")
    out = format_.linear(x, parts, (256, 512), None)
    compare(out, x.double() @ format_.dequantize(parts, (256, 512), torch.float32).double().T, BF16)
    assert calls == ["few_rows_int4"]
