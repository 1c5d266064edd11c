"""Check NVFP4's arithmetic: golden roundings, optimal codes, four over six, Hadamard transform, stochastic rounding."""

from itertools import pairwise

import pytest
import torch

from halfbyte.formats.e2m1 import (
    MAGNITUDES,
    codebook_e2m1,
    decode_scales,
    dequantize_e2m1,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_e4m3,
    pack_e2m1,
)
from halfbyte.formats.nvfp4 import ERRORS, hadamard, packed_nvfp4, quantize_nvfp4

CPU = torch.device("cpu")
ONE = torch.tensor(1.0)
DRAWS = 1_000_000


def values_of(codes):
    return codebook_e2m1(CPU)[codes.int()]


def spread(rows=64, columns=160, seed=0):
    """Normal values with block magnitudes that differ by up to 2^12, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-12, 1, (rows, columns // 16, 1), generator=generator)
    blocks = torch.randn(rows, columns // 16, 16, generator=generator) * sizes
    blocks[3, 2] = 0
    return blocks.view(rows, columns)


def tiles_of(matrix, tile_rows):
    rows, columns = matrix.shape
    return matrix.view(rows // tile_rows, tile_rows, columns // 16, 16)


def dequantized(quantized, tile_rows, width):
    packed = pack_e2m1(quantized.codes)
    return dequantize_e2m1(packed, quantized.scales, quantized.factor, (tile_rows, 16), width, torch.float32)


# ---- rounding


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.0, 0.0), (0.25, 0.0), (0.2500001, 0.5), (0.5, 0.5), (0.7499999, 0.5), (0.75, 1.0), (1.25, 1.0),
        (1.2500001, 1.5), (1.7499999, 1.5), (1.75, 2.0), (2.5, 2.0), (2.5000002, 3.0), (3.4999998, 3.0), (3.5, 4.0),
        (5.0, 4.0), (5.0000005, 6.0), (6.0, 6.0), (7.0, 6.0), (1e30, 6.0),
    ],
)  # fmt: skip
def test_e2m1_golden(value, rounded):
    values = torch.tensor([value, -value])
    assert values_of(encode_e2m1(values)).tolist() == [rounded, -rounded]


def test_e2m1_codes_are_those_of_the_specification():
    assert codebook_e2m1(CPU)[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(codebook_e2m1(CPU)[8:], -codebook_e2m1(CPU)[:8])
    assert pack_e2m1(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


@pytest.mark.parametrize(
    ("value", "nearest", "up"),
    [
        (0.0, 0x00, 0x00), (2**-9, 0x01, 0x01), (2**-10, 0x00, 0x01), (1e-9, 0x00, 0x01), (3 * 2**-10, 0x02, 0x02),
        (2**-6, 0x08, 0x08), (1.0, 0x38, 0x38), (1.0625, 0x38, 0x39), (1.1875, 0x3A, 0x3A), (1.13, 0x39, 0x3A),
        (448.0, 0x7E, 0x7E), (447.0, 0x7E, 0x7E), (420.0, 0x7D, 0x7E), (449.0, 0x7E, 0x7E), (1e9, 0x7E, 0x7E),
    ],
)  # fmt: skip
def test_e4m3_golden(value, nearest, up):
    values = torch.tensor([value])
    assert encode_e4m3(values).item() == nearest
    assert encode_e4m3(values, up=True).item() == up


def test_scales_decode():
    e4m3, e8m0 = torch.tensor([0x01, 0x38, 0x7E], dtype=torch.uint8), torch.tensor([0, 127, 254], dtype=torch.uint8)
    assert decode_scales(e4m3, ONE).tolist() == [2**-9, 1.0, 448.0]
    assert decode_scales(e8m0, None).tolist() == [2.0**-127, 1.0, 2.0**127]


# ---- blocks


@pytest.mark.parametrize("tile_rows", [1, 16])
def test_scales_are_two_level(tile_rows):
    matrix = spread()
    _, scales, factor = quantize_nvfp4(matrix, tile_rows)
    assert factor == matrix.abs().max() / 2688
    amax = tiles_of(matrix, tile_rows).abs().amax((1, 3))
    assert torch.equal(scales, (amax / (6 * factor)).to(torch.float8_e4m3fn).view(torch.uint8))
    assert scales.max() == 0x7E
    assert quantize_nvfp4(matrix, tile_rows, "MSE").factor == matrix.abs().max() / 1536


def test_a_square_tile_is_the_same_for_the_transpose():
    matrix = spread(96, 160)
    there, back = (dequantized(quantize_nvfp4(m, 16), 16, m.shape[1]) for m in (matrix, matrix.t()))
    assert torch.equal(there, back.t())
    by_row, by_column = (dequantized(quantize_nvfp4(m, 1), 1, m.shape[1]) for m in (matrix, matrix.t()))
    assert not torch.equal(by_row, by_column.t())


@pytest.mark.parametrize("metric", ERRORS)
@pytest.mark.parametrize("tile_rows", [1, 16])
def test_four_over_six_is_never_worse_than_six(tile_rows, metric):
    matrix = spread()
    found = quantize_nvfp4(matrix, tile_rows, metric)
    blocks = tiles_of(matrix, tile_rows)
    six = encode_e4m3(blocks.abs().amax((1, 3)) / (6 * found.factor))
    step = decode_scales(six, found.factor)[:, None, :, None]
    plain = values_of(encode_e2m1(torch.where(step > 0, blocks / step, 0.0))) * step
    chosen = tiles_of(dequantized(found, tile_rows, matrix.shape[1]), tile_rows)
    errors, of_six = (ERRORS[metric]((blocks - values) / found.factor) for values in (chosen, plain))
    assert (errors <= of_six).all()
    assert torch.equal(errors < of_six, found.scales != six)  # ties stay at six
    assert 0 < (found.scales != six).float().mean() < 0.95


@pytest.mark.parametrize("size", [2.0**-100, 2.0**100])
def test_four_over_six_does_not_depend_on_the_unit(size):
    """The squared errors at this scale are not representable in fp32."""
    assert torch.equal(quantize_nvfp4(spread() * size, 1, "MSE").scales, quantize_nvfp4(spread(), 1, "MSE").scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_reach_the_factor(bad):
    matrix = torch.ones(4, 20)
    matrix[2, 19] = bad
    assert not torch.isfinite(packed_nvfp4(matrix, 16, "MSE")[2])


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e30, 3e38])
def test_wide_ranges(size):
    matrix = torch.randn(16, 32).clamp(-1, 1) * size
    values = dequantized(quantize_nvfp4(matrix, 1), 1, 32)
    assert torch.isfinite(values).all()
    if size > 1e-30:
        assert (values.double() - matrix.double()).norm() < 0.15 * matrix.double().norm()


# ---- random Hadamard transform


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hadamard_is_orthonormal(seed):
    h = hadamard(seed, CPU)
    assert torch.equal(h @ h.t(), torch.eye(16))  # entries are ±1/4: every sum is exact
    assert torch.equal(h.abs(), torch.full((16, 16), 0.25))
    assert not torch.equal(h, hadamard(seed + 1, CPU))


# ---- stochastic rounding


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased_between_all_levels():
    """10^6 draws at three points of every gap, both signs: the mean is within 4 standard errors, codes are adjacent."""
    generator = torch.Generator().manual_seed(1)
    for lower, upper in pairwise(MAGNITUDES):
        for share, sign in ((0.03, 1), (0.5, -1), (0.9, 1)):
            value = torch.tensor(sign * (lower + share * (upper - lower)))
            drawn = values_of(encode_e2m1_stochastic(value.expand(DRAWS), generator))
            assert set(drawn.unique().tolist()) == {sign * lower, sign * upper}
            error = 4 * (upper - lower) * (share * (1 - share) / DRAWS) ** 0.5
            assert abs(drawn.double().mean() - value.double()) <= error


@pytest.mark.parametrize("metric", [None, "MSE"])
def test_a_tensor_is_unbiased_as_a_whole(metric):
    """Scales round up, so nothing saturates; the choice of 4 or 6 does not depend on the draws."""
    row = torch.randn(1, 64)
    found = quantize_nvfp4(row.expand(50_000, 64), 1, metric, stochastic=True)
    assert torch.equal(found.scales, found.scales[:1].expand_as(found.scales))
    drawn = dequantized(found, 1, 64).double()
    error = 4.5 * drawn.std(0) / 50_000**0.5 + 1e-6
    assert ((drawn.mean(0) - row[0].double()).abs() <= error).all()
