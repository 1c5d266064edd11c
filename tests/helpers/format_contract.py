"""Inputs of the format contract tests: the registry's examples, weights, layers and comparisons."""

import torch
from torch import nn

from halfbyte.formats import FORMATS, from_spec
from halfbyte.layers import QuantizedLinear
from halfbyte.tensor import QuantizedTensor

EXAMPLES = [example for cls in FORMATS.values() for example in cls.examples()]

# Examples for rules without format code; they differ most in the number, dtypes and dimensions of their parts.
REPRESENTATIVES = [from_spec(spec) for spec in ("blockwise4:nf4:64:nested", "nvfp4:2d:plain", "kbit:2:affine")]

# One value, dimensions that no block or tile divides, one row, one column, three dimensions, and aligned dimensions.
SHAPES = [(1,), (1, 1), (3, 5), (64,), (17, 1), (7, 33), (31, 129), (65, 129), (2, 3, 37), (3, 64, 32)]
SHORT = [(33,), (1, 37)]  # one more than a block of 32


def weight_of(shape, dtype=torch.float32, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def quantized(format, shape=(65, 129), dtype=torch.float32, seed=0):
    return QuantizedTensor.quantize(weight_of(shape, dtype, seed), format)


def linear(format, rows=33, columns=70, *, bias=True, dtype=torch.float32, seed=0):
    layer = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weight_of((rows, columns), dtype, seed))
        if bias:
            layer.bias.copy_(weight_of((rows,), dtype, seed + 1))
    return QuantizedLinear.from_linear(layer, format)


def plain(layer, dtype=None):
    """The `nn.Linear` with the dequantized weight."""
    twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    twin.weight = nn.Parameter(layer.weight.dequantize(dtype), requires_grad=False)
    if layer.bias is not None:
        twin.bias = nn.Parameter(layer.bias.detach().clone())
    return twin


def same(one, other):
    """Equal formats, shapes, dtypes and bytes of every part."""
    assert (one.format, one.shape, one.dtype) == (other.format, other.shape, other.dtype)
    assert one.parts.keys() == other.parts.keys()
    for name, part in one.parts.items():
        assert part.dtype == other.parts[name].dtype
        assert torch.equal(part, other.parts[name]), name
