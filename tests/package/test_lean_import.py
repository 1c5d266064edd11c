"""`import halfbyte` and `halfbyte --help` are quick and touch neither torch nor transformers."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "datasets", "matplotlib", "triton", "bitsandbytes")

PROGRAM = """
import json, sys, time
started = time.process_time()
{statement}
spent = time.process_time() - started
print(json.dumps({{"seconds": spent, "heavy": [name for name in {heavy} if name in sys.modules]}}))
"""


def run(statement: str) -> dict:
    program = PROGRAM.format(statement=statement, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# Processor time, so that a busy machine does not decide.
def test_importing_halfbyte_is_quick_and_light():
    measured = run("import halfbyte")
    assert measured["heavy"] == []
    assert measured["seconds"] < 1.5


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_do_not_spin_long_at_barriers_unless_the_user_says_so(given, spins):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    program = "import os, halfbyte; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(spins)


def test_reading_a_config_needs_no_torch():
    assert run("import halfbyte; halfbyte.RunConfig(model_name_or_path='m', dataset='d')")["heavy"] == []


@pytest.mark.parametrize("module", ["halfbyte.cli", "halfbyte.demo", "halfbyte.utils.errors", "halfbyte.utils.files"])
def test_the_command_line_and_its_leaves_are_light(module):
    assert run(f"import {module}")["heavy"] == []


def test_help_is_light():
    statement = (
        "import contextlib, io\n"
        "from halfbyte.cli import main\n"
        "sys.argv = ['halfbyte', '--help']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main()"
    )
    measured = run(statement)
    assert measured["heavy"] == []
    assert measured["seconds"] < 1.5
