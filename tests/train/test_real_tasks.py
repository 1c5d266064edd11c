"""A classifier and an embedder of llama-40m in NF4, on texts of the shared data sets."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from halfbyte.config import load_config
from halfbyte.export.merge import merge
from halfbyte.train.run import train
from tests.helpers.task_runs import write

SHARED = Path(os.environ.get("HALFBYTE_SHARED", "../shared"))
MODEL, DATA = SHARED / "models" / "llama-40m", SHARED / "data" / "datasets"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.is_dir(), reason="needs the shared model")]
KEYS = {"device": "cpu", "dtype": "float32", "max_length": 64, "save_steps": 1000, "eval_steps": 1000, "max_steps": 40}


def questions():
    return [json.loads(line)["question"] for line in (DATA / "gsm8k" / "train.jsonl").read_text().splitlines()]


def run(path, output, **keys):
    keys = {
        "model_name_or_path": str(MODEL),
        "dataset": str(path),
        "output_dir": str(output),
        "eval_split_size": 96,
    } | keys
    train(load_config(None, KEYS | keys))
    lines = (output / "metrics.jsonl").read_text().splitlines()
    evaluated = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    return evaluated[0], evaluated[-1]


def test_a_classifier_of_four_sources(tmp_path):
    """Math questions, children's stories, web pages and plays, by their first 160 characters."""
    texts = {
        "math": questions(),
        "play": (DATA / "tinyshakespeare.txt").read_text().split("\n\n"),
        "story": (DATA / "tinystories" / "train_slice.txt").read_text().split("\n\n"),
        "web": [
            json.loads(line)["text"] for line in (DATA / "llamafactory" / "c4_demo.jsonl").read_text().splitlines()
        ],
    }
    pick, rows = random.Random(0), []
    for label, documents in texts.items():
        documents = [" ".join(text.split())[:160] for text in documents if len(text.split()) > 8]
        rows += [{"text": text, "label": label} for text in pick.sample(documents, 120)]
    pick.shuffle(rows)
    keys = {"method": "sequence_classification", "per_device_train_batch_size": 8, "learning_rate": 5e-4}
    before, after = run(write(tmp_path / "rows.jsonl", rows), tmp_path / "run", **keys)
    assert before["f1"] < 0.5
    assert after["f1"] > 0.7
    merge(tmp_path / "run", tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    held_out = pick.sample(rows, 32)
    inputs = tokenizer(
        [row["text"] for row in held_out], padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    with torch.no_grad():
        predicted = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.argmax(-1)
    named = [model.config.id2label[int(number)] for number in predicted]
    assert sum(name == row["label"] for name, row in zip(named, held_out, strict=True)) > 24


def test_an_embedder_finds_the_rest_of_a_question(tmp_path):
    """The last sentence of a math question, and the sentences before it."""
    pairs = [question.rpartition(". ") for question in questions()]
    rows = [{"anchor": last, "positive": first[:200]} for first, _, last in pairs if first][:480]
    keys = {"method": "embedding", "per_device_train_batch_size": 16, "learning_rate": 3e-4}
    before, after = run(write(tmp_path / "rows.jsonl", rows), tmp_path / "run", **keys)
    assert before["recall_at_10"] < 0.35
    assert after["recall_at_10"] > 0.5
    assert after["ndcg_at_10"] > before["ndcg_at_10"] + 0.15
