"""Exit codes and error messages of commands, which never show a traceback."""

import re
import subprocess
import sys

import pytest

from halfbyte.cli import main
from halfbyte.utils.errors import ConfigError, DataError, UsageError


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


@pytest.fixture
def stopped_with(monkeypatch, tmp_path):
    """Return a function that makes `halfbyte env` raise an exception."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))

    def stop_with(stop: BaseException) -> None:
        def stop_now(*arguments):
            raise stop

        monkeypatch.setattr("halfbyte.cli.commands.print_environment", stop_now)

    return stop_with


CODES = {
    DataError("no rows", "add some"): 1,
    ConfigError("r is 0"): 1,
    UsageError("--base best is not known"): 2,
    MemoryError(): 1,
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"): 1,
    KeyError("a bug"): 1,
    OSError(28, "No space left on device"): 1,
    KeyboardInterrupt(): 130,
    BrokenPipeError(): 141,
}


@pytest.mark.parametrize("stop", CODES, ids=repr)
def test_an_exit_code_for_each_end(stop, stopped_with, capsys):
    stopped_with(stop)
    assert exit_code("env") == CODES[stop]
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out


def test_a_bug_is_one_line_and_a_file_with_the_full_text(stopped_with, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["halfbyte", "serve", "m", "--api-key", "hunter2"])
    stopped_with(IndexError("list index out of range\nand more"))
    assert exit_code("env") == 1
    said = capsys.readouterr().err.splitlines()
    (file,) = (tmp_path / "cache").iterdir()
    assert said == [
        "error: this is a bug in halfbyte: IndexError: list index out of range",
        f"  fix: report it with {file}, which has the full text",
    ]
    text = file.read_text()
    assert "raise stop" in text
    assert "and more" in text
    assert "command: halfbyte serve m --api-key ***" in text
    assert "torch 2." in text


def test_a_bug_of_a_run_is_written_into_its_folder(monkeypatch, tmp_path, capsys):
    def broken(*arguments):
        raise IndexError("a bug")

    monkeypatch.setattr("halfbyte.cli.train.train_run", broken)
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: m\ndataset: d\noutput_dir: {tmp_path}/out\n")
    assert exit_code("train", str(tmp_path / "run.yaml")) == 1
    assert f"{tmp_path}/cache/halfbyte-bug-" in capsys.readouterr().err  # the run's folder does not exist yet
    (tmp_path / "out").mkdir()
    assert exit_code("train", str(tmp_path / "run.yaml")) == 1
    assert f"{tmp_path}/out/halfbyte-bug-" in capsys.readouterr().err


def test_bug_report_is_printed_if_it_cannot_be_written(stopped_with, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", "/dev/null/cache")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/dev/null/tmp")
    stopped_with(IndexError("a bug"))
    assert exit_code("env") == 1
    assert "raise stop" in capsys.readouterr().err


def test_ctrl_c_says_saved_message(stopped_with, capsys):
    stopped_with(KeyboardInterrupt("out/checkpoint-40 is saved"))
    assert exit_code("env") == 130
    assert capsys.readouterr().err == "\nstopped: out/checkpoint-40 is saved\n"


@pytest.mark.parametrize("place", [0, 1])
def test_debug_shows_the_traceback_wherever_it_stands(place, stopped_with, capsys):
    stopped_with(DataError("no rows"))
    arguments = ["env"]
    arguments.insert(place, "--debug")
    assert exit_code(*arguments) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("error: no rows\n")


def test_square_brackets_and_control_codes_in_a_message_are_shown(stopped_with, capsys):
    stopped_with(DataError("messages[0]: [bold] is no role: \x1b[2J\u202e"))
    assert exit_code("env") == 1
    assert capsys.readouterr().err == "error: messages[0]: [bold] is no role: \\x1b[2J\\u202e\n"


USAGE = {
    "chekc": ("no such command 'chekc'", "did you mean check?"),
    "train": ("missing argument 'RUN.YAML | MODEL DATA | KEY=VALUE'", r"write halfbyte train \[OPTIONS\] {?RUN\.YAML"),
    "chat m --temperature -1": ("--temperature -1: it must be greater than or equal to 0", "write halfbyte chat "),
    "chat m --max-new-tokens many": ("--max-new-tokens many: it must be a valid integer", "write halfbyte chat "),
    "chat m --temperature": ("option '--temperature' requires an argument", "write --temperature VALUE"),
    "chat m --compar": ("no such option: --compar", r"did you mean --compare-base\?"),
    "env --what": ("no such option: --what", "`halfbyte env -h` explains"),
    "init m": ("missing argument 'DATA'", "{?MODEL}? {?DATA}?"),
    "init m d more": ("got unexpected extra argument(s) (more)", "{?MODEL}? {?DATA}?"),
    "export m": ("export ", "give --gguf TYPE, or --adapter vllm"),
}


@pytest.mark.parametrize("line", USAGE)
def test_wrong_usage_is_an_error_with_its_fix(line, capsys):
    assert exit_code(*line.split()) == 2
    error, fix = capsys.readouterr().err.splitlines()
    what, how = USAGE[line]
    assert error.startswith(f"error: {what}")
    assert fix.startswith("  fix: ")
    assert re.search(how, fix)  # typer before 0.27 writes arguments without braces


def test_no_command_shows_the_help(capsys):
    assert exit_code() == 2
    assert "import-config" in capsys.readouterr().err


PRINTS = "import sys\nfrom halfbyte.cli import main\nmain(sys.argv[1:])"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", [["-h"], ["env", "--kernels"], ["train", "--help"]])
def test_closed_output_pipe_ends_a_command_silently(command):
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | true', "-", sys.executable, "-c", PRINTS, *command],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) in {(141, ""), (0, "")}  # 0: it wrote all before the pipe closed


def test_full_output_device_is_reported():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS, "-h"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write the output: the disk is full\n")
