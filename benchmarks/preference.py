"""Preference training on a CPU beside TRL's trainer: the same tokens, first adapter, order and steps, in one run.

    python -m benchmarks.preference --data dpo_en_demo.json --model FOLDER [--method dpo] [--steps 20] [--rows 2]
                                    [--length 512] [--held-out 50] [--threads 2] [--json FILE]

Both train LoRA r=16 on the seven linears in float32, from the rows that halfbyte prepares, and hold some out. Compared
are the losses of the steps, the held-out accuracy after them, and pairs a second without the first steps. TRL runs
with its defaults but for those of the optimizer and for checkpointing, which neither does here. Each trains in a
process of its own; halfbyte's reference, which TRL computes in each step, is counted among its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import cpu_name, write_result

WARMUP = 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Settings:
    """What is the same on both sides; `rows` of a step, of at most `length` tokens with each answer."""

    method: str
    data: str
    model: str
    steps: int
    rows: int
    length: int
    held_out: int
    threads: int


def configured(given: Settings, work: Path) -> Any:
    from halfbyte.config import load_config

    return load_config(None, {
        "model_name_or_path": given.model, "dataset": given.data, "method": given.method, "max_length": given.length,
        "device": "cpu", "dtype": "float32", "load_in_4bit": False, "per_device_train_batch_size": given.rows,
        "max_steps": given.steps, "activation_checkpointing": False, "r": 16, "lora_alpha": 16,
        "target_modules": TARGETS, "learning_rate": 5e-5, "warmup_steps": 0, "eval_split_size": given.held_out,
        "output_dir": str(work / "ours"), "sample_prompts": 0, "logging_steps": 1, "overlong": "drop",
        "eval_steps": given.steps, "save_steps": given.steps,
    })  # fmt: skip


def ours(given: Settings, work: Path) -> dict[str, Any]:
    from halfbyte.train.sft import train

    config = configured(given, work)
    shutil.rmtree(config.output_path, ignore_errors=True)  # of a run before
    os.environ["HALFBYTE_CACHE"] = str(work / "cache")  # in which nothing is kept
    shutil.rmtree(work / "cache", ignore_errors=True)
    train(config)
    records = [json.loads(line) for line in (work / "ours" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "eval"][-1]
    return {
        "losses": [record["loss"] for record in trained],
        "accuracy": held_out["rewards/accuracies"],
        "pairs_per_second": _rate(given, [record["step_seconds"] for record in trained]),
        "tokens": sum(record["tokens"] for record in trained),
    }


def peer(given: Settings, work: Path) -> dict[str, Any]:
    """TRL, from the rows and the adapter that halfbyte begins with."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed
    from trl import DPOConfig, DPOTrainer

    from halfbyte.adapters import add_adapter
    from halfbyte.methods import method_of
    from halfbyte.models.load import load_tokenizer

    config = configured(given, work)
    tokenizer = load_tokenizer(given.model)
    data = method_of(config).prepare(config, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    set_seed(config.seed)
    model = add_adapter(model, config)
    seconds: list[float] = []
    tokens: list[int] = []

    class Timed(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def training_step(self, model, inputs, *args, **kwargs):
            tokens.append(int(inputs["attention_mask"].sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = DPOConfig(
        output_dir=str(work / "peer"), per_device_train_batch_size=given.rows, per_device_eval_batch_size=given.rows,
        max_length=given.length, max_steps=given.steps, bf16=False, learning_rate=5e-5, lr_scheduler_type="cosine",
        warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, report_to=[], gradient_checkpointing=False,
        save_strategy="no", use_cpu=True, logging_steps=1, optim="adamw_torch_fused", seed=config.seed,
    )  # fmt: skip
    trainer = Timed(model, args=arguments, train_dataset=data.train, eval_dataset=data.eval, processing_class=tokenizer)
    trainer.add_callback(_clock(seconds))
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    rate = _rate(given, seconds)
    return {"losses": losses, "accuracy": accuracy, "pairs_per_second": rate, "tokens": sum(tokens)}


def _clock(seconds: list[float]) -> Any:
    """A callback of transformers that notes the seconds of each step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.began)

    return Clock()


def _rate(given: Settings, seconds: list[float]) -> float:
    return given.rows * len(seconds[WARMUP:]) / sum(seconds[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=["dpo"], default="dpo")
    parser.add_argument("--work", type=Path, default=Path("/tmp/preference"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["ours", "peer"], help="(internal) one of the two")
    given = parser.parse_args()
    settings = Settings(given.method, given.data, given.model, given.steps, given.rows, given.length,
                        given.held_out, given.threads)  # fmt: skip
    given.work.mkdir(parents=True, exist_ok=True)
    if given.only:
        import torch

        torch.set_num_threads(given.threads)
        found = {"ours": ours, "peer": peer}[given.only](settings, given.work)
        (given.work / f"{given.only}.json").write_text(json.dumps(found))
        return
    results = {}
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("peer", "ours"):
        subprocess.run([sys.executable, "-m", "benchmarks.preference", "--only", name, *sys.argv[1:]], check=True,
                       env=environment)  # fmt: skip
        results[name] = json.loads((given.work / f"{name}.json").read_text())
    both = zip(results["ours"]["losses"], results["peer"]["losses"], strict=True)
    apart = max(abs(mine - theirs) / theirs for mine, theirs in both)
    speed = results["ours"]["pairs_per_second"] / results["peer"]["pairs_per_second"]
    named = asdict(settings) | {"data": Path(given.data).name, "model": Path(given.model).name}
    result = {"device": cpu_name(), "settings": named, **results, "losses_apart": apart, "speed": speed,
              "tokens": results["ours"]["tokens"] / results["peer"]["tokens"]}  # fmt: skip
    print(json.dumps(result, indent=1))
    write_result(given.json, result)


if __name__ == "__main__":
    main()
