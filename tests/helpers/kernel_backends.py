"""Parametrize kernel tests by `backend`, the place where the kernel runs.

`cpu`: C, compiled here. `emulated`: the CUDA source on a CPU, with emulated warps (`emulated`). `hopper`: CUDA on a
GPU. `gpu`: any GPU. `interpret`: Triton's interpreter, in the process that `test_interpreted` starts.
"""

import shutil

import pytest
import torch

from tests.helpers.emulated import emulate, needs_compiler
from tests.helpers.parity import INTERPRETED

_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
MARKS = {
    "cpu": [pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")],
    "emulated": [needs_compiler],
    "gpu": [pytest.mark.gpu],
    "interpret": [pytest.mark.interpret, pytest.mark.skipif(not INTERPRETED, reason="in a process of its own")],
    "hopper": [pytest.mark.gpu, pytest.mark.skipif(not _hopper, reason="needs a Hopper GPU or newer")],
}
DEVICES = {"cpu": "cpu", "emulated": "cpu", "interpret": "cpu", "gpu": "cuda", "hopper": "cuda"}
hopper = MARKS["hopper"]


def backends(*names):
    """Run a test on each of these backends."""
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=MARKS[name]) for name in names])


def cases(names, **by_backend):
    """Run a test on each backend with that backend's cases: values of `names`."""
    names = names if isinstance(names, tuple) else (names,)
    values = [
        pytest.param(backend, *(case if len(names) > 1 else (case,)), marks=MARKS[backend], id=_id(backend, case))
        for backend, listed in by_backend.items()
        for case in listed
    ]
    return pytest.mark.parametrize(("backend", *names), values)


def _id(backend, case):
    parts = case if isinstance(case, tuple) else (case,)
    return "-".join([backend, *[getattr(part, "__name__", str(part)).rsplit(".", 1)[-1] for part in parts]])


def loaded(module, backend, monkeypatch, runner):
    """Load a module of CUDA kernels for `backend`; `runner` is C++ for `emulate`."""
    return emulate(module, monkeypatch, runner) if backend == "emulated" else module
