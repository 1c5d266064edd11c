"""CPU training speed beside stock TRL with the same settings, in one run: real tokens per second, padding not counted.

    python -m benchmarks.cpu_step --data gsm8k.jsonl --model FOLDER [--dtype bfloat16] [--packed] [--checkpointing]
                                  [--threads 2] [--steps 8] [--experts grouped_mm] [--json FILE]

Both train LoRA r=16 on the seven linears of each layer, from the same rows, 4 of at most 512 tokens a step: one
document a row, padded to the longest, or with --packed documents that share rows and do not see each other. Both
multiply in --dtype, default the one that halfbyte picks for this CPU, and both checkpoint every layer or neither does.
What differs: halfbyte's frozen weights are in NF4, stock TRL's (SFTTrainer with PEFT) in --dtype. Each trains in a
process of its own. `--random` makes a random-weight model of the shape of FOLDER's config: speed does not depend on
weights. `--experts NAME` makes the model of FOLDER, a Llama, a mixture with eight copies of each MLP, of which a token
takes two; adapters are on attention and experts, stock TRL's through PEFT's `target_parameters`, with transformers'
implementation NAME. Beside seconds of the clock there are seconds of CPU, which other work on the machine leaves alone.
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
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
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
    experts: transformers' implementation of a mixture's experts on the other side; None: the model is none.
    """

    dtype: str
    packed: bool
    checkpointing: bool
    threads: int
    steps: int
    rows: int = 4
    length: int = 512
    rank: int = 16
    experts: str | None = None


Rates = dict[str, float]  # tokens a second, and a second of CPU


class Clock:
    """What the clock and the process's CPU time were behind each step of an optimizer."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.times: list[tuple[float, float]] = []
        register_optimizer_step_post_hook(lambda *_: self.times.append((time.perf_counter(), time.process_time())))

    def rates(self, tokens: list[int]) -> Rates:
        """Of the steps behind the first few, of so many tokens each."""
        times = self.times[-len(tokens) :]  # without a rehearsal's
        clock, cpu = (end - begin for begin, end in zip(times[WARMUP - 1], times[-1], strict=True))
        return {"second": sum(tokens[WARMUP:]) / clock, "CPU second": sum(tokens[WARMUP:]) / cpu}


def stock(model: str, data: Path, given: Settings, work: Path) -> Rates:
    """Of TRL."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
    tokens: list[int] = []

    class Counting(SFTTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            mask = inputs.get("attention_mask")  # packed rows have none: every token is real
            tokens.append(inputs["input_ids"].numel() if mask is None else int(mask.sum()))
            return super().training_step(model, inputs, *args, **kwargs)

    of_experts = {"experts_implementation": given.experts} if given.experts else {}
    arguments = SFTConfig(
        output_dir=str(work / "stock"), per_device_train_batch_size=given.rows, max_length=given.length,
        max_steps=given.steps, packing=given.packed, bf16=given.dtype == "bfloat16", learning_rate=2e-4, report_to=[],
        gradient_checkpointing=given.checkpointing, save_strategy="no", use_cpu=True,
        model_init_kwargs={"dtype": getattr(torch, given.dtype), **of_experts},
    )  # fmt: skip
    adapted = (
        {"target_modules": TARGETS[:4], "target_parameters": STACKS} if of_experts else {"target_modules": TARGETS}
    )
    lora = LoraConfig(r=given.rank, lora_alpha=given.rank, task_type="CAUSAL_LM", **adapted)
    trainer = Counting(model, arguments, train_dataset=dataset, peft_config=lora)
    clock = Clock()
    trainer.train()
    return clock.rates(tokens)


def ours(model: str, data: Path, given: Settings, work: Path) -> Rates:
    """Of `halfbyte train`."""
    from halfbyte.config import load_config
    from halfbyte.train.run import train

    config = load_config(None, {
        "model_name_or_path": model, "dataset": str(data), "max_length": given.length, "packing": given.packed,
        "device": "cpu", "dtype": given.dtype, "per_device_train_batch_size": given.rows, "max_steps": given.steps,
        "activation_checkpointing": given.checkpointing, "r": given.rank, "lora_alpha": given.rank,
        "target_modules": "all-linear" if given.experts else TARGETS, "learning_rate": 2e-4,
        "output_dir": str(work / "ours"), "sample_prompts": 0, "logging_steps": 1,
    })  # fmt: skip
    shutil.rmtree(config.output_path, ignore_errors=True)  # of a run before
    clock = Clock()
    train(config)
    lines = (work / "ours" / "metrics.jsonl").read_text().splitlines()
    return clock.rates([record["tokens"] for record in map(json.loads, lines) if record["kind"] == "train"])


def same_rows(data: Path, given: Settings, file: Path) -> Path:
    """`file` with the rows that both train on: as many documents as the steps may take, as prompt and completion."""
    rows = [json.loads(line) for line in data.read_text().splitlines()][: given.steps * given.rows * 8]
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def mixture(source: Path, folder: Path) -> None:
    """A Llama as a Mixtral: copies of its MLP, each a little different, and a random router."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    dense = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    known = {key: value for key, value in dense.config.to_dict().items() if key not in ("model_type", "architectures")}
    model = MixtralForCausalLM(MixtralConfig(**known, num_local_experts=8, num_experts_per_tok=2)).float()
    state = dense.state_dict()
    model.load_state_dict({key: value for key, value in state.items() if ".mlp." not in key}, strict=False)
    with torch.no_grad():
        for layer, whole in zip(model.model.layers, dense.model.layers, strict=True):
            torch.nn.init.normal_(layer.mlp.gate.weight)
            gate_up = torch.cat([whole.mlp.gate_proj.weight, whole.mlp.up_proj.weight])
            for stack, values in ((layer.mlp.experts.gate_up_proj, gate_up),
                                  (layer.mlp.experts.down_proj, whole.mlp.down_proj.weight)):  # fmt: skip
                stack.copy_(values + 0.1 * values.std() * torch.randn_like(stack))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


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
    parser.add_argument("--experts", choices=["eager", "grouped_mm", "batched_mm"])
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["stock", "ours"], help="(internal) one of the two")
    given = parser.parse_args()
    dtype = given.dtype or dtype_of_this_cpu()
    settings = Settings(dtype, given.packed, given.checkpointing, given.threads, given.steps, experts=given.experts)
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
    if given.experts:
        mixture(Path(given.model), given.work / "mixture")
        given.model = str(given.work / "mixture")
    rates = {}
    # Neither may see a GPU: TRL picks Triton kernels by what the machine has, not by where the model is.
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    rows = same_rows(given.data, settings, given.work / "rows.jsonl")
    for name in ("stock", "ours"):
        command = [sys.executable, "-m", "benchmarks.cpu_step", "--only", name, "--data", str(rows), "--dtype", dtype]
        command += ["--model", given.model, "--work", str(given.work)]
        command += ["--threads", str(given.threads), "--steps", str(given.steps)]
        command += ["--experts", given.experts] if given.experts else []
        command += [f"--{key}" for key in ("packed", "checkpointing") if getattr(given, key)]
        subprocess.run(command, check=True, env=environment)
        rates[name] = json.loads((given.work / f"{name}.json").read_text())
    ratio = {key: rates["ours"][key] / rates["stock"][key] for key in rates["ours"]}
    result = {"device": cpu_name(), "model": Path(given.model).name, "settings": asdict(settings),
              "tokens": rates, "ratio": ratio}  # fmt: skip
    print(json.dumps(result, indent=1))
    write_result(given.json, result)


def dtype_of_this_cpu() -> str:
    import torch

    from halfbyte.utils.hardware import compute_dtype

    return str(compute_dtype(torch.device("cpu")).dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
