"""Dequantization of the stored formats against the copy bandwidth, NF4 beside bitsandbytes, in one run.

python -m benchmarks.dequantize [--json FILE]           on a GPU: TB/s of packed bytes read and values written
python -m benchmarks.dequantize --planes [--json FILE]  on a GPU: kbit and hqq at 67M weights, as fractions of a copy
python -m benchmarks.dequantize --cpu [--json FILE]     on the CPU: ms at 4096×4096, 2 threads
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from benchmarks.common import copy_bandwidth, event_us, graph_us, write_result
from halfbyte.formats import Blockwise4, from_spec

SHAPES = [(4096, 4096), (14336, 4096), (28672, 8192)]
PLANES = ["blockwise4:nf4:64:plain", "kbit:2:nf", "kbit:2:affine", "kbit:3:nf", "kbit:4:nf", "kbit:4:fitted",
          "kbit:5:nf", "hqq:2:64", "hqq:3:64", "hqq:4:64", "hqq:8:64"]  # fmt: skip


def moved_bytes(rows: int, columns: int, nested: bool) -> float:
    """bf16 values written, packed codes and scales read."""
    weights = rows * columns
    return weights * 2.5 + weights / 64 * (1 if nested else 4)


def gpu() -> dict:
    import bitsandbytes.functional as peer

    result: dict = {"copy_TBps": copy_bandwidth(), "shapes": {}}
    print(f"copy {result['copy_TBps']:.2f} TB/s")
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        copies = min(max(2, int(6e8 / weight.numel() / 2)), 8)
        for nested in (False, True):
            format_ = Blockwise4("nf4", 64, nested)
            ours = [format_.quantize(weight) for _ in range(copies)]
            theirs = [peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested) for _ in range(copies)]
            shape = (rows, columns)
            calls = [partial(format_.dequantize, parts, shape, torch.bfloat16) for parts in ours]
            peer_calls = [partial(peer.dequantize_4bit, *packed) for packed in theirs]
            moved = moved_bytes(rows, columns, nested)
            times = {
                "ours_graph_us": graph_us(calls),
                "ours_called_us": event_us(calls),
                "bitsandbytes_called_us": event_us(peer_calls),
                "bitsandbytes_graph_us": graph_us(peer_calls),
            }
            row = {**times, **{k.replace("_us", "_TBps"): moved / v / 1e6 for k, v in times.items()}}
            row["ratio_graph"] = times["bitsandbytes_graph_us"] / times["ours_graph_us"]
            row["ratio_called"] = times["bitsandbytes_called_us"] / times["ours_called_us"]
            result["shapes"][f"{rows}x{columns}{' nested' if nested else ''}"] = row
            print(
                f"{rows}x{columns} {'nested' if nested else 'plain ':6}: halfbyte {row['ours_graph_TBps']:.2f} TB/s "
                f"(as called {row['ours_called_TBps']:.2f}), bitsandbytes {row['bitsandbytes_graph_TBps']:.2f} "
                f"(as called {row['bitsandbytes_called_TBps']:.2f}): {row['ratio_graph']:.2f}x, "
                f"as called {row['ratio_called']:.2f}x"
            )
    return result


def planes(shape: tuple[int, int] = (8192, 8192)) -> dict:
    """The formats in bit planes from a CUDA graph, over rotating weights; NF4 first, for comparison."""
    copy = copy_bandwidth()
    result: dict = {"copy_TBps": copy, "shape": list(shape), "formats": {}}
    print(f"copy {copy:.2f} TB/s; {shape[0]}×{shape[1]} to bf16")
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for spec in PLANES:
        format_ = from_spec(spec)
        stored = [format_.quantize(weight) for weight in weights]
        calls = [partial(format_.dequantize, parts, shape, torch.bfloat16) for parts in stored]
        moved = weights[0].numel() * (2 + format_.bits_per_weight(shape) / 8)
        graph, called = graph_us(calls), event_us(calls)
        row = {"graph_us": graph, "called_us": called, "copy_fraction": moved / graph / 1e6 / copy}
        result["formats"][spec] = row
        print(f"{spec:24} {graph:6.1f} µs (as called {called:6.1f}): {row['copy_fraction']:.1%} of a copy")
    return result


def cpu(repeats: int = 15) -> dict:
    import bitsandbytes.functional as peer

    torch.set_num_threads(2)
    result: dict = {"threads": 2, "ms": {}}
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(4096, 4096).to(dtype)
        for nested in (False, True):
            format_ = Blockwise4("nf4", 64, nested)
            packed = peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
            parts = format_.quantize(weight)
            calls = {
                "halfbyte": lambda p=parts, f=format_, d=dtype: f.dequantize(p, (4096, 4096), d),
                "bitsandbytes": lambda q=packed: peer.dequantize_4bit(*q),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(repeats):  # alternating, so that both see the same machine
                for name, call in calls.items():
                    began = time.perf_counter()
                    call()
                    times[name].append((time.perf_counter() - began) * 1e3)
            medians = {name: statistics.median(values) for name, values in times.items()}
            label = f"{str(dtype).removeprefix('torch.')}{' nested' if nested else ''}"
            result["ms"][label] = medians
            print(
                f"{label}: halfbyte {medians['halfbyte']:.1f} ms, bitsandbytes {medians['bitsandbytes']:.1f} ms, "
                f"{medians['bitsandbytes'] / medians['halfbyte']:.2f}x"
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--planes", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    write_result(given.json, cpu() if given.cpu else planes() if given.planes else gpu())


if __name__ == "__main__":
    main()
