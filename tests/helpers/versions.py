"""Run the test suite at both ends of the supported versions: `python -m tests.helpers.versions [END[=PYTHON] ...]`.

The oldest end has the lowest version of each package that pyproject.toml names, on the oldest Python; the newest end
has the highest ones. Each is an environment of its own in `build/`, made by uv, which also fetches a missing Python.
Arguments after `--` are added to pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

from tests.helpers.cpus import DEFAULT, ROOT

ENDS = {"oldest": ("3.11", "lowest-direct"), "newest": ("3.14", "highest")}  # Python, uv's resolution
VERSIONS = """
from importlib.metadata import version
import platform
print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")))
"""


def environment(end: str, interpreter: str) -> Path:
    """Make or update the environment of an end and return its Python."""
    folder = ROOT / "build" / f"versions-{end}"
    python = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--allow-existing", "--python", interpreter, str(folder)], check=True)
    install = [*uv, "pip", "install", "--quiet", "--upgrade", "--python", str(python), "--resolution", ENDS[end][1]]
    subprocess.run([*install, "--editable", f"{ROOT}[test]"], check=True)
    return python


def run(python: Path, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests by this Python. Returns whether they passed, and a line of versions and counts."""
    report = python.parents[1] / "tests.xml"
    report.unlink(missing_ok=True)
    command = [str(python), *DEFAULT, f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    versions = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
    suite = next(xml.parse(report).iter("testsuite")).attrib if report.exists() else {}
    counts = [f"{suite[key]} {key}" for key in ("tests", "failures", "errors", "skipped") if key in suite]
    return code == 0, f"{versions}: {', '.join(counts) or f'no report, exit code {code}'}"


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    lines, failed = [], 0
    for argument in arguments[:split] or list(ENDS):
        end, _, interpreter = argument.partition("=")
        passed, line = run(environment(end, interpreter or ENDS[end][0]), arguments[split + 1 :])
        lines.append(f"{end}: {line}")
        failed += not passed
    print("\n".join(lines))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
