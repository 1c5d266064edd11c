"""The board over many runs: seconds to open pages, bytes sent, idle CPU, and the delay of a record to the screen.

    python -m benchmarks.board [--runs 200] [--records 1000] [--long 100000] [--peers] [--json FILE]

Runs are made up in a temporary folder. Pages are opened over HTTP, each cold (first request of a new process) and warm.
With Playwright and Chromium installed, four pages are open while eight runs record twice a second; the delay is the
time from the write of a record until its loss, or a later one, is in the page. `--peers` measures TensorBoard and
Trackio on the same numbers, where they are installed: the seconds until their servers list all runs and send six curves
of one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of, write_result
from halfbyte.board.folders import run_id
from halfbyte.utils.files import write_text
from tests.helpers.board_runs import status, train_record, write_run

TICKS = os.sysconf("SC_CLK_TCK")
CURVES = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_bytes", "step_seconds")
LIVE, TABS = 8, 4
# Notes when each loss first stands in the page; init scripts are not subject to the page's policy.
SEEN = """
window.seen = [];
new MutationObserver(() => {
  const cells = document.querySelectorAll('td:nth-child(5), .tiles div:first-child .figure');
  for (const cell of cells) window.seen.push([Number(cell.textContent), Date.now() / 1000]);
}).observe(document, {subtree: true, childList: true});
"""


# Moves the pointer over the first curve; returns the ms of each move until all cursors and values are laid out.
HOVER = """
async () => {
  const chart = document.querySelector('svg.chart'), seconds = [];
  chart.scrollIntoView();
  for (let move = 0; move < 100; move++) {
    const box = chart.getBoundingClientRect(), share = 0.15 + 0.8 * ((move * 37) % 100) / 100;
    const at = {clientX: box.left + box.width * share, clientY: box.top + box.height / 2, bubbles: true};
    const begin = performance.now();
    chart.dispatchEvent(new PointerEvent('pointermove', at));
    await new Promise((done) => requestAnimationFrame(() => { document.body.offsetHeight; done(); }));
    seconds.push(performance.now() - begin);
  }
  return seconds.sort((a, b) => a - b);
}
"""


class Board:
    """A board in its own process, and requests to it."""

    def __init__(self, root: Path, state: Path):
        command = [sys.executable, "-m", "halfbyte", "board", str(root), "--port", "0"]
        environment = {**os.environ, "HALFBYTE_QUEUE": str(state / "queue")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", self.process.stdout.readline())
        assert address is not None
        self.port, self.token, self.url = int(address[1]), address[2], address[0]

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path, headers={"cookie": f"halfbyte-board-{self.port}={self.token}"})
        response = connection.getresponse()
        assert response.status == 200, response.status
        body = response.read()
        connection.close()
        return body

    def follow(self, path: str) -> http.client.HTTPConnection:
        """Open the page's stream of changes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        cookie = f"halfbyte-board-{self.port}={self.token}"
        connection.request("GET", path, headers={"cookie": cookie, "accept": "text/event-stream"})
        connection.getresponse().readline()
        return connection

    def cpu(self) -> float:
        """Return the CPU seconds of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def mebibytes(self, name: str) -> float:
        words = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"{name}:\s+(\d+)", words)
        return round(int(match[1]) / 1024, 1) if match else 0.0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextlib.contextmanager
def board_of(root: Path, state: Path) -> Iterator[Board]:
    board = Board(root, state)
    try:
        yield board
    finally:
        board.close()


def opened(board: Board, path: str) -> dict[str, float]:
    """Return elapsed and CPU seconds of a first request and of the median of five later ones, and the KiB sent."""
    before, start = board.cpu(), time.perf_counter()
    size = len(board.get(path))
    result = {"cold_seconds": time.perf_counter() - start, "cold_cpu_seconds": board.cpu() - before}
    warm = []
    before = board.cpu()
    for _ in range(5):
        start = time.perf_counter()
        board.get(path)
        warm.append(time.perf_counter() - start)
    result |= {"warm_seconds": statistics.median(warm), "warm_cpu_seconds": (board.cpu() - before) / 5}
    return {name: round(value, 3) for name, value in result.items()} | {"kib": round(size / 1024)}


def idle_share(board: Board, paths: Sequence[str], seconds: float = 20.0) -> float:
    """Return the share of a core that the board takes with these pages open and no run alive."""
    streams = [board.follow(path) for path in paths]
    time.sleep(15)
    before = board.cpu()
    time.sleep(seconds)
    share = (board.cpu() - before) / seconds
    for stream in streams:
        stream.close()
    return round(share, 4)


def write_live(folders: Sequence[Path], seconds: float, written: dict[int, list[tuple[float, float]]]) -> None:
    """Append a record to each run twice a second, with a loss that grows by 0.001, and its status every 2 s."""
    end = time.time() + seconds
    step = 0
    while time.time() < end:
        step += 1
        for at, folder in enumerate(folders):
            record = train_record(1000 + step, loss=at + 1 + step / 1000, time=time.time())
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            written[at].append((record["loss"], time.time()))
            if step % 4 == 0:
                write_text(folder / "status.json", json.dumps(status("training", 1000 + step, 9999)))
        time.sleep(0.5)


def delays(root: Path, state: Path, seconds: float = 60.0) -> dict[str, float] | None:
    """Return percentiles of the delay of a record to the screen; None without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if importlib.util.find_spec("playwright") is None or chromium is None:
        return None
    from playwright.sync_api import sync_playwright

    folders = [root / f"live-{at}" for at in range(LIVE)]
    for folder in folders:
        write_run(folder, 1000, status_json=status("training", 1000, 9999))
    written: dict[int, list[tuple[float, float]]] = {at: [] for at in range(LIVE)}
    with board_of(root, state) as board, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = []
        for at in range(TABS):  # the list, and three runs, in windows of their own, so that none is hidden
            page = browser.new_context().new_page()
            page.add_init_script(SEEN)
            page.goto(board.url)
            page.get_by_role("heading", name="Runs").wait_for()
            page.goto(f"http://127.0.0.1:{board.port}{'/' if at == 0 else f'/run/{run_id(folders[at])}'}")
            pages.append(page)
        before = board.cpu()
        writer = threading.Thread(target=write_live, args=(folders, seconds, written))
        writer.start()
        writer.join()
        share = (board.cpu() - before) / seconds
        time.sleep(3)
        waits = []
        for at, page in enumerate(pages):
            seen = page.evaluate("window.seen")
            for run in range(LIVE) if at == 0 else (at,):
                shown = [(loss, moment) for loss, moment in seen if run + 1 < loss < run + 2]
                for loss, moment in written[run]:
                    later = [then for value, then in shown if value >= round(loss, 3) - 1e-9 and then >= moment]
                    waits.append(min(later) - moment if later else float("inf"))
        browser.close()
    ordered = sorted(waits)
    ranks = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    shown = {name: round(ordered[int(rank * len(ordered))], 3) for name, rank in ranks.items()}
    return shown | {"records": len(waits), "board_cpu_share": round(share, 3)}


# --- other tools -----------------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], limit: float = 300.0) -> float:
    """Return the seconds until a condition holds; connections that fail count as not yet."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            if condition():
                return round(time.perf_counter() - start, 3)
        time.sleep(0.05)
    return float("inf")


def json_of(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"{response.status} {path}")
    return json.loads(response.read())


@contextlib.contextmanager
def program(text: str, *words: str, **environment: str) -> Iterator[None]:
    command = [sys.executable, "-c", text, *words]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def new_page() -> Iterator[Any]:
    """Yield a page of a new browser; None without playwright or Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if importlib.util.find_spec("playwright") is None or chromium is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1280, "height": 900})
        browser.close()


def hover_ms(board: Board, path: str) -> dict[str, float] | None:
    """Return percentiles of the ms that the cursor takes to follow the pointer on a page; None without a browser."""
    with new_page() as page:
        if page is None:
            return None
        page.goto(board.url)
        page.get_by_role("heading", name="Runs").wait_for()
        page.goto(f"http://127.0.0.1:{board.port}{path}")
        moves = page.evaluate(HOVER)
    return {"p50": round(moves[50], 1), "p95": round(moves[95], 1)}


def shown_in_browser(address: str, name: str) -> float | None:
    """Return the seconds from the request of a page in a new browser until a name is on it; None without a browser."""
    with new_page() as page:
        if page is None:
            return None
        start = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.get_by_text(re.compile(name)).first.wait_for(timeout=120_000)
        return round(time.perf_counter() - start, 3)


def six_curves(fetch: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of a first request for the curves of a run, and the KiB of its JSON."""
    start = time.perf_counter()
    points = fetch()
    return {"six_curves": round(time.perf_counter() - start, 3), "kib": round(len(json.dumps(points)) / 1024)}


def tensorboard(folder: Path, runs: dict[str, int]) -> dict[str, float | None]:
    """Return the seconds until TensorBoard's server answers, lists all runs, and has read the last step, and those
    until a browser shows a run. Of each curve it keeps 1,000 points, as by default."""
    from torch.utils.tensorboard import SummaryWriter

    for name, count in runs.items():
        writer = SummaryWriter(str(folder / name), max_queue=10_000)
        for step in range(1, count + 1):
            record = train_record(step)
            for curve in CURVES:
                writer.add_scalar(curve, record[curve], step)
        writer.close()
    port, base, longest = 16006, "/data/plugin/scalars", max(runs, key=lambda name: runs[name])

    def curve(tag: str) -> Any:
        return json_of(port, f"{base}/scalars?run={longest}&tag={tag}")

    words = ["--logdir", str(folder), "--port", str(port)]
    with program("from tensorboard.main import run_main; run_main()", *words):
        seconds = {"answers": until(lambda: json_of(port, "/data/runs") is not None)}
        seconds["lists_all"] = until(lambda: len(json_of(port, f"{base}/tags")) == len(runs))
        seconds["last_step"] = until(lambda: curve("loss")[-1][1] == runs[longest])
        seconds |= six_curves(lambda: [curve(tag) for tag in CURVES])
        return seconds | {"shown_in_browser": shown_in_browser(f"http://127.0.0.1:{port}/", "run-|long")}


def trackio(folder: Path, runs: dict[str, int]) -> dict[str, float | None]:
    """Return the seconds until Trackio's server answers, those of a list of all runs and the curves of one, and those
    until a browser shows a run."""
    os.environ["TRACKIO_DIR"] = str(folder.parent)  # read once
    project = folder.name
    from trackio.sqlite_storage import SQLiteStorage

    longest = max(runs, key=lambda name: runs[name])
    for name, count in runs.items():
        records = [{curve: train_record(step)[curve] for curve in CURVES} for step in range(1, count + 1)]
        SQLiteStorage.bulk_log(project, name, records, steps=list(range(1, count + 1)))
    port = 17860
    script = f"import trackio; trackio.show('{project}', open_browser=False, block_thread=True, server_port={port})"

    def call(name: str, **keys: Any) -> Any:
        return json_of(port, f"/api/{name}", {"project": project, **keys})

    with program(script, TRACKIO_DIR=str(folder.parent)):
        seconds = {"answers": until(lambda: call("get_all_projects"))}
        seconds["lists_all"] = until(lambda: len(call("get_runs_for_project")["data"]) == len(runs), 5.0)
        seconds |= six_curves(lambda: call("get_logs", run=longest))
        address = f"http://127.0.0.1:{port}/?project={project}"
        return seconds | {"shown_in_browser": shown_in_browser(address, "run-|long")}


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of live runs")
    parser.add_argument("--peers", action="store_true")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        root, state = Path(folder) / "runs", Path(folder) / "state"
        for at in range(options.runs):
            write_run(root / f"run-{at:03d}", options.records)
        long_run = write_run(root / "long", options.long)
        result: dict[str, Any] = {"runs": options.runs, "records": options.records, "long_run": options.long}
        with board_of(root, state) as board:
            result["memory_mib_at_start"] = board.mebibytes("VmRSS")
            result["list"] = opened(board, "/")
            result["run"] = opened(board, f"/run/{run_id(root / 'run-000')}")
            result["run_of_many_records"] = opened(board, f"/run/{run_id(long_run)}")
            result["list"]["shown_in_browser"] = shown_in_browser(board.url, "run-000")
            result["hover_ms_of_many_records"] = hover_ms(board, f"/run/{run_id(long_run)}")
            result["memory_mib_at_most"] = board.mebibytes("VmHWM")
            result["idle_cpu_share_list_and_run"] = idle_share(board, ["/", f"/run/{run_id(long_run)}"])
        result["delay_to_screen_seconds"] = delays(root, state, options.seconds)
        cases = {"many_runs": {f"run-{at:03d}": options.records for at in range(options.runs)}}
        cases["long_run"] = {"long": options.long}
        for peer in (tensorboard, trackio) if options.peers else ():
            if importlib.util.find_spec(peer.__name__):
                folders = {name: Path(folder) / f"{peer.__name__}-{name}" for name in cases}
                result[f"{peer.__name__}_seconds"] = {name: peer(folders[name], runs) for name, runs in cases.items()}
    print(json.dumps(result, indent=1))
    if options.json:
        write_result(options.json, result)


if __name__ == "__main__":
    main()
