"""NF4 and FP4 against their definition: each code is the nearest value, bytes pack as written, scales are maxima."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfbyte.formats import Blockwise4
from halfbyte.formats.blockwise4 import dequantize_scales, quantize_scales
from halfbyte.formats.codebooks import codebook4, dynamic_map
from halfbyte.utils.errors import ModelError

CPU = torch.device("cpu")
quick = settings(max_examples=20, deadline=None)
values = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
blocks = st.sampled_from([32, 64, 128])
kinds = st.sampled_from(["nf4", "fp4"])


def vectors(largest=300):
    return arrays(np.float32, st.integers(1, largest), elements=values)


def codes_of(parts, count):
    packed = parts["packed"].view(-1)
    return torch.stack([packed >> 4, packed & 15], 1).view(-1)[:count]


@quick
@given(vectors(), blocks, kinds)
def test_each_scale_is_the_largest_magnitude_of_its_block(vector, blocksize, kind):
    parts = Blockwise4(kind, blocksize).quantize(torch.from_numpy(vector))
    for index, scale in enumerate(parts["absmax"].tolist()):
        block = np.abs(vector[index * blocksize : (index + 1) * blocksize])
        assert scale == max(block.max(), np.float32(1e-38) if len(block) < blocksize else 0)


@quick
@given(vectors(), blocks, kinds)
def test_each_code_is_the_nearest_value(vector, blocksize, kind):
    """Compared in float64; a value within fp32 rounding of the midpoint of two codes may take either code."""
    format_ = Blockwise4(kind, blocksize)
    parts = format_.quantize(torch.from_numpy(vector))
    scale = parts["absmax"].double().repeat_interleave(blocksize)[: len(vector)]
    normal = torch.where(scale > 1e-38, torch.from_numpy(vector).double() / scale.clamp(min=1e-300), 0)
    code = codebook4(kind, CPU).double()
    distance = (normal - code[codes_of(parts, len(vector)).int()]).abs()
    best = (normal.unsqueeze(1) - code).abs().min(1).values
    assert (distance - best).max() <= 1e-6


@quick
@given(st.lists(st.integers(0, 15), min_size=1, max_size=200), blocks, kinds)
def test_codes_survive_a_round_trip(codes, blocksize, kind):
    """Exact codebook entries round-trip, with the even element in the high nibble."""
    vector = codebook4(kind, CPU)[torch.tensor(codes)]
    vector = torch.cat([vector, torch.ones(-len(vector) % blocksize)])  # full blocks
    vector.view(-1, blocksize)[:, -1] = 1.0  # whose scale is 1
    format_ = Blockwise4(kind, blocksize)
    parts = format_.quantize(vector)
    assert torch.equal(format_.dequantize(parts, tuple(vector.shape), torch.float32), vector)
    expected = vector.view(-1, 2)
    high, low = parts["packed"].view(-1) >> 4, parts["packed"].view(-1) & 15
    code = codebook4(kind, CPU)
    assert torch.equal(torch.stack([code[high.int()], code[low.int()]], 1), expected)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 256, 4096])
def test_dequantizing_is_code_times_scale_rounded_once(kind, blocksize):
    for count in (1, 2, 31, 33, blocksize - 1, blocksize, blocksize + 1, 3 * blocksize + 7):
        generator = torch.Generator().manual_seed(count)
        packed = torch.randint(0, 256, ((count + 1) // 2, 1), dtype=torch.uint8, generator=generator)
        absmax = torch.rand(-(-count // blocksize), generator=generator)
        parts = {"packed": packed, "absmax": absmax}
        code = codebook4(kind, CPU)[codes_of(parts, count).int()]
        expected = code * absmax.repeat_interleave(blocksize)[:count]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found = Blockwise4(kind, blocksize).dequantize(parts, (count,), dtype)
            assert torch.equal(found, expected.to(dtype))


@quick
@given(arrays(np.float32, st.integers(1, 700), elements=st.floats(2**-10, 10, width=32)))
def test_nested_scales_are_the_nearest_of_the_dynamic_map(scales):
    absmax, code = torch.from_numpy(scales), dynamic_map()
    quantized, second, offset = quantize_scales(absmax, code)
    assert quantized.dtype == torch.uint8
    assert offset == absmax.mean()
    assert second.shape == (-(-len(scales) // 256),)
    centred = absmax - offset
    found = dequantize_scales(quantized, second, code, offset)
    per_scale = second.repeat_interleave(256)[: len(scales)]
    # Half of the widest step of the map (between its top two decades' neighbours), and the lookup's 65,536 points.
    widest = (code[1:] - code[:-1]).max() / 2 + 1 / 65535
    assert ((found - absmax).abs() <= per_scale * widest + 1e-6 * absmax.abs() + 1e-6).all()
    assert (centred.abs() <= per_scale).all()


@pytest.mark.parametrize(("signed", "zero", "least"), [(True, 127, -0.99296874), (False, 0, 0.0)])
def test_dynamic_map(signed, zero, least):
    code = dynamic_map(signed=signed)
    assert code.shape == (256,)
    assert torch.equal(code, code.sort().values)
    assert code.unique().numel() == 256
    assert code[zero] == 0
    assert code[-1] == 1
    assert float(code[0]) == pytest.approx(least, abs=1e-7)


@pytest.mark.parametrize("nested", [False, True])
def test_the_odd_tail_pads_with_zero(nested):
    parts = Blockwise4("nf4", 64, nested).quantize(torch.ones(3, 3))
    assert parts["packed"].shape == (5, 1)
    assert parts["packed"][-1].item() == 0xF7


@pytest.mark.parametrize("nested", [False, True])
def test_an_empty_tensor(nested):
    format_ = Blockwise4("nf4", 64, nested)
    parts = format_.quantize(torch.empty(0, 5))
    assert {name: (tuple(p.shape), p.dtype) for name, p in parts.items()} == format_.part_specs((0, 5))
    assert format_.dequantize(parts, (0, 5), torch.bfloat16).shape == (0, 5)


@pytest.mark.parametrize(
    ("options", "named"),
    [(("nf3", 64), "nf3"), (("nf4", 48), "48"), (("nf4", 8192), "8192"), (("fp4", 0), "blocksize 0")],
)
def test_unsupported_options_are_refused(options, named):
    with pytest.raises(ModelError, match=named):
        Blockwise4(*options)
