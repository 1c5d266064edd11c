"""quantize_4bit and dequantize_4bit: names, shapes and meaning as in bitsandbytes."""

import pytest
import torch

from halfbyte.functional import QuantState, dequantize_4bit, quantize_4bit
from halfbyte.utils.errors import CheckpointError, ModelError


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5), (8, 64)])
def test_round_trip(shape, nested, kind):
    A = torch.randn(shape, dtype=torch.bfloat16)
    packed, state = quantize_4bit(A, compress_statistics=nested, quant_type=kind)
    assert (packed.dtype, packed.shape) == (torch.uint8, ((A.numel() + 1) // 2, 1))
    assert (state.shape, state.dtype, state.blocksize, state.quant_type) == (A.shape, A.dtype, 64, kind)
    assert state.nested is nested
    assert state.absmax.dtype == (torch.uint8 if nested else torch.float32)
    values = dequantize_4bit(packed, state)
    assert (values.shape, values.dtype) == (A.shape, A.dtype)
    assert (values.float() - A.float()).abs().max() <= 0.18 * A.float().abs().max()
    assert torch.equal(dequantize_4bit(packed, state, dtype=torch.float32).bfloat16(), values)
    assert torch.equal(dequantize_4bit(packed, state, dtype=torch.float64).bfloat16(), values)


def test_defaults_are_those_of_bitsandbytes():
    import inspect

    parameters = inspect.signature(quantize_4bit).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults == {"blocksize": 64, "compress_statistics": False, "quant_type": "nf4"}


def test_dictionary_round_trip():
    A = torch.randn(67, 131)
    packed, state = quantize_4bit(A, compress_statistics=True)
    again, read = QuantState.from_dict(state.as_dict(packed))
    assert torch.equal(dequantize_4bit(again, read), dequantize_4bit(packed, state))
    entries = state.as_dict(packed)
    del entries["nested_absmax"]
    with pytest.raises(CheckpointError, match=r"q_proj\.weight\.nested_absmax"):
        QuantState.from_dict(entries, "q_proj.weight")


def test_bytes_of_another_tensor_are_refused():
    packed, _ = quantize_4bit(torch.randn(64))
    _, state = quantize_4bit(torch.randn(66))
    with pytest.raises(ModelError, match=r"32 packed.*shape \(66,\)"):
        dequantize_4bit(packed, state)
