"""GRPO steps of a model with random weights on one CUDA device: seconds of each phase and peak memory.

    python -m benchmarks.grpo_step [--model llama-3.1-8b] [--prompts 32] [--group 8] [--new 256] [--rows 16]
        [--limit 40] [--steps 3] [--json FILE]

Prompts have 128 tokens and every answer --new tokens; the reward is computed from token ids. The loop is
`halfbyte train`'s own, over NF4 with double quantization and r = 16 on the seven linears. The plan's prediction is
reported with the peak.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parser_of, write_result
from benchmarks.step_model import build, model_config, run_config

PROMPT, TASKS = 128, 128
GIB = 2**30


def odd(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the share of odd token ids, a reward that differs between answers."""
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


class Words:
    """The part of a tokenizer that the loop uses."""

    pad_token_id = 2

    def decode(self, ids: list[int], **options: Any) -> str:
        return " ".join(map(str, ids))


def prompts_of(vocabulary: int) -> Any:
    from datasets import Dataset

    from halfbyte.data.prepare_answers import as_read

    ids = torch.randint(3, vocabulary, (TASKS, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"prompt": json.dumps(str(at)), "prompt_ids": each, "columns": "{}"} for at, each in enumerate(ids)]
    return Dataset.from_list(rows).with_transform(as_read)


def configured(given: argparse.Namespace, folder: str) -> Any:
    answers = given.prompts * given.group
    return run_config(given.model).model_copy(update={
        "method": "grpo", "packing": False, "reward_funcs": ["python:odd"], "num_generations": given.group,
        "per_device_train_batch_size": given.rows, "gradient_accumulation_steps": answers // given.rows,
        "max_completion_length": given.new, "max_length": PROMPT + given.new, "max_steps": given.steps,
        "memory_limit_gib": given.limit, "learning_rate": 1e-5, "output_dir": folder, "temperature": 1.0,
        "loss_type": "dapo", "beta": 0.0, "save_steps": 1000, "dataset": "random", "device": given.device,
    })  # fmt: skip


def planned(config: Any, device: torch.device, data: Any) -> Any:
    from halfbyte.data.batches import batches_of
    from halfbyte.plan.estimate import estimate

    batches = batches_of(config, data, device)
    return estimate(config, model_config(config.model_name_or_path), device=device, batches=batches)


def looped(given: argparse.Namespace, folder: str) -> tuple[Any, Any, Any]:
    """Build the training loop, its generations and the plan."""
    from halfbyte.data.prepare import PreparedData
    from halfbyte.methods import method_of
    from halfbyte.modeling.adapters import compute_autocast
    from halfbyte.modeling.patch import patch
    from halfbyte.optim import trained_parameters
    from halfbyte.rl.rewards.score import Rewards
    from halfbyte.rl.rewards.specs import named, read_specs
    from halfbyte.rl.rollouts import Generations
    from halfbyte.runs.metrics import MetricsFile
    from halfbyte.train.callbacks import training_arguments
    from halfbyte.train.loop import TrainingLoop
    from halfbyte.train.stepper import GraphedStepper, Stepper, sums_of

    named(odd)
    device = torch.device(given.device)
    config, tokenizer = configured(given, folder), Words()
    method, dtype = method_of(config), torch.bfloat16
    rows = prompts_of(model_config(given.model).vocab_size)
    report = {"train": {}, "template": None}
    data = method.documents(config, PreparedData(rows, None, report, shared=True))
    plan = planned(config, device, data)
    print(f"plan: {plan.total / GIB:.2f} GiB: {plan.reason}; rollouts {plan.answering}", flush=True)
    began = time.perf_counter()
    model = build(given.model, given.device)
    print(f"model: {time.perf_counter() - began:.1f} s", flush=True)
    if device.type == "cuda":
        patch(model, plan.levels or None)
    arguments = training_arguments(config, device, dtype, rows=len(rows), evaluate=False)
    metrics, collate = MetricsFile(Path(folder, "metrics.jsonl")), method.collator(config, tokenizer, device)
    sums = sums_of(method, model, dtype)
    parameters = list(trained_parameters(model).values())
    stepper = GraphedStepper(sums, parameters) if plan.use_graphs else Stepper(sums)
    specs = read_specs(config.reward_funcs, [])
    generations = Generations(
        config, method, model, tokenizer, data.train, Rewards(specs, [], 60.0, given.new), device=device,
        computing=partial(compute_autocast, model, dtype), stops=[],
        file=MetricsFile(Path(folder, "completions.jsonl")), plan=plan.answering, shared=data.shared, stepper=stepper,
    )  # fmt: skip
    loop = TrainingLoop(
        config=config, data={"rows": len(rows)}, metrics=metrics, compute_dtype=dtype, model=model, args=arguments,
        device=device, rows=data.train, collate=collate, stepper=stepper, rollouts=generations,
    )  # fmt: skip
    return loop, generations, plan


def show(record: dict[str, Any]) -> None:
    """Print a step's metrics."""
    if record["kind"] != "train":
        return
    names = ("rollout_seconds", "reward_seconds", "compare_seconds", "step_seconds")
    shown = " ".join(f"{name} {record[name]:.3f}" for name in names)
    apart = record["sampling/sampling_logp_difference/mean"]
    print(f"step {record['step']}: {shown} reward {record['reward']:.4f} |Δ log p| {apart:.4f}", flush=True)


def measured(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    loop, generations, plan = looped(given, folder)
    on_gpu, peaks = given.device != "cpu", {}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        own = generations.answer

        def answer(*args: Any) -> Any:
            """Record the peaks of training so far and of this rollout."""
            peaks["training"] = max(peaks.get("training", 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            found = own(*args)
            print(f"answered: {found.numbers['rollout_seconds']:.2f} s", flush=True)
            peaks["rollout"] = max(peaks.get("rollout", 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return found

        generations.answer = answer
    loop.metrics.listeners.append(show)
    loop.train()
    if on_gpu:
        peaks["training"] = max(peaks["training"], torch.cuda.max_memory_allocated())
    records = [record for record in loop.metrics.records() if record["kind"] == "train"]
    tokens = given.prompts * given.group * given.new
    last = records[-1]
    found = {
        "seconds": last["step_seconds"],
        "rollout_seconds": last["rollout_seconds"],
        "reward_seconds": last["reward_seconds"],
        "compare_seconds": last["compare_seconds"],
        "rollout_tokens_per_second": tokens / last["rollout_seconds"],
        "outside": last["sampling/outside"],
        "planned_gib": plan.total / GIB,
        "planned_rollout_gib": (plan.total - plan.rollouts - plan.activations - plan.logits + plan.answering.total)
        / GIB,
    } | {f"{name}_peak_gib": size / GIB for name, size in peaks.items()}
    print(json.dumps(found), flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--prompts", type=int, default=32)
    made.add_argument("--group", type=int, default=8)
    made.add_argument("--new", type=int, default=256)
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--limit", type=float, default=40)
    made.add_argument("--steps", type=int, default=3)
    made.add_argument("--device", default="cuda:0")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(given, folder)
    write_result(given.json, vars(given) | found)


if __name__ == "__main__":
    main()
