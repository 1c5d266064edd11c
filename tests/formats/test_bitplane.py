"""kbit against its definition: planes, E4M4 scales, nearest codes; and its error on real weights."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfbyte.formats import KBit, from_spec
from halfbyte.formats.bitplane import (
    NF,
    e4m4_decode,
    e4m4_encode,
    fit_codebook,
    fit_scales,
    kbit_codebook,
    pack_planes,
    unpack_planes,
)
from halfbyte.utils.errors import ModelError
from tests.helpers.sqnr import normal, sqnr

CPU = torch.device("cpu")
quick = settings(max_examples=20, deadline=None)
SYMMETRIC = [f"kbit:{k}:{kind}" for k in (2, 3, 4, 5) for kind in ("nf", "bnf", "bof")]


# ---- planes and scales


@quick
@given(st.data(), st.sampled_from([2, 3, 4, 5, 8]))
def test_planes_round_trip(data, k):
    codes = torch.from_numpy(
        data.draw(arrays(np.int32, (data.draw(st.integers(1, 5)), 32), elements=st.integers(0, 2**k - 1)))
    )
    packed = pack_planes(codes, k)
    assert (packed.shape, packed.dtype) == ((codes.shape[0] * k,), torch.int32)
    assert torch.equal(unpack_planes(packed, k), codes)
    for block, row in enumerate(codes.tolist()):  # bit j of word b of a block is bit b of its code j
        for b in range(k):
            word = int(packed[block * k + b]) & 0xFFFFFFFF
            assert word == sum(((code >> b) & 1) << j for j, code in enumerate(row))


def e4m4_by_definition(value):
    """The nearest representable value, by its formula in exact arithmetic; ties to the even mantissa."""
    if value < 2.0**-10:
        return round(value * 2.0**14) * 2.0**-14
    exponent = math.frexp(value)[1] - 1
    return min(round(value * 2.0 ** (4 - exponent)) * 2.0 ** (exponent - 4), 31.0)


@quick
@given(arrays(np.float32, st.integers(1, 200), elements=st.floats(0, 40, width=32)))
def test_e4m4_rounds_to_nearest(values):
    found = e4m4_decode(e4m4_encode(torch.from_numpy(values)))
    assert found.tolist() == [e4m4_by_definition(float(value)) for value in values]


def test_e4m4_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    values = e4m4_decode(codes)
    assert torch.equal(e4m4_encode(values), codes)
    assert (values[1:] > values[:-1]).all()
    assert values[[0, 1, 16, 255]].tolist() == [0, 2**-14, 2**-10, 31]
    exact = [2 ** ((c >> 4) - 11) * (1 + (c & 15) / 16) if c >= 16 else 2**-10 * c / 16 for c in range(256)]
    assert values.tolist() == exact
    # A mantissa that rounds up to 16 carries into the exponent; the largest value saturates.
    assert e4m4_decode(e4m4_encode(torch.tensor([1.99, 33.0, 1e30]))).tolist() == [2.0, 31.0, 31.0]


@quick
@given(arrays(np.float32, st.integers(1, 50), elements=st.floats(2.0**-10, 31, width=32)))
def test_scales_in_range_need_no_factor(absmax):
    scales, factor = fit_scales(torch.from_numpy(absmax))
    assert factor == 1
    assert (e4m4_decode(scales) / torch.from_numpy(absmax) - 1).abs().max() <= 1 / 32


@quick
@given(st.floats(-36, 37), arrays(np.float32, st.integers(1, 50), elements=st.floats(0, 10, width=32)))
def test_a_factor_brings_any_scales_in_range(exponent, decades):
    """Scales within 2^14 of the largest have a relative error of at most 1/32, at any magnitude."""
    absmax = (torch.tensor(10.0) ** (exponent - torch.from_numpy(decades).clamp(max=4))).clamp(min=1e-36)
    scales, factor = fit_scales(absmax)
    assert math.log2(factor) == round(math.log2(factor))
    assert (e4m4_decode(scales) * factor / absmax - 1).abs().max() <= 1 / 32


# ---- codes and codebooks


def test_nf_is_quantiles_of_the_normal_distribution():
    for k in (2, 3, 4, 5):
        n = 2**k
        quantiles = torch.special.ndtri(torch.linspace(0.5 / n, 1 - 0.5 / n, n, dtype=torch.float64))
        torch.testing.assert_close(
            kbit_codebook("nf", k, CPU), (quantiles / quantiles.max()).float(), rtol=1e-6, atol=1e-8
        )
        assert len(NF[k]) == n // 2


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_bnf_equals_lloyd_max_on_normal_weights(k):
    blocks = normal(1 << 15, 32)
    absmax = blocks.abs().amax(1)
    found = fit_codebook(blocks, *fit_scales(absmax), k, padding=0)
    assert (found - kbit_codebook("bnf", k, CPU)).abs().max() < 0.02
    assert (found[1:] > found[:-1]).all()


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_bof_levels_are_means_of_their_cells_around_fixed_ends_and_zero(k):
    blocks = normal(1 << 15, 32)
    values = (blocks / blocks.abs().amax(1, keepdim=True)).view(-1)
    levels = kbit_codebook("bof", k, CPU)
    cells = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
    means = torch.stack([values[cells == code].mean() for code in range(2**k)])
    free = (levels.abs() != 1) & (levels != 0)
    assert int((~free).sum()) == 3
    torch.testing.assert_close(levels[free], means[free], atol=2e-3, rtol=0)


def block_errors(weight, format):
    values = format.dequantize(format.quantize(weight), tuple(weight.shape), torch.float32)
    return (values - weight).double().square().view(-1, 32).sum(1)


@pytest.mark.parametrize("spec", ["kbit:2:bof", "kbit:3:bof", "kbit:4:nf", "kbit:5:bof"])
def test_a_searched_scale_is_never_worse_in_a_block(spec):
    weight = normal(40, 96)
    weight[::3, 5] *= 20
    plain, searched = block_errors(weight, from_spec(spec)), block_errors(weight, from_spec(f"{spec}:searched"))
    assert bool((searched <= plain).all())
    assert searched.sum() < plain.sum()
    assert bool((searched == plain).any())


def test_searched_codes_are_read_like_any_others():
    """The search changes the choice of scales, not the meaning of stored bytes."""
    weight = normal(9, 70)
    searched = from_spec("kbit:4:bof:searched")
    parts = searched.quantize(weight)
    values = searched.dequantize(parts, (9, 70), torch.float32)
    assert torch.equal(values, from_spec("kbit:4:bof").dequantize(parts, (9, 70), torch.float32))
    again = searched.quantize(values)
    assert all(torch.equal(again[name], part) for name, part in parts.items())


def test_an_outlier_and_its_neighbours_near_zero_survive():
    weight = torch.full((1, 32), 1e-3)
    weight[0, 7] = 1.0
    for spec in ("kbit:2:bof:searched", "kbit:3:bof:searched"):
        values = from_spec(spec).dequantize(from_spec(spec).quantize(weight), (1, 32), torch.float32)
        assert float(values[0, 7]) == 1.0
        assert not values[0, :7].any()
    bnf = from_spec("kbit:3:bnf").dequantize(from_spec("kbit:3:bnf").quantize(weight), (1, 32), torch.float32)
    assert float(bnf[0, 7]) < 0.9
    assert float(bnf[0, 0]) > 0.1


@quick
@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=st.floats(-100, 100, width=32)),
       st.sampled_from(SYMMETRIC))  # fmt: skip
def test_codes_round_to_nearest(weight, spec):
    weight, format = torch.from_numpy(np.where(np.abs(weight) < 1e-30, 0, weight)), from_spec(spec)
    parts = format.quantize(weight)
    found = format.dequantize(parts, tuple(weight.shape), torch.float32).double()
    per_row = -(-weight.shape[1] // 32)
    scales = (e4m4_decode(parts["scales"]) * parts["factor"]).double().view(-1, per_row)
    scales = scales.repeat_interleave(32, 1)[:, : weight.shape[1]]
    choices = scales.unsqueeze(-1) * kbit_codebook(format.codebook, format.k, CPU).double()
    best = (choices - weight.double().unsqueeze(-1)).abs().min(-1).values
    assert (((found - weight).abs() - best) <= 1e-6 * scales).all()


def test_blocks_do_not_cross_rows():
    """An outlier at the end of a row does not change the next row."""
    weight = normal(4, 33)
    louder = weight.clone()
    louder[1, 32] = 1.0
    for format in [*KBit.examples()[:2], KBit(4)]:
        one, other = (format.dequantize(format.quantize(w), (4, 33), torch.float32) for w in (weight, louder))
        assert torch.equal(one[[0, 2, 3]], other[[0, 2, 3]])
        assert torch.equal(one[1, :32], other[1, :32])


def test_fitted_codebook_represents_three_magnitudes():
    """Eight levels represent weights of three magnitudes exactly, up to the rounding of the scale."""
    weight = torch.tensor([1.0, 0.5, -0.125, -1.0])[
        torch.randint(4, (64, 96), generator=torch.Generator().manual_seed(0))
    ]
    assert sqnr(weight, KBit(3, "fitted")) > 60
    assert sqnr(weight, KBit(3, "nf")) < 30


# ---- error


@pytest.mark.parametrize("kind", ["nf", "bnf", "bof", "fitted"])
def test_error_falls_with_every_bit(kind):
    found = [sqnr(normal(256, 512), KBit(k, kind)) for k in (2, 3, 4, 5)]
    assert all(more > less + 4 for less, more in pairwise(found))


# ---- unsupported options


@pytest.mark.parametrize(
    ("options", "named"),
    [((6, "nf"), "6-bit"), ((4, "nf4"), "'nf4'"), ((3, "affine"), "3 bits"), ((3, "bnf", True), "bnf")],
)
def test_unsupported_options_are_refused(options, named):
    with pytest.raises(ModelError, match=named):
        KBit(*options)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), ()])
@pytest.mark.parametrize("format", KBit.examples(), ids=lambda format: format.spec)
def test_empty_tensors_and_scalars(format, shape):
    weight = torch.full(shape, 0.5)
    parts = format.quantize(weight)
    assert {name: (tuple(p.shape), p.dtype) for name, p in parts.items()} == format.part_specs(shape)
    torch.testing.assert_close(format.dequantize(parts, shape, torch.float32), weight, rtol=0.15, atol=0)
