"""Golden runs: what whole runs leave behind, recorded before a change of structure and compared after it.

    python -m tests.helpers.golden_runs record before.json --source ../other-checkout/src
    python -m tests.helpers.golden_runs record after.json
    python -m tests.helpers.golden_runs compare before.json after.json

Each case is one or more `halfbyte` commands on a tiny random model, on the CPU, through the command line alone, so that
no internal name matters. Recorded are exit codes, losses of every step, digests of adapters and merged weights, the
tree of files, and the kinds of errors. Two records are compared on one machine: products round by its processor.
Wording is not recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SOURCE = Path(__file__).parents[2] / "src"
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "small", "bears", "count",
    "green", "apples", "near", "an", "old", "river",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One golden run.

    Attributes:
        name: of its folder and of its entry in the record.
        keys: of its configuration, beside the common ones.
        then: commands after training; `{run}` is the run's folder, `{out}` another, `{root}` that of the inputs.
        model: the tiny model that is trained.
        data: the file of rows.
    """

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    then: tuple[str, ...] = ()
    model: str = "llama"
    data: str = "messages"


GRADED = "def score(completions, **columns):\n    return [float(len(text) % 7) for text in completions]\n"
COMMON = {
    "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "r": 4, "max_length": 96, "device": "cpu",
    "dtype": "float32", "seed": 3, "sample_prompts": 0, "logging_steps": 1,
}  # fmt: skip
TAUGHT = {"teacher_model_name_or_path": "{root}/teacher", "max_completion_length": 8}
POLICY = {"max_completion_length": 8, "num_generations": 2, "reward_funcs": ["{root}/graded.py:score"]}

MERGE, EVALUATE = "merge {run} {out}/merged", "eval {run} {root}/messages.jsonl --device=cpu"
EXPORT = "export {run} --gguf q8_0 --out {out}/model.gguf", "export {run} --adapter vllm --out {out}/vllm"
LEVELS = {"*.mlp.*": "int4", "*": "nf4"}
RESUME = "train {config} resume_from_checkpoint={run}/checkpoint-2 output_dir={out}/again"

CASES = (
    Case("nf4", {"lora_dropout": 0.1, "eval_split_size": 2, "sample_prompts": 1}, (MERGE, EVALUATE)),
    Case("fp4_packed", {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "packing": True}),
    Case("int8_dora", {"quantization": "int8", "use_dora": True, "activation_checkpointing": "checkpoint"}, (MERGE,)),
    Case("mixed", {"quantization": LEVELS, "use_rslora": True, "activation_checkpointing": "recompute_mlp"}),
    Case("with_head", {"padding_free": True, "modules_to_save": ["lm_head"], "activation_checkpointing": "recompute"}),
    Case("qat", {"qat_scheme": "int4", "load_in_4bit": False}, (MERGE,)),
    Case("full", {"use_peft": False, "load_in_4bit": False, "gradient_accumulation_steps": 2}),
    Case("nvfp4_recipe", {"quantization": "nvfp4", "recipe": "nvfp4", "gradient_accumulation_steps": 2}),
    Case("dpo", {"method": "dpo"}, data="pairs"),
    Case("reward", {"method": "reward"}, data="pairs"),
    Case("kto", {"method": "kto", "per_device_train_batch_size": 4}, data="labelled"),
    Case("grpo", {"method": "grpo", **POLICY}, data="prompts"),
    Case("gkd", {"method": "gkd", **TAUGHT}, data="prompts"),
    Case("mixture", {"activation_checkpointing": "checkpoint"}, model="mixture"),
    Case("shard", {"parallel": {"shard": 2}}),
    Case("pipeline", {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2}),
    Case("resumed", {"max_steps": 4, "save_steps": 2, "lora_dropout": 0.1}, (RESUME,)),
    Case("exported", {}, EXPORT),
    Case("unknown_key", {"learning_rte": 1.0}),
    Case("contradiction", {"load_in_4bit": False, "qat_scheme": "nf4", "use_dora": True}),
    Case("missing_data", data="nowhere"),
)  # fmt: skip


def make_inputs(root: Path) -> None:
    """Write the models, the tokenizer, the rows and the reward function that all cases share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    tokenizer = make_tokenizer()
    sizes["vocab_size"] = len(tokenizer)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    made = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **ids)),
        "teacher": lambda: LlamaForCausalLM(LlamaConfig(**sizes | {"num_hidden_layers": 3}, **ids)),
        "mixture": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **ids, **experts)),
    }
    for name, make in made.items():
        torch.manual_seed(0)
        make().save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, rows in make_rows().items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "graded.py").write_text(GRADED)


def make_tokenizer() -> Any:
    """Return a byte-level BPE of a few hundred tokens with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], chat_template=TEMPLATE
    )


def make_rows() -> dict[str, list[dict[str, Any]]]:
    """Rows of every kind, of uneven lengths."""

    def text(start: int, count: int) -> str:
        return " ".join(WORDS[(start + n * (start % 3 + 1)) % len(WORDS)] for n in range(count))

    count = 12
    asked = [text(n, 3 + n % 5) for n in range(count)]
    said = [text(n + 7, 2 + (3 * n) % 7) for n in range(count)]
    worse = [text(n + 11, 1 + (2 * n) % 5) for n in range(count)]
    turns = [[{"role": "user", "content": each}] for each in asked]
    answers = [[{"role": "assistant", "content": each}] for each in said]
    rejected = [[{"role": "assistant", "content": each}] for each in worse]
    return {
        "messages": [{"messages": [*a, *b]} for a, b in zip(turns, answers, strict=True)],
        "pairs": [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(turns, answers, rejected, strict=True)],
        "labelled": [
            {"prompt": a, "completion": b, "label": n % 2 == 0}
            for n, (a, b) in enumerate(zip(turns, answers, strict=True))
        ],
        "prompts": [{"prompt": a} for a in turns],
    }


def record(path: Path, source: Path, names: Iterable[str], jobs: int) -> int:
    """Run the cases with the package in `source` and write what they left to `path`."""
    cases = [case for case in CASES if not names or case.name in names]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_inputs(root)
        with ThreadPoolExecutor(jobs) as pool:
            left = pool.map(lambda case: run(case, root, source), cases)
            found = {case.name: each for case, each in zip(cases, left, strict=True)}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0


def run(case: Case, root: Path, source: Path) -> dict[str, Any]:
    """Run one case; return the exit codes of its commands and what its folders hold."""
    import yaml

    place = root / "cases" / case.name
    run_folder, out = place / "run", place / "out"
    out.mkdir(parents=True)
    given = COMMON | {"model_name_or_path": "{root}/" + case.model, "dataset": "{root}/" + case.data + ".jsonl"}
    keys = json.loads(json.dumps(given | {"output_dir": str(run_folder)} | case.keys).replace("{root}", str(root)))
    config = place / "config.yaml"
    config.write_text(yaml.safe_dump(keys))
    started, codes, errors = time.monotonic(), [], []
    for command in ("train {config}", *case.then):
        words = command.format(config=config, run=run_folder, out=out, root=root).split()
        done = subprocess.run(
            [sys.executable, "-m", "halfbyte", *words], env=environment(source, root), capture_output=True, text=True
        )
        codes.append(done.returncode)
        if done.returncode:
            errors.append(done.stderr[-2000:] + done.stdout[-2000:])
    print(f"{case.name}: {codes}, {time.monotonic() - started:.1f} s", *errors, sep="\n", flush=True)
    return {"codes": codes} | {name: contents(folder) for name, folder in (("run", run_folder), ("out", out))}


def environment(source: Path, root: Path) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return os.environ | threads | {"PYTHONPATH": str(source.resolve()), "HALFBYTE_CACHE": str(root / "cache")}


def contents(folder: Path) -> dict[str, Any]:
    """Return what a folder holds: its files, the digests of its weights, and the numbers of its metrics."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {
        "files": sorted({re.sub(r"-\d{5,}|\d{8}-\d{6}", "-N", name) for name in files}),
        "weights": {name: digest(folder / name) for name in files if name.endswith((".safetensors", ".gguf"))},
        "metrics": {name: list(numbers(folder / name)) for name in files if name.endswith("metrics.jsonl")},
    }


TIMED = re.compile(r"second|_share|time|memory|bytes|per_|_at$|date|peak|power|pid|version|commit")


def numbers(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file without clocks and memory."""
    for line in path.read_text().splitlines():
        yield {key: value for key, value in json.loads(line).items() if not TIMED.search(key)}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """Yield each place at which two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys(), key=str):
            yield from differences(before.get(key), after.get(key), f"{at}/{key}")
    elif before != after:
        yield f"{at}: {str(before)[:300]} -> {str(after)[:300]}"


def compare(before: Path, after: Path) -> int:
    """Print where two records differ; return 1 if they do."""
    found = list(differences(json.loads(before.read_text()), json.loads(after.read_text())))
    print("\n".join(found) or "equal")
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run all cases and write what they left")
    recording.add_argument("path", type=Path)
    recording.add_argument("--source", type=Path, default=SOURCE, help="folder of the package")
    recording.add_argument("--only", nargs="*", default=(), help="names of cases")
    recording.add_argument("--jobs", type=int, default=2, help="cases at once")
    comparing = commands.add_parser("compare", help="print where two records differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after)
    return record(given.path, given.source, given.only, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
