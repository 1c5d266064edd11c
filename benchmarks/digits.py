"""A language model learns to read: it gets a random vision tower, and is trained on scanned digits on a CPU.

    python -m benchmarks.digits LLAMA-40M --work FOLDER [--runs full lora ...] [--epochs 3] [--json FILE]

LLAMA-40M is a Llama in 16 bits whose tokenizer has ChatML's tokens. It becomes a LLaVA: a SigLIP tower of two layers
and a projector, both random, read 16 patches of an image. Rows are scikit-learn's 1,797 digits of 8 x 8 pixels
("Which digit?"), enlarged to 32 x 32; 297 are held out (`pip install scikit-learn`). Every run is halfbyte's command
line: `train`, `generate` on the held-out rows, and `export` to GGUF. With the package cyllama, llama.cpp reads the file
and its mmproj, and the first token of its answers to 100 held-out rows is compared with transformers' on the merged
model (float32).

Runs, each for all epochs in batches of 32:

    full         all weights of language model, tower and projector
    lora         NF4 base with LoRA on all three
    whole_tower  NF4 base with LoRA on the language model; tower and projector in full (modules_to_save)
    frozen       NF4 base with LoRA on the language model; tower and projector stay random

A run replaces its row in FILE. `seconds` and `cpu_seconds` are those of `train` with imports, checks and saving, and
`load` is the machine's load average at its end: with other processes on the cores, the first says little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration

from benchmarks.harness import parser_of, write_result
from benchmarks.llamacpp_reader import MARKER, logits_after

HELD_OUT, COMPARED, SEED, SIDE, PATCH = 297, 100, 7, 32, 8
IMAGE, QUESTION = "<image>", "Which digit?"
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False,
}  # fmt: skip
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
COMMON = {
    "max_length": 64, "per_device_train_batch_size": 32, "lr_scheduler_type": "cosine", "warmup_steps": 10,
    "dtype": "float32", "logging_steps": 5, "sample_prompts": 0, "seed": SEED,
}  # fmt: skip
UNFROZEN = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
LORA = {"load_in_4bit": True, "r": 16, "lora_alpha": 32, "learning_rate": 2e-3}
RUNS: dict[str, dict[str, Any]] = {
    "full": {"use_peft": False, "load_in_4bit": False, "learning_rate": 5e-4, **UNFROZEN},
    "lora": {**LORA, **UNFROZEN},
    "whole_tower": {**LORA, **UNFROZEN, "modules_to_save": ["vision_tower", "multi_modal_projector"]},
    "frozen": LORA,
}


def save_model(base: Path, folder: Path) -> None:
    """Save the language model in `base` as a LLaVA with a random tower and projector, and its processor."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    text = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    text.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    config = LlavaConfig(
        text_config=text.config.to_dict(), vision_config=TOWER, image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )  # fmt: skip
    model = LlavaForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.generation_config = text.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shared = {"processor_class": "LlavaProcessor"}
    images = {"image_processor_type": "SiglipImageProcessor", "size": {"height": SIDE, "width": SIDE},
              "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    keys = {"patch_size": PATCH, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full",
            "image_token": IMAGE}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(shared | images))
    (folder / "processor_config.json").write_text(json.dumps(shared | keys))


def write_rows(folder: Path, images: Any, digits: Sequence[int], held_out: int = HELD_OUT) -> None:
    """Write images as PNG files, and train.jsonl and held_out.jsonl with a question about each.

    Args:
        images: [N, 8, 8], values of 0 to 16.
        digits: N answers.
        held_out: number of rows in held_out.jsonl, drawn by `SEED`.
    """
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(SEED)).tolist()
    for name, numbers in (("train", order[held_out:]), ("held_out", order[:held_out])):
        rows = []
        for number in numbers:
            file = f"digits/{number}.png"
            pixels = (images[number] * (255 / 16)).round().astype("uint8")
            Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(folder / file)
            asked = [{"type": "image", "image": file}, {"type": "text", "text": QUESTION}]
            answer = {"role": "assistant", "content": str(digits[number])}
            rows.append(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def halfbyte(*words: str | Path) -> str:
    """Run a command of halfbyte in its own process; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte", *map(str, words)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"halfbyte {words[0]} failed")
    return done.stdout


def train(work: Path, name: str, epochs: float) -> dict[str, float]:
    """Train run `name` into its folder in `work`; return seconds and the machine's load."""
    keys = {"model_name_or_path": work / "model", "dataset": work / "train.jsonl", "output_dir": work / name}
    keys |= {**COMMON, **RUNS[name], "num_train_epochs": epochs}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    halfbyte("train", *(f"{key}={value}" for key, value in keys.items()))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - start, "cpu_seconds": used, "load": os.getloadavg()[0]}


def held_out_rows(work: Path) -> list[tuple[Path, str]]:
    """Return image and answer of each held-out row."""
    rows = [json.loads(line)["messages"] for line in (work / "held_out.jsonl").read_text().splitlines()]
    return [(work / asked["content"][0]["image"], answer["content"]) for asked, answer in rows]


def right_answers(work: Path, name: str) -> int:
    """Return how many held-out digits a trained run reads, by `halfbyte generate`."""
    printed = halfbyte("generate", work / name, work / "held_out.jsonl", "--max-new-tokens", "4", "--batch-size", "33")
    answers = [json.loads(line)["answer"] for line in printed.splitlines()]
    return sum(answer == expected for answer, (_, expected) in zip(answers, held_out_rows(work), strict=True))


# --- llama.cpp and transformers --------------------------------------------------------------------------------------


def prompt_of(tokenizer: Any) -> str:
    """Return the question as the model reads it, with a placeholder for the image."""
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    return tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)


@torch.no_grad()
def transformers_tokens(folder: Path, files: Sequence[Path]) -> list[int]:
    """Return the likeliest first token of the answer about each image, by transformers in float32."""
    from transformers import LlavaProcessor
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    keys = json.loads((folder / "processor_config.json").read_text())
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = LlavaProcessor.from_args_and_dict([images, tokenizer], keys)
    pictures = [[Image.open(file).convert("RGB")] for file in files]
    inputs = processor(text=[prompt_of(tokenizer)] * len(files), images=pictures, return_tensors="pt")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model(**inputs, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


def llamacpp_tokens(gguf: Path, mmproj: Path, prompt: str, files: Sequence[Path]) -> list[int]:
    """Return the likeliest first token of the answer about each image, by llama.cpp."""
    images = [np.array(Image.open(file).convert("RGB")) for file in files]
    logits, _ = logits_after(str(gguf), str(mmproj), [prompt.replace(IMAGE, MARKER)] * len(files), images)
    return logits.argmax(1).tolist()


def equal_tokens(work: Path, name: str) -> int:
    """Export a trained run as F16; return for how many of `COMPARED` images llama.cpp and transformers agree."""
    merged, gguf = work / name / "model", work / f"{name}.gguf"
    if not merged.exists():
        merged = work / f"{name}-merged"
        halfbyte("merge", work / name, merged)
    halfbyte("export", work / name, "--gguf", "f16", "--out", gguf)
    files = [file for file, _ in held_out_rows(work)[:COMPARED]]
    prompt = prompt_of(AutoTokenizer.from_pretrained(merged))
    answers = llamacpp_tokens(gguf, work / f"mmproj-{name}.gguf", prompt, files)
    return sum(token == other for token, other in zip(answers, transformers_tokens(merged, files), strict=True))


def parser() -> argparse.ArgumentParser:
    options = parser_of(__doc__)
    options.add_argument("model", type=Path, metavar="LLAMA-40M", help="folder of the language model")
    options.add_argument("--work", type=Path, required=True, help="folder for model, rows and runs")
    options.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    options.add_argument("--epochs", type=float, default=3)
    return options


def main(words: Sequence[str] | None = None) -> None:
    from importlib.util import find_spec

    from sklearn.datasets import load_digits

    options = parser().parse_args(words)
    work = options.work
    data = load_digits()
    if not (work / "model").exists():
        save_model(options.model, work / "model")
    write_rows(work, data.images, data.target)
    rows = {}
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["runs"]
    for name in options.runs:
        row: dict[str, Any] = {"threads": torch.get_num_threads(), **train(work, name, options.epochs)}
        row |= {"epochs": options.epochs, "right": right_answers(work, name), "of": HELD_OUT}
        if find_spec("cyllama"):
            row |= {"equal_first_tokens": equal_tokens(work, name), "compared": COMPARED}
        print(name, row, flush=True)
        rows[name] = row
        write_result(options.json, {"model": options.model.name, "rows": len(data.target) - HELD_OUT, "runs": rows})


if __name__ == "__main__":
    main()
