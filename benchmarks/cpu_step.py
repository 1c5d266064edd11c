"""CPU training speed beside stock TRL, in one run: real tokens per second, padding not counted.

    python -m benchmarks.cpu_step --data gsm8k.jsonl --model FOLDER [--threads 2] [--steps 8] [--json FILE]

Stock TRL: SFTTrainer with PEFT LoRA r=16 in float32, its own defaults otherwise, 4 rows of at most 512 tokens a step.
halfbyte: NF4 QLoRA r=16, packed rows of 512 tokens, 4 a step, in the dtype it picks for this CPU. Each trains in a
process of its own. `--random` makes a random-weight model of the shape of FOLDER's config: speed does not depend on
weights.
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

WARMUP = 2


def stock(model: str, data: str, steps: int, work: Path) -> dict:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["question"], "completion": row["answer"]} for row in rows[: steps * 8]])
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_train_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    tokens: list[int] = []

    class Counting(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            tokens.append(int(inputs["attention_mask"].sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = SFTConfig(
        output_dir=str(work / "stock"), per_device_train_batch_size=4, max_length=512, max_steps=steps, bf16=False,
        learning_rate=2e-4, report_to=[], save_strategy="no", use_cpu=True, model_init_kwargs={"dtype": torch.float32},
    )  # fmt: skip
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    trainer = Counting(model, arguments, train_dataset=dataset, peft_config=lora, callbacks=[Clock()])
    trainer.train()
    seconds = times[-1] - times[WARMUP]
    return {"tokens_per_second": sum(tokens[WARMUP:]) / seconds, "dtype": "float32",
            "gradient_checkpointing": bool(arguments.gradient_checkpointing)}  # fmt: skip


def ours(model: str, data: str, steps: int, work: Path) -> dict:
    from halfbyte.config import load_config
    from halfbyte.train.sft import train

    config = load_config(None, {
        "model_name_or_path": model, "dataset": data, "max_length": 512, "packing": True, "device": "cpu",
        "per_device_train_batch_size": 4, "max_steps": steps, "output_dir": str(work / "ours"), "sample_prompts": 0,
    })  # fmt: skip
    train(config)
    lines = (work / "ours" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"][WARMUP:]
    facts = json.loads((work / "ours" / "environment.json").read_text())["compute_dtype"]
    rate = sum(record["tokens"] for record in records) / sum(record["step_seconds"] for record in records)
    return {"tokens_per_second": rate, **facts}


def random_model(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/cpu-step"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["stock", "ours"], help="(internal) one of the two")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.only:
        import torch

        torch.set_num_threads(given.threads)
        result = {"stock": stock, "ours": ours}[given.only](given.model, given.data, given.steps, given.work)
        (given.work / f"{given.only}.json").write_text(json.dumps(result))
        return
    if given.random:
        random_model(Path(given.model), given.work / "model")
        given.model = str(given.work / "model")
    results = {}
    # Neither may see a GPU: TRL picks Triton kernels by what the machine has, not by where the model is.
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("stock", "ours"):
        command = [sys.executable, "-m", "benchmarks.cpu_step", "--only", name, "--data", given.data]
        command += ["--model", given.model, "--work", str(given.work)]
        command += ["--threads", str(given.threads), "--steps", str(given.steps)]
        subprocess.run(command, check=True, env=environment)
        results[name] = json.loads((given.work / f"{name}.json").read_text())
    ratio = results["ours"]["tokens_per_second"] / results["stock"]["tokens_per_second"]
    print(json.dumps({**results, "ratio": ratio}, indent=1))
    write_result(given.json, {"threads": given.threads, **results, "ratio": ratio})


if __name__ == "__main__":
    main()
