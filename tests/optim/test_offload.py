"""Offloaded state: windows of any size give the bytes of resident state, through save and load."""

import copy

import pytest
import torch
from torch import nn

from halfbyte.memory.pinned import whole_pages
from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.optim import fused, offload
from halfbyte.utils.errors import TrainingError

SIZES = ((3,), (300, 7), (4097,), (5000,), (64, 80), (1,), (0,))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=[1, 3000, 2**28], ids=["many windows", "some windows", "one window"])
def window(request, monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", request.param)
    monkeypatch.setattr(offload, "CUT", 512)


def made(device, dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(device, dtype)) for size in SIZES]


def step(parameters, optimizer, number):
    torch.manual_seed(number)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(parameter)
    optimizer.clip(1.0)
    optimizer.step()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rounding", ["nearest", "correction8"])
def test_equals_resident_state(window, device, storage, rounding):
    dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
    runs = []
    for offloaded in (False, True):
        parameters = made(device, dtype)
        options = {"storage": storage, "rounding": rounding, "offload": offloaded, "min_quantized": 100}
        optimizer = fused.AdamW(parameters, 1e-2, **options)
        for number in range(3):
            step(parameters, optimizer, number)
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = fused.AdamW(parameters, 1e-2, **options)
        resumed.load_state_dict(saved)
        for number in range(3, 5):
            step(parameters, resumed, number)
        runs.append((parameters, saved, resumed.state_dict(), resumed))
    resident, other = runs
    for a, b in zip(resident[0], other[0], strict=True):
        assert torch.equal(a, b)
    for a, b in ((resident[1], other[1]), (resident[2], other[2])):
        assert a["state"].keys() == b["state"].keys()
        for number, values in a["state"].items():
            assert_equal(b["state"][number], values)
    held = [value for state in other[3].state.values() for key, value in state.items() if key != "step"]
    assert {value.device.type for value in held} == {"cpu"}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        else:
            one, two = (torch.as_tensor(each).cpu() for each in (found[key], value))
            assert one.shape == two.shape
            assert torch.equal(one.view(torch.uint8) if one.dim() else one, two.view(torch.uint8) if two.dim() else two)


@pytest.mark.gpu
def test_device_holds_two_windows_only():
    parameters = [nn.Parameter(torch.zeros(2**26, device="cuda", dtype=torch.bfloat16)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = fused.AdamW(parameters, offload=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 2.2 * offload.WINDOW
    assert sum(value.nbytes for state in optimizer.state.values() for value in state.values()) > 7 * offload.WINDOW


def test_parameters_without_elements_alone():
    weight = nn.Parameter(torch.empty(0, 3))
    optimizer = fused.AdamW([weight], offload=True, rounding="correction8")
    step([weight], optimizer, 0)
    assert optimizer.state[weight]["step"].item() == 1


def test_parameters_vanish_and_come_back(window):
    """State is laid out anew when other parameters have gradients; the weights are those of resident state."""
    runs = []
    for offloaded in (False, True):
        parameters = made("cpu", torch.float32)
        optimizer = fused.AdamW(parameters, 1e-2, storage="dynamic8", offload=offloaded, min_quantized=100)
        for number in range(6):
            torch.manual_seed(number)
            for at, parameter in enumerate(parameters):
                parameter.grad = None if at == number % 4 else torch.randn(parameter.shape)
            optimizer.step()
        runs.append(parameters)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("offloaded", [False, True])
def test_state_that_host_memory_does_not_hold_is_refused(offloaded):
    weight = nn.Parameter(torch.ones(1).expand(2**50))
    weight.grad = torch.ones(1).expand(2**50)
    optimizer = fused.AdamW([weight], offload=offloaded)
    with pytest.raises(TrainingError):
        optimizer.step()
    with pytest.raises(TrainingError):
        whole_pages(2**52)
