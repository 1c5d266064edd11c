"""Build the C kernels: on machines without a compiler or a home, and with libraries from other machines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.dispatch import Unavailable
from halfbyte.kernels import native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    for cached in (native.library, native._version):
        cached.cache_clear()
    yield
    native.library.cache_clear()
    native._version.cache_clear()


def compiler(folder: Path, name: str, body: str) -> str:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
@needs_compiler
def test_a_rows_sums_are_the_same_alone_where_the_compiler_avoids_fmas(monkeypatch):
    """GCC avoids FMAs on some CPUs, but only in loops over one row."""
    import ctypes

    import torch

    from halfbyte.kernels.native import decode4, few_rows

    version = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip("the compiler is not GCC")
    native.library.cache_clear()  # the one of the import
    monkeypatch.setenv("CC", "cc --param avoid-fma-max-bits=512")
    packed, absmax, codebook = (
        torch.randint(256, (64, 256), dtype=torch.uint8),
        torch.rand(64 * 8),
        few_rows.table4("nf4"),
    )
    given = packed.data_ptr(), absmax.data_ptr()
    sizes = {"codebook": codebook.data_ptr(), "rows": 64, "columns": 512}
    weights = {
        "halfbyte_gemv4": ("decode4", decode4.Weight(*given, **sizes, blocksize=64)),
        "halfbyte_few_rows": (
            "few_rows",
            few_rows.PackedWeight(*given, **sizes, stride=256, block=64, scale_stride=8, tall=1, factor=1),
        ),
    }
    x, whole, alone = torch.randn(4, 512), torch.empty(4, 64), torch.empty(4, 64)
    for name, (source, weight) in weights.items():
        function = getattr(native.library(source), name)
        function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int]
        function(ctypes.byref(weight), x.data_ptr(), whole.data_ptr(), 4, 1)
        for row in range(4):
            function(ctypes.byref(weight), x[row].data_ptr(), alone[row].data_ptr(), 1, 1)
        assert torch.equal(alone, whole)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(Unavailable):
        native.library("bitplane")


@pytest.mark.slow
@needs_compiler
def test_a_library_that_does_not_load_is_built_again(tmp_path, monkeypatch):
    native.library("bitplane")
    (built,) = (tmp_path / "native").glob("*.so")
    whole, damaged = built.read_bytes(), tmp_path / "other" / "native" / built.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"of another kind of machine")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "other"))
    native.library.cache_clear()
    native.library("bitplane")
    assert len(damaged.read_bytes()) == len(whole)


@pytest.mark.slow
def test_products_run_without_a_compiler(tmp_path):
    """Run in a separate process: dispatch logs what is missing and takes the reference."""
    script = (
        "import torch\nfrom halfbyte.formats import blockwise4\nfrom halfbyte.utils.notices import notices_so_far\n"
        "packed, absmax = blockwise4.quantize_blockwise4(torch.randn(64), 64, 'nf4')\n"
        "assert packed.numel() == 32\nprint(notices_so_far())"
    )
    environment = os.environ | {"CC": "/bin/false", "HALFBYTE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "code 1" in done.stdout


@needs_compiler
@pytest.mark.parametrize("source", sorted(Path(native.__file__).parent.glob("*.c")), ids=lambda path: path.stem)
def test_every_source_is_c(source):
    """An operation whose source does not compile falls back to torch with a notice, so only this test finds it."""
    done = subprocess.run(["cc", "-fsyntax-only", *native.FLAGS, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
