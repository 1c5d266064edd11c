"""Run the parity tests without a GPU: in Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET when a kernel is decorated, and an interpreted kernel would break the other tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
PATTERN = r"parity\.mark|\bmark, |\"interpret\"|interpret="
PARITY = sorted(
    path.name for path in HERE.glob("test_*.py") if path != Path(__file__) and re.search(PATTERN, path.read_text())
)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process of its own")
@pytest.mark.parametrize("every", [400, 1])
def test_in_the_interpreter(every):
    """Run all kernels, with every n-th case of each test, the first included."""
    options = ["-q", "-p", "no:cacheprovider", "-x", "-m", "interpret"]
    command = [sys.executable, "-m", "pytest", *options, *(str(HERE / name) for name in PARITY)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "HALFBYTE_INTERPRET_EVERY": str(every),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
