"""CPU training speed beside stock TRL with the same settings, in one run: real tokens per second, padding not counted.

    python -m benchmarks.cpu_step --data gsm8k.jsonl --model FOLDER [--dtype bfloat16] [--packed] [--checkpointing]
                                  [--threads 2] [--steps 8] [--json FILE]

Both train LoRA r=16 on the seven linears of each layer, from the same rows, 4 of at most 512 tokens a step: one
document a row, padded to the longest, or with --packed documents that share rows and do not see each other. Both
multiply in --dtype, default the one that halfbyte picks for this CPU, and both checkpoint every layer or neither does.
What differs: halfbyte's frozen weights are in NF4, stock TRL's (SFTTrainer with PEFT) in --dtype. Each trains in a
process of its own. `--random` makes a random-weight model of the shape of FOLDER's config: speed does not depend on
weights.
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

from benchmarks.common import cpu_name, write_result

WARMUP = 2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Settings:
    """What is the same on both sides.

    Attributes:
        dtype: of matrix products, "float32" or "bfloat16".
        packed: documents share rows; otherwise each has its own, padded.
        checkpointing: of every layer.
        rows, length: rows of a step, and tokens of a row at most.
        rank: of the adapters.
    """

    dtype: str
    packed: bool
    checkpointing: bool
    threads: int
    steps: int
    rows: int = 4
    length: int = 512
    rank: int = 16


def stock(model: str, data: Path, given: Settings, work: Path) -> float:
    """Tokens a second of TRL."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            times.append(time.perf_counter())

        def on_train_end(self, *args, **kwargs):
            times.append(time.perf_counter())

    tokens: list[int] = []

    class Counting(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            mask = inputs.get("attention_mask")  # packed rows have none: every token is real
            tokens.append(inputs["input_ids"].numel() if mask is None else int(mask.sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = SFTConfig(
        output_dir=str(work / "stock"), per_device_train_batch_size=given.rows, max_length=given.length,
        max_steps=given.steps, packing=given.packed, bf16=given.dtype == "bfloat16", learning_rate=2e-4, report_to=[],
        gradient_checkpointing=given.checkpointing, save_strategy="no", use_cpu=True,
        model_init_kwargs={"dtype": getattr(torch, given.dtype)},
    )  # fmt: skip
    lora = LoraConfig(r=given.rank, lora_alpha=given.rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = Counting(model, arguments, train_dataset=dataset, peft_config=lora, callbacks=[Clock()])
    trainer.train()
    return sum(tokens[WARMUP:]) / (times[-1] - times[WARMUP])


def ours(model: str, data: Path, given: Settings, work: Path) -> float:
    """Tokens a second of `halfbyte train`."""
    from halfbyte.config import load_config
    from halfbyte.train.sft import train

    config = load_config(None, {
        "model_name_or_path": model, "dataset": str(data), "max_length": given.length, "packing": given.packed,
        "device": "cpu", "dtype": given.dtype, "per_device_train_batch_size": given.rows, "max_steps": given.steps,
        "activation_checkpointing": given.checkpointing, "r": given.rank, "lora_alpha": given.rank,
        "target_modules": TARGETS, "learning_rate": 2e-4, "output_dir": str(work / "ours"), "sample_prompts": 0,
        "logging_steps": 1,
    })  # fmt: skip
    shutil.rmtree(config.output_path, ignore_errors=True)  # of a run before
    train(config)
    lines = (work / "ours" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"][WARMUP:]
    return sum(record["tokens"] for record in records) / sum(record["step_seconds"] for record in records)


def same_rows(data: Path, given: Settings, file: Path) -> Path:
    """`file` with the rows that both train on: as many documents as the steps may take, as prompt and completion."""
    rows = [json.loads(line) for line in data.read_text().splitlines()][: given.steps * given.rows * 8]
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def random_model(source: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/cpu-step"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["stock", "ours"], help="(internal) one of the two")
    given = parser.parse_args()
    dtype = given.dtype or dtype_of_this_cpu()
    settings = Settings(dtype, given.packed, given.checkpointing, given.threads, given.steps)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.only:
        import torch

        torch.set_num_threads(given.threads)
        rate = {"stock": stock, "ours": ours}[given.only](given.model, given.data, settings, given.work)
        (given.work / f"{given.only}.json").write_text(json.dumps(rate))
        return
    if given.random:
        random_model(Path(given.model), given.work / "model")
        given.model = str(given.work / "model")
    rates = {}
    # Neither may see a GPU: TRL picks Triton kernels by what the machine has, not by where the model is.
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    rows = same_rows(given.data, settings, given.work / "rows.jsonl")
    for name in ("stock", "ours"):
        command = [sys.executable, "-m", "benchmarks.cpu_step", "--only", name, "--data", str(rows), "--dtype", dtype]
        command += ["--model", given.model, "--work", str(given.work)]
        command += ["--threads", str(given.threads), "--steps", str(given.steps)]
        command += [f"--{key}" for key in ("packed", "checkpointing") if getattr(given, key)]
        subprocess.run(command, check=True, env=environment)
        rates[name] = json.loads((given.work / f"{name}.json").read_text())
    result = {"device": cpu_name(), "model": Path(given.model).name, "settings": asdict(settings),
              "tokens_per_second": rates, "ratio": rates["ours"] / rates["stock"]}  # fmt: skip
    print(json.dumps(result, indent=1))
    write_result(given.json, result)


def dtype_of_this_cpu() -> str:
    import torch

    from halfbyte.hardware import compute_dtype

    return str(compute_dtype(torch.device("cpu")).dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
