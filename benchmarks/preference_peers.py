"""A step of DPO on one CUDA device beside TRL's trainer on bitsandbytes' weights.

    python -m benchmarks.preference_peers [--model llama-3.1-8b] [--pairs 8] [--prompt 1024] [--answer 512] [--steps 3]
                                          [--only ours|checkpointed|kept] [--json FILE]

Random weights in NF4 with nested scales, r=16 on seven linears, random pairs of one shape. Both compute the reference
in each step. Ours has each prompt once and keeps of the layers what its plan says. TRL's DPOTrainer is as its defaults
have it, with checkpointing, and then with activations kept, of two pairs at a time, since those of all do not fit. Each
is a process of its own; milliseconds are the median step's after the first, and the peak is torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import write_result

PARTS = ("ours", "checkpointed", "kept")
AT_A_TIME = 2  # pairs, where activations are kept


def ours(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.preference_step import steps_for
    from benchmarks.step_model import timed

    step, tokens = steps_for(given)["dpo, shared"]
    return timed(step, tokens, given.steps)


def trl(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from benchmarks.step_model import model_config
    from benchmarks.step_peers import bitsandbytes_model, byte_tokenizer

    class Prepared(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    checkpointing, on_gpu = given.only == "checkpointed", torch.cuda.is_available()
    size, steps = given.pairs if checkpointing else AT_A_TIME, given.steps + 1
    model = bitsandbytes_model(given.model, checkpointing, "cuda" if on_gpu else "cpu")
    generator = torch.Generator().manual_seed(1)
    sizes = {"prompt_ids": given.prompt, "chosen_ids": given.answer, "rejected_ids": given.answer}
    rows = {key: torch.randint(3, model_config(given.model).vocab_size, (given.pairs * steps, length),
                               generator=generator).tolist() for key, length in sizes.items()}  # fmt: skip
    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=size,
        gradient_accumulation_steps=given.pairs // size, max_length=given.prompt + given.answer, max_steps=steps,
        gradient_checkpointing=checkpointing, report_to=[], save_strategy="no", logging_steps=1,
        optim="adamw_torch_fused", disable_tqdm=True, bf16=on_gpu,
    )  # fmt: skip
    trainer = Prepared(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=byte_tokenizer())
    seconds: list[float] = []
    trainer.add_callback(_clock(seconds))
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"ms": 1e3 * statistics.median(seconds[1:]), "first_step_seconds": seconds[0], "peak_gib": peak,
            "losses": losses}  # fmt: skip


def _clock(seconds: list[float]) -> Any:
    """A callback of transformers that notes the seconds of each step, until the device is done with it."""
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    return Clock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=PARTS, help="one part, in this process; prints a line RESULT")
    given = parser.parse_args()
    given.reference = "each"
    if given.only:
        print("RESULT", json.dumps((ours if given.only == "ours" else trl)(given)), flush=True)
        return
    result: dict[str, Any] = {"settings": vars(given)}
    for part in PARTS:
        done = subprocess.run([sys.executable, "-m", "benchmarks.preference_peers", "--only", part, *sys.argv[1:]],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result[part] = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"failed": done.returncode}
        if lines and part != "ours" and "ms" in result["ours"]:
            result[part]["ours_is_faster"] = result[part]["ms"] / result["ours"]["ms"]
        print(json.dumps({part: result[part]}), flush=True)
        write_result(given.json, result)


if __name__ == "__main__":
    main()
