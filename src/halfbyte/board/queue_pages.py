"""The pages Queue and New run."""

from __future__ import annotations

import math
from pathlib import Path

from ..config.schema import RunKeys
from ..reading import read_text
from ..report.sections import missing, table, text
from ..runs import layout
from ..runs.queue import ACTIVE, HELD, QUEUED, digest_of
from ..utils.errors import ConfigError
from ..utils.text import duration, size
from .folders import Runs, Summary, run_id
from .pages import button, frame

EXAMPLE = """model_name_or_path: Qwen/Qwen3-8B
dataset: data.jsonl
max_length: 2048
packing: true
r: 16
learning_rate: 2.0e-4
eval_split_size: 0.05
output_dir: out
"""


def queue_page(runs: Runs, read_only: bool) -> str:
    """Return the jobs of the queue with their planned memory and, of running ones, the time that is left."""
    run_ids, jobs = runs.folders(), runs.jobs()
    waiting = [job.id for job in jobs if job.state in (QUEUED, HELD)]
    rows = []
    for job in jobs:
        number = run_id(Path(job.output))
        name = f'<a href="/run/{number}">{text(job.output)}</a>' if number in run_ids else text(job.output)
        remark = job.error
        if job.state == QUEUED and job.file and digest_of(job.file) != job.digest:
            remark = f"{job.file} has changed since it was queued"
        forms = ""
        if not read_only and job.state in (QUEUED, HELD):
            place = str(max(waiting.index(job.id), 1))
            fields = {"job": str(job.id)}
            forms = button(
                "Earlier", "/api/queue-move", fields | {"place": place}, f"halfbyte queue move {job.id} {place}"
            )
        if not read_only and job.state not in ACTIVE:
            forms += button("Remove", "/api/queue-remove", {"job": str(job.id)}, f"halfbyte queue remove {job.id}")
        left = _time_left(runs, number) if job.state in ACTIVE and number in run_ids else ""
        keys = f"{name}<br><small>{text(job.keys)}</small>"
        rows.append((str(job.id), text(job.state), keys, size(job.planned), text(job.lane), left, text(remark), forms))
    head = ("Job", "state", "run", "planned memory", "on", "time left", "remark", "changes")
    listed = f'<div class="queue">{table(head, rows)}</div>' if rows else missing("The queue is empty.")
    run = "" if read_only else button("Run the queue", "/api/queue-run", {}, "halfbyte queue run")
    return frame("Queue", f"<h1>Queue</h1>{run}{listed}", path="/queue", live=True)


def _time_left(runs: Runs, number: str) -> str:
    run = runs.summary(number)
    seconds = run.train.last("step_seconds")
    if run.status is None or run.status.total_steps is None or seconds is None or not math.isfinite(seconds):
        return ""
    return f"step {run.status.step:,}, {duration((run.status.total_steps - run.status.step) * seconds)}"


def new_page(source: Summary | None, read_only: bool) -> str:
    """Return the form of a new run: its YAML, buttons that check, queue and start it, and a table of all keys.

    Args:
        source: the run that its keys are copied from.
    """
    keys = EXAMPLE
    origin = number = ""
    if source is not None:
        number = source.id
        origin = f'<p>Copied from <a href="/run/{number}">{text(source.name)}</a>; give another output_dir.</p>'
        try:
            keys = read_text(source.folder / layout.GIVEN_CONFIG, ConfigError)
        except ConfigError:
            origin = f"<p>{text(source.name)} has no readable {layout.GIVEN_CONFIG}; this is an example.</p>"
    if read_only:
        return frame(
            "New run", f"<h1>New run</h1>{missing('The board is read-only.')}<pre>{text(keys)}</pre>", path="/new"
        )
    hidden = f'<input type="hidden" name="run" value="{text(number)}">' if number else ""
    buttons = "".join(
        f'<div><button data-post="/api/{action}">{name}</button> <code>{command}</code></div>'
        for action, name, command in (
            ("check", "Check", "halfbyte check run.yaml"),
            ("queue-add", "Add to the queue", "halfbyte queue add run.yaml"),
            ("start", "Start", "halfbyte queue add run.yaml; halfbyte queue run"),
        )
    )
    form = (
        f'<form class="new" data-post="/api/check">{hidden}<label>run.yaml <textarea name="keys" rows="16"'
        f' spellcheck="false">{text(keys)}</textarea></label>{buttons}</form>'
    )
    return frame("New run", f"<h1>New run</h1>{origin}{form}{_reference()}", path="/new")


def _reference() -> str:
    """Return every key with its default and meaning, from the schema."""
    rows = []
    for key, field in RunKeys.model_fields.items():
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        rows.append((f"<code>{text(key)}</code>", text(str(default)), text(field.description or "")))
    return f"<details><summary>Every key</summary>{table(('Key', 'default', 'meaning'), rows)}</details>"
