"""Planned memory and seconds beside measured ones, of whole runs on several GPUs of one host.

    python -m benchmarks.planned FOLDER [--shape qwen3-0.6b] [--gpus 2] [--json FILE] [KEY=VALUE ...]

FOLDER gets a checkpoint of random weights, a tokenizer and data, where they are not there. Each mesh of MESHES of so
many GPUs trains a few steps, as `halfbyte train` does, and what its memory.json and metrics.jsonl say is printed: total
planned and measured, of the process that needed most; frozen bytes after loading; seconds of a step. At most 10% off,
and never over by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_result

GIB = 2**30
STEPS = 6
ROWS = 600  # of 500 tokens: more than the steps of any mesh take
OFF, OVER = 0.10, 0.05
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"data": 2}, {"shard": 2}, {"pipeline": 2}, {"tensor": 2}, {"context": 2}),
    4: ({"data": 4}, {"shard": 4}, {"data": 2, "shard": 2}, {"shard": 2, "context": 2}, {"pipeline": 4}),
}
KEYS = ("max_length=2048", "packing=true", "per_device_train_batch_size=1", "gradient_accumulation_steps=4",
        f"max_steps={STEPS}", "sample_prompts=0", "logging_steps=1")  # fmt: skip


def made(folder: Path, shape: str) -> tuple[str, str]:
    """A checkpoint of a benchmark's model with a byte-level tokenizer, and rows of random words."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    from benchmarks.loading_together import write_checkpoint

    model, data = folder / shape, folder / "data.jsonl"
    write_checkpoint(shape, model, packed=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a"], vocab_size=259, special_tokens=[*special.values()])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **special).save_pretrained(model)
    random.seed(0)
    rows = ("".join(random.choices("abcdefgh ", k=random.randint(100, 900))) for _ in range(ROWS))
    data.write_text("".join(json.dumps({"prompt": "say: ", "completion": row}) + "\n" for row in rows))
    return str(model), str(data)


def measured(model: str, data: str, mesh: dict[str, int], keys: list[str], folder: Path) -> dict[str, Any]:
    """The line of a run divided as `mesh`."""
    written = "{" + ", ".join(f"{axis}: {ways}" for axis, ways in mesh.items()) + "}"
    output = folder / "-".join(f"{axis}{ways}" for axis, ways in mesh.items())
    command = [sys.executable, "-m", "halfbyte", "train", model, data, f"output_dir={output}", f"parallel={written}"]
    run = subprocess.run([*command, *KEYS, *keys], capture_output=True, text=True, check=False)
    if run.returncode:
        return {"parallel": written, "error": run.stderr.strip().splitlines()[-1:]}
    memory = json.loads((output / "memory.json").read_text())
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [record["tokens"] / record["tokens_per_second"] for record in records if record["kind"] == "train"]
    planned, found = memory["predicted"]["total"], max(memory["ranks"], key=lambda rank: rank["run_bytes"])
    parts = {part: round(size / GIB, 3) for part, size in memory["predicted"].items() if size}
    return {
        "parallel": written,
        "planned_gib": planned / GIB,
        "measured_gib": found["run_bytes"] / GIB,
        "ratio": planned / found["run_bytes"],
        "loaded_gib": (found["after_load_bytes"] - found["base_bytes"]) / GIB,
        "planned_s": memory["step_seconds"],
        "measured_s": statistics.median(steps[2:]),
        "stays": memory["stays"],
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--gpus", type=int, default=2, choices=MESHES)
    parser.add_argument("--json")
    given = parser.parse_intermixed_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    lines, (model, data) = [], made(given.folder, given.shape)
    with tempfile.TemporaryDirectory() as folder:
        for mesh in MESHES[given.gpus]:
            lines.append(measured(model, data, mesh, given.keys, Path(folder)))
            print(json.dumps(lines[-1]), flush=True)
    ratios = [line["ratio"] for line in lines if "ratio" in line]
    good = len(ratios) == len(lines) and all(1 - OFF <= ratio <= 1 + OVER for ratio in ratios)
    print(json.dumps({"good": good}))
    write_result(given.json, {"lines": lines, "good": good})


if __name__ == "__main__":
    main()
