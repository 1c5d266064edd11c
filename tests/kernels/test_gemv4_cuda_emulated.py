"""The CUDA kernel of small products without a GPU: its own code, compiled for the CPU against emulated warps."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gemv4_cases import arguments, check

pytest.importorskip("triton")  # whose launcher's arithmetic gemv4_cuda shares
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EMULATION = Path(__file__).parent / "emulation"

RUN = {
    "gemv4": """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Weight *w, const u16 **x, const u16 **bias, u16 **out,
                    u32 *batch) {
    launch(blocks, threads, bytes, [&] { gemv4(*w, *x, *bias, *out, *batch); });
}
""",
}


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """`gemv4_cuda` whose kernels run here, on three multiprocessors."""
    from halfbyte.kernels import cuda as folder
    from halfbyte.kernels import gemv4_cuda

    def kernel(name, blocks, device, tiles, bf16, table, row, constants):
        source = folder.source_of(name, (EMULATION, Path(folder.__file__).parent)) + RUN[name]
        values = dict(zip(("RT", "WR", "WK", "STAGES"), blocks, strict=True))
        values |= {"NT": tiles, "BF16": int(bf16), **dict(constants)}
        (tmp_path / "kernel.cpp").write_text(source)
        built = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
        flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *(f"-D{key}={value}" for key, value in values.items())]
        subprocess.run([COMPILER, *flags, str(tmp_path / "kernel.cpp"), "-o", str(built)], check=True)
        run, size = ctypes.CDLL(str(built)).run, blocks.shared_bytes(8 * tiles, table, row)
        return lambda count, threads, values: run(count, threads, size, *[ctypes.byref(value) for value in values])

    monkeypatch.setattr(gemv4_cuda, "_kernel", kernel)
    monkeypatch.setattr(gemv4_cuda, "multiprocessors_of", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return gemv4_cuda


@pytest.mark.parametrize(
    ("blocks", "batch", "dtype", "nested"),
    [
        ((1, 1, 2, 3), 1, torch.bfloat16, True),  # a warp has one step more than the other
        ((2, 2, 1, 2), 3, torch.float16, False),  # of a block's two groups, one has a tile less
        ((1, 1, 4, 2), 11, torch.float16, True),  # a warp has nothing
    ],
    ids=str,
)
def test_products(cuda, blocks, batch, dtype, nested):
    """Several tiles for each cluster; N that ends within a tile."""

    def function(x, packed, absmax, second, blocksize, kind, rows, bias):
        return cuda.product(x, packed, absmax, second, kind, rows, bias, cuda.Blocks(*blocks))

    weight = arguments(86, 768, "nf4" if nested else "fp4", 64, nested)
    check(function, batch, weight, 768, dtype, bias=batch > 1)


def test_block_shapes_fit_a_multiprocessor(cuda):
    for rows in (16, 256, 1024, 4096, 14336, 28672, 131072):
        for batch in (1, 8, 9, 16):
            blocks = cuda.blocks_for(rows, batch, 132)
            full = 8 * cuda.power_of_2(cuda.ceil_div(batch, 8))
            assert blocks.shared_bytes(full, cuda.TABLE_BYTES, cuda.row_bytes(False)) <= cuda.SHARED_BYTES
            assert blocks.wr * blocks.wk == (16 if batch <= 8 else 8)
    assert [cuda.blocks_for(rows, 1, 132).wr for rows in (1024, 4096, 8192, 14336)] == [1, 2, 4, 8]
