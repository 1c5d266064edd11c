"""Shared by all benchmarks: timing on a GPU, the copy bandwidth, and results with their provenance."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the module's docstring as help and the option `--json FILE` for the result."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    return parser


def require_gpu() -> None:
    """Exit with a message if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device, and torch finds none.")


class HostEvent:
    """Stand-in on a CPU for the part of `torch.cuda.Event` that timing uses, by the host's clock."""

    seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.seconds - self.seconds)


def timing_event(device: str = "cuda") -> Any:
    """Return an event whose `elapsed_time` gives ms, for a device type."""
    return torch.cuda.Event(enable_timing=True) if device == "cuda" else HostEvent()


def synchronize(device: str = "cuda") -> None:
    """Block until the device has finished; on a CPU everything has."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: str = "cuda") -> dict[str, float]:
    """Return the most GiB that torch's allocator has allocated and reserved since the last `reset_peak`; 0 on a CPU."""
    if device != "cuda":
        return {"peak_gib": 0.0, "reserved_gib": 0.0}
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": most[0] / 2**30, "reserved_gib": most[1] / 2**30}


def reset_peak(device: str = "cuda") -> None:
    """Start a new measurement of `peak_gib`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the ms of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def event_us(calls: Sequence[Callable[[], Any]], repeats: int = 40, warmup: int = 8) -> float:
    """Median µs of a call from Python, by events. Rotates over `calls` so that no input stays in the L2 cache."""
    for i in range(warmup):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return statistics.median(milliseconds(calls[i % len(calls)]) * 1e3 for i in range(repeats))


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Median µs of a call replayed from one CUDA graph of all `calls`: GPU time without Python."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_us([graph.replay], repeats, 2) / len(calls)


def copy_bandwidth() -> float:
    """Return the TB/s (read and written) of a 1 GiB device copy, the ceiling of memory-bound kernels."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / event_us([lambda: target.copy_(source)], 20) / 1e6


def free_memory() -> None:
    """Collect garbage and empty the CUDA cache."""
    gc.collect()
    torch.cuda.empty_cache()


def run_peer(command: Sequence[str], environment: dict[str, str] | None = None) -> Any:
    """Run `python -m COMMAND` in its own process; returns what it printed as JSON after RESULT, or its error."""
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": (done.stderr or done.stdout).strip()[-600:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def provenance() -> dict[str, Any]:
    """Return commit, device and library versions."""
    from halfbyte.utils.environment import environment

    facts = environment()
    device = facts["gpus"][0]["name"] if facts["gpus"] else facts["cpu"]["model"]
    return {"commit": _commit(), "device": device, "versions": facts["versions"]}


def _commit() -> str | None:
    """Return the checkout's commit, or the content of benchmarks/COMMIT on a machine without the repository."""
    marker = Path(__file__).parent / "COMMIT"
    if marker.exists():
        return marker.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result with its provenance, if a path is given."""
    if path:
        path.write_text(json.dumps({**provenance(), **result}, indent=1) + "\n")
