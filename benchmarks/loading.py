"""Peak memory of loading a checkpoint in 4 bits, on the device and on the host.

    python -m benchmarks.loading --tokenizer llama3/ [--model llama-3.1-8b] [--work DIR] [--json FILE]

Writes a random-weight checkpoint in 4 GB shards first (if it is not there); loading runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import write_result
from benchmarks.qlora_8b import SHAPES, write_checkpoint


def measure(folder: Path) -> dict:
    """Load once; anonymous host memory is sampled while it happens, since mapped checkpoint pages are cache."""
    import threading

    from halfbyte import load_model
    from halfbyte.tensor import QuantizedTensor

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    torch.zeros(1, device="cuda")
    base, highest, running = anonymous(), 0, True

    def watch() -> None:
        nonlocal highest
        while running:
            highest = max(highest, anonymous())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = load_model(str(folder))
    seconds = time.perf_counter() - began
    running = False
    watcher.join()
    linears = [p.data for p in model.parameters() if isinstance(p.data, QuantizedTensor)]
    return {
        "seconds": seconds,
        "loaded_gib": torch.cuda.memory_allocated() / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_growth_gib": (highest - base) / 2**30,
        "quantized_weights": len(linears),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--work", type=Path, default=Path("/tmp/loading"))
    parser.add_argument("--json")
    parser.add_argument("--measure", action="store_true", help="(internal) load and print")
    given = parser.parse_args()
    folder = given.work / "base"
    if given.measure:
        print(json.dumps(measure(folder)))
        return
    if not folder.exists():
        write_checkpoint(given.model, given.tokenizer, folder)
        torch.cuda.empty_cache()
    command = [sys.executable, "-m", "benchmarks.loading", "--measure", "--work", str(given.work)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))
    write_result(given.json, {"model": given.model, **result})


if __name__ == "__main__":
    main()
