"""HQQ against its definition, its objective, and the authors' package if installed."""

from itertools import pairwise

import pytest
import torch

from halfbyte.formats import HQQ, from_spec, hqq
from halfbyte.formats.bitplane import unpack_planes
from halfbyte.utils.errors import ModelError
from tests.helpers.sqnr import normal, sqnr


def objective(weight, values):
    """HQQ's objective: the mean of |error|^0.7."""
    return float((weight.double() - values.double()).abs().pow(0.7).mean())


def stored(weight, format):
    return format.dequantize(format.quantize(weight), tuple(weight.shape), torch.float32)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_values_are_scale_times_code_minus_zero(bits):
    weight, format = normal(5, 256), HQQ(bits, 64)
    parts = format.quantize(weight)
    codes = unpack_planes(parts["packed"], bits).view(-1, 64)
    assert int(codes.max()) <= 2**bits - 1
    expected = (codes - parts["zeros"].float()[:, None]) * parts["scales"].float()[:, None]
    assert torch.equal(format.dequantize(parts, (5, 256), torch.float32), expected.view(5, 256))
    # Codes are the nearest for the stored scale and zero.
    best = (weight.view(-1, 64) / parts["scales"].float()[:, None] + parts["zeros"].float()[:, None]).round()
    assert (codes - best.clamp(0, 2**bits - 1)).abs().float().mean() < 1e-4


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_fitting_lowers_the_error(bits, monkeypatch):
    weight, format = normal(64, 512).pow(3), HQQ(bits, 64)  # a heavy tail
    fitted = objective(weight, stored(weight, format))
    monkeypatch.setattr(hqq, "ROUNDS", 1)  # the unfitted zero, of the range's lower end
    assert fitted < objective(weight, stored(weight, format))


def test_groups_are_fitted_one_by_one(monkeypatch):
    """The bytes do not depend on the chunking of groups."""
    weight, format = normal(33, 200), HQQ(4, 64)
    whole = format.quantize(weight)
    monkeypatch.setattr(hqq, "CHUNK", 64 * 5)
    for name, part in format.quantize(weight).items():
        assert torch.equal(part, whole[name]), name


def test_error_falls_with_every_bit():
    found = [sqnr(normal(128, 512), HQQ(bits)) for bits in (2, 3, 4, 8)]
    assert all(more > less + 5 for less, more in pairwise(found))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_against_the_authors_package(bits):
    """The error is at most that of the authors' package with fp32 scales and zeros; +5% at 8 bits (fp16 zeros)."""
    theirs = pytest.importorskip("hqq.core.quantize").Quantizer
    weight = normal(128, 512)
    packed, meta = theirs.quantize(
        weight, nbits=bits, group_size=64, axis=1, round_zero=bits == 4, device="cpu", compute_dtype=torch.float32
    )
    their_values = theirs.dequantize(packed, {**meta, "compute_dtype": torch.float32})
    room = 1.05 if bits == 8 else 1.0
    assert objective(weight, stored(weight, HQQ(bits, 64))) <= room * objective(weight, their_values)


@pytest.mark.parametrize(("options", "named"), [((7, 64), "7-bit"), ((4, 48), "48")])
def test_unsupported_options_are_refused(options, named):
    with pytest.raises(ModelError, match=named):
        HQQ(*options)


def test_zeros_from_the_range():
    weight, format = normal(8, 256), from_spec(HQQ.names["int4"])
    assert format == HQQ(4, 64, fitted=False)
    groups, parts = weight.view(-1, 64), format.quantize(weight)
    step = parts["scales"].float()
    assert torch.equal(parts["zeros"], (-groups.amin(1) / step).half())
    assert objective(weight, stored(weight, HQQ(4, 64))) < objective(weight, stored(weight, format))
    error = (stored(weight, format).view(-1, 64) - groups).abs().amax(1)
    assert (error <= 0.52 * step).all()  # half a step, and what rounding the scale to bf16 cuts off at the ends
    with pytest.raises(ModelError):
        HQQ.parse("4:64:ranges")


def test_scales_in_fp16():
    """fp16 scales as in GGUF's Q8_0: finer than bf16, with an error for scales outside fp16's range."""
    format = from_spec("hqq:8:32:range:float16")
    assert format == HQQ(8, 32, fitted=False, scale_dtype="float16")
    weight = normal(8, 256)
    parts = format.quantize(weight)
    assert parts["scales"].dtype == torch.float16
    fine, coarse = (sqnr(weight, each) for each in (format, HQQ(8, 32, fitted=False)))
    assert fine > coarse
    small = torch.cat([weight[:4], 1e-9 * weight[4:]])  # their scale is 0
    assert torch.equal(stored(small, format)[4:], torch.zeros(4, 256))
    with pytest.raises(ModelError, match="float16"):
        format.quantize(1e8 * weight)
