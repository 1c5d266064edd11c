"""Compare a causal convolution over packed documents with torch's on each document; gradients by autograd."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.recurrent import causal_conv
from halfbyte.ops.attention import spans

BOUNDS = [0, 1, 3, 17, 18, 40]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("size", "bias"), [(4, False), (2, True), (1, True)])
def test_packed_documents_equal_single_ones(size, bias, silu):
    torch.manual_seed(size)
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    weight, added = torch.randn(6, size).double(), torch.randn(6).double() if bias else None
    y = causal_conv(x, weight, added, spans(torch.tensor(BOUNDS, dtype=torch.int32), 40)[0], silu)
    alone = []
    for begin, end in itertools.pairwise(BOUNDS):
        padded = F.pad(x[begin:end].T, (size - 1, 0))[None]
        alone.append(F.conv1d(padded, weight.unsqueeze(1), added, groups=6)[0].T)
    truth = torch.cat(alone)
    truth = F.silu(truth) if silu else truth
    torch.testing.assert_close(y, truth)
    upstream = torch.randn_like(truth)
    mine, theirs = (torch.autograd.grad(each, x, upstream)[0] for each in (y, truth))
    torch.testing.assert_close(mine, theirs)


def test_fewer_tokens_than_the_kernel_size():
    x, weight = torch.randn(2, 3), torch.randn(3, 4)
    y = causal_conv(x, weight, None, torch.zeros(2, dtype=torch.int32), False)
    torch.testing.assert_close(y, torch.stack([x[0] * weight[:, 3], x[1] * weight[:, 3] + x[0] * weight[:, 2]]))
