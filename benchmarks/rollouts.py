"""Rollouts: tokens a second of completions with their log-probabilities, a live adapter, prompts in groups of 8.

python -m benchmarks.rollouts [--model llama-3.1-8b] [--rows 64,128,256,512] [--new 256] [--json FILE]   GPU
python -m benchmarks.rollouts --uneven [...]   GPU: lengths of 16 to 1,024 tokens, beside even ones and a static batch
python -m benchmarks.rollouts --long [...]   GPU: prompts of 2,048 tokens in groups of 16, beside each row's own
python -m benchmarks.rollouts --cpu FOLDER [--json FILE]   CPU: a real model in NF4, beside Hugging Face generate

Models on a GPU have random weights. Prompts have 128 tokens. Seconds are those of a whole call, reading the prompts
included; graphs were captured in the call before.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

PROMPT, GROUP = 128, 8
CPU_ROWS, CPU_PROMPT, CPU_NEW = 32, 66, 96


def prompts_of(rows: int, vocabulary: int, length: int = PROMPT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (-(-rows // GROUP), length), generator=generator).tolist()


def seconds(model: Any, rows: int, vocabulary: int, new: int, **keys: Any) -> tuple[float, int, Any]:
    """Of the second call, new tokens of it, and the engine."""
    from halfbyte.generation import Rollouts, Sampling

    engine = Rollouts(model, rows=rows, **keys)
    for seed in (1, 2):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        began = time.perf_counter()
        found = engine.generate(
            prompts_of(rows, vocabulary), GROUP, max_new_tokens=new, sampling=Sampling(1.0, seed=seed), stops=[]
        )
        taken = time.perf_counter() - began
    return taken, sum(len(each.ids) for each in found), engine


def model_of(name: str) -> tuple[Any, int]:
    """And its vocabulary."""
    from benchmarks.step_model import build, model_config

    return build(name, "cuda").eval(), model_config(name).vocab_size


def gpu(given: argparse.Namespace) -> dict[str, Any]:
    (model, vocabulary), results = model_of(given.model), []
    for rows in map(int, given.rows.split(",")):
        for weights in ("auto",) if rows < 64 else ("unpacked", "packed"):
            torch.cuda.reset_peak_memory_stats()
            taken, tokens, engine = seconds(model, rows, vocabulary, given.new, weights=weights)
            peak = torch.cuda.max_memory_allocated() / 2**30
            row = {"rows": rows, "weights": weights, "seconds": taken, "tokens_per_second": tokens / taken, "GiB": peak}
            results.append(row)
            print(f"{rows:4} rows, {weights:8}: {tokens / taken:8.0f} tok/s, {taken:.2f} s, {peak:.1f} GiB", flush=True)
            engine.free()
            del engine
            torch.cuda.empty_cache()
    return {"model": given.model, "new": given.new, "rows": results}


def timed(engine: Any, *arguments: Any, stops: Any = (), **keys: Any) -> float:
    """Seconds of a call that draws and, without `stops`, never stops early."""
    from halfbyte.generation import Sampling

    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.generate(*arguments, sampling=Sampling(1.0, seed=1), stops=stops, **keys)
    return time.perf_counter() - began


def ready(engine: Any, vocabulary: int, *arguments: Any, **keys: Any) -> None:
    """Pages, decoded weights and the graph of all rows for such a call; each row ends with its first token."""
    for _ in range(2):
        timed(engine, *arguments, stops=range(vocabulary), **keys)


def uneven(given: argparse.Namespace) -> dict[str, Any]:
    """Completions of 16 to 1,024 tokens, geometric, eight times as many as run at once, where that is how many each may
    have; as many of their mean length; a static batch of them, in which every row runs as long as the longest; and
    as many that may all have 1,024 and end at each token with a chance of one in the mean, known to nobody before."""
    from halfbyte.generation import Rollouts, Sampling

    (model, vocabulary), seats = model_of(given.model), 256
    generator, results = torch.Generator().manual_seed(1), {}
    lengths = (16 * 64 ** torch.rand(given.times * seats, generator=generator)).long().tolist()
    prompts = torch.randint(3, vocabulary, (len(lengths), PROMPT), generator=generator).tolist()
    mean, first = sum(lengths) // len(lengths), lengths[:seats]
    engine = Rollouts(model, rows=seats)
    ready(engine, vocabulary, prompts[:seats], max_new_tokens=max(lengths))
    timed(engine, prompts[:seats], max_new_tokens=list(range(2, 2 + seats)))  # graphs of fewer rows
    for name, own, tokens in (
        ("even", [mean] * len(lengths), mean * len(lengths)),
        ("uneven", lengths, sum(lengths)),
        ("static", [max(first)] * seats, sum(first)),
    ):
        results[name] = tokens / timed(engine, prompts[: len(own)], max_new_tokens=own)
        print(f"{name}: {results[name]:.0f} tok/s over {len(own)} completions", flush=True)
    print(
        f"uneven / even {results['uneven'] / results['even']:.2f}, / static {results['uneven'] / results['static']:.2f}"
    )
    began = time.perf_counter()
    options: Any = {"max_new_tokens": max(lengths), "stops": range(vocabulary // mean)}
    found = engine.generate(prompts, sampling=Sampling(1.0, seed=1), **options)
    results["unforeseen"] = sum(len(each.ids) for each in found) / (time.perf_counter() - began)
    print(
        f"unforeseen: {results['unforeseen']:.0f} tok/s, / even {results['unforeseen'] / results['even']:.2f}",
        flush=True,
    )
    return {"model": given.model, "completions": len(lengths), "mean": mean, **results}


def long(given: argparse.Namespace) -> dict[str, Any]:
    """64 rows of 128 new tokens."""
    from halfbyte.generation import Rollouts

    (model, vocabulary), results = model_of(given.model), {}
    prompts = torch.randint(3, vocabulary, (4, 2048), generator=torch.Generator().manual_seed(1)).tolist()
    for name, own, n in (("shared", prompts, 16), ("own", [each for each in prompts for _ in range(16)], 1)):
        engine = Rollouts(model, rows=64)
        ready(engine, vocabulary, own, n, max_new_tokens=128)
        rate = 64 * 128 / timed(engine, own, n, max_new_tokens=128)
        cache = engine._decoder.pages * engine._decoder.page_bytes / 2**30
        results[name] = {"tokens_per_second": rate, "cache_GiB": cache}
        print(f"{name}: {rate:.0f} tok/s, {cache:.2f} GiB of pages", flush=True)
        engine.free()
        del engine
        torch.cuda.empty_cache()
    return {"model": given.model, **results}


def cpu(folder: str) -> dict[str, Any]:
    """4 prompts of 66 tokens, 8 completions of 96 each, an adapter of rank 16."""
    from transformers import AutoModelForCausalLM

    from benchmarks.common import cpu_name
    from halfbyte import load_model
    from halfbyte.config import RunConfig
    from halfbyte.generation import Rollouts, Sampling
    from halfbyte.modeling.adapters import add_adapter

    model = add_adapter(
        load_model(folder, device="cpu"), RunConfig(model_name_or_path=folder, dataset="x", r=16)
    ).eval()
    prompts = prompts_of(CPU_ROWS, model.config.vocab_size, CPU_PROMPT)
    result: dict[str, Any] = {"device": cpu_name(), "threads": torch.get_num_threads(), "dtype": str(model.dtype)}
    for weights in ("unpacked", "packed"):
        engine = Rollouts(model, rows=CPU_ROWS, weights=weights)
        options: Any = {"sampling": Sampling(1.0, seed=1), "stops": []}
        engine.generate(prompts, GROUP, max_new_tokens=4, **options)
        began = time.perf_counter()
        engine.generate(prompts, GROUP, max_new_tokens=CPU_NEW, **options)
        result[weights] = CPU_ROWS * CPU_NEW / (time.perf_counter() - began)
        print(f"halfbyte NF4, {weights}: {result[weights]:.0f} tok/s", flush=True)
    ids = torch.tensor(prompts).repeat_interleave(GROUP, 0)
    for dtype in ("float32", "bfloat16"):
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        keys = {"do_sample": True, "max_new_tokens": CPU_NEW, "min_new_tokens": CPU_NEW, "pad_token_id": 0}
        began = time.perf_counter()
        stock.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)
        result[f"hf_{dtype}"] = CPU_ROWS * CPU_NEW / (time.perf_counter() - began)
        print(f"Hugging Face {dtype}, no adapter: {result[f'hf_{dtype}']:.0f} tok/s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rows", default="64,128,256,512")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--times", type=int, default=8, help="completions for each that runs at once, with --uneven")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--cpu", metavar="FOLDER")
    parser.add_argument("--json")
    given = parser.parse_args()
    from benchmarks.common import write_result

    measure = uneven if given.uneven else long if given.long else gpu
    write_result(given.json, cpu(given.cpu) if given.cpu else measure(given))


if __name__ == "__main__":
    main()
