"""Model card: README.md for users of the adapter, in the Hugging Face hub's layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..config.methods import SCORES
from ..methods import METHODS
from ..runs.layout import ADAPTER, METRICS, MODEL, MODEL_CARD, REPORT, RESOLVED_CONFIG
from ..utils.files import write_text
from ..utils.terminal import duration, method, size, storage
from ..utils.text import visible
from .run import Run, read_run

HYPERPARAMETERS = (
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "adapter_dtype", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "optim", "weight_decay", "max_grad_norm", "max_length", "packing", "seed",
)  # fmt: skip
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
ADAPTER_KEYS = HYPERPARAMETERS[:7]


def write_card(run_dir: Path | str) -> Path:
    """Read the files of a run directory and write README.md, a model card, into it.

    Returns:
        The path of README.md.

    Raises:
        TrainingError: README.md cannot be written.
    """
    run = read_run(run_dir)
    return write_text(run.path / MODEL_CARD, card(run))


def card(run: Run) -> str:
    """Return the card as Markdown with its YAML header."""
    full = not run.config.get("use_peft", True)
    what = "Fine-tuned weights" if full else "A LoRA adapter"
    parts = [
        f"---\n{yaml.safe_dump(_hub_header(run, full), sort_keys=False)}---",
        f"# {_plain(Path(run.model).name)}, fine-tuned with halfbyte",
        f"{what} for `{_code(run.model)}`, trained by {method(run.config)}.",
        f"## Use\n\n```python\n{_usage(run, full)}\n```",
        f"## Results\n\n{_table(_results(run))}",
        f"## Data\n\n{_table(_data(run))}",
        f"## Hyperparameters\n\n{_table(_hyperparameters(run, full))}",
        f"Every key is in `{RESOLVED_CONFIG}`, every number in `{METRICS}`, and plots are in `{REPORT}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _hub_header(run: Run, full: bool) -> dict[str, Any]:
    header: dict[str, Any] = {"library_name": "transformers" if full else "peft"}
    # The hub checks that base_model exists there, so a local folder is not named.
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", run.model) and not Path(run.model).exists():
        header["base_model"] = run.model
    header["tags"] = ["halfbyte", *([] if full else ["lora"]), run.config.get("method", "sft")]
    if not full and storage(run.config) != "16-bit":
        header["tags"].append("qlora")
    header["pipeline_tag"] = PIPELINES[_loader(run)[0]]
    return header


def _usage(run: Run, full: bool) -> str:
    """Code that loads the model with transformers and PEFT only."""
    loader, labels = _loader(run)
    lines = [f"from transformers import {loader}, AutoTokenizer"]
    if scheme := run.config.get("qat_scheme"):
        lines.insert(0, f"# trained for {scheme}; this loads 16-bit weights, `halfbyte merge` writes quantized ones")
    folder = MODEL if full else ADAPTER
    tokenizer = folder if (run.path / folder / "tokenizer_config.json").exists() else run.model
    if full:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained("{MODEL}", dtype="auto")')
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})")
        return "\n".join(lines)
    revision = run.config.get("model_revision", "main")
    pinned = "" if revision == "main" else f", revision={revision!r}"
    lines.insert(-1, "from peft import PeftModel")
    head = f", num_labels={labels}" if labels else ""
    lines.append(f'base = {loader}.from_pretrained({run.model!r}{head}, dtype="auto"{pinned})')
    lines.append(f'model = PeftModel.from_pretrained(base, "{ADAPTER}")')
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})")
    return "\n".join(lines)


def _loader(run: Run) -> tuple[str, int]:
    """Name of transformers' auto class for the base, and number of labels of the adapter's head (0: none)."""
    scores = getattr(METHODS.get(run.config.get("method", "sft")), "scores", None)
    labels, loader = SCORES.get(scores or "", (0, "AutoModelForCausalLM"))
    return loader, labels


def _results(run: Run) -> dict[str, str]:
    results, (loss, *others) = {}, run.numbers.evaluated
    if run.final_loss is not None:
        results[f"final training {loss.label}"] = format(run.final_loss, run.numbers.trained[0].format)
    if len(run.evals) > 1:
        results[f"held-out {loss.label} before"] = f"{loss.shown(run.evals[0])} (step {run.evals[0]['step']})"
    if run.evals:
        results[f"held-out {loss.label}"] = f"{loss.shown(run.evals[-1])} (step {run.evals[-1]['step']})"
        results |= {f"held-out {metric.label}": metric.shown(run.evals[-1]) for metric in others}
    if run.throughput:
        results["tokens per second"] = f"{run.throughput:,.0f}"
    if run.peak_bytes:
        base = ((run.memory or {}).get("measured") or {}).get("base_bytes")
        process = f", in addition to the process's {size(base)}" if base else ""
        results["peak memory of the run"] = size(run.peak_bytes - (base or 0)) + process
    if run.wall_seconds is not None:
        results["wall time"] = duration(run.wall_seconds)
    return results


def _data(run: Run) -> dict[str, str]:
    report = run.data or {}
    facts = {source["path"]: f"{source['rows']:,} rows, {source['format']}" for source in report.get("sources") or []}
    for name in ("train", "eval"):
        if split := report.get(name):
            facts[f"{name} tokens"] = f"{split['tokens']:,}, {split['trained_tokens']:,} of them trained on"
    return facts


def _hyperparameters(run: Run, full: bool) -> dict[str, str]:
    keys = [key for key in HYPERPARAMETERS if key in run.config and not (full and key in ADAPTER_KEYS)]
    return {key: str(run.config[key]) for key in keys}


def _table(facts: dict[str, str]) -> str:
    if not facts:
        return "Not recorded."
    rows = (f"| {_plain(name)} | {_plain(value)} |" for name, value in facts.items())
    return "\n".join(("| | |", "|---|---|", *rows))


def _plain(words: str) -> str:
    """Escape `words` as Markdown text; line breaks become spaces."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(visible(words).split()))


def _code(words: str) -> str:
    """Escape `words` for a Markdown code span."""
    return " ".join(visible(words).replace("`", "'").split())
