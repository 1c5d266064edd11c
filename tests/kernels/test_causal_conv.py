"""Compare a causal convolution over packed documents with one document at a time, forward and backward."""

import pytest
import torch

from halfbyte.ops.attention import spans
from halfbyte.ops.causal_conv import causal_conv, causal_conv_backward
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes, mark, random

pytest.importorskip("triton")
from halfbyte.kernels.triton import causal_conv as kernels

pytestmark = mark
BOUNDS = [0, 1, 3, 17, 18, 40]


@dtypes
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("channels", "size", "bias"), [(24, 4, False), (150, 3, True)])
def test_the_kernels(channels, size, bias, silu, dtype):
    begins = spans(torch.tensor(BOUNDS, dtype=torch.int32, device=DEVICE), 40)[0]
    x, grad = random(40, channels, dtype=dtype), random(40, channels, dtype=dtype)
    own = random(channels, size, dtype=dtype), random(channels, dtype=dtype) if bias else None
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(kernels.causal_conv(x, *own, begins, silu),
                               causal_conv.reference(x, *own, begins, silu), **near)  # fmt: skip
    torch.testing.assert_close(kernels.causal_conv_backward(grad, x, *own, begins, silu),
                               causal_conv_backward.reference(grad, x, *own, begins, silu), **near)  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="many programs")
def test_many_tokens():
    begins = torch.arange(5000, device=DEVICE, dtype=torch.int32) // 1024 * 1024
    x, weight = random(5000, 1100, dtype=torch.bfloat16), random(1100, 4, dtype=torch.bfloat16)
    given = x, weight, None, begins, True
    torch.testing.assert_close(kernels.causal_conv(*given), causal_conv.reference(*given), rtol=2**-7, atol=1e-5)
