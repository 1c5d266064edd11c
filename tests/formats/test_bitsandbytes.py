"""halfbyte against the real bitsandbytes on a CPU: equal bytes when quantizing, bit-equal values when dequantizing.

On a CPU bitsandbytes 0.50.2 dequantizes in one of two ways: by its torch implementation, which equals its CUDA
kernels, or by a C++ kernel. If a block does not end with its row, the C++ kernel uses wrong scales ((64, 64) in
blocks of 128). So values are always compared with the torch implementation, and with the kernel if blocks divide
rows.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from halfbyte.functional import QuantState, dequantize_4bit, quantize_4bit
from halfbyte.layers import Embedding4bit, Linear4bit

bnb = pytest.importorskip("bitsandbytes", minversion="0.50", reason="the test extra installs bitsandbytes")

BLOCKSIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
KINDS = ["nf4", "fp4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(64, 64), (300, 64), (67, 131), (1, 1), (127,), (3, 50, 31), (96, 130), (9, 512)]


@pytest.fixture(autouse=True, scope="module")
def _no_compiling():
    """bitsandbytes compiles its torch implementation with inductor, which takes minutes here and changes no value."""
    with torch.compiler.set_stance("force_eager"):
        yield


def weight_of(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.03
    weight.view(-1)[::97] = 0
    return weight.to(dtype)


def edge_weight(dtype):
    """[16, 256] of special values: both zeros, blocks of subnormals, subnormals among normal numbers, large numbers."""
    limits = torch.finfo(dtype)
    weight = weight_of((16, 256), torch.float32).double()
    weight[0] = 0.0
    weight[1] = -0.0
    weight[2, ::2] = -0.0
    weight[3] = limits.smallest_normal * torch.linspace(-1, 1, 256, dtype=torch.float64)  # subnormals
    weight[4, ::3] = limits.smallest_normal / 4
    weight[5] *= limits.smallest_normal * 64
    weight[6] = limits.max / 1024 * torch.linspace(-1, 1, 256, dtype=torch.float64)
    weight[7, 5] = limits.max / 1024  # nested scales are sums
    weight[8] = limits.eps * torch.linspace(-1, 1, 256, dtype=torch.float64)
    weight[9, ::2] = weight[9, ::2].abs() * 1e-3  # small positives: code 8 of FP4
    weight[9, 0] = 1.0
    return weight.to(dtype)


def same_bits(mine, theirs):
    """Equal shapes, dtypes and bytes: unlike torch.equal, -0.0 is not 0.0 here."""
    same = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    mine, theirs = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (mine, theirs))
    return same and torch.equal(mine, theirs)


def flushed(values):
    """bf16 without subnormals, which the AVX512-BF16 conversion of their CPU kernel flushes to zero."""
    if values.dtype is not torch.bfloat16:
        return values
    return values.where(values.abs() >= torch.finfo(values.dtype).smallest_normal, values * 0)


def their_values(packed, state):
    """Values by bitsandbytes' torch implementation."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(packed.view(-1), absmax, state.code, state.blocksize, state.shape, state.dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_bytes_and_values(blocksize, kind, dtype, nested):
    for weight in [*(weight_of(shape, dtype) for shape in SHAPES), edge_weight(dtype)]:
        shape = weight.shape
        theirs, their_state = bnb.functional.quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=nested, quant_type=kind
        )
        mine, state = quantize_4bit(weight, blocksize, nested, kind)
        assert same_bits(mine, theirs), shape
        assert same_bits(state.absmax, their_state.absmax), shape
        assert same_bits(state.code, their_state.code)
        if nested:
            assert same_bits(state.nested_absmax, their_state.state2.absmax)
            assert same_bits(state.nested_code, their_state.state2.code)
            assert same_bits(state.offset, their_state.offset)
        values = dequantize_4bit(mine, state)
        assert (values.shape, values.dtype) == (weight.shape, dtype)
        assert same_bits(values, their_values(theirs, their_state)), shape
        if shape[-1] % blocksize == 0:
            kernels = bnb.functional.dequantize_4bit(theirs, their_state)
            # + 0.0: without AVX-512 their CPU kernel gives FP4's zero as -0.0, other implementations as 0.0
            assert same_bits(flushed(values) + 0.0, flushed(kernels) + 0.0), shape


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_entries_are_byte_for_byte_theirs(kind, nested):
    weight = weight_of((67, 131), torch.bfloat16)
    theirs, their_state = bnb.functional.quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
    mine, state = quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
    expected = their_state.as_dict(packed=True) | {"": theirs}
    found = state.as_dict(mine)
    assert set(found) == set(expected)
    for suffix, value in expected.items():
        assert same_bits(found[suffix], value), suffix
    packed, read = QuantState.from_dict(expected)
    assert torch.equal(packed, theirs)
    assert (read.shape, read.dtype, read.blocksize, read.quant_type) == (weight.shape, weight.dtype, 64, kind)
    assert torch.equal(dequantize_4bit(packed, read), dequantize_4bit(mine, state))


def their_linear(weight, bias, kind, nested, storage=torch.uint8):
    layer = bnb.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias=bias is not None, compute_dtype=weight.dtype, quant_type=kind,
        compress_statistics=nested, quant_storage=storage,
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        weight.clone(),
        requires_grad=False,
        quant_type=kind,
        compress_statistics=nested,
        quant_storage=storage,
        module=layer,
    )
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer.to("cpu")  # quantizes


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", KINDS)
def test_their_linear_loads_here(kind, nested, storage, tmp_path):
    weight, bias = weight_of((96, 130), torch.bfloat16), weight_of((96,), torch.bfloat16)
    theirs = their_linear(weight, bias, kind, nested, storage)
    save_file(theirs.state_dict(), tmp_path / "linear.safetensors")
    mine = Linear4bit(130, 96, dtype=torch.bfloat16)
    mine.load_state_dict(load_file(tmp_path / "linear.safetensors"), strict=True)
    assert torch.equal(mine.weight.packed.view(-1), theirs.weight.data.view(torch.uint8).view(-1))
    expected = their_values(theirs.weight.data.view(torch.uint8), theirs.weight.quant_state)
    assert torch.equal(mine.weight.dequantize(), expected)
    x = torch.randn(3, 130, dtype=torch.bfloat16)
    torch.testing.assert_close(mine(x), nn.functional.linear(x, expected, theirs.bias))


def test_embedding_equals_theirs():
    weight = weight_of((50, 64), torch.float32)
    theirs = bnb.nn.Embedding4bit(50, 64, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", module=theirs)
    theirs = theirs.to("cpu")
    mine = Embedding4bit(50, 64)
    mine.load_state_dict({"weight": weight})
    index = torch.tensor([[0, 49], [7, 7]])
    assert torch.equal(mine(index), theirs(index).to(torch.float32))
