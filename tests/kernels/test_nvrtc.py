"""Check the compilation of CUDA sources: files, errors, and struct sizes shared with Python."""

import ctypes
import re

import pytest

from benchmarks.kernel_matrix import any_nvrtc
from halfbyte.dispatch import Unavailable
from halfbyte.kernels.cuda import gemm4, gemv4, low_rank, nvrtc
from halfbyte.kernels.device import HOPPER_SHARED_BYTES
from tests.helpers.emulated import built, needs_compiler

needs_nvrtc = pytest.mark.skipif(any_nvrtc() is None, reason="needs the wheel nvidia-cuda-nvrtc")
GEMV4 = {"RT": 1, "WR": 2, "WK": 2, "STAGES": 2, "NT": 1, "BF16": 1, "NESTED": 1, "ORIGIN": 1024}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder, and the sources that are compiled into it."""
    compiled = []
    image = built("low_rank", {"SPLIT": 4, "WARPS": 2, "BF16": 1}).read_bytes()
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compiled", lambda files, options: compiled.append((files, options)) or image)
    return compiled


@needs_compiler
def test_cached_cubin_is_reused_unless_an_input_changes(cache, monkeypatch, tmp_path):
    def get(constants=(("BF16", 1),), capability=(9, 0)):
        return nvrtc.cubin("low_rank", capability, dict(constants))

    assert get() == get()
    assert len(cache) == 1
    get((("BF16", 0),)), get(capability=(10, 0))
    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 1))
    get()
    for path in nvrtc.FOLDER.glob("*.cu*"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    get()
    assert len(cache) == 4
    with (tmp_path / "warp.cuh").open("a") as header:
        header.write("\n")
    get()
    assert len(cache) == 5
    with (tmp_path / "lora.cuh").open("a") as header:  # a header that the source does not include
        header.write("\n")
    get()
    assert len(cache) == 5


@needs_compiler
def test_struct_sizes_are_compared_with_python(cache):
    """A source exports its shared memory and its structs' sizes; an unequal size in Python raises an error."""

    class Extra(ctypes.Structure):
        _fields_ = (("a", ctypes.c_uint32),)

    with pytest.raises(RuntimeError, match=re.escape("low_rank.cu: the structs (Extra) have [] bytes in CUDA and [4]")):
        nvrtc.cubin("low_rank", (9, 0), {}, [Extra])


@needs_compiler
@pytest.mark.parametrize(
    ("name", "constants", "structs"),
    [
        ("gemv4", GEMV4, [gemv4.Weight]),
        ("gemm4", GEMV4 | {"GROUPS": 1, "NT": 2}, [gemm4.parts_of(gemv4.Weight), gemm4.Sums]),
    ],
)
def test_layouts(name, constants, structs):
    layout = nvrtc.exported(built(name, constants).read_bytes())
    assert layout[2:] == [ctypes.sizeof(each) for each in structs]
    assert layout[0] <= HOPPER_SHARED_BYTES
    grown = type("Grown", (structs[-1],), {"_fields_": (("more", ctypes.c_uint64),)})
    with pytest.raises(RuntimeError, match=f"{name}.cu: the structs .*Grown"):
        nvrtc.checked(layout, name, [*structs[:-1], grown])


@needs_nvrtc
def test_an_error_has_file_and_line(monkeypatch):
    monkeypatch.setattr(nvrtc, "_nvrtc", any_nvrtc)
    files = nvrtc.sources("gemv4")
    line = files["warp.cuh"].count("\n") + 1
    files["warp.cuh"] += "__device__ int f() { return zz; }\n"
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{key}={value}" for key, value in GEMV4.items())]
    with pytest.raises(Unavailable, match=rf"(?s)NVRTC.*warp.cuh\({line}\):"):
        nvrtc.compiled(files, options)


@needs_nvrtc
def test_a_cubin_exports_its_layout(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", any_nvrtc)
    warps, tile = low_rank.WARPS, low_rank.TILE
    constants = {"SPLIT": low_rank.SPLIT, "WARPS": warps, "BF16": 1}
    assert nvrtc.cubin("low_rank", (9, 0), constants).shared == (warps + 1) * tile * tile * 4
