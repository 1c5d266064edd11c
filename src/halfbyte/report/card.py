"""Model card: README.md for users of the adapter, in the Hugging Face hub's layout."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import yaml

from ..adapter_kinds import adapter_type_of, find_adapter_kind
from ..config.methods import SCORES, TASKS
from ..methods import METHODS
from ..reading.tensors import OVERRIDES
from ..runs.layout import ADAPTER, METRICS, MODEL, MODEL_CARD, REPORT, RESOLVED_CONFIG
from ..runs.metrics import describe_best
from ..utils.files import new_file, write_text
from ..utils.hub import is_local
from ..utils.text import duration, size, visible
from .run import Run, read_run
from .sections import PICTURE
from .terminal import method, storage

HYPERPARAMETERS = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "weight_decay", "max_grad_norm",
    "max_length", "rope_scaling", "packing", "seed",
)  # fmt: skip
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModel": "sentence-similarity",
}
ANSWERS = 3  # about images, on a card
ADAPTER_KEYS = ("target_modules", "adapter_dtype")  # after those of the kind of adapter


def write_card(run_dir: Path | str) -> Path:
    """Read the files of a run directory and write README.md, a model card, into it and into its folder of weights.

    The card beside the weights is meant for the hub: it names no file of this machine.

    Returns:
        The path of README.md in the run directory.

    Raises:
        TrainingError: README.md cannot be written.
    """
    run = read_run(run_dir)
    weights = run.path / _weights(run)
    if weights.is_dir():
        write_text(weights / MODEL_CARD, card(run, published=True))
    for generation in _seen(run):
        for name, url in _pictures(generation).items():
            with new_file(run.path / name) as temporary:
                temporary.write_bytes(base64.b64decode(url.partition(",")[2]))
    return write_text(run.path / MODEL_CARD, card(run))


def card(run: Run, *, published: bool = False) -> str:
    """Return the card as Markdown with its YAML header.

    Args:
        published: whether the card is beside the weights, without paths of this machine; default: in the run's folder.
    """
    row = find_adapter_kind(run.config)
    description = "Fine-tuned weights" if _weights(run) == MODEL else f"A {row.name if row else 'PEFT'} adapter"
    base = _shown(run.model, published)
    code = " ".join(visible(base).replace("`", "'").split())  # for a code span
    blocks = [
        f"---\n{yaml.safe_dump(_hub_header(run), sort_keys=False)}---",
        f"# {_plain(Path(run.model).name)}, fine-tuned with halfbyte",
        f"{description} for `{code}`, trained by {method(run.config)}.",
        f"## Use\n\n```python\n{_usage(run, published)}\n```{_base_warning(run)}",
        f"## Results\n\n{_table(_results(run))}",
        f"## Data\n\n{_table(_data(run, published))}",
        f"## Hyperparameters\n\n{_table(_hyperparameters(run))}",
    ]
    if not published:
        if answers := [_answer(generation) for generation in _seen(run)]:
            blocks.append("\n\n".join(["## Answers about images", *answers]))
        files = f"Every key is in `{RESOLVED_CONFIG}`, every number in `{METRICS}`, and plots are in `{REPORT}`."
        blocks.append(files)
    return "\n\n".join(blocks) + "\n"


def _seen(run: Run) -> list[dict[str, Any]]:
    """Return the first answers about images; private images stay out of the published card."""
    return [generation for generation in run.generations or () if generation.get("images")][:ANSWERS]


def _pictures(generation: dict[str, Any]) -> dict[str, str]:
    """Return file name → data URL of a prompt's thumbnails; the name is made of the URL, so a page keeps its images."""
    urls = (url for url in generation["images"] if PICTURE.fullmatch(str(url)))
    return {f"picture-{hashlib.sha256(url.encode()).hexdigest()[:12]}.jpg": url for url in urls}


def _answer(generation: dict[str, Any]) -> str:
    """Return a prompt with its thumbnails, and its answers, as Markdown."""
    pictures = " ".join(f"![image]({name})" for name in _pictures(generation))
    answers = {name: str(generation.get(name) or "") for name in ("prompt", "before", "after", "reference")}
    return f"{pictures}\n\n{_table({name: answer for name, answer in answers.items() if answer})}"


def _weights(run: Run) -> str:
    """Return the name of the folder that the run saves its weights in."""
    return ADAPTER if run.config.get("use_peft", True) else MODEL


def _hub_header(run: Run) -> dict[str, Any]:
    full = _weights(run) == MODEL
    header: dict[str, Any] = {"library_name": "transformers" if full else "peft"}
    # The hub checks that base_model exists there, so a local folder is not named.
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", run.model) and not Path(run.model).exists():
        header["base_model"] = run.model
    adapter = "" if full else adapter_type_of(run.config).lower()
    header["tags"] = ["halfbyte", *([adapter] if adapter else []), run.config.get("method", "sft")]
    if adapter == "lora" and storage(run.config) != "16-bit":
        header["tags"].append("qlora")
    header["pipeline_tag"] = PIPELINES[_loader(run)[0]]
    return header


def _usage(run: Run, published: bool) -> str:
    """Return code that loads the model with transformers and PEFT only, in the folder of the card."""
    loader, labels = _loader(run)
    reader = "AutoProcessor" if _reads_images(run) else "AutoTokenizer"
    lines = [f"from transformers import {loader}, {reader}"]
    scheme = "the base's own format" if run.config.get("merge_aware") else run.config.get("qat_scheme")
    if scheme:
        lines.insert(0, f"# trained for {scheme}; this loads 16-bit weights, `halfbyte merge` writes quantized ones")
    weights = "." if published else _weights(run)
    has_tokenizer = (run.path / _weights(run) / "tokenizer_config.json").exists()
    tokenizer = f"{reader}.from_pretrained({weights!r})"
    if not has_tokenizer:
        tokenizer = f"{reader}.from_pretrained({_arguments_of_base(run, published)})"
    tokenizer = f"{reader.removeprefix('Auto').lower()} = {tokenizer}"
    if _weights(run) == MODEL:
        lines.append(f'model = {loader}.from_pretrained("{weights}", dtype="auto")')
        lines.append(tokenizer)
        return "\n".join(lines)
    if run.config.get("method") == "embedding":
        lines = ["from sentence_transformers import SentenceTransformer", f'model = SentenceTransformer("{weights}")']
        return "\n".join([*lines, 'queries = model.encode(["..."], prompt_name="query")'])
    head = f", num_labels={labels}" if labels else ""
    if run.config.get("method") in TASKS:  # config.json beside the adapter names the labels
        lines[0] = f"from transformers import AutoConfig, {loader}, AutoTokenizer"
        head = f', config=AutoConfig.from_pretrained("{weights}")'
    lines.insert(-1, "from peft import PeftModel")
    arguments = f'{_arguments_of_base(run, published)}{head}, dtype="auto"'
    if run.config.get("rope_scaling"):  # the base's own config.json has another scale
        lines.insert(0, "import json")
        lines.append(f"overrides = json.load(open({os.path.join(weights, OVERRIDES)!r}))  # RoPE as in training")
        arguments += ", **overrides"
    lines.append(f"base = {loader}.from_pretrained({arguments})")
    lines.append(f'model = PeftModel.from_pretrained(base, "{weights}")')
    lines.append(tokenizer)
    return "\n".join(lines)


def _base_warning(run: Run) -> str:
    """Return which base the adapter was trained on, if it is not the one that `_usage` loads."""
    stored = storage(run.config)
    if _weights(run) == MODEL or stored == "16-bit" or run.config.get("qat_scheme"):
        return ""
    return (
        f"\n\nThe adapter was trained on the base stored as {_plain(stored)}. The code above loads the base in its own"
        " precision, which gives slightly different answers. `halfbyte merge` compares both bases and merges onto the"
        " closer one; `halfbyte chat` and `halfbyte serve` load the base as it was trained on."
    )


def _arguments_of_base(run: Run, published: bool) -> str:
    """Return the arguments of transformers' `from_pretrained` that load the base model."""
    path = Path(run.model)
    if not is_local(run.model):
        revision = run.config.get("model_revision", "main")
        return f"{run.model!r}" + ("" if revision == "main" else f", revision={revision!r}")
    folder, file = (path.parent, f", gguf_file={path.name!r}") if path.suffix == ".gguf" else (path, "")
    shown = f"FOLDER_OF_{'GGUF' if file else 'BASE'}" if published else os.path.abspath(folder)
    return f"{shown!r}{file}"


def _loader(run: Run) -> tuple[str, int]:
    """Name of transformers' auto class for the base, and number of labels of the adapter's head (0: none)."""
    scores = getattr(METHODS.get(run.config.get("method", "sft")), "scores", None)
    plain = "AutoModelForImageTextToText" if _reads_images(run) else "AutoModelForCausalLM"
    labels, loader = SCORES.get(scores or "", (0, plain))
    return loader, len(run.config.get("labels") or ()) or labels


def _reads_images(run: Run) -> bool:
    """Return whether rows of a run have images."""
    return bool(((run.data or {}).get("train") or {}).get("images"))


def _results(run: Run) -> dict[str, str]:
    results, (loss, *metrics) = {}, run.numbers.evaluated
    if run.final_loss is not None:
        steps = f"steps {run.last_steps[0]['step']:,} to {run.train[-1]['step']:,}"
        figure = format(run.final_loss, run.numbers.trained[0].format)
        results[f"final training {loss.label}"] = f"{figure} (mean of the last tenth of the records: {steps})"
    if len(run.evals) > 1:
        results[f"held-out {loss.label} before"] = f"{loss.shown(run.evals[0])} (step {run.evals[0]['step']})"
    if run.evals:
        last = run.final_evaluation
        results[f"held-out {loss.label}"] = f"{loss.shown(last)} (step {last['step']})"
        results |= {f"held-out {metric.label}": metric.shown(last) for metric in metrics}
    if run.best:
        results["checkpoint"] = describe_best(run.best)
    if run.throughput:
        results["tokens per second"] = f"{run.throughput:,.0f}"
    if run.peak_bytes:
        base = ((run.memory or {}).get("measured") or {}).get("base_bytes")
        process = f", in addition to the process's {size(base)}" if base else ""
        results["peak memory of the run"] = size(run.peak_bytes - (base or 0)) + process
    if run.wall_seconds is not None:
        results["wall time"] = duration(run.wall_seconds)
    return results


def _data(run: Run, published: bool) -> dict[str, str]:
    report = run.data or {}
    facts = {
        _shown(source["path"], published): f"{source['rows']:,} rows, {source['format']}"
        for source in report.get("sources") or []
    }
    for name in ("train", "eval"):
        if split := report.get(name):
            facts[f"{name} tokens"] = f"{split['tokens']:,}, {split['trained_tokens']:,} of them trained on"
    return facts


def _shown(path: str, published: bool) -> str:
    """Return the name of a model or data source in a card; a published card has no folders of this machine."""
    return Path(path).name if published and is_local(path) else path


def _hyperparameters(run: Run) -> dict[str, str]:
    row = find_adapter_kind(run.config)
    of_adapter = () if row is None or _weights(run) == MODEL else (*row.reported, *ADAPTER_KEYS)
    keys = (*of_adapter, *HYPERPARAMETERS)
    shown = {key: str(run.config[key]) for key in keys if run.config.get(key) is not None}
    if 0 < (run.config.get("warmup_steps") or 0) < 1:
        shown["warmup_steps"] += " of all steps"
    return shown


def _table(facts: dict[str, str]) -> str:
    if not facts:
        return "Not recorded."
    rows = (f"| {_plain(name)} | {_plain(value)} |" for name, value in facts.items())
    return "\n".join(("| | |", "|---|---|", *rows))


def _plain(words: str) -> str:
    """Escape `words` as Markdown text; line breaks become spaces."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(visible(words).split()))
