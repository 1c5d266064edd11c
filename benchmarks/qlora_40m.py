"""The main job on real weights and data, on a CPU: does QLoRA learn as much as 16-bit LoRA?

    python -m benchmarks.qlora_40m --model llama-40m --data NAME=FILE [NAME=FILE ...] [--threads 2] [--json FILE]

For each dataset, `halfbyte train` runs twice with the same seed and data, 10% held out: NF4 + double quantization, and
16-bit LoRA. Prints the fall of the held-out loss, QLoRA's share of LoRA's gain, time, and what `halfbyte merge
--verify` says. Both gains are counted from one start, the 16-bit model before training: the quantized one starts from a
higher loss, and its own fall would count what quantizing had cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import write_result

STEPS = {"glaive": 60, "gsm8k": 120}


def train(model: str, data: str, out: Path, steps: int, load_in_4bit: bool, threads: int) -> dict:
    settings = {
        "model_name_or_path": model, "dataset": data, "output_dir": str(out), "load_in_4bit": load_in_4bit,
        "eval_split_size": 0.1, "max_length": 512, "packing": True, "per_device_train_batch_size": 4,
        "max_steps": steps,
        "learning_rate": 1e-3, "device": "cpu", "seed": 11, "eval_steps": steps, "sample_prompts": 1,
    }  # fmt: skip
    config = out.with_suffix(".yaml")
    config.write_text(json.dumps(settings))
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "halfbyte", "train", str(config)], check=True, env=environment)
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evals = [record["loss"] for record in records if record["kind"] == "eval"]
    rows = [record for record in records if record["kind"] == "train"]
    return {
        "seconds": seconds, "eval_loss_before": evals[0], "eval_loss_after": evals[-1], "gain": evals[0] - evals[-1],
        "tokens_per_second": sum(r["tokens"] for r in rows) / sum(r["step_seconds"] for r in rows),
        "compute_dtype": json.loads((out / "environment.json").read_text())["compute_dtype"],
        "memory": json.loads((out / "memory.json").read_text()),
        "checks": json.loads((out / "checks.json").read_text()),
    }  # fmt: skip


def share(qlora: dict, lora16: dict) -> float:
    """What QLoRA gains of what LoRA gains, both from the 16-bit model's held-out loss before training."""
    start = lora16["eval_loss_before"]
    return (start - qlora["eval_loss_after"]) / (start - lora16["eval_loss_after"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/qlora-40m"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    results: dict = {}
    for pair in given.data:
        name, _, file = pair.partition("=")
        result = {}
        for kind, load_in_4bit in (("qlora", True), ("lora16", False)):
            result[kind] = train(
                given.model, file, given.work / f"{name}-{kind}", STEPS[name], load_in_4bit, given.threads
            )
        result["gain_share"] = share(result["qlora"], result["lora16"])
        run = given.work / f"{name}-qlora"
        merge = [sys.executable, "-m", "halfbyte", "merge", str(run), str(given.work / f"{name}-merged"), "--verify"]
        result["merge_exit"] = subprocess.run(merge, check=False).returncode
        result["merge"] = json.loads((run / "merge.json").read_text()) if (run / "merge.json").exists() else None
        results[name] = result
        for kind in ("qlora", "lora16"):
            r = result[kind]
            print(
                f"{name} {kind}: held-out {r['eval_loss_before']:.4f} -> {r['eval_loss_after']:.4f}, "
                f"{r['seconds']:.0f} s, {r['tokens_per_second']:.0f} tok/s, {r['compute_dtype']['dtype']}"
            )
        print(
            f"{name}: QLoRA reaches {100 * result['gain_share']:.1f}% of LoRA's gain; "
            f"merge --verify exit {result['merge_exit']}",
            flush=True,
        )
    write_result(given.json, {"threads": given.threads, **results})


if __name__ == "__main__":
    main()
