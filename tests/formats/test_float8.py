"""Check the FP8 reference by hand, and reading and writing of Hugging Face's block-FP8 checkpoints."""

import pytest
import torch

from halfbyte.formats import Float8, from_spec
from halfbyte.formats.float8 import (
    E4M3,
    E5M2,
    dequantize_float8,
    quantize_float8,
    scale_shape,
    spread_scales,
    to_float8,
)
from halfbyte.utils.errors import CheckpointError, ModelError


@pytest.mark.parametrize("scaling", ["tensor", "row", "tile"])
@pytest.mark.parametrize("shape", [(130, 260), (3, 5), (2, 129, 5), (200,)], ids=str)
def test_values_are_the_nearest(scaling, shape):
    weight = torch.randn(shape) * torch.logspace(-2, 2, shape[-1])
    codes, scale = quantize_float8(weight, scaling)
    assert (codes.shape, codes.dtype, scale.shape) == (weight.shape, E4M3, scale_shape(shape, scaling))
    spread = spread_scales(scale, shape, scaling).expand(shape).unsqueeze(-1)
    levels = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127].view(E4M3).float()
    best = (weight.unsqueeze(-1) - levels * spread).abs().amin(-1)
    error = (dequantize_float8(codes, scale, scaling, torch.float32) - weight).abs()
    assert (error <= best * (1 + 1e-5) + 1e-7 * spread.squeeze(-1)).all()


def test_casting_saturates_and_rounds_to_even():
    values = torch.tensor([500.0, -1e9, 17.0, 19.0, 2.0**-10])
    assert to_float8(values, E4M3).float().tolist() == [448.0, -448.0, 16.0, 20.0, 0.0]
    assert to_float8(torch.tensor([1e9]), E5M2).float().item() == 57344.0


def test_names():
    assert Float8.names == {"fp8": "fp8:row", "fp8-tensor": "fp8:tensor", "fp8-tile": "fp8:tile"}
    for spec in Float8.names.values():
        assert from_spec(spec).spec == spec
    with pytest.raises(ModelError, match="column"):
        Float8("column")


def hugging_face_block(rows=130, columns=260, scale_dtype=torch.float32):
    """Codes and scales of a block-FP8 checkpoint, and the values by transformers' definition."""
    codes = (torch.randn(rows, columns) * 100).to(E4M3)
    scale = (torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5).to(scale_dtype)
    spread = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"": codes, "../weight_scale_inv": scale}, codes.float() * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_block_fp8_loads_without_quantizing_again(dtype):
    state, values = hugging_face_block(scale_dtype=dtype)
    format_, parts, shape, value_dtype = Float8.from_state(state, "q.weight")
    assert (format_, shape, value_dtype) == (Float8("tile"), (130, 260), torch.bfloat16)
    assert torch.equal(format_.dequantize(parts, shape, torch.float32), values)
    again = format_.to_state(parts, shape, value_dtype)
    assert torch.equal(again[""].view(torch.uint8), state[""].view(torch.uint8))
    assert again["../weight_scale_inv"].dtype == torch.float32


def test_quantization_config_of_hugging_face():
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert Float8.from_quantization_config(entry) == Float8("tile")
    assert Float8.from_quantization_config({"quant_method": "gptq"}) is None
    with pytest.raises(CheckpointError, match="weight_block_size"):
        Float8.from_quantization_config({**entry, "weight_block_size": [64, 64]})
