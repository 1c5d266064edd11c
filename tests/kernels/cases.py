"""What the kernels are compared on: tensors of ugly sizes, and references for their codes, scales and values."""

import itertools

import torch

from halfbyte.ops import blockwise4
from halfbyte.ops.codebooks import dynamic_map

KINDS = ("nf4", "fp4")
# One value; a block and its neighbours; odd; a tail shorter than a word of 8; programs that end within a block.
COUNTS = (1, 2, 7, 31, 33, 63, 64, 65, 1001, 4095, 4096, 4097, 8193, 16387)


def weight_of(count, dtype, device="cpu"):
    weight = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.03
    weight[::13] = 0
    weight[64:128] = 0  # a whole block of zeros
    return weight.to(dtype).to(device)


def quantized(count, blocksize, kind, nested, dtype=torch.float32):
    """Arguments of `dequantize_blockwise4` up to `numel`, by the reference, on the CPU."""
    packed, absmax = blockwise4.quantize_blockwise4.reference(weight_of(count, dtype), blocksize, kind)
    if not nested:
        return packed, absmax, None, blocksize, kind, count
    code = dynamic_map()
    scales, second, offset = blockwise4.quantize_scales(absmax, code)
    return packed, scales, (second, code, offset), blocksize, kind, count


def check_dequantize(kernel, dtypes, blocksizes, counts=COUNTS, device="cpu"):
    """The kernel's values are the reference's, bit for bit."""
    for count, blocksize, kind, nested in itertools.product(counts, blocksizes, KINDS, (False, True)):
        arguments = quantized(count, blocksize, kind, nested)
        moved = [to(argument, device) for argument in arguments]
        for dtype in dtypes:
            found = kernel(*moved, dtype)
            expected = blockwise4.dequantize_blockwise4.reference(*arguments, dtype)
            assert (found.shape, found.dtype) == ((count,), dtype)
            assert torch.equal(found.cpu(), expected), (count, blocksize, kind, nested, dtype)


def check_quantize(kernel, dtypes, blocksizes, counts=COUNTS, device="cpu"):
    """The kernel's codes and scales are the reference's, bit for bit."""
    for count, blocksize, kind, dtype in itertools.product(counts, blocksizes, KINDS, dtypes):
        weight = weight_of(count, dtype)
        packed, absmax = kernel(weight.to(device), blocksize, kind)
        expected_packed, expected_absmax = blockwise4.quantize_blockwise4.reference(weight, blocksize, kind)
        assert packed.shape == expected_packed.shape
        assert torch.equal(absmax.cpu(), expected_absmax), (count, blocksize, kind, dtype)
        assert torch.equal(packed.cpu(), expected_packed), (count, blocksize, kind, dtype)


def to(argument, device):
    if isinstance(argument, tuple):
        return tuple(part.to(device) for part in argument)
    return argument.to(device) if isinstance(argument, torch.Tensor) else argument
