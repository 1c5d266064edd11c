"""What every benchmark shares: timing, and results with the versions and the commit they belong to."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def event_us(calls: Sequence[Callable[[], Any]], repeats: int = 40, warmup: int = 8) -> float:
    """Median µs of a call as a user makes it, by CUDA events; rotates over `calls` so that no input stays in cache."""
    for i in range(warmup):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[i % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Median µs of a call replayed from a CUDA graph: the GPU's time, without the host's."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return event_us([graph.replay], repeats, 2) / len(calls)


def copy_bandwidth() -> float:
    """TB/s of a device copy of 1 GiB, bytes read and written: the ceiling of memory-bound kernels."""
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / event_us([lambda: target.copy_(source)], 20) / 1e6


def provenance() -> dict[str, Any]:
    """Commit, device and versions of a result."""
    from halfbyte.utils.environment import environment

    facts = environment()
    device = facts["gpus"][0]["name"] if facts["gpus"] else facts["cpu"]["model"]
    return {"commit": _commit(), "device": device, "versions": facts["versions"]}


def cpu_name() -> str:
    """The CPU's model: what a result of a CPU names as its device, whether or not there is a GPU beside it."""
    from halfbyte.utils.environment import environment

    return str(environment()["cpu"]["model"])


def _commit() -> str | None:
    """The checkout's commit; on a machine that has only the files, what `benchmarks/COMMIT` says."""
    marker = Path(__file__).parent / "COMMIT"
    if marker.exists():
        return marker.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write_result(path: str | None, result: dict[str, Any]) -> None:
    """Write a result with its provenance, when a path is given."""
    if path:
        Path(path).write_text(json.dumps({**provenance(), **result}, indent=1) + "\n")
