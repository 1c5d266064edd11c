"""The CUDA kernel of small products in bit planes without a GPU: its own code, on emulated warps."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gemv_planes_cases import SPECS, check, weight_of

pytest.importorskip("triton")  # whose launcher's arithmetic it shares
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EMULATION = Path(__file__).parent / "emulation"
RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Planes *w, const u16 **x, const u16 **bias, u16 **out,
                    const float **factor, u32 *batch) {
    launch(blocks, threads, bytes, [&] { planes(*w, *x, *bias, *out, *factor, *batch); });
}
"""


@pytest.fixture
def planes(monkeypatch, tmp_path):
    """`gemv_planes` whose kernel runs here, on three multiprocessors."""
    from halfbyte.kernels import cuda as folder
    from halfbyte.kernels import gemv_planes

    source = folder.source_of("planes", (EMULATION, Path(folder.__file__).parent)) + RUN
    (tmp_path / "kernel.cpp").write_text(source)

    class Emulated:
        def __init__(self, constants, name, bytes_):
            built = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
            flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *(f"-D{k}={v}" for k, v in constants.items())]
            subprocess.run([COMPILER, *flags, str(tmp_path / "kernel.cpp"), "-o", str(built)], check=True)
            self.run, self.bytes = ctypes.CDLL(str(built)).run, bytes_

        def __call__(self, blocks, threads, arguments):
            self.run(blocks, threads, self.bytes, *[ctypes.byref(argument) for argument in arguments])

    monkeypatch.setattr(gemv_planes, "_kernel", gemv_planes._kernel.__wrapped__)
    monkeypatch.setattr(gemv_planes, "Kernel", Emulated)
    monkeypatch.setattr(gemv_planes, "cubin", lambda name, capability, constants: constants)
    monkeypatch.setattr(gemv_planes, "multiprocessors_of", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return gemv_planes


@pytest.mark.parametrize("spec", SPECS)
def test_products(planes, spec):
    """N that ends within a tile; a warp that has a step more than the other; several tiles for a group."""
    dtype = torch.float16 if spec in ("kbit:3:bnf", "kbit:4:fitted") else torch.bfloat16
    batch = 11 if spec in ("kbit:4:fitted", "hqq:3:32") else 2
    weight = weight_of(spec, 70, 768)
    check(planes, weight, batch, dtype, planes.Blocks(1 + (batch > 8), 1, 2, 2), bias=True)


def test_more_rings_than_fit_before_the_table_and_warps_without_work(planes):
    check(planes, weight_of("kbit:2:nf", 38, 512), 1, torch.bfloat16, planes.Blocks(1, 4, 4, 4))


def test_block_shapes_fit_a_multiprocessor(planes):
    for rows in (16, 256, 1024, 4096, 14336, 28672, 131072):
        for batch in (1, 2, 4, 8, 16):
            for bits, group in ((2, 0), (3, 0), (4, 0), (5, 0), (2, 32), (3, 32), (4, 32), (8, 32)):
                blocks = planes.blocks_for(bits, rows, batch, 132)
                assert blocks.shared_bytes(bits, group, batch) <= 232448
    for bits in (2, 3, 4):  # the next product's blocks fit beside
        assert planes.blocks_for(bits, 4096, 1, 132).shared_bytes(bits, 0, 1) <= planes.HALF
