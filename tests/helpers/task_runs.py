"""Rows of each task for a tiny model with a tokenizer of bytes, and runs on them."""

import json
import random
from pathlib import Path

import torch

from halfbyte.config import load_config
from halfbyte.train.run import train
from tests.helpers.merge_runs import save_base

TASKS = ("sequence_classification", "token_classification", "embedding", "reranker")
GOOD, BAD = ("good", "fine", "warm"), ("bad", "poor", "cold")
THINGS = ("tea", "day", "road", "song", "boat", "hill")


def rows_of(task: str, count: int = 32, seed: int = 0) -> list[dict]:
    """Rows in the columns that users have."""
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        good, thing, other = number % 2, pick.choice(THINGS), pick.choice(THINGS)
        word = pick.choice(GOOD if good else BAD)
        words = [*pick.sample(("the", "a", "one"), 2), word, thing]
        if task == "sequence_classification":
            rows.append({"text": " ".join(words), "label": "good" if good else "bad"})
        elif task == "token_classification":
            tags = ["O", "O", "B-GOOD" if good else "B-BAD", "O"]
            rows.append({"tokens": words, "ner_tags": tags})
        elif task == "embedding":
            texts = {"anchor": f"a {thing} {number}", "positive": f"{number} {thing}", "negative": f"no {other}"}
            rows.append(texts)
        else:
            rows.append({"query": f"{thing} {number}", "documents": [f"{word} {other}", thing], "labels": [0, 1]})
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def save_inputs(folder: Path) -> Path:
    """Write a base in `model` and `TASK.jsonl` for each task."""
    torch.manual_seed(3)
    save_base(folder / "model", torch.float32, shard="10MB")
    for task in TASKS:
        write(folder / f"{task}.jsonl", rows_of(task))
    return folder


def config_of(folder: Path, output: Path, task: str, **changed):
    keys = {
        "model_name_or_path": str(folder / "model"), "dataset": str(folder / f"{task}.jsonl"), "method": task,
        "output_dir": str(output), "device": "cpu", "dtype": "float32", "max_length": 64,
        "per_device_train_batch_size": 4, "learning_rate": 5e-3, "warmup_steps": 0, "r": 4, "load_in_4bit": False,
        "max_steps": 4, "save_steps": 2,
    }  # fmt: skip
    return load_config(None, keys | changed)


def run(folder: Path, output: Path, task: str, **changed) -> Path:
    train(config_of(folder, output, task, **changed))
    return output
