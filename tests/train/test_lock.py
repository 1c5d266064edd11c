"""One run at a time per folder: a second run is refused at once, and a killed run's lock does not block the next."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from halfbyte.config import load_config
from halfbyte.runs import inputs, lock
from halfbyte.runs.lock import run_lock
from halfbyte.train import run
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.processes import Process

HOST = socket.gethostname()


def elsewhere(code, *arguments):
    """Start Python on `code` with `arguments` in sys.argv."""
    head = "import os, signal, sys, time\nfrom pathlib import Path\nfrom halfbyte.runs.lock import run_lock\n"
    program = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path):
    out = tmp_path / "a" / "out"
    with run_lock(out):
        (out / "metrics.jsonl").touch()
        _, said = elsewhere("with run_lock(Path(sys.argv[1])): pass", out).communicate(timeout=60)
        assert f"ConfigError: output_dir: process {os.getpid()}" in said
        with pytest.raises(ConfigError, match=f"process {os.getpid()}.*{HOST}"):
            run_lock(out).__enter__()
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
    with run_lock(out):
        pass
    assert not notices.notices_so_far()


def test_train_refuses_a_locked_folder_before_other_checks(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "open_run", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(inputs, "check_inputs", lambda *_: pytest.fail("it began"))
    config = load_config(None, {"model_name_or_path": "m", "dataset": "d", "output_dir": str(tmp_path / "out")})
    with run_lock(tmp_path / "out"), pytest.raises(ConfigError):
        run.train(config)


def test_a_killed_run_leaves_nothing_that_stops_the_next(tmp_path):
    """Not even by a child process that outlives it."""
    code = """
        with run_lock(Path(sys.argv[1])):
            if not os.fork():
                time.sleep(60)
                os._exit(0)
            print("held", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with elsewhere(f"os.setpgrp()\n{textwrap.dedent(code)}", tmp_path / "out") as killed:
        assert killed.stdout.readline() == "held\n"
        assert killed.wait(60) == -signal.SIGKILL
        try:
            with run_lock(tmp_path / "out"):
                os.killpg(killed.pid, 0)  # the child is running
                (said,) = notices.notices_so_far().values()
                assert f"process {killed.pid}" in said
        finally:
            os.killpg(killed.pid, signal.SIGKILL)


@pytest.mark.slow
def test_one_of_many_that_start_together_gets_it(tmp_path):
    code = """
        time.sleep(max(0, float(sys.argv[2]) - time.time()))
        for _ in range(200):
            try:
                with run_lock(Path(sys.argv[1])):
                    with open(sys.argv[3], "x"):
                        os.unlink(sys.argv[3])
            except Exception as error:
                if "is writing into" not in str(error):
                    raise
    """
    (tmp_path / "out").mkdir()
    start = time.time() + 3
    started = [elsewhere(code, tmp_path / "out", start, tmp_path / "alone") for _ in range(3)]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert not list((tmp_path / "out").iterdir())


def test_a_file_system_without_locks_is_said_and_goes_by_the_name(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "lockf", unsupported)
    out, ended = tmp_path / "out", subprocess.Popen(["true"])
    ended.wait()
    with run_lock(out):
        assert "no-locks" in notices.notices_so_far()
    out.mkdir()
    for pid, host, alive in ((os.getppid(), HOST, True), (1, "another", True), (ended.pid, HOST, False)):
        holder = Process.of_pid(pid)._replace(**({"machine": "0"} if host != HOST else {}))
        (out / lock.LOCK).write_text(json.dumps({"host": host, **holder._asdict()}))
        if alive:
            with pytest.raises(ConfigError, match=f"process {pid}.*{host}") as refused, run_lock(out):
                pass
            assert f"{out}/.lock" in refused.value.fix
        else:
            with run_lock(out):
                assert f"lock {out / lock.LOCK}" in notices.notices_so_far()


def test_a_run_that_stops_before_its_first_file_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
