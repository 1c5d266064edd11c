"""README and the guides, walked as written: each block runs after the one above it, in one folder, on a tiny model."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.utils.notices import reset_notices
from tests.helpers.documents import ROOT, blocks_of, commands
from tests.helpers.run_inputs import VOCABULARY, write_model

# Beginning or argument of a command that is not run → the reason.
NOT_RUN = {
    "pip install": "needs the network",
    "pip download": "needs the network",
    "unzip": "reads what was downloaded",
    "curl": "needs the network",
    "halfbyte demo": "pretrains for minutes; tests/demo",
    "runs/mine": "a run of the reader's; tests/export/test_fit.py",
    "halfbyte serve": "runs until it is stopped; tests/serve",
    "parallel=": "needs several GPUs; tests/parallel",
    "device=cuda": "needs a GPU",
    "python -m benchmarks": "measures for hours, on GPUs",
    "python -m halfbyte.bitsandbytes": "runs a program of the reader's; tests/bitsandbytes",
    "torchrun": "starts several processes; tests/parallel",
    "accelerate launch": "starts several processes",
    "srun": "needs a cluster",
    "halfbyte stop": "ends a run that trains; tests/train/test_status.py",
    "halfbyte board": "runs until it is stopped; tests/board",
    "ssh": "needs another machine",
    "halfbyte queue": "starts a process that outlives the page; tests/train/test_queue.py",
    "vllm serve": "needs vLLM and a GPU; tests/train/test_served.py",
}
# What makes commands quick on the tiny model, which writes no end of text.
QUICK = {"train": ["sample_max_new_tokens=2"], "chat": ["--max-new-tokens", "4"], "generate": ["--max-new-tokens", "4"]}
SAMPLING = ["max_completion_length=4"]  # with methods that sample
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
AXOLOTL = "base_model: Qwen/Qwen3-8B\ndatasets:\n  - path: data.jsonl\n    type: chat_template\nadapter: qlora\n"
REWARDS = "def correct(completions, answer, **columns):\n    return [float(len(text)) for text in completions]\n"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama with a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = write_model(
        tmp_path_factory.mktemp("model"), LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def place(tiny, tmp_path, monkeypatch):
    """A folder with the files that the documents name, and a tiny model under each name that they use."""
    monkeypatch.chdir(tmp_path)
    for name in MODELS:
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copytree(tiny, name)
    shown = next(text for language, text in blocks_of(ROOT / "README.md") if language == "json")  # README's own row
    asked = [{"prompt": f"What is {n} plus one?", "answer": str(n + 1)} for n in range(60)]
    files = {
        "data.jsonl": shown * 40,
        "chats.jsonl": shown * 400,
        "more.jsonl": shown * 4,
        "prompts.jsonl": lines({"prompt": row["prompt"]} for row in asked),
        "gsm8k.jsonl": lines({"question": row["prompt"], "answer": row["answer"]} for row in asked),
        "pairs.jsonl": lines({"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in asked),
        "axolotl.yml": AXOLOTL,
        "rewards.py": REWARDS,
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    return tmp_path


def run(words, target=None):
    """Run a command of halfbyte in this process; its output goes to the file `target`, if there is one."""
    reset_notices()
    samples = Path("run.yaml").exists() and "max_completion_length" in Path("run.yaml").read_text()
    words = [*words[1:], *QUICK.get(words[1], []), *(SAMPLING if samples and words[1] == "train" else [])]
    result = CliRunner().invoke(app, words, obj=words, input="Hello\n/quit\n")
    assert result.exit_code == 0, f"{' '.join(words)}:\n{result.output}\n{result.exception!r}"
    if target is not None:
        Path(target).write_text(result.stdout)


def is_run(words):
    """Return whether a command is not in `NOT_RUN`."""
    return not any(left_out in " ".join(words) for left_out in NOT_RUN)


def walk(page):
    """Run the blocks of a page in order; YAML that names a model is saved as run.yaml."""
    for language, text in blocks_of(ROOT / page):
        if language == "yaml" and "model_name_or_path:" in text:
            if find_spec("math_verify") is None:
                text = text.replace("math: answer", "exact: answer")
            Path("run.yaml").write_text(text)
        if language == "python" and "finetune(" in text:
            exec(compile(text, page, "exec"), {})
        for words, target in commands(text) if language == "bash" else ():
            if is_run(words):
                assert words[0] == "halfbyte", words
                run(words, target)


GUIDES = ("quickstart", "command-line", "board", "preference", "distillation", "policy", "several-gpus")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", *(f"docs/{guide}.md" for guide in GUIDES)])
def test_page_runs_from_top_to_bottom(page, place):
    if page == "docs/several-gpus.md":  # assumes a file
        run(["halfbyte", "init", MODELS[0], "data.jsonl"], "run.yaml")
    walk(page)


def test_every_page_with_commands_to_run_is_walked():
    for path in (ROOT / "docs").glob("*.md"):
        shell = [text for language, text in blocks_of(path) if language == "bash"]
        assert path.stem in GUIDES or not [words for text in shell for words, _ in commands(text) if is_run(words)], (
            path
        )
