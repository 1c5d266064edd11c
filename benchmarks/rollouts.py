"""Rollouts on one CUDA device: tokens per second of completions with their log-probabilities and a live adapter.

    python -m benchmarks.rollouts [--model llama-3.1-8b] [--rows 64,128,256,512] [--new 256] [--json FILE]
    python -m benchmarks.rollouts --long [--json FILE]

Random weights in NF4; prompts of 128 tokens in groups of 8. Seconds are those of a whole call with its prefill; CUDA
graphs are captured in an earlier call. --long: 64 rows of 128 new tokens after prompts of 2,048 tokens in groups of 16,
whose rows share the prompt's pages or have their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import parser_of, write_result
from benchmarks.step_model import build, model_config

PROMPT, GROUP = 128, 8


def random_prompts(count: int, vocabulary: int, length: int = PROMPT) -> list[list[int]]:
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def seconds(engine: Any, prompts: list[list[int]], n: int, new: int) -> float:
    """Time the second of two calls that sample `n` completions of exactly `new` tokens for each prompt."""
    from halfbyte.generation import Sampling

    for seed in (1, 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.generate(prompts, n, max_new_tokens=new, sampling=Sampling(1.0, seed=seed), stops=[])
        taken = time.perf_counter() - began
    return taken


def by_rows(given: argparse.Namespace, model: Any, vocabulary: int) -> dict[str, Any]:
    """Measure each number of rows, with packed and with decoded weights."""
    from halfbyte.generation import Rollouts

    results = []
    for rows in map(int, given.rows.split(",")):
        for weights in ("unpacked", "packed"):
            torch.cuda.reset_peak_memory_stats()
            engine = Rollouts(model, rows=rows, weights=weights)
            taken = seconds(engine, random_prompts(-(-rows // GROUP), vocabulary), GROUP, given.new)
            rate, peak = -(-rows // GROUP) * GROUP * given.new / taken, torch.cuda.max_memory_allocated() / 2**30
            results.append({"rows": rows, "weights": weights, "seconds": taken, "tokens_per_second": rate, "GiB": peak})
            print(f"{rows:4} rows, {weights:8}: {rate:8.0f} tok/s, {taken:.2f} s, {peak:.1f} GiB", flush=True)
            engine.free()
            del engine
            torch.cuda.empty_cache()
    return {"model": given.model, "new": given.new, "rows": results}


def long_prompts(given: argparse.Namespace, model: Any, vocabulary: int) -> dict[str, Any]:
    """Compare shared pages of a prompt with one copy per row."""
    from halfbyte.generation import Rollouts

    prompts, results = random_prompts(4, vocabulary, 2048), {}
    for name, own, n in (("shared", prompts, 16), ("own", [each for each in prompts for _ in range(16)], 1)):
        engine = Rollouts(model, rows=64)
        rate = 64 * 128 / seconds(engine, own, n, 128)
        cache = engine._decoder.pages * engine._decoder.page_bytes / 2**30
        results[name] = {"tokens_per_second": rate, "cache_GiB": cache}
        print(f"{name}: {rate:.0f} tok/s, {cache:.2f} GiB of pages", flush=True)
        engine.free()
        del engine
        torch.cuda.empty_cache()
    return {"model": given.model, **results}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--rows", default="64,128,256,512")
    made.add_argument("--new", type=int, default=256)
    made.add_argument("--long", action="store_true")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    model = build(given.model, "cuda").eval()
    measure = long_prompts if given.long else by_rows
    write_result(given.json, measure(given, model, model_config(given.model).vocab_size))


if __name__ == "__main__":
    main()
