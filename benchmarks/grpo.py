"""GRPO on a CPU: how fast a run's rewards rise, and the steps per minute compared with TRL's trainer.

    python -m benchmarks.grpo MODEL GSM8K_TRAIN.jsonl [--steps 40] [--dtype float32] [--peer 4] [--json FILE]

The reward is 1 for an answer that ends in "#### number". A step has 4 prompts × 8 answers of up to 96 tokens; NF4 with
double quantization, r = 16 on all linears. `--peer N` also runs N steps of TRL's GRPOTrainer on halfbyte's model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import parser_of, write_result

PATTERN = r"#### -?[\d.,]+$"
RATE = 1e-3


@contextlib.contextmanager
def cpu_seconds(of: type, *names: str) -> Iterator[list[float]]:
    """Record the process's CPU seconds in each call of these methods, which must not call each other."""
    found: list[float] = []

    def timed(own: Any) -> Any:
        def call(*arguments: Any, **keys: Any) -> Any:
            began = time.process_time()
            try:
                return own(*arguments, **keys)
            finally:
                found.append(time.process_time() - began)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(of, name, timed(getattr(of, name))))
        yield found


def ours(model: str, data: str, steps: int, dtype: str) -> dict[str, Any]:
    from halfbyte.train.loop import TrainingLoop
    from halfbyte.train.run import finetune

    with tempfile.TemporaryDirectory() as folder, cpu_seconds(TrainingLoop, "_take", "_step") as used:
        began = time.perf_counter()
        finetune(
            model, data, method="grpo", column_mapping={"prompt": "question"}, reward_funcs=[{"regex": PATTERN}],
            num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=4, max_completion_length=96,
            max_length=512, max_steps=steps, learning_rate=RATE, lr_scheduler_type="constant_with_warmup",
            warmup_steps=2, sample_prompts=0, save_steps=steps, dtype=dtype, device="cpu", output_dir=f"{folder}/run",
        )  # fmt: skip
        seconds = time.perf_counter() - began
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    rewards = [record["reward"] for record in records]
    step = sorted(record["step_seconds"] for record in records)[len(records) // 2]
    return {
        "rewards": rewards,
        "first_5": sum(rewards[:5]) / 5,
        "last_5": sum(rewards[-5:]) / 5,
        "seconds": seconds,
        "steps_per_minute": 60 / step,
        "cpu_seconds_of_the_first_3": sum(used[:6]) / 3,
        "rollout_seconds": [record["rollout_seconds"] for record in records],
        "tokens": [record["completions/mean_length"] for record in records],
        "largest_log_prob_difference": max(record["sampling/sampling_logp_difference/max"] for record in records),
        "ratios_outside": max(record["sampling/outside"] for record in records),
    }


def peer(model: str, data: str, steps: int, dtype: str) -> dict[str, float]:
    """Return the steps per minute of TRL's trainer and the CPU seconds of one step."""
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    import halfbyte

    def reward(completions, **_):
        return [float(re.search(PATTERN, each[0]["content"].strip()) is not None) for each in completions]

    rows = load_dataset("json", data_files=data, split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["question"]}]})
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8,
            max_completion_length=96, max_steps=steps, learning_rate=RATE, report_to="none", use_cpu=True,
            bf16=dtype == "bfloat16", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            halfbyte.load_model(model, dtype=getattr(torch, dtype)), reward_funcs=reward, args=config,
            train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
        )  # fmt: skip
        began = time.perf_counter()
        with cpu_seconds(GRPOTrainer, "training_step") as used:
            trainer.train()
        found = {"trl_steps_per_minute": 60 * steps / (time.perf_counter() - began)}
        return found | {"trl_cpu_seconds_a_step": sum(used) / steps}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("model")
    made.add_argument("data")
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--dtype", default="float32")
    made.add_argument("--peer", type=int, default=0)
    return made


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    found = ours(options.model, options.data, options.steps, options.dtype)
    print(json.dumps(found), flush=True)
    if options.peer:
        found |= (theirs := peer(options.model, options.data, options.peer, options.dtype))
        print(json.dumps(theirs), flush=True)
    write_result(options.json, {"steps": options.steps, "dtype": options.dtype, **found})


if __name__ == "__main__":
    main()
