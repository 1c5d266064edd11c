"""The first seconds of commands on a tiny model: process start, first line, imports, loaded model, first result.

    python -m benchmarks.startup [--commands train generate eval merge] [--limit 85] [--json FILE]

Each run is a process of its own, `python -m halfbyte` with a hook on imports. Cold runs have empty caches for compiled
kernels (halfbyte's, Triton's, CUDA's); warm runs have the caches that the run before left. The first result is the line
of step 1 for train, the first answer for generate, the loss for eval, and the written model for merge. Runs that would
begin after `--limit` seconds are left out. Columns are seconds since the process started; `imports` is a process that
only imports torch, transformers and PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import parser_of, write_result
from halfbyte.demo.base import Recipe, build_tokenizer
from halfbyte.demo.corpus import Corpus

COMMANDS = ("train", "generate", "eval", "merge")
RESULT = {"train": "step 1/", "generate": "{", "eval": "loss ", "merge": "merged model in "}  # how its line begins
PHASES = ("first line", "torch", "imports", "model", "result", "end")
# Runs the command, and writes the seconds at which torch is imported, all imports are done and the model is loaded.
HOOK = """
import importlib.machinery, os, sys, time

def mark(name):
    with open(os.environ["STARTUP_MARKS"], "a") as file:
        file.write(f"{name}\\t{time.time()}\\n")

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "halfbyte.loading.load"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            mark(name)
            if name != "torch":
                load = module.load_model
                def load_model(*arguments, **named):
                    mark("imports")
                    model = load(*arguments, **named)
                    mark("model")
                    return model
                module.load_model = load_model
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
from halfbyte.cli import main
main()
"""
IMPORTS = """
import torch
print("torch", flush=True)
import transformers, peft
from transformers import AutoModelForCausalLM
"""


def write_inputs(folder: Path) -> None:
    """Write a model of 6 M random weights, its tokenizer, 64 short conversations and 8 prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    questions = [f"What is {number} plus {number}?" for number in range(64)]
    answers = [f"It is {2 * number}." for number in range(64)]
    tokenizer = build_tokenizer(Corpus(prose=[*questions, *answers], exchanges=[]), Recipe(vocab_size=512))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers, strict=True)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    (folder / "prompts.txt").write_text("\n".join(questions[:8]) + "\n")


def words_of(command: str, folder: Path) -> list[str]:
    """Return the arguments of a command on the inputs in `folder`; what it writes replaces an earlier run's."""
    model, data, run = str(folder / "model"), str(folder / "data.jsonl"), folder / "run"
    if command == "train":
        shutil.rmtree(run, ignore_errors=True)
        keys = {"max_steps": 2, "max_length": 128, "warmup_steps": 0, "logging_steps": 1, "output_dir": run}
        return ["train", model, data, *(f"{key}={value}" for key, value in keys.items())]
    if command == "generate":
        return ["generate", str(run), str(folder / "prompts.txt"), "--max-new-tokens", "16"]
    if command == "eval":
        return ["eval", str(run), data]
    shutil.rmtree(folder / "merged", ignore_errors=True)
    return ["merge", str(run), str(folder / "merged")]


def measure(command: str, folder: Path, caches: Path) -> dict[str, Any]:
    """Run a command; return the seconds since its start at which each phase ended, rounded to 10 ms.

    Raises:
        RuntimeError: it failed; with its output.
    """
    marks = folder / "marks"
    marks.unlink(missing_ok=True)
    own = {name: str(caches / name) for name in ("HALFBYTE_CACHE", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
    given = ["-c", IMPORTS] if command == "imports" else ["-c", HOOK, *words_of(command, folder)]
    environment = {**os.environ, **own, "STARTUP_MARKS": str(marks), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, *given], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seconds: dict[str, float] = {}
    lines = []
    for line in process.stdout:
        lines.append(line)
        seconds.setdefault("first line", time.time() - began)
        if line.strip().startswith(RESULT.get(command, "\n")):
            seconds.setdefault("result", time.time() - began)
    if process.wait():
        raise RuntimeError(f"{command} failed:\n{''.join(lines)}")
    seconds["end"] = time.time() - began
    if command == "imports":
        return {"torch": round(seconds["first line"], 2), "imports": round(seconds["end"], 2)}
    for line in marks.read_text().splitlines():
        name, at = line.split("\t")
        seconds.setdefault(name, float(at) - began)  # of several models the first
    return {phase: round(seconds[phase], 2) for phase in PHASES if phase in seconds}


def runs(commands: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield commands and whether their caches are empty, the most important first; merge etc. need the run of train."""
    yield "train", True
    yield "train", False
    for cold in (False, True):
        yield from ((command, cold) for command in commands if command != "train")


def parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--limit", type=float, default=85.0, help="seconds after which no further run begins")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    began, result = time.time(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_inputs(place)
        result["imports"] = measure("imports", place, place / "caches")
        print(f"{'':15}" + "".join(f"{phase:>11}" for phase in PHASES))
        _print("imports", result["imports"])
        for command, cold in runs(given.commands):
            name = f"{command}, {'cold' if cold else 'warm'}"
            if time.time() - began > given.limit:
                print(f"{name:15} left out")
                continue
            caches = place / ("caches" if command == "train" or not cold else f"caches-{command}")
            result[name] = measure(command, place, caches)
            _print(name, result[name])
    write_result(given.json, {"seconds": result, "device_of_runs": "cuda" if torch.cuda.is_available() else "cpu"})


def _print(name: str, seconds: dict[str, float]) -> None:
    cells = (f"{seconds[phase]:11.2f}" if phase in seconds else f"{'':11}" for phase in PHASES)
    print(f"{name:15}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
