"""Check 4-bit kernels bit for bit against the reference, at irregular sizes, past 2^31 values and on streams."""

import importlib
import importlib.util
import itertools

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats import Blockwise4, blockwise4
from halfbyte.formats.blockwise4 import dequantize_blockwise4, quantize_blockwise4
from halfbyte.formats.codebooks import dynamic_map
from halfbyte.functional import dequantize_4bit, quantize_4bit
from halfbyte.ops import blockwise_cuda
from tests.helpers.kernel_backends import DEVICES, backends, cases

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), -float("inf")]
KINDS = ("nf4", "fp4")
# One value; one block plus or minus one; an odd number; a tail of less than 8 values; programs that end within a block.
COUNTS = (1, 2, 7, 31, 33, 63, 64, 65, 1001, 4095, 4096, 4097, 8193, 16387)


def weight_of(count, dtype, device="cpu"):
    weight = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.03
    weight[::13] = 0
    weight[64:128] = 0  # a whole block of zeros
    return weight.to(dtype).to(device)


def quantized(count, blocksize, kind, nested, dtype=torch.float32):
    """Arguments of `dequantize_blockwise4` up to `numel`, quantized by the reference on the CPU."""
    packed, absmax = blockwise4.quantize_blockwise4.reference(weight_of(count, dtype), blocksize, kind)
    if not nested:
        return packed, absmax, None, blocksize, kind, count
    code = dynamic_map()
    scales, second, offset = blockwise4.quantize_scales(absmax, code)
    return packed, scales, (second, code, offset), blocksize, kind, count


def check_dequantize(kernel, dtypes, blocksizes, counts=COUNTS, device="cpu"):
    """Check that the values equal the reference's bit for bit."""
    for count, blocksize, kind, nested in itertools.product(counts, blocksizes, KINDS, (False, True)):
        arguments = quantized(count, blocksize, kind, nested)
        moved = [to(argument, device) for argument in arguments]
        for dtype in dtypes:
            found = kernel(*moved, dtype)
            expected = blockwise4.dequantize_blockwise4.reference(*arguments, dtype)
            assert (found.shape, found.dtype) == ((count,), dtype)
            assert torch.equal(found.cpu(), expected), (count, blocksize, kind, nested, dtype)


def check_quantize(kernel, dtypes, blocksizes, counts=COUNTS, device="cpu"):
    """Check that the codes and scales equal the reference's bit for bit."""
    for count, blocksize, kind, dtype in itertools.product(counts, blocksizes, KINDS, dtypes):
        weight = weight_of(count, dtype)
        packed, absmax = kernel(weight.to(device), blocksize, kind)
        expected_packed, expected_absmax = blockwise4.quantize_blockwise4.reference(weight, blocksize, kind)
        assert packed.shape == expected_packed.shape
        assert torch.equal(absmax.cpu(), expected_absmax), (count, blocksize, kind, dtype)
        assert torch.equal(packed.cpu(), expected_packed), (count, blocksize, kind, dtype)


def to(argument, device):
    if isinstance(argument, tuple):
        return tuple(part.to(device) for part in argument)
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument


@pytest.fixture
def kernels(backend):
    """The module of kernels; on a GPU the ops."""
    if backend == "gpu":
        return type("Ops", (), {"dequantize": dequantize_blockwise4, "quantize": quantize_blockwise4})
    try:
        return importlib.import_module(f"halfbyte.kernels.{'native' if backend == 'cpu' else 'triton'}.blockwise4")
    except Unavailable as error:
        pytest.skip(str(error))


# The interpreter takes 5-12 ms a program and computes bf16 wrongly: few programs, fp32 and fp16 only.
@cases(
    ("blocksize", "dtypes", "counts"),
    cpu=[(blocksize, DTYPES, COUNTS) for blocksize in (32, 64, 512, 4096)],
    gpu=[(blocksize, DTYPES, COUNTS) for blocksize in (32, 64, 128, 512, 4096)],
    interpret=[(32, DTYPES[:2], (1, 65, 1001)), (256, DTYPES[:2], (1, 65, 1001)), (64, DTYPES[1:2], (8193,))],
)
def test_dequantize(kernels, backend, blocksize, dtypes, counts):
    check_dequantize(kernels.dequantize, dtypes, [blocksize], counts, DEVICES[backend])


@cases(
    ("blocksize", "dtypes", "counts"),
    cpu=[(blocksize, DTYPES, COUNTS) for blocksize in (32, 64, 512, 4096)],
    gpu=[(blocksize, DTYPES, COUNTS) for blocksize in (32, 64, 128, 512, 4096)],
    interpret=[(32, DTYPES[:2], (1, 65, 1001)), (256, DTYPES[:2], (1, 65, 1001)), (64, DTYPES[:1], (8193,)),
               (4096, DTYPES[:1], (8193,))],
)  # fmt: skip
def test_quantize(kernels, backend, blocksize, dtypes, counts):
    check_quantize(kernels.quantize, dtypes, [blocksize], counts, DEVICES[backend])


@cases(
    ("blocksize", "dtypes", "counts"),
    gpu=[(blocksize, DTYPES, COUNTS) for blocksize in (32, 64, 128, 512, 4096)],
    interpret=[(32, DTYPES[:2], (1, 65, 1001)), (64, DTYPES[:1], (8193,)), (4096, DTYPES[:1], (8193,))],
)
def test_quantize_as_bitsandbytes_cuda_kernels(backend, blocksize, dtypes, counts):
    """Zeros, partial blocks and numbers below the smallest normal one among the values."""
    kernel = importlib.import_module("halfbyte.kernels.triton.blockwise4")
    for count, kind, dtype in itertools.product(counts, KINDS, dtypes):
        weight = weight_of(count, dtype).to(DEVICES[backend])
        weight[5:7] = 1e-39
        found = kernel.quantize_cuda(weight, blocksize, kind)
        expected = blockwise_cuda.quantize_blockwise4_cuda.reference(weight, blocksize, kind)
        assert all(map(torch.equal, found, expected)), (count, kind, dtype)
        scales = expected[1].float()
        assert torch.equal(kernel.reciprocal(scales), blockwise_cuda.approximate_reciprocal(scales))


def test_codes_of_bitsandbytes_cuda_kernels_at_their_thresholds():
    code = dynamic_map()
    middles = (code[:-1] + code[1:]) * 0.5
    ones = torch.ones(len(middles))
    codes, _ = blockwise_cuda.quantize_blockwise8_cuda(torch.stack([middles, ones], 1).view(-1), code, 2)
    lower = torch.arange(len(middles))
    assert torch.equal(codes.view(-1, 2)[:, 0].long(), lower + lower % 2)  # the even one of two codes
    for kind, zero, tiny in (("nf4", 0x00, 0x77), ("fp4", 0x00, 0x88)):
        packed, absmax = blockwise_cuda.quantize_blockwise4_cuda(torch.zeros(4), 64, kind)
        assert (packed.flatten().tolist(), absmax.tolist()) == ([zero] * 2, [0.0])
        packed, _ = blockwise_cuda.quantize_blockwise4_cuda(torch.tensor([-1e-4, -1e-4, 1.0]), 64, kind)
        assert packed[0].item() == tiny  # FP4 keeps the sign
    for kind in KINDS:
        limits, codes = blockwise_cuda.thresholds(kind, torch.device("cpu"))
        pairs = torch.stack([limits, torch.nextafter(limits, torch.tensor(2.0))], 1)
        values = torch.nn.functional.pad(pairs, (0, 2), value=1.0)  # blocks of 4 with the scale 1
        packed, _ = blockwise_cuda.quantize_blockwise4_cuda(values, 4, kind)
        pairs = packed.view(-1, 2)[:, 0]
        assert torch.equal(pairs >> 4, codes[:-1])
        assert torch.equal(pairs & 15, codes[1:])


@backends("cpu")
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_values_do_not_depend_on_threads(kernels, blocksize):
    before, counts = torch.get_num_threads(), (1 << 17, (1 << 18) + 4097)
    torch.set_num_threads(2)
    try:
        check_dequantize(kernels.dequantize, [torch.bfloat16], [blocksize], counts)
        check_quantize(kernels.quantize, [torch.bfloat16], [blocksize], counts)
    finally:
        torch.set_num_threads(before)


@cases(("rows", "low", "high"), cpu=[(4096, -44, 38)], gpu=[(1 << 14, -30, 30)])
def test_wide_ranges(kernels, backend, rows, low, high):
    """Magnitudes from 10^low on: denormals, and blocks with a scale below the smallest reciprocal."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.rand(rows, 1, generator=generator) * (high - low) + low
    weight = (torch.randn(rows, 64, generator=generator).clamp(-3, 3) * 10.0**exponent).view(-1)
    for kind in KINDS:
        expected = quantize_blockwise4.reference(weight, 64, kind)
        found = kernels.quantize(weight.to(DEVICES[backend]), 64, kind)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
        for dtype in DTYPES:
            arguments = (*expected, None, 64, kind, weight.numel(), dtype)
            values = kernels.dequantize(*(to(argument, DEVICES[backend]) for argument in arguments))
            assert torch.equal(values.cpu(), dequantize_blockwise4.reference(*arguments))


@backends("cpu")
def test_every_rounding_to_16_bits(kernels):
    """Products that fall between two 16-bit values, ties among them, for all 256 nested scales."""
    packed, absmax, nested, *_ = quantized(64 * 256, 64, "nf4", True)
    absmax = torch.arange(256, dtype=torch.uint8)
    for dtype in DTYPES:
        arguments = (packed, absmax, nested, 64, "nf4", 64 * 256, dtype)
        assert torch.equal(kernels.dequantize(*arguments), dequantize_blockwise4.reference(*arguments))


@cases(
    "bad",
    **{backend: [float("nan"), -float("nan"), float("inf"), -float("inf")] for backend in ("cpu", "gpu", "interpret")},
)
def test_nonfinite_values_reach_the_scale(kernels, backend, bad):
    for dtype in DTYPES[:1] if backend == "interpret" else DTYPES:
        for count in (130,) if backend == "interpret" else (70, 5001):
            for at in (0, 37, count - 1):
                weight = weight_of(count, dtype)
                weight[at] = bad
                assert not torch.isfinite(kernels.quantize(weight.to(DEVICES[backend]), 64, "nf4")[1]).all()


@backends("cpu")
def test_non_contiguous_parts(kernels):
    packed, absmax, (second, code, offset), *rest = quantized(64 * 600, 64, "nf4", True)
    expected = kernels.dequantize(packed, absmax, (second, code, offset), *rest, torch.float32)
    strided = [torch.stack([part, part], -1)[..., 0] for part in (packed, absmax, second, code)]
    found = kernels.dequantize(strided[0], strided[1], (strided[2], strided[3], offset), *rest, torch.float32)
    assert torch.equal(found, expected)
    weight = weight_of(64 * 130, torch.float32).view(64, 130)
    for one, other in zip(
        kernels.quantize(weight.t(), 64, "nf4"), kernels.quantize(weight.t().contiguous(), 64, "nf4"), strict=True
    ):
        assert torch.equal(one, other)


@backends("interpret")
def test_nothing_is_written_past_the_end(kernels):
    packed, absmax = kernels.quantize(torch.ones(5), 64, "nf4")
    assert packed.shape == (3, 1)
    assert packed[-1].item() == 0xF7  # the odd tail's low nibble is zero
    assert torch.equal(kernels.dequantize(packed, absmax, None, 64, "nf4", 5, torch.float32), torch.ones(5))


@pytest.mark.gpu
def test_format_on_the_gpu_equals_the_cpu_nested_scales_included():
    weight = weight_of(67 * 131, torch.bfloat16).view(67, 131)
    format_ = Blockwise4("nf4", 64, True)
    expected, found = format_.quantize(weight), format_.quantize(weight.cuda())
    assert torch.equal(found["packed"].cpu(), expected["packed"])
    # The mean of the scales is summed in another order, so everything computed from it may differ in the last bit.
    torch.testing.assert_close(found["nested_offset"].cpu(), expected["nested_offset"], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        format_.dequantize(found, (67, 131), torch.float32).cpu(),
        format_.dequantize(expected, (67, 131), torch.float32),
        rtol=1e-2,
        atol=1e-6,
    )


@pytest.mark.gpu
@pytest.mark.large(13)
def test_more_than_two_to_the_31_values():
    count = 2**31 + 4096 + 3
    weight = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    ends = (0, 2**31 - 64, 2**31, count - 3)
    for start in ends:
        weight[start : start + 3] = torch.tensor([1.0, -1.0, 0.5], device="cuda")
    packed, absmax = quantize_blockwise4(weight, 64, "fp4")
    del weight
    values = dequantize_blockwise4(packed, absmax, None, 64, "fp4", count, torch.bfloat16)
    for start in ends:
        assert values[start : start + 3].tolist() == [1.0, -1.0, 0.5]
    assert sum(int(torch.count_nonzero(part)) for part in values.split(2**28)) == 3 * len(ends)  # int64 in between


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_values_equal_those_of_bitsandbytes(kind, nested):
    import bitsandbytes.functional as bnb

    for dtype in DTYPES:
        for shape in ((67, 131), (1024, 1024), (9,)):
            weight = weight_of(torch.Size(shape).numel(), dtype, "cuda").view(shape)
            packed, state = bnb.quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
            _, mine = quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
            mine.absmax = state.absmax
            if nested:
                mine.nested_absmax, mine.nested_code, mine.offset = state.state2.absmax, state.state2.code, state.offset
            assert torch.equal(dequantize_4bit(packed, mine), bnb.dequantize_4bit(packed, state)), (dtype, shape)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_drop_in_equal_those_of_bitsandbytes(kind, dtype, nested):
    import bitsandbytes.functional as real

    from halfbyte.bitsandbytes import functional as own

    for count in (2**22, 4099, 1):
        weight = weight_of(count, dtype, "cuda")
        options = {"compress_statistics": nested, "quant_type": kind}
        (mine, state), (theirs, expected) = (module.quantize_4bit(weight, **options) for module in (own, real))
        assert torch.equal(mine, theirs)
        assert torch.equal(state.absmax, expected.absmax)
        if nested:
            assert torch.equal(state.state2.absmax, expected.state2.absmax)


@pytest.mark.gpu
def test_results_follow_the_current_stream():
    arguments = [to(argument, "cuda") for argument in quantized(16387, 64, "nf4", True)]
    expected = dequantize_blockwise4(*arguments, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = dequantize_blockwise4(*arguments, torch.bfloat16)
    side.synchronize()
    assert torch.equal(found, expected)
