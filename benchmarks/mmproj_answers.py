"""llama.cpp's answers about images after fine-tuning, against transformers', for every kind of vision part.

    PYTHONPATH=CYLLAMA python -m benchmarks.mmproj_answers --work FOLDER [--models qwen3_vl gemma3 ...] [--json FILE]

A tiny model of each kind (`benchmarks.tiny_image_models`, random weights) learns on a CPU to name the colour and the
corner of a block in a picture: first with all weights, then on this base in NF4 with LoRA on language model, tower and
projector. The run is merged, and exported as an F16 file with its mmproj. 100 prompts about held-out pictures of sizes
that need no scaling, and 100 of any size, are answered by transformers on the merged checkpoint (float32) and by
llama.cpp on the files. A row has, for both:

    equal       prompts with the same likeliest next token
    difference  largest difference of logits, as a share of the largest logit
    right       prompts that transformers answers as the picture is
    tokens      prompts whose image has equally many embeddings in both

and `as_server`: equal answers to the pictures that need no scaling if llama.cpp gets the prompt that llama-server
writes, with the image alone in place of the chat template's text for it. A file that llama.cpp does not read gives its
message. Rows are added to FILE; `--work` keeps what is trained. `--llamacpp PYTHON=FOLDER …` names Pythons and their
folders of packages with cyllama, whose builds of llama.cpp read the files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import parser_of, write_result
from benchmarks.image_models import SMOOTH, write_model
from benchmarks.llamacpp_reader import MARKER
from benchmarks.tiny_image_models import MEDIA, READERS, Reader

COLOURS = ((230, 30, 30), (30, 200, 40), (40, 50, 230), (245, 245, 245))
QUESTIONS = (
    "Which colour?",
    "Which corner?",
)  # of the latter: above left, above right, below left, below right
ANSWERS = (("red", "green", "blue", "white"), ("A", "B", "C", "D"))
TRAINED, COMPARED = 320, 100
STEPS = {"base": 70, "run": 20}
COMMON = {
    "freeze_vision_tower": False, "freeze_multi_modal_projector": False, "max_length": 512,
    "lr_scheduler_type": "cosine", "warmup_steps": 10, "dtype": "float32",
    "logging_steps": 20, "sample_prompts": 0, "seed": 7, "device": "cpu",
}  # fmt: skip
KEYS = {
    "base": COMMON | {"use_peft": False, "load_in_4bit": False, "learning_rate": 2e-3},
    "run": COMMON
    | {
        "load_in_4bit": True,
        "bnb_4bit_blocksize": 32,
        "r": 16,
        "lora_alpha": 32,
        "learning_rate": 1e-3,
    },
}
BARE_PROJECTOR = ("gemma3",)  # a matrix outside of a linear layer, which LoRA does not adapt


def picture(size: tuple[int, int], colour: int, corner: int, generator: np.random.Generator) -> Image.Image:
    """Return a picture of grey noise with a block of one of `COLOURS` in one of four corners."""
    width, height = size
    coarse = (max(height // SMOOTH, 1), max(width // SMOOTH, 1))
    grey = Image.fromarray(generator.integers(60, 180, coarse, dtype=np.uint8))
    image = grey.resize(size, Image.Resampling.BICUBIC).convert("RGB")
    columns, rows = (int(side * generator.uniform(0.35, 0.5)) for side in size)
    left, top = (width - columns) * (corner % 2), (height - rows) * (corner // 2)
    image.paste(COLOURS[colour], (left, top, left + columns, top + rows))
    return image


def write_rows(folder: Path, name: str, sizes: Sequence[tuple[int, int]], seed: int) -> list[dict[str, str]]:
    """Write a picture of each size and NAME.jsonl with a question about each; return image, question and answer."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    rows, lines = [], []
    for number, size in enumerate(sizes):
        facts = generator.integers(len(COLOURS), size=2).tolist()
        file, kind = f"{name}/{number}.png", number % 2
        picture(size, *facts, generator).save(folder / file)
        row = {
            "image": str(folder / file),
            "question": QUESTIONS[kind],
            "answer": ANSWERS[kind][facts[kind]],
        }
        content = [
            {"type": "image", "image": file},
            {"type": "text", "text": row["question"]},
        ]
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": row["answer"]},
        ]
        lines.append(json.dumps({"messages": turns}))
        rows.append(row)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return rows


def sizes_of(reader: Reader, count: int, seed: int, is_scaled: bool) -> list[tuple[int, int]]:
    """Return `count` sizes of pictures: any, or such as need no scaling."""
    generator = np.random.default_rng(seed)
    if is_scaled:
        return [tuple(map(int, sides)) for sides in generator.integers(*reader.sides, (count, 2))]
    return [reader.sizes[number] for number in generator.integers(len(reader.sizes), size=count)]


def train(work: Path, name: str) -> None:
    """Write model and rows, train twice, merge and export, unless an earlier call did."""
    from halfbyte.config import load_config
    from halfbyte.export.gguf_model import export_gguf
    from halfbyte.export.merge import merge
    from halfbyte.train.run import train as halfbyte_train

    reader = READERS[name]
    model = work / "model"
    if not (model / "processor_config.json").exists():
        write_model(model, reader.shape, None, False, "cpu")
    sizes = sizes_of(reader, TRAINED // 2, 1, False) + sizes_of(reader, TRAINED // 2, 2, True)
    write_rows(work, "train", sizes, 3)
    for run, options in KEYS.items():
        keys = options | {
            "max_steps": STEPS[run],
            "per_device_train_batch_size": reader.batch,
        }
        keys |= {
            "model_name_or_path": str(model),
            "dataset": str(work / "train.jsonl"),
            "output_dir": str(work / run),
        }
        if name in BARE_PROJECTOR and run == "run":
            keys["freeze_multi_modal_projector"] = True
        if not (work / run / "report.html").exists():
            halfbyte_train(load_config(None, keys))
        model = work / run / "model"
    if not (work / "merged").exists():
        merge(work / "run", work / "merged")
    if not (work / "model.gguf").exists():
        export_gguf(work / "run", "f16", work / "model.gguf", device="cpu")


# --- answers ---------------------------------------------------------------------------------------------------------


def prompt_of(tokenizer: Any, question: str) -> str:
    """Return a question as the chat template writes it, with the template's text for an image."""
    turn = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": question}],
    }
    return str(tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True))


@torch.no_grad()
def by_transformers(folder: Path, rows: Sequence[dict[str, str]]) -> tuple[np.ndarray, list[int]]:
    """Return logits [N, vocabulary] after each prompt, and the number of embeddings of its image."""
    from transformers import AutoModelForImageTextToText

    from halfbyte.config import load_config
    from halfbyte.data.image_processor import ImageProcessor
    from halfbyte.loading.tokenizers import load_run_tokenizer

    config = load_config(
        None,
        {"model_name_or_path": str(folder), "dataset": "none", "output_dir": "none"},
    )
    tokenizer = load_run_tokenizer(config)
    processor = ImageProcessor(config, tokenizer).processor
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    logits, tokens = [], []
    for row in rows:
        image = Image.open(row["image"])
        texts = [prompt_of(tokenizer, row["question"])]
        inputs = processor(text=texts, images=[[image]], add_special_tokens=False, return_tensors="pt")
        tokens.append(int((inputs["input_ids"] == model.config.image_token_id).sum()))
        logits.append(model(**inputs, logits_to_keep=1).logits[0, -1].numpy())
    return np.stack(logits), tokens


def version_of(reader: Sequence[str]) -> str:
    """Return the build of llama.cpp in cyllama; `reader` as in `by_llamacpp`."""
    code = "import cyllama, pathlib; print(pathlib.Path(cyllama.__file__).with_name('build_config.json').read_text())"
    printed = subprocess.run(
        [reader[0], "-c", code],
        env=environment_of(reader),
        capture_output=True,
        check=True,
    )
    return str(json.loads(printed.stdout)["versions"]["llama_cpp_version"])


def environment_of(reader: Sequence[str]) -> dict[str, str]:
    """Return the environment of llama.cpp's process; `reader` as in `by_llamacpp`."""
    return os.environ | ({"PYTHONPATH": reader[1]} if reader[1] else {})


def by_llamacpp(
    work: Path,
    prompts: Sequence[str],
    rows: Sequence[dict[str, str]],
    reader: Sequence[str],
) -> Any:
    """Return logits [N, vocabulary] and numbers of embeddings, or what llama.cpp said at the end of its process.

    Args:
        reader: a Python with cyllama, and PYTHONPATH for it ("": as it is).
    """
    images = {f"image{number}": np.array(Image.open(row["image"])) for number, row in enumerate(rows)}
    np.savez(work / "prompts.npz", prompts=np.array(prompts), **images)
    files = [str(work / name) for name in ("model.gguf", "mmproj-model.gguf", "prompts.npz", "answers.npz")]
    command = [reader[0], Path(__file__).with_name("llamacpp_reader.py"), *files]
    done = subprocess.run(command, env=environment_of(reader), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        return next((line for line in lines if "GGML_ASSERT" in line or "rror: " in line), lines[-1])
    answers = np.load(work / "answers.npz")
    return answers["logits"], answers["tokens"].tolist()


def compared(
    expected: tuple[np.ndarray, list[int]],
    answers: Any,
    rows: Sequence[dict[str, str]],
    first: Any,
) -> Any:
    """Return the figures of a row, or llama.cpp's message.

    Args:
        expected: transformers' logits and numbers of embeddings.
        first: id of an answer's first token.
    """
    if isinstance(answers, str):
        return {"error": answers}
    (logits, tokens), (other, other_tokens) = expected, answers
    other = other[:, : logits.shape[1]]
    equal = logits.argmax(1) == other.argmax(1)
    apart = np.abs(logits - other).max(1) / np.abs(logits).max(1)
    right = logits.argmax(1) == np.array([first(row["answer"]) for row in rows])
    same = sum(count == image for count, image in zip(tokens, other_tokens, strict=True))
    return {"equal": int(equal.sum()), "difference": float(apart.max()), "median_difference": float(np.median(apart)),
            "right": int(right.sum()), "tokens": same}  # fmt: skip


def measure(work: Path, name: str, readers: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the row of a trained model for each build of llama.cpp.

    Args:
        readers: build → reader, as in `by_llamacpp`.
    """
    from transformers import AutoTokenizer

    kind = READERS[name]
    tokenizer = AutoTokenizer.from_pretrained(work / "merged")
    result: dict[str, Any] = {build: {} for build in readers}
    for part, is_scaled in (("unscaled", False), ("scaled", True)):
        rows = write_rows(work, part, sizes_of(kind, COMPARED, 4, is_scaled), 5)
        texts = [prompt_of(tokenizer, row["question"]) for row in rows]
        expected = by_transformers(work / "merged", rows)
        prompts = {part: kind.around} | ({"as_server": MEDIA} if kind.around != MEDIA and not is_scaled else {})
        for build, reader in readers.items():
            for key, around in prompts.items():
                written = [text.replace(kind.shape.image, around.replace(MEDIA, MARKER)) for text in texts]
                answers = by_llamacpp(work, written, rows, reader)
                result[build][key] = compared(
                    expected,
                    answers,
                    rows,
                    lambda answer: tokenizer(answer)["input_ids"][0],
                )
    return result


def parser() -> argparse.ArgumentParser:
    options = parser_of(__doc__)
    options.add_argument("--work", type=Path, required=True, help="folder for models, rows and runs")
    options.add_argument("--models", nargs="+", choices=READERS, default=list(READERS))
    options.add_argument(
        "--llamacpp", nargs="+", default=[f"{sys.executable}="], metavar="PYTHON=FOLDER",
        help="Pythons with cyllama, and PYTHONPATH for each (default: this one)",
    )  # fmt: skip
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    readers = {version_of(reader): reader for reader in (text.split("=", 1) for text in options.llamacpp)}
    result: dict[str, Any] = {}
    if options.json and options.json.exists():
        result = json.loads(options.json.read_text())["llama.cpp"]
    for name in options.models:
        work = options.work / name
        train(work, name)
        for build, row in measure(work, name, readers).items():
            result.setdefault(build, {})[name] = row
            print(build, name, json.dumps(row), flush=True)
        write_result(options.json, {"steps": STEPS, "compared": COMPARED, "llama.cpp": result})


if __name__ == "__main__":
    main()
