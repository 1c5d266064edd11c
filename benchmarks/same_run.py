"""One run on several GPUs and on one, through `halfbyte train`: how far apart losses are, step by step.

    python -m benchmarks.same_run [WAY…] [--steps 50] [--gpus 2] [--json FILE] [--device cpu --hidden 128]

A Llama of 0.16B in NF4 with random weights, which learns fast, so that its losses differ easily: packed rows of 512
tokens, computed in bfloat16. WAYs are axes of `parallel`, and `kernels`: one GPU with transformers' own operations in
place of the fused ones. What that is apart is what another order of roundings comes to, without any division.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import write_result

VOCABULARY, WORDS = 2048, 600
WAYS = ("kernels", "data", "shard", "tensor", "pipeline", "context")
WINDOW = 4  # micro-batches of a step on one GPU


def write_place(folder: Path, hidden: int) -> None:
    """A checkpoint with a tokenizer in `model`, and rows of words in `data.jsonl`."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(WORDS)]
    texts = [" ".join(drawn.choices(words[: 20 + n % 60], k=drawn.randint(20, 200))) for n in range(3000)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["</s>", "<pad>"], show_progress=False)
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names).save_pretrained(folder / "model")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=8, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    ))  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    rows = ({"prompt": text[:40], "completion": text[40:]} for text in texts)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(given: argparse.Namespace, way: str) -> list[float]:
    """Of each step."""
    output = given.work / f"run-{way}"
    ways, rows = {way: given.gpus}, WINDOW // given.gpus if way in ("data", "shard") else WINDOW
    keys: dict[str, Any] = {
        "output_dir": output, "packing": "true", "max_length": 512, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": rows, "max_steps": given.steps, "learning_rate": given.rate, "seed": 0,
        "logging_steps": 1, "sample_prompts": 0, "eval_split_size": 0, "save_steps": 100000, "dtype": "bfloat16",
    }  # fmt: skip
    if way in ("alone", "kernels"):
        keys |= {"device": "cpu" if given.device == "cpu" else "cuda:0", "use_kernels": str(way == "alone").lower()}
    else:
        keys |= {"parallel": json.dumps(ways)} | ({"device": "cpu"} if given.device == "cpu" else {})
    command = [sys.executable, "-m", "halfbyte", "train", str(given.work / "model"), str(given.work / "data.jsonl")]
    began = time.perf_counter()
    ran = subprocess.run([*command, *(f"{key}={value}" for key, value in keys.items())], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{way}: exit {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    print(f"{way}: {time.perf_counter() - began:.0f} s", flush=True)
    return [record["loss"] for record in records if record["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, default=Path("/tmp/same-run"))
    parser.add_argument("--json")
    given = parser.parse_args()
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    write_place(given.work, given.hidden)
    found: dict[str, Any] = {"alone": {"losses": losses(given, "alone")}}
    for way in given.ways:
        own = losses(given, way)
        apart = [abs(one / other - 1) for one, other in zip(own, found["alone"]["losses"], strict=True)]
        found[way] = {"losses": own, "first_apart": apart[0], "most_apart": max(apart)}
        print(f"  first step {apart[0]:.1e} apart, the farthest {max(apart):.1e}", flush=True)
        keys = {"steps": given.steps, "gpus": given.gpus, "learning_rate": given.rate, "hidden": given.hidden}
        write_result(given.json, {**keys, "runs": found})


if __name__ == "__main__":
    main()
