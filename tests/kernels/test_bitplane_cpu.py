"""The C kernels of kbit and hqq: bit-equal to the torch references at ugly shapes, on one thread and several."""

import pytest
import torch
from plane_cases import HQQ, KBIT, SHAPES, check_dequantize, check_quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGER = (*SHAPES, (130, 33), (67, 1024))


@pytest.fixture
def kernels():
    from halfbyte.dispatch import Unavailable

    try:
        from halfbyte.kernels.native import bitplane as bitplane_cpu
        from halfbyte.kernels.native import hqq as hqq_cpu
    except Unavailable as error:
        pytest.skip(str(error))
    return {"kernel": bitplane_cpu.dequantize, "hqq_kernel": hqq_cpu.dequantize}, bitplane_cpu.quantize


@pytest.mark.parametrize("spec", [*KBIT, *HQQ])
def test_dequantize(kernels, spec):
    check_dequantize([spec], DTYPES, LARGER, **kernels[0])


@pytest.mark.parametrize("spec", KBIT)
def test_quantize(kernels, spec):
    check_quantize([spec], DTYPES, LARGER, kernel=kernels[1])


@pytest.mark.parametrize("spec", ["kbit:3:nf", "kbit:2:affine", "hqq:4:128"])
def test_threads_leave_no_seam(kernels, spec):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_dequantize([spec], [torch.bfloat16], [(131, 1057)], **kernels[0])
        if spec.startswith("kbit"):
            check_quantize([spec], [torch.bfloat16], [(131, 1057)], kernel=kernels[1])
    finally:
        torch.set_num_threads(before)


def test_every_scale_and_every_rounding(kernels):
    """All 256 scale bytes, with factors that take values to fp16's subnormals, its overflow, and fp32's extremes."""
    from halfbyte.ops.bitplane import dequantize_bitplane, kbit_codebook

    codebook = kbit_codebook("nf", 5, torch.device("cpu"))
    packed = torch.randint(-(2**31), 2**31, (256 * 5,), dtype=torch.int64).int()
    scales = torch.arange(256, dtype=torch.uint8)
    for exponent in (-120, -12, 0, 13, 122):
        for dtype in DTYPES:
            arguments = (packed, scales, None, torch.tensor(2.0**exponent), codebook, 256, 32, dtype)
            assert torch.equal(kernels[0]["kernel"](*arguments), dequantize_bitplane.reference(*arguments))


def test_parts_that_are_not_contiguous(kernels):
    from halfbyte.formats import from_spec

    for spec in ("kbit:4:fitted", "kbit:2:affine", "hqq:3:64"):
        format = from_spec(spec)
        parts = format.quantize(torch.randn(7, 96))
        strided = {name: torch.stack([part, part], -1)[..., 0] for name, part in parts.items()}
        found = format.dequantize(strided, (7, 96), torch.float32)
        assert torch.equal(found, format.dequantize(parts, (7, 96), torch.float32))
