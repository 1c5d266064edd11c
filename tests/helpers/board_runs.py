"""Folders of made-up runs, as training leaves them."""

import json
import math
import os
import time
from pathlib import Path

from halfbyte.utils.files import write_text
from halfbyte.utils.processes import Process

CONFIG = """# The model
model_name_or_path: org/tiny-model     # folder, file, or hub id
method: sft                            # training method
dataset: data.jsonl                    # files
r: {r}                                 # rank
learning_rate: 0.0002                  # rate
max_length: 512                        # tokens
output_dir: out                        # folder
"""


def train_record(step: int, **changed) -> dict:
    wobble = math.sin(step * 12.9898) * 0.1
    record = {"kind": "train", "step": step, "epoch": step / 60, "time": 1_790_000_000.0 + step * 0.5}
    record |= {"loss": 1.1 + 1.6 * math.exp(-step / 25) + wobble, "grad_norm": 0.6 + wobble, "learning_rate": 2e-4}
    record |= {"tokens": 4000, "trained_tokens": 1500, "step_seconds": 0.5, "tokens_per_second": 8000.0}
    return record | {"memory_bytes": 6 * 2**30} | changed


def eval_record(step: int, loss: float) -> dict:
    record = {"kind": "eval", "step": step, "epoch": step / 60, "time": 1_790_000_000.0 + step * 0.5, "loss": loss}
    return record | {"perplexity": math.exp(loss), "tokens": 51_200, "seconds": 2.5}


def status(state: str = "finished", step: int = 60, total: int = 60, **changed) -> dict:
    process = Process.current()
    document = {"state": state, "error": "", "step": step, "total_steps": total, "host": "here", **process._asdict()}
    document |= {"launcher": None, "started": time.time(), "heartbeat": time.time(), "uptime": time.monotonic()}
    return document | changed


def write_run(folder: Path, steps: int = 60, *, r: int = 8, records=None, **files) -> Path:
    """Write a run; `files` replace or add files by their names, with `_` for the dot, as text or JSON values."""
    folder.mkdir(parents=True, exist_ok=True)
    if records is None:
        records = [eval_record(0, 2.6), *map(train_record, range(1, steps + 1)), eval_record(steps, 1.3)]
    split = {"documents": 40, "rows": 40, "tokens": 8000, "trained_tokens": 3000, "dropped": {}, "truncated": 0}
    split |= {
        "empty_answers": 0,
        "packing_efficiency": None,
        "length_histogram": {"edges": [1, 5, 9], "counts": [3, 4]},
    }
    data = {"sources": [{"path": "data.jsonl", "rows": 40, "format": "chat", "why": "column messages"}]}
    data |= {"mask": "assistant turns", "template": None, "eos_trained": True, "stop_tokens": ["<|im_end|>"]}
    data |= {"train": split, "samples": [{"tokens": ["What", " is", " 2"], "trained": [False, False, True]}]}
    answers = [{"prompt": "What is 2?", "before": "?", "after": f"two by {r}", "reference": "two"}]
    contents = {
        "metrics_jsonl": "".join(json.dumps(record) + "\n" for record in records),
        "status_json": status(step=steps, total=steps),
        "config_resolved_yaml": CONFIG.format(r=r),
        "data_report_json": data,
        "generations_json": answers,
        "memory_json": {"device": "cpu", "predicted": {"weights": 2**30, "total": 2**30}, "measured": {}},
        "environment_json": {"started": 1_790_000_000.0, "finished": 1_790_000_100.0, "inputs": {"eval_dataset": "a"}},
        "checks_json": {"first_step": {"loss": 2.0}},
    } | files
    names = {"config_resolved_yaml": "config.resolved.yaml"}
    for key, value in contents.items():
        if value is not None:
            name = names.get(key, ".".join(key.rsplit("_", 1)))
            write_text(folder / name, value if isinstance(value, str) else json.dumps(value))
    return folder


def document_line(split: str, row: int, start: float, end: float, words: str, digest: str) -> dict:
    line = {"split": split, "row": row, "hash": digest, "tokens": len(words), "trained_tokens": 3}
    return line | {"start": start, "end": end, "text": [[False, "ask "], [True, words]]}


def lost_process() -> dict:
    """Fields of the status of a process that has ended."""
    return {"pid": os.getpid(), "since": 1}
