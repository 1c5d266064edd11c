"""Check the cache of a Launcher, on CPU tensors and with a compiled kernel that only records its arguments."""

import ast
from types import SimpleNamespace

import pytest
import torch

from halfbyte.dispatch import Unavailable, op
from halfbyte.utils import notices

pytest.importorskip("triton")
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from halfbyte.kernels.triton import launch


@pytest.fixture
def launched(monkeypatch):
    """Recorded calls: ("triton", tensors ...) for a call of Triton, then ("compiled", addresses ...)."""
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7)))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: -1)  # the index of CPU tensors
    return []


def launcher(launched):
    def run(x, y, z, stream, function, metadata, *rest):
        assert (y, z, stream, function, metadata, *rest[:3]) == (1, 1, 7, "handle", "packed", None, None, None)
        launched.append(("compiled", x, *rest[3:]))

    class Jitted:
        __module__, __name__ = "halfbyte.kernels.triton.some", "_kernel"

        def warmup(self, *arguments, grid, num_warps):
            launched.append(("triton", *arguments))
            return SimpleNamespace(run=run, function="handle", packed_metadata="packed")

    return launch.Launcher(Jitted())


def test_compiled_kernel_is_launched_with_addresses(launched):
    call = launcher(launched)
    x, other = torch.zeros(16), torch.zeros(16)
    for tensor in (x, other):
        call(3, (tensor,), (16, 1e-6), (64,), 4)
    assert [kind for kind, *_ in launched] == ["triton", "compiled", "compiled"]
    assert launched[2] == ("compiled", 3, other.data_ptr(), 16, 1e-6, 64)


@pytest.mark.parametrize(
    ("tensor", "numbers", "constants"),
    [(torch.zeros(16).half(), (16,), (64,)), (torch.zeros(16), (17,), (64,)), (torch.zeros(16), (16,), (128,)),
     (torch.zeros(17)[1:], (16,), (64,))],
    ids=["dtype", "number", "constant", "pointer not aligned"],
)  # fmt: skip
def test_other_calls_go_to_triton(launched, tensor, numbers, constants):
    call = launcher(launched)
    call(1, (torch.zeros(16),), (16,), (64,), 4)
    call(1, (tensor,), numbers, constants, 4)
    assert [kind for kind, *_ in launched] == ["triton", "compiled"] * 2


def test_repeat(launched):
    call = launcher(launched)
    x, other, shifted = torch.zeros(16), torch.zeros(16), torch.zeros(17)[1:]
    key = launch.layouts(x)
    assert not call.repeat(key, (x,))
    call(3, (shifted,), (16,), (64,), 4, launch.layouts(shifted))  # compiled for fewer alignments: not cached
    assert not call.repeat(key, (x,))
    call(3, (x,), (16,), (64,), 4, key)
    assert call.repeat(launch.layouts(other), (other,))
    assert launched[-1] == ("compiled", 3, other.data_ptr(), 16, 64)
    count = len(launched)
    assert not call.repeat(launch.layouts(shifted), (shifted,))
    assert len(launched) == count


class Refusing:
    """A jitted kernel that does not compile, or raises `loads` when it is loaded."""

    __module__, __name__ = "halfbyte.kernels.triton.some", "_kernel"

    def __init__(self, compiles=None, loads=None):
        self.compiles, self.loads, self.asked = compiles, loads, 0

    def warmup(self, *arguments, grid, num_warps):
        self.asked += 1
        if self.compiles:
            raise self.compiles
        return self

    @property
    def run(self):
        raise self.loads


REFUSALS = [
    ({"loads": OutOfResources(159744, 101376, "shared memory")}, "Required: 159744, Hardware limit: 101376"),
    ({"compiles": CompilationError("source", ast.parse("1").body[0], "no such type here")}, "no such type here"),
    ({"compiles": PTXASError("`ptxas` failed")}, "ptxas"),
    ({"compiles": RuntimeError("PassManager::run failed")}, "PassManager::run failed"),
    ({"loads": RuntimeError("Triton Error [CUDA]: no kernel image is available")}, "no kernel image"),
]
refusals = pytest.mark.parametrize(("how", "said"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")


def refusing(call):
    """An op whose kernel is launched by `call`."""

    @op()
    def double(x, number):
        return 2 * x

    @double.kernel("cpu")
    def launching(x, number):
        call(1, (x,), (number,), (64,), 4)

    return double


@refusals
def test_failing_kernel_is_refused_and_logged_once(how, said, launched):
    call = launch.Launcher(Refusing(**how))
    double, tensors = refusing(call), (torch.zeros(16), torch.zeros(16).half())
    for number in range(3):  # sizes change every time: nothing is compiled again for a new one
        assert double(tensors[0], number).tolist() == [0] * 16
    assert double(tensors[1], 1).tolist() == [0] * 16
    assert call.function.asked == 2
    (text,) = notices.notices_so_far().values()
    assert said in text
    assert "it does not run on Triton's interpreter: " in text


def test_other_errors_are_raised(launched):
    with pytest.raises(TypeError):
        launch.Launcher(Refusing(TypeError("missing a required argument")))(1, (torch.zeros(16),), (1,), (64,), 4)


def test_driver_error_in_a_capture_is_raised(launched, monkeypatch):
    monkeypatch.setattr(launch, "_in_capture", lambda tensor: True)
    loads = launch.Launcher(Refusing(loads=RuntimeError("operation not permitted when stream is capturing")))
    with pytest.raises(RuntimeError, match="not permitted"):
        loads(1, (torch.zeros(16),), (1,), (64,), 4)
    monkeypatch.setattr(launch, "_in_capture", lambda tensor: False)
    with pytest.raises(Unavailable):  # tried again: the failure was not recorded
        loads(1, (torch.zeros(16),), (1,), (64,), 4)
    monkeypatch.setattr(launch, "_in_capture", lambda tensor: True)
    large = launch.Launcher(Refusing(loads=OutOfResources(159744, 101376, "shared memory")))
    with pytest.raises(Unavailable):
        large(1, (torch.zeros(16),), (1,), (64,), 4)
