"""Memory of a process: what it holds, without the pages of files that it has mapped."""

import subprocess
import sys

import pytest

MAPPED_AND_HELD = """
import sys
import numpy
from halfbyte.memory.allocators import process_memory, reset_process_peak, return_free_memory

MIB = 2**20
numpy.ones(64 * MIB, dtype="uint8").tofile(sys.argv[1])
return_free_memory()
start = process_memory().current
mapped = numpy.memmap(sys.argv[1], mode="r")
assert mapped[:: 4096].sum() and process_memory().current - start < 8 * MIB
del mapped
reset_process_peak()
assert process_memory().peak - start < 8 * MIB
held = numpy.ones(64 * MIB, dtype="uint8")
assert process_memory().current - start > 60 * MIB
del held
assert process_memory().current - start < 8 * MIB
assert 60 * MIB < process_memory().peak - start < 80 * MIB
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no peak that can be reset")
def test_pages_of_files_are_not_held_and_the_peak_is_kept(tmp_path):
    subprocess.run([sys.executable, "-c", MAPPED_AND_HELD, tmp_path / "file"], check=True, timeout=60)
