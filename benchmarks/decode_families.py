"""Decoding speed of families whose layers are unlike Llama's: our engines beside transformers' forward on the same
packed weights and adapter, which ran before; prompts of 128 tokens.

python -m benchmarks.decode_families [--models qwen3.5-9b,gpt-oss-20b] [--batches 1,8,32] [--rows 64,256] [--json FILE]

GPU, random weights: Qwen3.5-9B's shape in NF4, gpt-oss-20b's with its experts in MXFP4, an adapter of rank 16 on all
linears but experts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

EXPERTS = {"gpt-oss-20b": "mxfp4"}
NEW, WARM, STOCK_NEW = 128, 16, 40


def adapted(name: str) -> Any:
    from benchmarks.mixture_step import build
    from benchmarks.step_model import run_config
    from halfbyte.modeling.adapters import add_adapter

    model = build(name, "cuda", EXPERTS.get(name, "nf4"))
    return add_adapter(model, run_config(name, target_modules="all-linear", target_parameters=[])).eval()


@contextmanager
def transformers_forward() -> Iterator[None]:
    """Within, our engines know no family."""
    from halfbyte.generation import decoder
    from halfbyte.generation.linears import Unsupported

    def unknown(causal: Any) -> Any:
        raise Unsupported("asked for")

    own, decoder._views = decoder._views, unknown
    try:
        yield
    finally:
        decoder._views = own


def rate(model: Any, batch: int, vocabulary: int, new: int, warm: int) -> float:
    """Tokens a second of all rows together, after the first `warm`."""
    from benchmarks.decode import prompts_of
    from halfbyte.generation import stream

    began = 0.0
    for count, _ in enumerate(stream(model, prompts_of(batch, vocabulary), max_new_tokens=new, stops=[]), 1):
        if count == warm:
            began = time.perf_counter()
    return batch * (new - warm) / (time.perf_counter() - began)


def measured(name: str, batches: list[int], rows: list[int]) -> dict[str, Any]:
    from benchmarks.rollouts import seconds
    from halfbyte.generation.engine import forget

    model = adapted(name)
    vocabulary = model.config.get_text_config().vocab_size
    found: dict[str, Any] = {"weights_GiB": torch.cuda.memory_allocated() / 2**30, "decode": [], "rollouts": []}
    for batch in batches:
        own = rate(model, batch, vocabulary, NEW, WARM)
        forget(model)
        with transformers_forward():
            stock = rate(model, batch, vocabulary, STOCK_NEW, 8)
        found["decode"].append({"batch": batch, "halfbyte": own, "transformers": stock})
        print(f"{name}, batch {batch}: {own:.0f} tok/s, transformers {stock:.0f}: {own / stock:.1f}x", flush=True)
    for count in rows:
        taken, tokens, engine = seconds(model, count, vocabulary, 256)
        found["rollouts"].append(
            {"rows": count, "weights": engine._unpacks(count), "tokens_per_second": tokens / taken}
        )
        print(f"{name}, {count} rollouts: {tokens / taken:.0f} tok/s", flush=True)
        engine.free()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    from benchmarks.common import write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3.5-9b,gpt-oss-20b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--json")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    for name in given.models.split(","):
        result[name] = measured(
            name, *([int(each) for each in s.split(",") if each] for s in (given.batches, given.rows))
        )
        write_result(given.json, result)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
