"""What the bit-plane kernels of kbit and hqq are compared on: the parts of ugly shapes, by the references."""

import torch

from halfbyte.formats import from_spec

KBIT = ("kbit:2:nf", "kbit:2:affine", "kbit:3:bnf", "kbit:4:fitted", "kbit:5:nf")
HQQ = ("hqq:8:128", "hqq:8:32:range:float16", "hqq:4:64", "hqq:3:32", "hqq:2:64")
# One value; whole blocks; padded rows of which the last block is one value, or one short of whole.
SHAPES = ((1, 1), (3, 64), (5, 33), (9, 127), (2, 256))


def weight_of(shape, dtype=torch.float32, device="cpu"):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.03
    weight.view(-1)[::13] = 0
    weight[:, 32:64] = 0  # a whole block of zeros
    return weight.to(dtype).to(device)


def moved(parts, device):
    return {name: part.to(device) for name, part in parts.items()}


def kbit_arguments(format, parts):
    """Arguments that `quantize_bitplane` and `dequantize_bitplane` share: scales, zeros, factor, codebook."""
    return parts["scales"], parts.get("zeros"), parts["factor"], format.levels(parts)


def check_dequantize(specs, dtypes, shapes=SHAPES, device="cpu", kernel=None, hqq_kernel=None):
    """The kernel's values are the reference's, bit for bit. Kernels default to the ops, which dispatch."""
    from halfbyte.ops.bitplane import dequantize_bitplane
    from halfbyte.ops.hqq import dequantize_hqq

    for spec in specs:
        format = from_spec(spec)
        for shape in shapes:
            parts = format.quantize(weight_of(shape))
            theirs = moved(parts, device)
            for dtype in dtypes:
                if spec.startswith("kbit"):
                    op, by, tail = dequantize_bitplane, kernel, (*shape, dtype)
                    one, other = ((p["packed"], *kbit_arguments(format, p), *tail) for p in (parts, theirs))
                else:
                    op, by, tail = dequantize_hqq, hqq_kernel, (format.bits, format.group, *shape, dtype)
                    one, other = ((*p.values(), *tail) for p in (parts, theirs))
                found = (by or op)(*other)
                assert (found.shape, found.dtype) == (shape, dtype)
                assert torch.equal(found.cpu(), op.reference(*one)), (spec, shape, dtype)


def check_quantize(specs, dtypes, shapes=SHAPES, device="cpu", kernel=None):
    """The kernel's planes are the reference's, bit for bit, on the same scales."""
    from halfbyte.ops.bitplane import padded_blocks, quantize_bitplane

    for spec in specs:
        format = from_spec(spec)
        for shape in shapes:
            for dtype in dtypes:
                weight = weight_of(shape, dtype)
                parts, blocks = format.quantize(weight), padded_blocks(weight, 32)
                expected = quantize_bitplane.reference(blocks, *kbit_arguments(format, parts))
                found = (kernel or quantize_bitplane)(blocks.to(device), *kbit_arguments(format, moved(parts, device)))
                assert torch.equal(found.cpu(), expected), (spec, shape, dtype)
