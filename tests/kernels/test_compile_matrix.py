"""Compile every kernel for every architecture without a GPU, and compare its resources with the device's limits.

`benchmarks.kernel_matrix` records the launches that dispatch makes for each target. The committed page and its results
have all variants; a part of them is compiled here, and all of them with `slow`.
"""

import collections
import inspect
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime import driver

from benchmarks import kernel_cases as cases
from benchmarks import kernel_matrix as matrix
from halfbyte.kernels import cuda
from halfbyte.kernels.cuda import nvrtc
from halfbyte.kernels.selection import all_ops
from halfbyte.kernels.triton.launch import Launcher

TARGETS = {target.name: target for target in matrix.TARGETS}
# For one target all everyday kernels; for the others those that depend on shared memory and tensor cores.
EVERYDAY = {"sm_86": "", "sm_90": "gated unit with", "sm_75": "decoding", "gfx942": "decoding"}
needs_nvrtc = pytest.mark.skipif(matrix.any_nvrtc() is None, reason="needs the wheel nvidia-cuda-nvrtc")


@pytest.fixture(autouse=True)
def compilers(monkeypatch, tmp_path):
    """NVRTC from its wheel with an empty cache, and Triton's driver restored afterwards."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", matrix.any_nvrtc)
    before = driver._active
    yield
    driver._active = before


def an_image(name, capability, constants, structs=()):
    """Replace NVRTC where nothing is to be compiled."""
    return cuda.Image(f"{name} {constants}".encode(), 0, 0)


def launched(target, chosen, cubin=matrix.no_nvrtc):
    """Launches of the cases on a target."""
    with matrix.recorded(target, cubin) as found:
        for case in chosen:
            case.call()
    return found


def test_every_kernel_has_a_row():
    on_ada = launched(TARGETS["sm_89"], cases.all_cases())
    on_hopper = launched(TARGETS["sm_90"], cases.all_cases(), an_image)
    triton = {launch.name for launch in (*on_ada.triton, *on_hopper.triton)}
    of_cuda = {launch.name for launch in on_hopper.cuda}
    of_cuda |= {launch.name for launch in launched(TARGETS["sm_89"], cases.all_cases(), an_image).cuda}
    assert triton == matrix.triton_kernels()
    assert of_cuda == matrix.cuda_kernels()
    results = matrix.read_results()
    assert set(results) == set(TARGETS)
    rows = {kernel for groups in results.values() for kernel in matrix.joined(groups)}
    assert rows == triton | {f"cuda/{name}" for name in of_cuda}


def kernels():
    """Code of every kernel of an op, with the op's name."""
    for op in all_ops().values():
        for kernel in op.kernels("cuda"):
            yield inspect.unwrap(kernel.function).__code__, op.reference.__name__


def test_every_launch_can_fall_back_to_a_reference():
    """Launches are made by an op's kernel; the kernel of a mutating op launches once, before it changes an argument."""
    names, within = dict(kernels()), []  # per launch the frame of its kernel, which differs for every call

    def frames():
        frame = sys._getframe()
        while frame:
            yield frame
            frame = frame.f_back

    def record(self, *_):
        callers = [frame for frame in frames() if frame.f_code in names]
        assert callers, f"{matrix.kernel_name(self)} is launched outside of an op's kernel"
        within.append((names[callers[0].f_code], callers[0], matrix.kernel_name(self)))

    with matrix.recorded(TARGETS["sm_89"], matrix.no_nvrtc), mock.patch.object(Launcher, "_launch", record):
        for case in cases.all_cases():
            case.call()
    in_place = collections.Counter((name, frame) for name, frame, _ in within if name.endswith("_"))
    assert {name for name, _ in in_place} >= {"glu_backward_", "rope_", "lora_glu_backward_", "cross_entropy_"}
    assert set(in_place.values()) == {1}


@pytest.mark.parametrize(
    ("name", "half", "full"),
    [("sm_75", 0, 0), ("sm_80", 64, 32), ("sm_86", 64, 32), ("sm_90", 64, 32), ("sm_120", 64, 32), ("gfx942", 32, 16)],
)
def test_ranks_supported_in_one_pass(name, half, full):
    """Other ranks take separate products (`autograd.lora_mlp`): no rank is accepted and then refused."""
    for dtype, most in ((cases.BF16, half), (cases.FP16, half), (cases.FP32, full)):
        assert matrix.ranks_in_one_pass(TARGETS[name], dtype) == list(range(4, most + 1))
    assert not matrix.ranks_in_one_pass(TARGETS[name], torch.float64)


@pytest.mark.parametrize("target", matrix.TARGETS, ids=lambda target: target.name)
def test_every_rank_and_head_size_has_a_row(target):
    """Every variant that is launched is among the page's cases, except for numbers that only mask."""

    def form(launch):
        constants = launch.constants[3:] if launch.name.startswith("lora_glu.") else launch.constants
        return launch.name, launch.tensors[0].dtype, constants, launch.warps

    of_page = launched(target, [*cases.CASES["lora"], *cases.CASES["decoding"]])
    with matrix.recorded(target, matrix.no_nvrtc) as found:
        for dtype in cases.DTYPES:
            for rank in range(4, 129):
                cases.lora_call(dtype, rank, "silu", False)
            for size in range(64, 257):
                cases.attend_call(dtype, size, dtype, None, None)
    assert {form(launch) for launch in found.triton} <= {form(launch) for launch in of_page.triton}
    assert len(found.triton) >= 3 * 193


def test_page_matches_the_results():
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.rendered(matrix.read_results())
    readme = (matrix.ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/kernels.md" in readme


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_launches_compile_and_fit(name, monkeypatch):
    """The first variant of each kernel: compiling one takes half a second."""
    chosen = [case for case in cases.all_cases() if case.everyday and EVERYDAY[name] in case.name]
    compiled = {}

    def compile_first(launch, target):
        if launch.name not in compiled:
            compiled[launch.name] = compile_triton(launch, target)
        return compiled[launch.name]

    compile_triton = matrix.compile_triton
    monkeypatch.setattr(matrix, "compile_triton", compile_first)
    monkeypatch.setattr(cuda, "cubin", matrix.no_nvrtc)
    rows = matrix.measure(TARGETS[name], chosen)
    assert rows
    assert not {kernel: row.refused for kernel, row in rows.items() if row.refused}


@needs_nvrtc
def test_everyday_cuda_kernels_compile_and_fit():
    chosen = [case for case in cases.all_cases() if case.everyday and "products" in case.name and "4-bit" in case.name]
    with mock.patch.object(matrix, "compile_triton", return_value=matrix.Taken()):
        rows = matrix.measure(TARGETS["sm_90"], chosen)
    of_cuda = {kernel: row for kernel, row in rows.items() if kernel.startswith("cuda/")}
    assert {"cuda/row4", "cuda/gemm4"} <= set(of_cuda)
    assert not any(row.refused for row in of_cuda.values())
    assert all(row.shared_bytes > 64 * matrix.KIB for row in of_cuda.values() if row is not of_cuda.get("cuda/add"))


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_all_variants_match_the_page(name):
    expected = matrix.read_results()[name]
    for _, group, rows in matrix.measure_parts([name], 1):
        assert {kernel: (row.forms, row.sorted()["refused"]) for kernel, row in rows.items()} == {
            kernel: (row.forms, row.sorted()["refused"]) for kernel, row in expected[group].items()
        }
