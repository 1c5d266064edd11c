"""Decoding speed on one CUDA device: tokens per second after prompts of 128 tokens, with random weights.

    python -m benchmarks.decode [--model llama-3.1-8b] [--batches 1,8,32] [--storage nf4] [--peers] [--json FILE]
    python -m benchmarks.decode --rollouts 64,128,256,512 [--model llama-3.1-8b] [--json FILE]
    python -m benchmarks.decode --caches 32x4096 [--model llama-3.1-8b] [--json FILE]
    python -m benchmarks.decode --perplexity TEXT --model FOLDER [--json FILE]

The limit is the time to read a step's bytes at a device copy's bandwidth: packed weights, head and the cache so far.
--peers times Hugging Face's generate with bitsandbytes in its own process. --rollouts times instead the completions of
GRPO, with log-probabilities and a live adapter: so many sequences of 256 new tokens, in groups of 8 for a prompt.
Seconds are those of a whole call with its prefill; CUDA graphs are captured in an earlier call.

--caches times a step of ROWSxTOKENS over a paged cache of each kind, with random keys and values. --perplexity reads
windows of TEXT token by token over each kind of cache, after prompts of 64 tokens, in float32 on a CPU; TEXT is as in
`benchmarks.quality`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import copy_bandwidth, graph_us, parser_of, require_gpu, run_peer, write_result
from benchmarks.step_model import build, model_config

PROMPT, NEW, WARM = 128, 128, 16
PEER_NEW = 32
GROUP, ROLLOUT_NEW = 8, 256


def prompts_of(batch: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (batch, PROMPT), generator=generator).tolist()


def rate(model: Any, batch: int, vocabulary: int, **keys: Any) -> float:
    """Return the tokens per second of the whole batch after the first `WARM` tokens (prefill and graph capture)."""
    from halfbyte.generation import stream

    began = 0.0
    steps = stream(model, prompts_of(batch, vocabulary), max_new_tokens=NEW, stops=[], **keys)
    for count, _ in enumerate(steps, 1):
        if count == WARM:
            began = time.perf_counter()
    return batch * (NEW - WARM) / (time.perf_counter() - began)


def step_bytes(model: Any, batch: int) -> int:
    """Return the bytes that one step reads: stored linears, the head, and the cache at its mean length."""
    from halfbyte.tensor import QuantizedTensor

    config = model.config
    weights = [p for p in model.parameters() if isinstance(p.data, QuantizedTensor)]
    head = model.get_output_embeddings().weight
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return sum(p.data.nbytes for p in weights) + head.numel() * 2 + batch * cache * (PROMPT + (NEW + WARM) // 2)


def gpu(given: argparse.Namespace) -> dict[str, Any]:
    copy, rows = copy_bandwidth(), []
    print(f"copy {copy:.2f} TB/s")
    for storage in given.storage:
        model, vocabulary = build(given.model, "cuda", storage).eval(), model_config(given.model).vocab_size
        for batch in map(int, given.batches.split(",")):
            limit = batch * copy * 1e12 / step_bytes(model, batch)
            row: dict[str, Any] = {"storage": storage, "batch": batch, "limit": limit}
            row["base"] = rate(model, batch, vocabulary, adapter=None)
            row["lora"] = rate(model, batch, vocabulary)
            row["fp8_cache"] = rate(model, batch, vocabulary, adapter=None, kv_cache="fp8")
            print(f"{storage} batch {batch:2}: {row['base']:7.1f} tok/s, {row['base'] / limit:.0%} of {limit:.0f};"
                  f" LoRA unmerged {row['lora']:.1f} ({row['base'] / row['lora'] - 1:+.1%} time);"
                  f" FP8 cache {row['fp8_cache']:.1f}", flush=True)  # fmt: skip
            rows.append(row)
        del model
        torch.cuda.empty_cache()
    if given.peers:
        for row in rows:
            speed = run_peer(["benchmarks.decode", "--peer", str(row["batch"]), "--model", given.model])
            if isinstance(speed, dict):
                print(f"batch {row['batch']}: the peer failed: {speed['error']}")
                continue
            row["peer"] = speed
            print(f"batch {row['batch']:2}: bitsandbytes {row['peer']:.1f} tok/s: {row['base'] / row['peer']:.1f}x")
    return {"copy_TBps": copy, "rows": rows}


def peer(name: str, batch: int) -> float:
    """Return the tokens per second of Hugging Face's generate with bitsandbytes."""
    from benchmarks.step_peers import bitsandbytes_base

    prompts = prompts_of(batch, model_config(name).vocab_size)
    return stock_rate(bitsandbytes_base(name).eval(), prompts, PEER_NEW)


def stock_rate(model: Any, prompts: list[list[int]], new: int) -> float:
    """Return the tokens per second of `model.generate`, greedy, excluding the prefill."""
    ids = torch.tensor(prompts, device=model.device)

    def generate(count: int) -> None:
        keys = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)

    return without_prompt(generate, len(prompts), new)


def without_prompt(generate: Callable[[int], Any], batch: int, new: int) -> float:
    """Return the tokens per second of `generate(count)`, excluding the prefill: the time of a call for one token."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        generate(count)
        return time.perf_counter() - began

    seconds(4)
    return batch * (new - 1) / (seconds(new) - seconds(1))


def rollouts(name: str, counts: Sequence[int]) -> dict[str, Any]:
    """Time each number of sequences, with packed and with decoded weights."""
    from halfbyte.generation import Rollouts, Sampling

    model, vocabulary, rows = build(name, "cuda").eval(), model_config(name).vocab_size, []
    for count, weights in itertools.product(counts, ("unpacked", "packed")):
        torch.cuda.reset_peak_memory_stats()
        engine, prompts = Rollouts(model, rows=count, weights=weights), prompts_of(-(-count // GROUP), vocabulary)
        for seed in (1, 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.generate(prompts, GROUP, max_new_tokens=ROLLOUT_NEW, sampling=Sampling(1.0, seed=seed), stops=[])
            seconds = time.perf_counter() - began
        speed, peak = len(prompts) * GROUP * ROLLOUT_NEW / seconds, torch.cuda.max_memory_allocated() / 2**30
        rows.append({"rows": count, "weights": weights, "seconds": seconds, "tokens_per_second": speed, "GiB": peak})
        print(f"{count:4} rows, {weights:8}: {speed:8.0f} tok/s, {seconds:.2f} s, {peak:.1f} GiB", flush=True)
        engine.free()
        del engine
        torch.cuda.empty_cache()
    return {"model": name, "new": ROLLOUT_NEW, "rows": rows}


@torch.inference_mode()
def caches(name: str, rows: int, tokens: int) -> dict[str, Any]:
    """Time a captured step of `rows` sequences of `tokens` tokens over each kind of paged cache."""
    from halfbyte.generation.cache_dtypes import CACHES
    from halfbyte.generation.paged import PagedDecoder
    from halfbyte.ops.paged_attention import PAGE

    model, results = build(name, "cuda").eval(), {}
    pages = tokens // PAGE + 1
    for kind, dtype in CACHES.items():
        decoder = PagedDecoder(model, None, tokens + PAGE, dtype, unpacked=False)
        decoder.make_pages(rows * pages + 1, rows + 1)
        tables = torch.arange(1, rows * pages + 1, dtype=torch.int32, device="cuda").view(rows, pages)
        lengths = torch.full((rows,), tokens, dtype=torch.int32, device="cuda")
        seats = torch.arange(1, rows + 1, device="cuda")
        step = partial(decoder.step, seats, lengths, tables, None, seats)
        results[kind] = {"step_us": graph_us([step]), "page_bytes": decoder.page_bytes}
        print(f"{kind:4}: {results[kind]['step_us']:8.1f} us a step, {decoder.page_bytes} bytes a page", flush=True)
        del decoder, step
        torch.cuda.empty_cache()
    return {"model": name, "sequences": rows, "tokens": tokens, "caches": results}


@torch.inference_mode()
def perplexity(path: str, text: Path, count: int = 8, length: int = 320, prompt: int = 64) -> dict[str, Any]:
    """Measure the loss of `count` windows of `length` tokens after `prompt` tokens, over each kind of cache."""
    from benchmarks.quality import windows
    from halfbyte import load_model, load_tokenizer
    from halfbyte.generation.cache_dtypes import CACHES
    from halfbyte.generation.engine import StaticEngine
    from halfbyte.modeling.head import IGNORE_INDEX

    model = load_model(path, load_in_4bit=False, dtype="float32", device="cpu")
    rows = windows(load_tokenizer(path), text, length)
    rows = rows[(rows != IGNORE_INDEX).all(1)]
    rows = rows[:: len(rows) // count][:count]
    results: dict[str, dict[str, float]] = {}
    truth = torch.empty(0)
    for kind, dtype in CACHES.items():
        engine = StaticEngine(model, [None] * count, length, dtype)
        logits = engine.prefill(rows[:, :prompt], torch.zeros(count, dtype=torch.int64))
        log_probs = []
        for token in rows[:, prompt:].T:
            log_probs.append(logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0])
            logits = engine.step(token)
        own = torch.stack(log_probs)
        truth = own if kind == "auto" else truth
        loss, noise = -float(own.mean()), own - truth
        results[kind] = {"loss": loss, "noise": float(noise.std()), "error": float(noise.mean(0).std() / count**0.5)}
        print(f"{kind:4}: loss {loss:.4f}, differences of {results[kind]['noise']:.3f}", flush=True)
    return {"model": Path(path).name, "tokens": truth.numel(), "caches": results}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--batches", default="1,8,32")
    made.add_argument("--storage", nargs="+", default=["nf4"], help="formats of the frozen weights")
    made.add_argument("--peers", action="store_true")
    made.add_argument("--rollouts", metavar="ROWS")
    made.add_argument("--caches", metavar="ROWSxTOKENS")
    made.add_argument("--perplexity", type=Path, metavar="TEXT")
    made.add_argument("--peer", type=int, help=argparse.SUPPRESS)  # the batch of the peer's own process
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    if given.perplexity:
        return write_result(given.json, perplexity(given.model, given.perplexity))
    require_gpu()
    if given.caches:
        return write_result(given.json, caches(given.model, *map(int, given.caches.split("x"))))
    if given.peer:
        return print("RESULT", json.dumps(peer(given.model, given.peer)))
    if given.rollouts:
        return write_result(given.json, rollouts(given.model, list(map(int, given.rollouts.split(",")))))
    write_result(given.json, gpu(given))


if __name__ == "__main__":
    main()
