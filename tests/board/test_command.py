"""`halfbyte board` as a process: it serves without torch, in little memory, and ends with a signal."""

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.board.folders import run_id
from tests.helpers.board_runs import write_run

MEBIBYTE = 2**20
LARGEST = 120  # MiB of the process


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process in /proc")
def test_the_command_serves_pages_and_ends_with_a_signal(tmp_path):
    run = write_run(tmp_path / "runs" / "first", 2000)
    words = [sys.executable, "-m", "halfbyte", "board", str(tmp_path / "runs"), "--port", "0"]
    environment = {**os.environ, "HALFBYTE_QUEUE": str(tmp_path / "state" / "queue")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as board:
        address = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", board.stdout.readline())
        port, token = int(address[1]), address[2]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for cookie, status in ((token, 200), ("wrong", 401)):
            connection.request("GET", f"/run/{run_id(run)}", headers={"cookie": f"halfbyte-board-{port}={cookie}"})
            response = connection.getresponse()
            html = response.read().decode()
            assert response.status == status
            assert ('class="chart"' in html) == (status == 200)
        memory = Path(f"/proc/{board.pid}/status").read_text()
        assert int(re.search(r"VmRSS:\s+(\d+)", memory)[1]) * 1024 < LARGEST * MEBIBYTE
        assert "libtorch" not in Path(f"/proc/{board.pid}/maps").read_text()
        connection.close()
        board.send_signal(signal.SIGTERM)
        assert board.wait(30) == 0
