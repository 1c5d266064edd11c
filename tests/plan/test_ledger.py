"""Operators whose results the ledger derives from shapes return what fake tensors return, and count as much."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from halfbyte.plan.ledger import ELEMENTWISE, VIEWS, Ledger

aten = torch.ops.aten


def rows(dtype=torch.float32):
    return torch.empty(3, 4, dtype=dtype)


CALLS = {
    "expand": lambda: (aten.expand.default, torch.empty(3, 1), [3, 4]),
    "slice": lambda: (aten.slice.Tensor, rows(), 1, 1, 3),
    "transpose": lambda: (aten.transpose.int, torch.empty(2, 3, 4), 1, 2),
    "unsqueeze": lambda: (aten.unsqueeze.default, rows(), -1),
    "view": lambda: (aten.view.default, rows(), [2, -1]),
    "unsafe view": lambda: (aten._unsafe_view.default, rows(), [12]),
    "transposed": lambda: (aten.t.default, rows()),
    "detached": lambda: (aten.detach.default, rows().t()),
    "sum": lambda: (aten.add.Tensor, rows(), rows()),
    "broadcast": lambda: (aten.add.Tensor, torch.empty(3, 1, 4), torch.empty(5, 1)),
    "sum with a scalar": lambda: (aten.add.Tensor, rows(), 1),
    "difference": lambda: (aten.sub.Tensor, rows(torch.bfloat16), rows(torch.bfloat16)),
    "promoted": lambda: (aten.mul.Tensor, rows(torch.bfloat16), rows()),
    "scalar tensor": lambda: (aten.mul.Tensor, rows(torch.bfloat16), torch.empty(())),
    "integers": lambda: (aten.mul.Tensor, rows(torch.int64), 0.5),
    "transposed factor": lambda: (aten.mul.Tensor, rows(), torch.empty(4, 3).t()),
    "scaled": lambda: (aten.mul.Scalar, rows(), 2.0),
    "divided integers": lambda: (aten.div.Scalar, rows(torch.int64), 2),
    "copy": lambda: (aten.clone.default, rows()),
    "copy of a transposed": lambda: (aten.clone.default, rows().t()),
    "negated": lambda: (aten.neg.default, rows()),
    "power": lambda: (aten.pow.Tensor_Scalar, rows(), 2),
    "root": lambda: (aten.rsqrt.default, rows(torch.float16)),
    "silu": lambda: (aten.silu.default, rows()),
    "product": lambda: (aten.mm.default, rows(), torch.empty(5, 4).t()),
    "empty product": lambda: (aten.mm.default, torch.empty(3, 0), torch.empty(0, 5)),
}


def described(call, ledger=None):
    """Whether the result of a call on fake tensors shares the first argument's storage, and what it looks like."""
    with FakeTensorMode():
        func, *args = call()
        if ledger is not None:
            ledger.ignore(arg for arg in args if isinstance(arg, torch.Tensor))
        with ledger or contextlib.nullcontext():
            result = func(*args)
        shares = result.untyped_storage() == args[0].untyped_storage()
        return shares, (result.shape, result.stride(), result.dtype, result.device, result.storage_offset())


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_fake_tensors(name):
    ledger = Ledger()
    shares, expected = described(CALLS[name])
    assert described(CALLS[name], ledger) == (shares, expected)
    shape, _, dtype, *_ = expected
    assert ledger.peak == (0 if shares else shape.numel() * dtype.itemsize)


def test_every_operator_has_a_call():
    assert {call()[0] for call in CALLS.values()} == VIEWS | ELEMENTWISE | {aten.mm.default}
