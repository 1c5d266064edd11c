"""install() in fresh processes: imports, metadata, refusals, and the way back to the real package."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # processes of their own, with torch in each

INSTALLED = """
import halfbyte.bitsandbytes as own
own.install()
own.install()
import importlib.metadata, importlib.util
import bitsandbytes, bitsandbytes.nn.modules, bitsandbytes.backends.cuda.ops, bitsandbytes.cextension
from bitsandbytes.nn import Linear4bit
assert bitsandbytes is own and Linear4bit is own.nn.Linear4bit
assert importlib.metadata.version("bitsandbytes") == own.__version__ == "0.50.2+halfbyte"
assert importlib.metadata.packages_distributions()["bitsandbytes"][0] == "bitsandbytes"
assert importlib.util.find_spec("bitsandbytes") is not None
try:
    import bitsandbytes.missing
    raise SystemExit("found")
except ModuleNotFoundError:
    pass
import torch
assert torch.ops.bitsandbytes.quantize_4bit(torch.randn(4, 64), 64, "nf4", torch.uint8)[0].shape == (128, 1)
import runpy
runpy.run_module("bitsandbytes", run_name="__main__")  # prints the environment
"""

UNDONE = (
    INSTALLED
    + """
own.uninstall()
import bitsandbytes as real
assert real is not own and real.__version__ != own.__version__
x = torch.randn(64, 64)
packed = [each.functional.quantize_4bit(x, quant_type="nf4")[0] for each in (own, real)]
assert torch.equal(*packed)
"""
)

AFTER_THE_REAL_ONE = """
import bitsandbytes
import halfbyte.bitsandbytes as own
from halfbyte.utils.errors import ModelError
try:
    own.install()
except ModelError as error:
    assert "__main__" in str(error)
else:
    raise SystemExit("installed")
"""

REFUSED = (
    AFTER_THE_REAL_ONE
    + """
import threading
raised = []
def call():
    try:
        own.install()
    except ModelError as error:
        raised.append(error)
thread = threading.Thread(target=call)
thread.start()
thread.join()
assert len(raised) == 1
"""
)


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("program", [UNDONE, REFUSED], ids=["undone", "refused"])
def test_program(program):
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert ("0.50.2+halfbyte" in done.stdout) == (program is UNDONE)


def test_script_and_module_run_under_install(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, bitsandbytes, neighbour\nprint(bitsandbytes.__version__, sys.argv[1:], neighbour.x)\n"
    )
    (tmp_path / "neighbour.py").write_text("x = 3\n")
    done = run("-m", "halfbyte.bitsandbytes", str(script), "--flag")
    assert done.stdout.split() == ["0.50.2+halfbyte", "['--flag']", "3"], done.stderr
