"""Check the fallbacks of CUDA kernels that do not compile, load or launch."""

from types import SimpleNamespace

import pytest
import torch

from halfbyte.dispatch import Unavailable, op
from halfbyte.kernels import cuda, device
from halfbyte.kernels.cuda import Image, Kernel, remembered
from halfbyte.utils import notices


def test_compile_failure_is_logged_once_and_not_retried():
    """Only that variant is unavailable: others run."""
    calls = []

    @remembered
    def kernel(constant):
        calls.append(constant)
        if constant > 1:
            raise Unavailable("no NVRTC")
        return constant

    @op()
    def product(x, which, term):
        return "reference"

    @product.kernel("cpu")
    def compiled(x, which, term):
        return kernel(which) + term

    x = torch.ones(2)
    assert [product(x, which, term=10) for which in (0, 1, 2, 1, 2, 0)] == [10, 11, "reference", 11, "reference", 10]
    assert calls == [0, 1, 2]
    (text,) = notices.notices_so_far().values()
    assert "compiled: no NVRTC" in text


class Driver:
    """A driver that loads everything; launches return `status`."""

    def __init__(self, status=0, able=1, each=1):
        self.status, self.able, self.each, self.launched = status, able, each, 0

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuLaunchKernelEx(self, *arguments):
        self.launched += 1
        return self.status

    def cuDeviceGetAttribute(self, found, *rest):
        found._obj.value = self.able
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, found, *rest):
        found._obj.value = self.each
        return 0


@pytest.fixture
def kernel(monkeypatch):
    """Make a kernel on a device with 99 KiB of shared memory and 10 multiprocessors, with a driver."""
    monkeypatch.setattr(device, "_assumed", device.Device("RTX", "cuda", (12, 0), 99 * 1024, 1024, 10))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make(shared_bytes, driver):
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        return Kernel(Image(b"", shared_bytes, 0), "a_kernel")

    return make


def test_a_kernel_that_needs_more_shared_memory_than_there_is(kernel):
    kernel(99 * 1024, Driver())
    with pytest.raises(Unavailable, match=r"a_kernel.*160 KiB.*RTX.*99"):
        kernel(160 * 1024, Driver())


@pytest.mark.parametrize("status", cuda.REFUSED_LAUNCHES)
def test_a_launch_that_the_driver_refuses_falls_back(status, kernel):
    driver = Driver(status)
    with pytest.raises(Unavailable, match="CUDA"):
        kernel(0, driver)(1, 32, [])
    assert driver.launched == 1


@pytest.mark.parametrize(("able", "each", "room"), [(0, 1, 0), (1, 0, 0), (1, 1, 10)])
def test_too_many_cooperative_blocks_are_refused_before_a_launch(able, each, room, kernel):
    driver = Driver(able=able, each=each)
    made = kernel(0, driver)
    with pytest.raises(Unavailable, match=f"runs {room}.*11 blocks"):
        made.check_together(11, 384)
    assert not driver.launched
    if room:
        made.check_together(room, 384)


@pytest.mark.parametrize(("hip", "asked"), [(None, [torch.float32]), ("6.4", [])])
def test_rocm_s_gemm_is_not_asked_for_another_dtype(hip, asked, monkeypatch):
    from halfbyte.autograd.gemms import summed

    class OnGpu(torch.Tensor):
        is_cuda = True

    found = []

    def mm(a, b, out_dtype):
        found.append(out_dtype)
        return a.float() @ b.float()

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, "mm", mm)
    a, b = (torch.randn(4, 4).bfloat16() for _ in range(2))
    result = summed(a.as_subclass(OnGpu), b, 2.0, torch.float32)
    torch.testing.assert_close(result.as_subclass(torch.Tensor), 2 * a.float() @ b.float(), rtol=0.02, atol=0.02)
    assert (found, result.dtype) == (asked, torch.float32)
