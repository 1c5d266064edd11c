"""Registration of host memory with CUDA, on a fake runtime; on a GPU also during captures."""

import gc
import mmap

import pytest
import torch

from halfbyte.memory.pinned import AfterCapture, HostMemory, whole_pages
from halfbyte.utils.errors import TrainingError

ALREADY, NOT_REGISTERED = 712, 713


class Runtime:
    """A fake CUDA runtime that registers pages, rejects overlaps, and keeps a failure as the last error."""

    def __init__(self):
        self.pages: dict[int, set[int]] = {}  # address → its pages
        self.last, self.calls, self.refuses = 0, 0, 0

    def cudaHostRegister(self, address, size, _flags):
        self.calls += 1
        pages = set(range(address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)))
        if self.refuses or any(pages & own for own in self.pages.values()):
            self.last = self.refuses or ALREADY
            return self.last
        self.pages[address] = pages
        return 0

    def cudaHostUnregister(self, address):
        if self.pages.pop(address, None) is None:
            self.last = NOT_REGISTERED
            return self.last
        return 0

    def clear(self):
        self.last = 0


class Capture:
    on = False

    def __call__(self):
        return self.on


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def capture():
    return Capture()


@pytest.fixture
def host(runtime, capture):
    return HostMemory(lambda: runtime, runtime.clear, AfterCapture(capture))


def nothing():
    """There is no device to wait for."""


def test_a_range_is_registered_once(host, runtime):
    buffer = whole_pages(3 * mmap.PAGESIZE)
    for part in (buffer, buffer, buffer[100:5000]):
        assert host.pin(part) is part
    assert runtime.calls == len(runtime.pages) == 1
    host.unpin([buffer], nothing)
    host.unpin([buffer[100:5000]], nothing)
    assert host.nbytes == buffer.nbytes
    host.unpin([buffer], nothing)
    assert not runtime.pages
    assert host.nbytes == runtime.last == 0


def test_a_range_that_overlaps_is_refused_and_leaves_no_error(host, runtime):
    memory = whole_pages(4 * mmap.PAGESIZE)
    first, second = memory[: 2 * mmap.PAGESIZE], memory[mmap.PAGESIZE :]
    host.pin(first)
    with pytest.raises(TrainingError):
        host.pin(second)
    assert runtime.last == 0
    assert host.nbytes == first.nbytes
    host.unpin([first], nothing)
    host.pin(second)
    host.unpin([second], nothing)
    assert not runtime.pages


def test_memory_is_held_until_it_is_unregistered(host, runtime, capture):
    """Otherwise the next buffer could get an address that CUDA considers registered."""
    buffer, waits = host.pin(whole_pages(100)), []
    address = buffer.data_ptr()
    capture.on = True
    host.unpin([buffer], lambda: waits.append(1))
    del buffer
    gc.collect()
    assert not waits  # which would make the capture fail
    others = [whole_pages(100) for _ in range(50)]
    assert address not in [other.data_ptr() for other in others]
    assert host.nbytes == 100
    capture.on = False
    for other in others:
        host.pin(other)
    assert waits == [1]
    assert [*runtime.pages] == [other.data_ptr() for other in others]
    assert runtime.last == 0


def test_failed_synchronization_keeps_the_memory(host, runtime):
    def fails():
        raise RuntimeError("the device is gone")

    buffer = host.pin(whole_pages(100))
    with pytest.raises(RuntimeError):
        host.unpin([buffer], fails)
    assert list(runtime.pages) == [buffer.data_ptr()]
    assert host.nbytes == 100


def test_a_finalizer_that_runs_during_a_registration(host, runtime, monkeypatch):
    """As garbage collection may run it: between any two instructions."""
    first, register = host.pin(whole_pages(100)), runtime.cudaHostRegister

    def register_amid_garbage_collection(*arguments):
        host.unpin([first], nothing)
        assert first.data_ptr() in runtime.pages
        return register(*arguments)

    monkeypatch.setattr(runtime, "cudaHostRegister", register_amid_garbage_collection)
    second = host.pin(whole_pages(200))
    assert [*runtime.pages] == [second.data_ptr()]
    assert host.nbytes == 200


@pytest.mark.gpu
def test_offload_freed_during_a_capture(monkeypatch):
    """Its memory is freed after the capture, which succeeds without error; the same size can be pinned again."""
    from halfbyte.memory import offload
    from halfbyte.memory.pinned import AFTER_CAPTURE, HOST
    from halfbyte.utils.hardware import capture_stream

    monkeypatch.setattr(offload, "SMALLEST", 1024)
    device = torch.device("cuda", torch.cuda.current_device())
    gc.collect()
    AFTER_CAPTURE.settle()
    before, x = HOST.nbytes, torch.ones(64, 1024, device=device)

    def offloaded():
        store = offload.Offload(device)
        with store.hooks():
            packed = [store.pack(x.clone()) for _ in range(4)]
        store.unpack(packed[3])  # the one before is being fetched
        return store, packed

    store, packed = offloaded()
    assert HOST.nbytes > before
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(device.index)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        y = x * 2
        del store, packed
        gc.collect()
        assert HOST.nbytes > before
        graph.capture_end()
    AFTER_CAPTURE.settle()
    assert HOST.nbytes == before
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)
    for _ in range(3):
        store, packed = offloaded()
        assert torch.equal(store.unpack(packed[0]), x)


@pytest.mark.gpu
def test_a_failed_registration_leaves_no_error_on_a_gpu():
    from halfbyte.memory.pinned import HOST

    memory = whole_pages(4 * mmap.PAGESIZE)
    HOST.pin(memory[: 2 * mmap.PAGESIZE])
    with pytest.raises(TrainingError):
        HOST.pin(memory[mmap.PAGESIZE :])
    assert float(torch.ones(4, device="cuda").sum()) == 4
    HOST.unpin([memory[: 2 * mmap.PAGESIZE]])
