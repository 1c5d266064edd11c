"""Rounding to affine integers in groups: GPTQ's and compressed-tensors' formats quantize with it."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from halfbyte.formats import Awq, Gptq, GptqV2, PackQuantized, PackQuantizedZeros
from halfbyte.formats.affine import quantize_affine
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

CLASSES = (Gptq, GptqV2, Awq, PackQuantized, PackQuantizedZeros)
SIZES = ((8, 32, 32), (24, 96, 32), (40, 192, 64), (8, 384, 128), (72, 104, 104))  # outputs, inputs, group size


def errors(groups, zeros, step, bits):
    """Squared error of rounding each group [..., n]."""
    codes = ((groups / step).round() + zeros).clamp(0, 2**bits - 1)
    return ((codes - zeros) * step - groups).square().sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_group_is_rounded_worse_than_over_its_range(bits, symmetric):
    torch.manual_seed(bits)
    weight = torch.distributions.StudentT(3.0).sample((40, 192)) * 0.02
    codes, zeros, scales = quantize_affine(weight, 64, bits, symmetric, torch.bfloat16)
    assert (codes.dtype, zeros.shape, scales.dtype) == (torch.int32, (40, 3), torch.bfloat16)
    assert (int(codes.min()), int(codes.max())) == (0, 2**bits - 1)
    assert bool((zeros == 2 ** (bits - 1)).all()) == symmetric
    groups, zeros = weight.view(40, 3, 64), zeros[..., None]
    step = scales.float()[..., None]
    error = ((codes.view(40, 3, 64) - zeros) * step - groups).square().sum(-1)
    torch.testing.assert_close(error, errors(groups, zeros, step, bits))
    low, high = groups.amin(-1), groups.amax(-1)
    span = 2 * torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    over_range = errors(groups, zeros, (span / (2**bits - 1)).bfloat16().float()[..., None], bits)
    assert bool((error <= over_range * (1 + 1e-4)).all())
    assert float(error.sum()) < (0.97 if bits == 4 else 1.0001) * float(over_range.sum())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES)
def test_packed_weights_hold_the_codes(cls, outputs, inputs, group):
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    format_ = cls(group, "bfloat16", "runs" if cls is Awq else "listed")
    stored = QuantizedTensor.quantize(weight, format_)
    assert {name: (tuple(part.shape), part.dtype) for name, part in stored.parts.items()} == format_.part_specs(
        (outputs, inputs)
    )
    codes, zeros, scales = quantize_affine(weight, group, 4, cls.symmetric, torch.bfloat16)
    spread = [part.float().repeat_interleave(group, 1) for part in (zeros, scales)]
    assert torch.equal(stored.dequantize(torch.float32), (codes - spread[0]) * spread[1])
    state = format_.to_state(stored.parts, (outputs, inputs), torch.bfloat16)
    again, parts, shape, _ = cls.from_state(state, "weight")
    assert (again, shape) == (format_, (outputs, inputs))
    assert all(torch.equal(parts[name], part) for name, part in stored.parts.items())
    if issubclass(cls, PackQuantized):  # compressed-tensors' own packing
        assert torch.equal(state["../weight_packed"], pack_to_int32((codes - 8).to(torch.int8), 4))
    if cls is PackQuantizedZeros:
        assert torch.equal(state["../weight_zero_point"], pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0))


@pytest.mark.parametrize(("outputs", "inputs", "group"), SIZES[:3])
@pytest.mark.parametrize("cls", [PackQuantized, PackQuantizedZeros])
def test_packed_weights_of_eight_bits(cls, outputs, inputs, group):
    """They are loaded into bit planes, with the same values."""
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    stored = QuantizedTensor.quantize(weight, cls(group, "bfloat16", bits=8))
    codes, zeros, scales = quantize_affine(weight, group, 8, cls.symmetric, torch.bfloat16)
    state = stored.format.to_state(stored.parts, (outputs, inputs), torch.bfloat16)
    assert torch.equal(state["../weight_packed"], pack_to_int32((codes - 128).to(torch.int8), 8))
    spread = [part.float().repeat_interleave(group, 1) for part in (zeros, scales)]
    assert torch.equal(stored.dequantize(torch.float32), (codes - spread[0]) * spread[1])
    assert torch.equal(
        QuantizedTensor(*cls.from_state(state, "weight")).dequantize(torch.float32), stored.dequantize(torch.float32)
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("values", [0.0, 1e-30, -3.0, 1e37])
def test_groups_of_one_value(values, symmetric):
    weight = torch.full((8, 64), values)
    codes, zeros, scales = quantize_affine(weight, 32, 4, symmetric, torch.bfloat16)
    spread = [part.float().repeat_interleave(32, 1) for part in (zeros, scales)]
    torch.testing.assert_close((codes - spread[0]) * spread[1], weight, rtol=0.08, atol=0)


def test_scales_below_the_smallest_half_round_to_zero_codes():
    weight = torch.full((8, 32), 1e-9)
    codes, zeros, scales = quantize_affine(weight, 32, 4, True, torch.float16)
    assert torch.equal(codes, torch.full((8, 32), 8, dtype=torch.int32))
    assert bool((zeros == 8).all())
    assert bool((scales > 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad):
    weight = torch.randn(16, 64)
    weight[3, 5] = bad
    with pytest.raises(ModelError):
        QuantizedTensor.quantize(weight, PackQuantized(32))


@pytest.mark.parametrize("shape", [(8, 100), (8, 160), (12, 128), (8, 128, 2)])
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ModelError):
        QuantizedTensor.quantize(torch.randn(shape), Gptq(128))
