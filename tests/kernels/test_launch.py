"""What a Launcher keeps, on CPU tensors and with a compiled kernel that only writes down what it was given."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from halfbyte.kernels import launch


@pytest.fixture
def launched(monkeypatch):
    """Launches so far: ("triton", tensors ...) by Triton's own way, ("compiled", addresses ...) by the table's."""
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7)))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: -1)  # where CPU tensors say they are
    return []


def launcher(launched):
    def run(x, y, z, stream, function, metadata, *rest):
        assert (y, z, stream, function, metadata, *rest[:3]) == (1, 1, 7, "handle", "packed", None, None, None)
        launched.append(("compiled", x, *rest[3:]))

    def compile_and_launch(*arguments, num_warps):
        launched.append(("triton", *arguments))
        return SimpleNamespace(run=run, function="handle", packed_metadata="packed")

    class Jitted:
        def __getitem__(self, grid):
            return compile_and_launch

    return launch.Launcher(Jitted())


def test_what_was_compiled_is_launched_with_addresses(launched):
    call = launcher(launched)
    x, other = torch.zeros(16), torch.zeros(16)
    for tensor in (x, other):
        call(3, (tensor,), (16, 1e-6), (64,), 4)
    assert [kind for kind, *_ in launched] == ["triton", "compiled"]
    assert launched[1] == ("compiled", 3, other.data_ptr(), 16, 1e-6, 64)


@pytest.mark.parametrize(
    ("tensor", "numbers", "constants"),
    [(torch.zeros(16).half(), (16,), (64,)), (torch.zeros(16), (17,), (64,)), (torch.zeros(16), (16,), (128,)),
     (torch.zeros(17)[1:], (16,), (64,))],
    ids=["dtype", "number", "constant", "pointer not aligned"],
)  # fmt: skip
def test_anything_else_goes_tritons_way(launched, tensor, numbers, constants):
    call = launcher(launched)
    call(1, (torch.zeros(16),), (16,), (64,), 4)
    call(1, (tensor,), numbers, constants, 4)
    assert [kind for kind, *_ in launched] == ["triton", "triton"]


def test_repeat(launched):
    call = launcher(launched)
    x, other, shifted = torch.zeros(16), torch.zeros(16), torch.zeros(17)[1:]
    key = launch.layouts(x)
    assert not call.repeat(key, (x,))
    call(3, (shifted,), (16,), (64,), 4, launch.layouts(shifted))  # compiled for less than it could be: not kept
    assert not call.repeat(key, (x,))
    call(3, (x,), (16,), (64,), 4, key)
    assert call.repeat(launch.layouts(other), (other,))
    assert launched[-1] == ("compiled", 3, other.data_ptr(), 16, 64)
    count = len(launched)
    assert not call.repeat(launch.layouts(shifted), (shifted,))
    assert len(launched) == count


def test_layouts_tell_all_but_addresses():
    x = torch.zeros(4, 6)
    assert launch.layouts(x) == launch.layouts(torch.ones(4, 6))
    others = [x[:2], x.double(), x.t(), torch.zeros(6, 4).t(), torch.zeros(4, 6, 1)]
    assert all(launch.layouts(x) != launch.layouts(other) for other in others)


def test_tables_do_not_grow_for_ever(launched, monkeypatch):
    monkeypatch.setattr(launch, "TABLE", 3)
    call = launcher(launched)
    x = torch.zeros(16)
    for number in range(10):
        call(1, (x,), (number,), (64,), 4, (number,))
    assert 1 <= len(call.known) <= 3
    assert call.repeat((9,), (x,))
