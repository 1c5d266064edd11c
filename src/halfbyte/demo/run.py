"""The demo: build the base, write a run.yaml, train with it, and show answers before and after.

The training is an ordinary run: `halfbyte train demo-out/run.yaml` repeats it, with any key changed.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import load_config
from ..reading import read_json, read_text
from ..runs.layout import EVAL, GENERATIONS, GIVEN_CONFIG, METRICS, REPORT
from ..utils.errors import ConfigError
from ..utils.files import clear_leftovers, remove, write_text, writing
from ..utils.text import one_line
from .base import Recipe, base_model

if TYPE_CHECKING:
    from ..utils.console import Console

INSTRUCTIONS = Path(__file__).with_name("instructions.jsonl")
MARK = "# Written by `halfbyte demo`."

RUN = """\
{mark} Change any key and train again: halfbyte train run.yaml output_dir=again
model_name_or_path: {base}
load_in_4bit: true
bnb_4bit_quant_type: nf4
bnb_4bit_use_double_quant: true
dataset: {dataset}
eval_split_size: 0.1
max_length: 256
packing: true
assistant_only_loss: true
r: 16
lora_alpha: 32
target_modules: all-linear
per_device_train_batch_size: 1
num_train_epochs: {epochs}
learning_rate: 5.0e-3
logging_steps: 10
eval_steps: 0.25
save_steps: 0.5
sample_prompts: 6
sample_max_new_tokens: 40
output_dir: {output_dir}
"""


def main(
    output_dir: str | Path = "demo-out",
    *,
    recipe: Recipe | None = None,
    epochs: int = 20,
    seconds: float = 75.0,
    console: Console | None = None,
) -> Path:
    """Build or fetch the base, fine-tune it in 4 bits on the instructions, and show loss and answers before and after.

    Args:
        output_dir: the run's folder; an earlier demo is replaced, other contents are an error.
        recipe: settings of the base.
        epochs: passes over the instructions.
        seconds: time limit of pretraining.
        console: output; default: the terminal.

    Returns:
        The path of the report.

    Raises:
        ConfigError: `output_dir` holds something else.
    """
    from rich.text import Text

    from ..report.terminal import print_run
    from ..train.run import train
    from ..utils.console import Console

    started = time.monotonic()
    console = console or Console(outlives_reader=True)
    output_dir = Path(output_dir)
    # Remove an earlier demo, and refuse to touch anything else.
    clear_leftovers(output_dir.parent)
    run = output_dir / GIVEN_CONFIG
    if output_dir.is_dir() and any(output_dir.iterdir()):
        if not (run.is_file() and read_text(run).startswith(MARK)):
            raise ConfigError(f"output_dir: {output_dir} holds something that is not a demo", "name another folder")
        with writing(output_dir):
            remove(output_dir)
    aims = ": pretrain a small base, store it in 4 bits, teach it answers; no downloads"
    console.print(Text.assemble(("halfbyte demo", "bold"), aims))
    base = base_model(recipe, seconds=seconds, console=console)
    described = read_json(base / "recipe.json")
    console.print(
        f"base: {base}, a Llama of {described['parameters'] / 1e6:.1f} M parameters, {described['steps_done']} steps "
        f"on Python's own texts, loss {described['final_loss']:.2f}"
    )
    config = load_config(write_run(output_dir, base, epochs))
    print_run(console, config)
    train(config, console=console)
    _show(output_dir, console)
    console.print(one_line(f"talk to it: halfbyte chat {output_dir} --temperature 0"))
    console.print(one_line(f"report: {output_dir / REPORT}  ({time.monotonic() - started:.0f} s in all)"))
    return output_dir / REPORT


def write_run(output_dir: Path, base: Path, epochs: int) -> Path:
    """Write the demo's data and run.yaml, and return the path of the latter."""
    dataset = write_text(output_dir / "instructions.jsonl", read_text(INSTRUCTIONS))
    paths = {"base": base, "dataset": dataset, "output_dir": output_dir}
    quoted = {name: json.dumps(str(path), ensure_ascii=False) for name, path in paths.items()}  # JSON strings are YAML
    return write_text(output_dir / GIVEN_CONFIG, RUN.format(mark=MARK, epochs=epochs, **quoted))


def question(prompt: str) -> str:
    """Return the user's text from a prompt in the base's chat format."""
    return re.sub(r"<\|im_start\|>(user|assistant)\n|<\|im_end\|>", "", prompt).strip()


def _show(output_dir: Path, console: Console) -> None:
    """Print held-out losses and answers, before and after training."""
    from rich.table import Table
    from rich.text import Text

    from ..runs.metrics import MetricsFile

    records = MetricsFile(output_dir / METRICS).records()
    losses = [record["loss"] for record in records if record["kind"] == EVAL]
    table = Table(title="Questions held out of training", title_justify="left", show_lines=True)
    for heading in ("question", "base", "after fine-tuning", "reference"):
        table.add_column(heading, ratio=1)
    answers: list[dict[str, Any]] = read_json(output_dir / GENERATIONS)
    for answer in answers:
        cells = (question(answer["prompt"]), answer["before"], answer["after"], answer["reference"])
        table.add_row(*(Text(cell.strip()) for cell in cells))  # Text: brackets in answers are not markup
    console.print(table)
    console.print(
        "The model has not seen these questions, but it has seen their topics in training, in other words. A base of "
        "this size learns no more in a minute."
    )
    console.print(f"held-out loss: {losses[0]:.3f} before, {losses[-1]:.3f} after (nats per answer token)")
