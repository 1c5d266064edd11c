"""Check casts of 4-bit weights to E4M3, plain and transposed, bit for bit against the reference."""

import pytest
import torch

from halfbyte.formats import Blockwise4
from halfbyte.formats.float8 import E4M3
from halfbyte.ops.float8 import float8_of_blockwise4
from tests.helpers.parity import DEVICE, INTERPRETED, mark

pytest.importorskip("triton")
from halfbyte.kernels.triton.blockwise4 import float8

pytestmark = mark
SIZES = [(1, 64), (37, 40), (130, 136)]
if not INTERPRETED:
    SIZES += [(132, 96), (1024, 4096), (4096, 14336)]


def assert_equal(found, expected):
    """Compare codes; Triton's interpreter rounds to FP8 wrongly where the exponent grows, leaving no mantissa bits."""
    sound = expected & 7 != 0 if INTERPRETED else torch.ones_like(expected, dtype=torch.bool)
    assert torch.equal(found[sound], expected[sound])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format_", [Blockwise4("nf4", 64, True), Blockwise4("fp4", 32, False)], ids=lambda f: f.spec)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_codes(shape, format_, transposed):
    weight = torch.randn(shape) * 0.02
    parts = format_.quantize(weight)
    factor = 448 / weight.abs().max() * (1.2 if transposed else 1.0)  # some saturate
    options = (format_.blocksize, format_.quant_type, shape, factor, transposed)
    expected = float8_of_blockwise4.reference(parts["packed"], parts["absmax"], format_.nested_parts(parts), *options)
    moved = {name: part.to(DEVICE) for name, part in parts.items()}
    for gap in (0, 16):
        rows, columns = expected.shape
        out = torch.zeros(rows, columns + gap, dtype=torch.uint8, device=DEVICE).view(E4M3)[:, :columns]
        arguments = (moved["packed"], moved["absmax"], format_.nested_parts(moved), *options[:3], factor.to(DEVICE))
        found = float8(*arguments, transposed, out if gap else None)
        assert_equal(found.view(torch.uint8).cpu(), expected.view(torch.uint8))
