"""Decoding speed: tokens a second after 128-token prompts, beside Hugging Face generate with bitsandbytes.

python -m benchmarks.decode [--model llama-3.1-8b] [--batches 1,8,32] [--peers] [--json FILE]   GPU, random weights
python -m benchmarks.decode --cpu FOLDER [--json FILE]   CPU: a real model in NF4, beside Hugging Face generate

On a GPU the fraction is of the time that reading a step's bytes takes at the bandwidth of a device copy: packed
weights, head and the cache so far. The peer runs in a process of its own (`--peers`), so that neither has the other's
memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

PROMPT, NEW, WARM = 128, 128, 16
PEER_NEW = 32


def prompts_of(batch: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, vocabulary, (batch, PROMPT), generator=generator).tolist()


def rate(model: Any, batch: int, vocabulary: int, **keys: Any) -> float:
    """Tokens a second of all rows together, after the first `WARM` (a prompt's pass, and capturing)."""
    from halfbyte.generation import stream

    began = 0.0
    steps = stream(model, prompts_of(batch, vocabulary), max_new_tokens=NEW, stops=[], **keys)
    for count, _ in enumerate(steps, 1):
        if count == WARM:
            began = time.perf_counter()
    return batch * (NEW - WARM) / (time.perf_counter() - began)


def step_bytes(model: Any, batch: int) -> int:
    """What one step reads: every linear as stored, the head, and the cache at its mean length."""
    from halfbyte.tensor import QuantizedTensor

    config = model.config
    weights = [p for p in model.parameters() if isinstance(p.data, QuantizedTensor)]
    head = model.get_output_embeddings().weight
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    return sum(p.data.nbytes for p in weights) + head.numel() * 2 + batch * cache * (PROMPT + (NEW + WARM) // 2)


def gpu(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.common import copy_bandwidth
    from benchmarks.step_model import build, model_config

    copy, rows = copy_bandwidth(), []
    print(f"copy {copy:.2f} TB/s")
    model, vocabulary = build(given.model, "cuda").eval(), model_config(given.model).vocab_size
    for batch in map(int, given.batches.split(",")):
        limit = batch * copy * 1e12 / step_bytes(model, batch)
        row: dict[str, Any] = {"batch": batch, "limit": limit}
        for name, keys in (
            ("base", {"adapter": None}),
            ("lora", {}),
            ("fp8_cache", {"adapter": None, "kv_cache": "fp8"}),
        ):
            row[name] = rate(model, batch, vocabulary, **keys)
        print(f"batch {batch:2}: {row['base']:7.1f} tok/s, {row['base'] / limit:.0%} of the limit {limit:.0f};"
              f" LoRA unmerged {row['lora']:.1f} ({row['base'] / row['lora'] - 1:+.1%} time);"
              f" FP8 cache {row['fp8_cache']:.1f}", flush=True)  # fmt: skip
        rows.append(row)
    del model
    torch.cuda.empty_cache()
    if given.peers:
        for row in rows:
            command = [sys.executable, "-m", "benchmarks.decode", "--peer", str(row["batch"]), "--model", given.model]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not found:
                print(f"batch {row['batch']}: the peer failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            row["peer"] = json.loads(found[0].removeprefix("RESULT "))
            print(f"batch {row['batch']:2}: bitsandbytes {row['peer']:.1f} tok/s: {row['base'] / row['peer']:.1f}x")
    return {"copy_TBps": copy, "rows": rows}


def peer(name: str, batch: int) -> float:
    """Hugging Face generate with bitsandbytes' modules: tokens a second, its prompt's pass taken off."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    from benchmarks.step_model import empty_model, fill, model_config

    def quantize(linear: Any) -> Any:
        rows, columns = linear.weight.shape
        made = Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
        packed = Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
        made.weight = packed.to("cuda")
        return made

    model = empty_model(name)
    fill(model, "cuda", quantize)
    return stock_rate(model.eval(), prompts_of(batch, model_config(name).vocab_size), PEER_NEW)


def stock_rate(model: Any, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of `model.generate`, greedy."""
    ids = torch.tensor(prompts, device=model.device)

    def generate(count: int) -> None:
        keys = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)

    return without_prompt(generate, len(prompts), new)


def without_prompt(generate: Callable[[int], Any], batch: int, new: int) -> float:
    """Tokens a second of `generate(number of tokens)`, the time for one token taken off that for all."""

    def seconds(count: int) -> float:
        began = time.perf_counter()
        generate(count)
        return time.perf_counter() - began

    seconds(4)
    return batch * (new - 1) / (seconds(new) - seconds(1))


def cpu(folder: str) -> dict[str, Any]:
    """NF4 in the dtype that halfbyte picks, and 32 and 16 bits by transformers: the same prompts, tokens and clock."""
    from transformers import AutoModelForCausalLM

    from benchmarks.common import cpu_name
    from halfbyte import load_model
    from halfbyte.generation import stream

    ours = load_model(folder, device="cpu")
    stock = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        for dtype in ("float32", "bfloat16")
    }
    result: dict[str, Any] = {
        "device": cpu_name(), "threads": torch.get_num_threads(), "prompt": PROMPT, "new": NEW,
        "halfbyte_dtype": str(ours.dtype).removeprefix("torch."),
    }  # fmt: skip
    for batch in (1, 4):
        prompts = prompts_of(batch, ours.config.vocab_size)

        def generate(count: int, prompts: list[list[int]] = prompts) -> None:
            for _ in stream(ours, prompts, max_new_tokens=count, stops=[]):
                pass

        row = {"halfbyte": without_prompt(generate, batch, NEW)}
        row |= {f"hf_{name}": stock_rate(model, prompts, NEW) for name, model in stock.items()}
        ratio = row["halfbyte"] / max(row["hf_float32"], row["hf_bfloat16"])
        print(f"batch {batch}: halfbyte NF4 {row['halfbyte']:.1f} tok/s, Hugging Face float32 {row['hf_float32']:.1f},"
              f" bfloat16 {row['hf_bfloat16']:.1f}: {ratio:.2f}x the faster")  # fmt: skip
        result[f"batch_{batch}"] = {**row, "ratio": ratio}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--cpu", metavar="FOLDER")
    parser.add_argument("--peer", type=int, help="(internal) the peer's batch")
    parser.add_argument("--json")
    given = parser.parse_args()
    if given.peer:
        print("RESULT", json.dumps(peer(given.model, given.peer)))
        return
    from benchmarks.common import write_result

    write_result(given.json, cpu(given.cpu) if given.cpu else gpu(given))


if __name__ == "__main__":
    main()
