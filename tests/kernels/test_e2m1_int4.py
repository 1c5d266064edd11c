"""Check kernels of NVFP4, MXFP4, GPTQ and AWQ bit for bit against the references, on a GPU or in the interpreter."""

import pytest
import torch

from halfbyte.formats.e2m1 import dequantize_e2m1
from halfbyte.formats.int4 import dequantize_int4
from tests.helpers.parity import DEVICE, DTYPES, INTERPRETED, mark, poisoned  # noqa: F401

if INTERPRETED:
    from halfbyte.kernels.triton.dequantize import int4 as int4_kernel
    from halfbyte.kernels.triton.packed4 import dequantize_blocks as e2m1_kernel
else:
    e2m1_kernel, int4_kernel = dequantize_e2m1, dequantize_int4

pytestmark = mark
TILES = [(1, 16), (16, 16), (1, 32)]


def moved(arguments):
    return [argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument for argument in arguments]


def same_as_reference(kernel, reference, arguments):
    for dtype in DTYPES:
        found, expected = kernel(*moved(arguments), dtype), reference(*arguments, dtype)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found.cpu(), expected)


def e2m1_arguments(rows, width, tile):
    """Random codes, and every scale byte that can be stored."""
    columns = -(-width // tile[1])
    packed = torch.randint(0, 256, (rows, columns * tile[1] // 2), dtype=torch.uint8)
    blocks = -(-rows // tile[0]) * columns
    bytes_ = 127 if tile[1] == 16 else 255
    scales = (torch.arange(blocks) * 37 % bytes_).to(torch.uint8).view(-1, columns)
    return packed, scales, torch.tensor(0.0123) if tile[1] == 16 else None, tile, width


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 129), (33, 64), (48, 256)], ids=str)
def test_e2m1(shape, tile):
    same_as_reference(e2m1_kernel, dequantize_e2m1.reference, e2m1_arguments(*shape, tile))


@pytest.mark.parametrize("tile", TILES[:2], ids=str)
@pytest.mark.parametrize("width", [64, 129])
def test_stacked_matrices(tile, width):
    """Each matrix has its own factor, like a stack of experts."""
    packed, scales, _, *rest = e2m1_arguments(3 * 32, width, tile)
    factors = torch.tensor([0.0123, 0.7, 3e-5])
    found = e2m1_kernel(*moved((packed, scales, factors, *rest)), torch.float32).cpu()
    alone = zip(packed.chunk(3), scales.chunk(3), factors, strict=True)
    expected = [dequantize_e2m1.reference(*each, *rest, torch.float32) for each in alone]
    assert torch.equal(found, torch.cat(expected))
    assert torch.equal(dequantize_e2m1.reference(packed, scales, factors, *rest, torch.float32), found)


@pytest.mark.parametrize("layout", ["runs", "ordered", "indexed"])
@pytest.mark.parametrize("zero_shift", [0, 1])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(8, 8, 1), (72, 40, 3), (128, 136, 4)])
def test_int4(inputs, outputs, groups, zero_shift, layout):
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (groups, outputs // 8), dtype=torch.int32)
    scales = (torch.rand(groups, outputs) * 0.1).half()
    index = torch.randint(0, groups, (inputs,), dtype=torch.int32) if layout == "indexed" else None
    order = torch.randperm(inputs)
    order = torch.stack([order, order.argsort()]).int() if layout == "ordered" else None
    arguments = (qweight, qzeros, scales, index, order, zero_shift)
    same_as_reference(int4_kernel, dequantize_int4.reference, arguments)


@pytest.mark.skipif(INTERPRETED, reason="gigabytes")
@pytest.mark.large(8)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_e2m1_past_two_to_the_31(tile):
    rows, width = 2**16 + 16, 2**15
    packed, scales, factor, *_ = e2m1_arguments(16, width, tile)
    tall = torch.zeros(rows, width // 2, dtype=torch.uint8, device=DEVICE)
    tall_scales = torch.zeros(-(-rows // tile[0]), width // tile[1], dtype=torch.uint8, device=DEVICE)
    tall[-16:], tall_scales[-len(scales) :] = packed.to(DEVICE), scales.to(DEVICE)
    found = dequantize_e2m1(tall, tall_scales, None if factor is None else factor.to(DEVICE), tile, width, DTYPES[-1])
    expected = dequantize_e2m1.reference(packed, scales, factor, tile, width, DTYPES[-1])
    assert torch.equal(found[-16:].cpu(), expected)


@pytest.mark.skipif(INTERPRETED, reason="graphs are the GPU's")
def test_graph_capture():
    arguments = moved(e2m1_arguments(256, 512, (16, 16)))
    expected = dequantize_e2m1(*arguments, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = dequantize_e2m1(*arguments, torch.bfloat16)
    graph.replay()
    assert torch.equal(found, expected)
