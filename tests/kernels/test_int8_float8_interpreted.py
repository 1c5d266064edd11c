"""The parity tests of int8 and FP8 without a GPU: in Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.interpret
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process of its own")
def test_in_the_interpreter():
    file = Path(__file__).parent / "test_int8_float8_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
