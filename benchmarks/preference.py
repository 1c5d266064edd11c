"""Preference training on a CPU compared with TRL's trainer, from the same rows and the same initial adapter.

    python -m benchmarks.preference --data FILE --model FOLDER [--method dpo|kto|reward] --steps 20 [--json FILE]
    OMP_NUM_THREADS=1 python -m benchmarks.preference --data FILE --model FOLDER --tokens 700 [--json FILE]

Both train LoRA r = 16 on the seven linears in float32 without checkpointing, from the rows that halfbyte prepares.
--steps compares the losses of whole runs; TRL uses its defaults except for the optimizer's. --tokens compares the CPU
seconds of one step of two rows of about so many tokens, alternating in one process, with the reference computed in the
step on both sides; CPU seconds hardly depend on other work on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import cpu_name, parser_of, write_result

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEAREST = (0, 5)  # which two rows, ordered by the distance of their length from --tokens


def configured(given: argparse.Namespace) -> Any:
    """Return halfbyte's configuration."""
    from halfbyte.config import load_config

    return load_config(None, {
        "model_name_or_path": given.model, "dataset": given.data, "method": given.method, "max_length": given.length,
        "device": "cpu", "dtype": "float32", "load_in_4bit": False, "per_device_train_batch_size": given.rows,
        "max_steps": given.steps or 1, "activation_checkpointing": False, "r": 16, "lora_alpha": 16,
        "target_modules": TARGETS, "padding_free": True, "learning_rate": 5e-5, "warmup_steps": 0,
        "eval_split_size": given.held_out, "output_dir": str(given.work / "ours"), "sample_prompts": 0,
        "logging_steps": 1, "eval_steps": given.steps or 1, "save_steps": given.steps or 1,
    })  # fmt: skip


def our_losses(given: argparse.Namespace) -> list[float]:
    """Train with halfbyte. Returns the loss of each step."""
    from halfbyte.train.run import train

    config = configured(given)
    os.environ["HALFBYTE_CACHE"] = str(given.work / "cache")  # empty, so that the reference is computed
    for folder in (config.output_path, given.work / "cache"):
        shutil.rmtree(folder, ignore_errors=True)
    train(config)
    records = map(json.loads, (given.work / "ours" / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def their_losses(given: argparse.Namespace) -> list[float]:
    """Train with TRL. Returns the loss of each step."""
    trainer = trainer_of(given)
    trainer.args.train_sampling_strategy = "random"  # KTOTrainer would ask for another order
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def trainer_of(given: argparse.Namespace) -> Any:
    """Build TRL's trainer with halfbyte's rows and initial adapter."""
    import trl

    from halfbyte.loading.load import load_tokenizer

    trainer_type, config_type = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[given.method]

    class Prepared(trainer_type):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    config, tokenizer = configured(given), load_tokenizer(given.model)
    arguments = config_type(
        output_dir=str(given.work / "trl"), per_device_train_batch_size=given.rows, max_length=given.length,
        max_steps=given.steps or 1, bf16=False, learning_rate=5e-5, lr_scheduler_type="cosine", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, report_to=[], gradient_checkpointing=False, save_strategy="no",
        use_cpu=True, logging_steps=1, optim="adamw_torch_fused", seed=config.seed,
    )  # fmt: skip
    rows = rows_for_trl(given, config, tokenizer)
    return Prepared(adapted(given, config), args=arguments, train_dataset=rows, processing_class=tokenizer)


def rows_for_trl(given: argparse.Namespace, config: Any, tokenizer: Any) -> Any:
    """Return halfbyte's rows in the columns of TRL's prepared rows."""
    from halfbyte.data.collate_answers import mismatched
    from halfbyte.methods import method_of

    rows = method_of(config).prepare(config, tokenizer).train
    if given.method == "reward":
        return rows.map(_whole_answers, remove_columns=["prompt_ids", "chosen_mask", "rejected_mask"])
    if given.method == "kto":
        rows = mismatched(rows, given.length)
    rows = rows.map(_trained_answers)
    return rows.rename_column("other_ids", "KL_completion_ids") if given.method == "kto" else rows


def _trained_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Cut answers after their last trained token. TRL would also train the template's line break after the turn."""
    masks = {name.removesuffix("_mask"): mask for name, mask in row.items() if name.endswith("_mask")}
    return {f"{name}_ids": row[f"{name}_ids"][: max(n for n, kept in enumerate(mask) if kept) + 1]
            for name, mask in masks.items()}  # fmt: skip


def _whole_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Prepend the prompt to both answers."""
    return {f"{side}_ids": [*row["prompt_ids"], *row[f"{side}_ids"]] for side in ("chosen", "rejected")}


def adapted(given: argparse.Namespace, config: Any) -> Any:
    """Return transformers' own model with halfbyte's initial adapter and, for a reward model, head."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, set_seed

    from halfbyte.modeling.adapters import add_adapter

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    set_seed(config.seed)
    if given.method != "reward":
        return add_adapter(model, config)
    ours = add_adapter(model, config, scores="SEQ_CLS")
    initial = dict(ours.named_parameters())
    plain = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=1, dtype=torch.float32)
    theirs = get_peft_model(plain, copy.deepcopy(ours.peft_config["default"]))
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(initial[name])
    return theirs


def our_step(given: argparse.Namespace) -> tuple[Callable[[], None], list[int], int]:
    """Return halfbyte's loss and backward of two rows, the indices of the rows, and their tokens."""
    from halfbyte.layers.plain import multiply_by_onednn
    from halfbyte.loading.load import load_model, load_tokenizer
    from halfbyte.methods import method_of
    from halfbyte.modeling.adapters import add_adapter, compute_autocast, no_input_casts
    from halfbyte.train.stepper import LookAhead

    config, tokenizer = configured(given), load_tokenizer(given.model)
    method = method_of(config)
    base = load_model(config.model_name_or_path, config.storage, dtype=torch.float32, device="cpu")
    model = add_adapter(base, config.adapter, scores=method.scores)
    multiply_by_onednn(model)
    rows = method.ready(config, tokenizer, base.config).train
    order = sorted(range(len(rows)), key=lambda index: abs(len(rows[index]["input_ids"]) - given.tokens))
    taken = [order[place] for place in NEAREST]
    batch = method.collator(config, tokenizer, torch.device("cpu"))([rows[index] for index in taken])
    ahead = LookAhead(method, model, torch.float32)

    def step() -> None:
        model.train()
        (own,) = ahead.shared([batch], method.counts(batch))
        with no_input_casts(model, torch.float32), compute_autocast(model, torch.float32):
            method.sums(model, own)["loss"].backward()
        model.zero_grad()

    return step, taken, method.tokens([rows[index] for index in taken])


def their_step(given: argparse.Namespace, taken: list[int]) -> Callable[[], None]:
    """Return TRL's loss and backward of the same rows."""
    trainer = trainer_of(given)
    inputs = trainer.data_collator([trainer.train_dataset[index] for index in taken])

    def step() -> None:
        trainer.model.train()
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer.model.zero_grad()

    return step


def compare_losses(given: argparse.Namespace) -> dict[str, Any]:
    """Compare whole runs."""
    ours, theirs = our_losses(given), their_losses(given)
    apart = max(abs(mine - other) / other for mine, other in zip(ours, theirs, strict=True))
    return {"ours": {"losses": ours}, "peer": {"losses": theirs}, "losses_apart": apart}


def compare_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Compare the CPU seconds of a step. The first of each side is a warm-up."""
    given.rows, given.length = 2, 2048
    ours, taken, tokens = our_step(given)
    steps = {"ours": ours, "trl": their_step(given, taken)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(given.repeats + 1):
        for name, run in steps.items():
            began = time.process_time()
            run()
            if repeat:
                seconds[name].append(time.process_time() - began)
    ratio = statistics.median(theirs / own for own, theirs in zip(*seconds.values(), strict=True))
    return {"tokens": tokens, "cpu_seconds": seconds, "speed": ratio}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--data", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--method", choices=["dpo", "kto", "reward"], default="dpo")
    made.add_argument("--steps", type=int, help="compare the losses of so many steps")
    made.add_argument("--tokens", type=int, help="compare the CPU seconds of a step of two rows of so many tokens")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--rows", type=int, default=2)
    made.add_argument("--length", type=int, default=512)
    made.add_argument("--held-out", type=int, default=50)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--work", type=Path, default=Path("/tmp/preference"))
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    result = compare_losses(given) if given.steps else compare_steps(given)
    print(json.dumps(result))
    settings = {key: str(value) for key, value in vars(given).items() if key not in ("work", "json")}
    write_result(given.json, {"device": cpu_name(), "method": given.method, "settings": settings, **result})


if __name__ == "__main__":
    main()
