"""Signs of life: what is printed while a command waits, and how early its first line is."""

import io
import json
import subprocess
import sys
import time

import pytest

from halfbyte.utils import waiting as module
from halfbyte.utils.console import Console
from halfbyte.utils.waiting import drawing_waits, progress_bars, renew_wait, showing_waits, waiting


def console(terminal=False, **how):
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, **how)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "FIRST", 0.02)
    monkeypatch.setattr(module, "REPEAT", 0.05)
    monkeypatch.setattr(module, "LONG", 0.1)


def lines(console):
    return console.file.getvalue().splitlines()


def test_a_wait_in_a_pipe_gets_a_line_then_more_and_its_duration(quick):
    out = console()
    with showing_waits(out), waiting("loading"):
        while len(lines(out)) < 3:
            time.sleep(0.005)
    first, *others, last = lines(out)
    assert first.startswith("loading")
    assert all(line.startswith("loading") for line in [*others, last])
    assert len({first, last}) == 2
    assert "\x1b" not in out.file.getvalue()


def test_a_short_wait_a_quiet_console_and_no_console_print_nothing(monkeypatch):
    out, quiet = console(), console(quiet=True)
    with showing_waits(out), waiting("reading"):
        pass
    monkeypatch.setattr(module, "FIRST", 0.0)
    with showing_waits(quiet), waiting("reading"):
        time.sleep(0.05)
    with waiting("reading"):
        time.sleep(0.05)
    assert not lines(out)
    assert not lines(quiet)


def test_the_innermost_wait_names_the_line_and_failed_waits_end_silently(quick, monkeypatch):
    monkeypatch.setattr(module, "LONG", 0.0)
    out = console()

    def fail():
        with showing_waits(out), waiting("training"), waiting("sampling"):
            while not lines(out):
                time.sleep(0.005)
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert [line.split()[0] for line in lines(out)] == ["sampling"]


def test_a_step_of_known_pace_is_announced_later_than_the_first(monkeypatch):
    monkeypatch.setattr(module, "FIRST", 0.02)
    out = console()
    with showing_waits(out), waiting("first"):
        while not lines(out):
            time.sleep(0.005)
        renew_wait("second")
        time.sleep(0.1)
    assert len(lines(out)) == 1


def test_a_decorated_function_waits_at_each_call(quick):
    @waiting("computing")
    def compute(number):
        time.sleep(0.05)
        return number

    out = console()
    with showing_waits(out):
        assert [compute(1), compute(2)] == [1, 2]
    assert len(lines(out)) == 2


def test_a_spinner_on_a_terminal_vanishes_and_what_draws_waits_has_none():
    out = console(terminal=True)
    with showing_waits(out), waiting("loading"):
        time.sleep(0.05)
    assert "loading" in out.file.getvalue()
    drawn = console(terminal=True)
    with showing_waits(drawn), drawing_waits(), waiting("loading"):
        time.sleep(0.05)
    assert not drawn.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_bars_are_lines_in_a_pipe(quick, terminal):
    out = console(terminal)
    with progress_bars("merging", out) as bars:
        bars.add_task("merging onto the base", total=2)
        time.sleep(0.05)
    assert "merging" in out.file.getvalue()
    with progress_bars("merging", None) as bars:
        bars.add_task("merging onto the base", total=2)


# --- the first line, and what a single process imports ----------------------------------------------------------------

FIRST_LINE = """
import json, sys
from halfbyte.cli import main
from halfbyte.utils import console

def stop(self, *arguments, **named):
    print(json.dumps([name for name in HEAVY if name in sys.modules]))
    raise SystemExit
HEAVY = ("torch", "transformers", "peft", "datasets", "numpy", "pandas", "matplotlib", "triton")
console.Console.print = stop
main(json.loads(sys.argv[1]))
"""
COMMANDS = {
    "train": ["train", "model", "data.jsonl", "output_dir=out"],
    "check": ["check", "model", "data.jsonl"],
    "check of a mesh": ["check", "model", "data.jsonl", "--gpus", "2", "--gpu-memory", "24"],
    "generate": ["generate", "model", "prompts.txt"],
    "chat": ["chat", "model"],
    "eval": ["eval", "model", "data.jsonl"],
    "merge": ["merge", "run"],
    "export": ["export", "run", "--gguf", "q4_k_m"],
    "serve": ["serve", "run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_line_needs_no_heavy_library(command, tmp_path):
    program = [sys.executable, "-c", FIRST_LINE, json.dumps(COMMANDS[command])]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [], done.stderr
