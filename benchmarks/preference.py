"""Preference training on a CPU beside TRL's trainer: the same tokens, first adapter, order and steps, in one run.

    python -m benchmarks.preference --data dpo_en_demo.json --model FOLDER [--method dpo|kto|reward] [--steps 20]
                                    [--rows 2] [--length 512] [--held-out 50] [--threads 2] [--json FILE]

Both train LoRA r=16 on the seven linears in float32, from the rows that halfbyte prepares, and hold some out. Compared
are the losses of the steps, pairs a second without the first steps, and tokens. TRL runs with its defaults but for
those of the optimizer and for checkpointing, which neither does here; halfbyte with `padding_free`, which TRL has for
none of these. Each trains in a process of its own; halfbyte's reference, which TRL computes in each step, is counted
among its seconds. Then plain transformers and PEFT load both adapters and judge the held-out rows: accuracies (of pairs
with a margin above 0; of labelled answers whose reward has the label's sign) are one code's, and what halfbyte's own
evaluation said has to be what its files give there.

The result is written after each part.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import cpu_name, write_result

WARMUP = 2
FIRST = 20  # steps whose losses are compared
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What halfbyte's evaluation records, by method, and what of the judged rows its mean is over.
EVALUATED = {
    "dpo": {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    "kto": {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    "reward": {"margin": "margin", "mean_reward": "mean"},
}
BETA = 0.1


@dataclass(frozen=True)
class Settings:
    """What is the same on both sides; `rows` of a step are pairs or labelled answers of at most `length` tokens."""

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
        "target_modules": TARGETS, "padding_free": True, "learning_rate": 5e-5, "warmup_steps": 0,
        "eval_split_size": given.held_out,
        "output_dir": str(work / "ours"), "sample_prompts": 0, "logging_steps": 1,
        "eval_steps": given.steps, "save_steps": given.steps,
    })  # fmt: skip


def ours(given: Settings, work: Path) -> dict[str, Any]:
    from halfbyte.train.run import train

    config = configured(given, work)
    shutil.rmtree(config.output_path, ignore_errors=True)  # of a run before
    os.environ["HALFBYTE_CACHE"] = str(work / "cache")  # in which nothing is kept
    shutil.rmtree(work / "cache", ignore_errors=True)
    train(config)
    records = [json.loads(line) for line in (work / "ours" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    held_out = [record for record in records if record["kind"] == "eval"][-1]
    named = EVALUATED[given.method]
    return {
        "losses": [record["loss"] for record in trained],
        "evaluated": {name: held_out[name] for name in named},
        "rows_per_second": _rate(given, [record["step_seconds"] for record in trained]),
        "tokens": sum(record["tokens"] for record in trained),
    }


def peer(given: Settings, work: Path) -> dict[str, Any]:
    """TRL, from the rows and the adapter that halfbyte begins with."""
    import trl

    from halfbyte.loading.load import load_tokenizer

    config, tokenizer = configured(given, work), load_tokenizer(given.model)
    rows, _ = _rows(given, config, tokenizer)
    seconds: list[float] = []
    tokens: list[int] = []
    trainer_type, config_type = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[given.method]

    class Timed(trainer_type):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

        def training_step(self, model, inputs, *args, **kwargs):
            tokens.append(sum(int(inputs[name].sum()) for name in inputs if name.endswith("attention_mask")))
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = config_type(
        output_dir=str(work / "peer"), per_device_train_batch_size=given.rows, max_length=given.length,
        max_steps=given.steps, bf16=False, learning_rate=5e-5, lr_scheduler_type="cosine", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, report_to=[], gradient_checkpointing=False, save_strategy="no",
        use_cpu=True, logging_steps=1, optim="adamw_torch_fused", seed=config.seed,
    )  # fmt: skip
    model = _adapted(given, config)
    trainer = Timed(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.args.train_sampling_strategy = (
        "random"  # KTO's asks for another, since its mismatched answers are neighbours'
    )
    trainer.add_callback(_clock(seconds))
    trainer.train()
    trainer.model.save_pretrained(str(work / "peer" / "adapter"))
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"losses": losses, "rows_per_second": _rate(given, seconds), "tokens": sum(tokens)}


def _rows(given: Settings, config: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The rows that halfbyte prepares, in the columns of TRL's prepared ones, and those held out."""
    from halfbyte.data.collate_answers import mismatched
    from halfbyte.methods import method_of

    data = method_of(config).prepare(config, tokenizer)
    rows = data.train
    if given.method == "kto":
        rows = mismatched(rows, given.length)
    if given.method != "reward":
        rows = rows.map(_trained_answers)
    if given.method == "kto":
        rows = rows.rename_column("other_ids", "KL_completion_ids")
    if given.method == "reward":  # whose rows are prompt and answer
        rows = rows.map(_whole_answers, remove_columns=["prompt_ids", "chosen_mask", "rejected_mask"])
    return rows, data.eval


def _trained_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Answers up to their last trained token, since TRL trains all of them: a template's line break behind the end of
    the turn is not."""
    masks = {name.removesuffix("_mask"): mask for name, mask in row.items() if name.endswith("_mask")}
    return {f"{name}_ids": row[f"{name}_ids"][: max(n for n, kept in enumerate(mask) if kept) + 1]
            for name, mask in masks.items()}  # fmt: skip


def _whole_answers(row: dict[str, Any]) -> dict[str, Any]:
    return {f"{side}_ids": [*row["prompt_ids"], *row[f"{side}_ids"]] for side in ("chosen", "rejected")}


def _adapted(given: Settings, config: Any) -> Any:
    """transformers' own model with the adapter (and head) that halfbyte begins with."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

    from halfbyte.modeling.adapters import add_adapter

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    set_seed(config.seed)
    if given.method != "reward":
        return add_adapter(model, config)
    adapted = add_adapter(model, config, scores="SEQ_CLS")
    own = dict(adapted.named_parameters())
    plain = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=1, dtype=torch.float32)
    theirs = get_peft_model(plain, copy.deepcopy(adapted.peft_config["default"]))
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(own[name])
    return theirs


# --- judging ---------------------------------------------------------------------------------------------------------


def judge(given: Settings, work: Path) -> dict[str, Any]:
    """What plain transformers and PEFT make of the held-out rows with each of the two adapters."""
    from halfbyte.loading.load import load_tokenizer

    config = configured(given, work)
    _, held_out = _rows(given, config, load_tokenizer(given.model))
    return {side: _judged(given, work / side / "adapter", held_out) for side in ("ours", "peer")}


def _judged(given: Settings, adapter: Path, rows: Any) -> dict[str, Any]:
    """Means over `rows`, by the names in `EVALUATED`, their number, and how many are judged rightly."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if given.method == "reward":
        base = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=1, dtype=torch.float32)
    else:
        base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        if given.method == "kto":
            found = [(_reward(model, row, "completion"), row["label"]) for row in rows]
            good, bad = ([value for value, label in found if label is wanted] for wanted in (True, False))
            right = sum((value > 0) == label for value, label in found)
            return {"chosen": statistics.fmean(good), "rejected": statistics.fmean(bad), "right": right,
                    "rows": len(found)}  # fmt: skip
        score = _score if given.method == "reward" else _reward
        sides = [[score(model, row, side) for row in rows] for side in ("chosen", "rejected")]
    chosen, rejected = map(statistics.fmean, sides)
    right = sum(a > b for a, b in zip(*sides, strict=True))
    return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "mean": (chosen + rejected) / 2,
            "right": right, "rows": len(rows)}  # fmt: skip


def _score(model: Any, row: dict[str, Any], side: str) -> float:
    """Of a reward model."""
    import torch

    return float(model(torch.tensor([[*row["prompt_ids"], *row[f"{side}_ids"]]])).logits)


def _reward(model: Any, row: dict[str, Any], side: str) -> float:
    """βΔ of an answer's trained tokens."""
    import torch

    ids = torch.tensor([[*row["prompt_ids"], *row[f"{side}_ids"]]])
    mask = torch.tensor(row[f"{side}_mask"], dtype=torch.bool)

    def log_prob() -> float:
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return float(log_probs[-len(mask) :][mask].sum())

    policy = log_prob()
    with model.disable_adapter():
        return BETA * (policy - log_prob())


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


def compared(given: Settings, results: dict[str, Any]) -> dict[str, Any]:
    """The two sides of a result, as far as it has come."""
    ours, theirs, found = results.get("ours"), results.get("peer"), dict[str, Any]()
    if ours and theirs:
        both = list(zip(ours["losses"], theirs["losses"], strict=True))[:FIRST]
        found["losses_apart"] = max(abs(mine - other) / other for mine, other in both)
        found["speed"] = ours["rows_per_second"] / theirs["rows_per_second"]
        found["tokens"] = ours["tokens"] / theirs["tokens"]
    if judged := results.get("judged"):
        found["judged_apart"] = abs(judged["ours"]["right"] - judged["peer"]["right"])
        named = EVALUATED[given.method].items()
        found["reloaded_apart"] = max(abs(ours["evaluated"][name] - judged["ours"][mean]) for name, mean in named)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", choices=list(EVALUATED), default="dpo")
    parser.add_argument("--work", type=Path, default=Path("/tmp/preference"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held-out", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--only", choices=["ours", "peer", "judge"], help="(internal) one of the three")
    given = parser.parse_args()
    settings = Settings(given.method, given.data, given.model, given.steps, given.rows, given.length,
                        given.held_out, given.threads)  # fmt: skip
    given.work.mkdir(parents=True, exist_ok=True)
    if given.only:
        import torch

        torch.set_num_threads(given.threads)
        found = {"ours": ours, "peer": peer, "judge": judge}[given.only](settings, given.work)
        (given.work / f"{given.only}.json").write_text(json.dumps(found))
        return
    named = asdict(settings) | {"data": Path(given.data).name, "model": Path(given.model).name}
    result: dict[str, Any] = {"device": cpu_name(), "settings": named}
    environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    for name, part in (("ours", "ours"), ("peer", "peer"), ("judged", "judge")):
        subprocess.run([sys.executable, "-m", "benchmarks.preference", "--only", part, *sys.argv[1:]], check=True,
                       env=environment)  # fmt: skip
        result[name] = json.loads((given.work / f"{part}.json").read_text())
        result |= {"compared": compared(settings, result)}
        print(json.dumps({name: result[name], "compared": result["compared"]}), flush=True)
        write_result(given.json, result)


if __name__ == "__main__":
    main()
