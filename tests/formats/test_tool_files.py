"""Weights made by other tools' own code: values equal the tool's, and saving keeps them."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.formats import Float8, Nvfp4, of_checkpoint
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.tool_files import PACKED_HERE, TOOL_FILES

N, K = 160, 256


def loaded(entries, cls, name="layer.weight"):
    return QuantizedTensor(*cls.from_state(entries, name))


@pytest.mark.parametrize("make", TOOL_FILES.values(), ids=TOOL_FILES.keys())
def test_values_equal_the_tool_s(make):
    check(make)


@pytest.mark.parametrize("make", PACKED_HERE.values(), ids=PACKED_HERE.keys())
def test_values_equal_the_documented_layout_s(make):
    check(make)


def check(make):
    made = make(torch.randn(N, K).bfloat16() * 0.05)
    tensor = loaded(made.entries, type(of_checkpoint(made.config)))
    assert tensor.shape == (N, K)
    made.check(tensor)
    written = tensor.format.to_state(tensor.parts, (N, K), tensor.dtype)
    again = loaded(written, type(tensor.format))
    assert torch.equal(again.dequantize(torch.float32), tensor.dequantize(torch.float32))
    values, x = tensor.dequantize(torch.float32), torch.randn(3, K, requires_grad=True)
    y = F.linear(x, tensor)
    torch.testing.assert_close(y, x @ values.t(), rtol=1e-4, atol=1e-4)
    y.sum().backward()
    torch.testing.assert_close(x.grad[0], values.sum(0), rtol=1e-4, atol=1e-4)


def test_matrices_with_one_scale_each_become_rows_of_one_stack():
    """Gate and up of an FP8 expert."""
    matrices = torch.randn(2, 32, 64) * torch.tensor([1.0, 3.0]).view(2, 1, 1)
    format_ = Float8("tensor")
    joined, parts = format_.concat_rows([format_.quantize(matrix) for matrix in matrices], (32, 64))
    assert joined == Float8("row")
    expected = [format_.dequantize(format_.quantize(matrix), (32, 64), torch.float32) for matrix in matrices]
    assert torch.equal(joined.dequantize(parts, (64, 64), torch.float32), torch.cat(expected))


def test_nvfp4_matrices_are_joined_if_their_factors_are_equal():
    format_, matrix = Nvfp4(tiles=False), torch.randn(32, 64)
    parts = format_.quantize(matrix)
    joined, rows = format_.concat_rows([parts, parts], (32, 64))
    values = format_.dequantize(parts, (32, 64), torch.float32)
    assert torch.equal(joined.dequantize(rows, (64, 64), torch.float32), torch.cat([values, values]))
    with pytest.raises(ModelError):
        format_.concat_rows([parts, format_.quantize(2 * matrix)], (32, 64))
