"""`halfbyte train` against the bare step of `benchmarks.step`: what the trainer, the data and the records cost.

    python -m benchmarks.through_train --data gsm8k.jsonl --tokenizer llama3/ [--model qwen3-0.6b] [--batch 2]
        [--length 2048] [--steps 30] [--work DIR] [--json FILE]

Writes a checkpoint of random weights, trains it through the command line on packed rows, and takes the median time from
step to step of metrics.jsonl, after the warm-up. A record is written when its step has just ended on the device, so
this is device time. The bare step has the same shape, from Python and as a CUDA graph.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write_result
from benchmarks.qlora_8b import TEMPLATE
from benchmarks.step_model import MODELS, RANK, model_config

WARMUP = 8  # steps before the median: compilation, capture


def write_checkpoint(name: str, tokenizer: Path, folder: Path) -> None:
    """Random bf16 weights of a benchmark's shape, with the Llama-3 tokenizer."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|end_of_text|>", bos_token="<|begin_of_text|>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    del model
    torch.cuda.empty_cache()


def through_train(given: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Train, and read the run's own records."""
    out, config = given.work / "run", given.work / "run.yaml"
    settings = {
        "model_name_or_path": str(model), "dataset": given.data, "output_dir": str(out), "packing": True,
        "max_length": given.length, "per_device_train_batch_size": given.batch, "max_steps": given.steps, "r": RANK,
        "sample_prompts": 0, "eval_split_size": 0, "save_steps": 1000, "activation_checkpointing": False,
    }  # fmt: skip
    config.write_text(json.dumps(settings))
    subprocess.run([sys.executable, "-m", "halfbyte", "train", str(config)], check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row["kind"] == "train"][WARMUP:]
    milliseconds = 1e3 * statistics.median(after - before for before, after in itertools.pairwise(times))
    notices = json.loads((out / "environment.json").read_text())["notices"]
    return {
        "ms": milliseconds,
        "tokens_per_second": given.batch * given.length / milliseconds * 1e3,
        "peak_gib": json.loads((out / "memory.json").read_text())["measured"]["peak_bytes"] / 2**30,
        "notices": notices,
    }


def bare(given: argparse.Namespace) -> dict[str, Any]:
    """`benchmarks.step` in a process of its own."""
    result = given.work / "step.json"
    command = [sys.executable, "-m", "benchmarks.step", "--model", given.model, "--graph", "--no-floor"]
    command += ["--batch", str(given.batch), "--length", str(given.length), "--json", str(result)]
    subprocess.run(command, check=True)
    return json.loads(result.read_text())["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=Path("/tmp/through-train"))
    parser.add_argument("--json")
    given = parser.parse_args()
    model = given.work / "model"
    write_checkpoint(given.model, given.tokenizer, model)
    runs = bare(given) | {"halfbyte train": through_train(given, model)}
    best = min(run["ms"] for name, run in runs.items() if name != "halfbyte train")
    for name, run in runs.items():
        print(
            f"  {name:16} {run['ms']:8.1f} ms  {best / run['ms']:.3f} of the best bare step  {run['peak_gib']:5.1f} GiB"
        )
    write_result(given.json, {"model": given.model, "batch": given.batch, "length": given.length, "runs": runs})


if __name__ == "__main__":
    main()
