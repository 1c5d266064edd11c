"""The frame of every page, and the pages Runs and Run. Text of runs is escaped by `report.sections.text`."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ..methods.base import Metric
from ..report import sections as report
from ..report.explain import explain
from ..report.run import Run
from ..report.sections import table, text
from ..runs import layout
from ..utils.text import duration, size
from . import curves
from .curves import Line
from .folders import Summary
from .series import Records, Series

Query = Mapping[str, str]
AXES = {"step": "step", "tokens": "tokens", "time": "minutes", "epoch": "epoch"}
OTHER_CURVES = {
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "memory_bytes": "Memory (GiB)",
}
STEADY = ("learning_rate", "memory_bytes")  # curves without noise, which are not smoothed
NAVIGATION = (("/", "Runs"), ("/queue", "Queue"), ("/new", "New run"), ("/chat", "Chat"))
SAMPLE_STEPS = 8  # steps whose answers a page shows
WIDTHS = re.compile(r'class="(\w+)" style="width:([\d.]+)%"')
STATES = ("running", "finished", "stopped", "failed", "lost")


def frame(title: str, body: str, *, path: str = "", live: bool = False) -> str:
    """Return a page.

    Args:
        path: of the page, for the navigation.
        live: whether the script fetches the page again when it changes.
    """
    links = "".join(
        f'<a href="{target}"{" aria-current=page" if target == path else ""}>{name}</a>' for target, name in NAVIGATION
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(title)} · halfbyte board</title><link rel="stylesheet" href="/static/board.css">'
        '<script type="module" src="/static/board.js"></script></head><body>'
        f'<nav class="top" aria-label="Pages"><b>halfbyte</b>{links}</nav>'
        f'<p id="message" role="status"></p><main{" data-live" if live else ""}>{body}</main></body></html>\n'
    )


def classes_for_widths(html: str) -> str:
    """Return HTML of the report with classes in place of inline styles, which the board's policy forbids."""
    return WIDTHS.sub(lambda match: f'class="{match[1]} w{min(round(float(match[2])), 100)}"', html)


def button(label: str, action: str, fields: Mapping[str, str], command: str, *, confirm: str = "") -> str:
    """Return a button that the script sends as JSON, and the command line that does the same."""
    inputs = "".join(f'<input type="hidden" name="{name}" value="{text(value)}">' for name, value in fields.items())
    confirms = f' data-confirm="{text(confirm)}"' if confirm else ""
    shown = f"<code>{text(command)}</code>" if command else ""
    return f'<form class="action" data-post="{action}"{confirms}>{inputs}<button>{text(label)}</button>{shown}</form>'


# --- Runs ------------------------------------------------------------------------------------------------------------


def runs_page(runs: Sequence[Summary], query: Query, roots: Sequence[Path], read_only: bool) -> str:
    """Return the list of runs. The query searches (`q`), and chooses a `state`, a `tag` and `hidden` runs."""
    shown = [run for run in runs if _matches(run, query)]
    tags = sorted({tag for run in runs for tag in run.notes.tags})
    form = (
        '<form class="filters" role="search"><label>Search '
        f'<input name="q" value="{text(query.get("q", ""))}"></label>'
        f"{select('state', ('', *STATES), query.get('state', ''))}{select('tag', ('', *tags), query.get('tag', ''))}"
        f'<label><input type="checkbox" name="hidden" value="1"{" checked" if query.get("hidden") else ""}> hidden'
        "</label><button>Show</button></form>"
    )
    head = ("Compare", "Run", "State", "Step", "Loss", "Curve", "Held out", "tok/s", "Memory", "Time", "Updated")
    rows = "".join(_run_row(run) for run in shown)
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    listed = (
        f'<form action="/compare"><div class="scroll runs"><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody>'
        "</table></div><button>Compare the chosen runs</button></form>"
        if shown
        else '<p class="missing">No runs match.</p>'
        if runs
        else '<p class="missing">No runs yet.</p>'
    )
    folders = ", ".join(text(str(root)) for root in roots)
    mode = " The board is read-only." if read_only else ""
    note = f'<p class="note">{len(shown)} of {len(runs)} runs in {folders}.{mode}</p>'
    command = '<p class="note">On the command line: <code>halfbyte ps</code></p>'
    return frame("Runs", f"<h1>Runs</h1>{form}{note}{listed}{command}", path="/", live=True)


def _matches(run: Summary, query: Query) -> bool:
    words = query.get("q", "").lower().split()
    content = f"{run.name} {run.keys} {run.notes.text} {run.notes.tags} {run.state}".lower()
    state, tag = query.get("state", ""), query.get("tag", "")
    return (
        all(word in content for word in words)
        and (not state or run.state == state or (state == "running" and run.is_running))
        and (not tag or tag in run.notes.tags)
        and (not run.notes.hidden or bool(query.get("hidden")))
    )


def select(name: str, options: Iterable[str], chosen: str) -> str:
    """Return a list to choose from."""
    items = "".join(
        f'<option value="{text(option)}"{" selected" if option == chosen else ""}>{text(option) if option else "any"}'
        "</option>"
        for option in options
    )
    return f"<label>{name} <select name={name}>{items}</select></label>"


def _run_row(run: Summary) -> str:
    tags = "".join(f' <span class="tag">{text(tag)}</span>' for tag in run.notes.tags)
    facts = ", ".join(
        str(value)
        for value in (Path(str(run.keys.get("model_name_or_path", ""))).name, run.keys.get("method"))
        if value
    )
    name = f'<a href="/run/{run.id}">{text(run.name)}</a>{tags}<br><small>{text(facts)}</small>'
    error = f"<br><small class=bad>{text(run.error[:160])}</small>" if run.error else ""
    cells = [
        f'<input type="checkbox" name="run" value="{run.id}" aria-label="compare {text(run.name)}">',
        name + error,
        state(run),
        steps(run),
        number(run.train.last("loss")),
        curves.sparkline(run.train.steps, run.train.column("loss")),
        number(run.evals.last("loss")),
        number(run.train.last("tokens_per_second"), ",.0f"),
        size(run.train.last("memory_bytes")),
        duration(run.seconds),
        updated(run),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def state(run: Summary) -> str:
    """Return the state of a run, as a coloured word."""
    return f'<span class="state {text(run.state)}">{text(run.state)}</span>'


def steps(run: Summary) -> str:
    """Return step and number of steps of a run."""
    if run.status is None:
        return "–"
    return f"{run.status.step:,}" + (f" / {run.status.total_steps:,}" if run.status.total_steps else "")


def updated(run: Summary) -> str:
    """Return when a run wrote its status: the time of today, or a date."""
    if run.status is None or not 0 < run.status.heartbeat < 1e11:
        return "–"
    moment, today = time.localtime(run.status.heartbeat), time.localtime()
    return time.strftime("%H:%M:%S" if moment[:3] == today[:3] else "%Y-%m-%d", moment)


def number(value: float | None, shown: str = ".4g") -> str:
    """Format a number; – if it is missing."""
    return "–" if value is None or not math.isfinite(value) else format(value, shown)


# --- Run -------------------------------------------------------------------------------------------------------------


def run_page(
    run: Summary,
    contents: Run,
    metrics: Records,
    samples: Sequence[Mapping[str, Any]],
    query: Query,
    *,
    log: str = "",
    read_only: bool = False,
) -> str:
    """Return the page of a run: live numbers and curves, then the sections of its report.

    Args:
        contents: the files of the run, without records.
        samples: lines of samples.jsonl.
        query: `x` (a key of `AXES`), `log`, `smooth`, `from` and `to`.
        log: the end of its output, if the queue started it.
    """
    blocks = [
        ("curves", "Curves", lambda: _curves_section(contents, metrics, query)),
        ("explain", "What stands out", lambda: explained(contents, metrics)),
        ("memory", "Memory", lambda: classes_for_widths(report.memory(contents))),
        ("answers", "Answers", lambda: answers_by_step(samples) or report.answers(contents)),
        *([("sampled", "Answers it was trained on", lambda: report.sampled(contents))] if contents.sampled else []),
        *([("experts", "Experts", lambda: report.experts(contents))] if contents.experts else []),
        ("checks", "Merge and checks", lambda: report.checks(contents)),
        *([("log", "Log", lambda: f"<pre>{text(log)}</pre>")] if log else []),
        ("files", "Files", lambda: _files(run)),
        ("environment", "Environment", lambda: report.environment(contents)),
        ("configuration", "Configuration", lambda: report.configuration(contents)),
    ]
    html = "".join(f'<section id="{name}"><h2>{title}</h2>{guarded(make)}</section>' for name, title, make in blocks)
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in blocks)
    data = f'<a href="/run/{run.id}/data">Data</a>'
    problems = "".join(f"<li>{text(problem)}</li>" for problem in _problems(run, contents, metrics))
    body = (
        f'<header><p class="eyebrow">{text(str(run.folder))}</p><h1>{text(run.name)}</h1>'
        f"<p>{state(run)} step {steps(run)}, updated {updated(run)}</p></header>"
        + (f'<ul class="problems">{problems}</ul>' if problems else "")
        + _tiles(run, contents, metrics)
        + _actions(run, read_only)
        + f'<nav aria-label="Sections">{data}{links}</nav>{html}'
    )
    return frame(run.name, body, live=True)


def guarded(make: Callable[[], str]) -> str:
    """Return a part of a page; a note in its place if a file of the run has malformed values."""
    try:
        return make().replace("<h4>", '<h3 class="label">').replace("</h4>", "</h3>")  # sections have h2
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return report.missing(f"This cannot be shown from the run's files: {type(error).__name__}: {error}")


def _problems(run: Summary, contents: Run, metrics: Records) -> list[str]:
    problems = [*([run.error] if run.error else []), *contents.problems]
    if metrics.unreadable:
        problems.append(f"{layout.METRICS}: {metrics.unreadable:,} lines cannot be read and are ignored")
    if metrics.skipped:
        problems.append(f"{layout.METRICS} is huge: only its end is shown")
    return problems


def _tiles(run: Summary, contents: Run, metrics: Records) -> str:
    train, evals = metrics.train, metrics.evals
    measured = (contents.memory or {}).get("measured") or {}
    times = train.columns.get("time")
    eta = ""
    if run.is_running and run.status and run.status.total_steps and train.last("step_seconds"):
        left = (run.status.total_steps - run.status.step) * (train.last("step_seconds") or 0)
        eta = f"about {duration(left)} left"
    facts = [
        ("Training loss", number(train.last("loss")), f"from {number(train.first('loss'))}"),
        ("Held-out loss", number(evals.last("loss")), f"from {number(evals.first('loss'))}"),
        ("Throughput", number(train.last("tokens_per_second"), ",.0f") + " tok/s", eta),
        ("Peak memory", size(measured.get("peak_bytes") or train.last("memory_bytes")), ""),
        ("Time", duration(times[-1] - times[0]) if times else "–", ""),
    ]
    items = "".join(
        f'<div><dt>{name}</dt><dd class="figure">{text(figure)}</dd><dd class="aside">{text(aside)}</dd></div>'
        for name, figure, aside in facts
    )
    return f'<dl class="tiles">{items}</dl>'


def _actions(run: Summary, read_only: bool) -> str:
    """Return what can be done with the run, each with its command line."""
    folder = str(run.folder)
    if read_only:
        note = f'<p class="note">{text(run.notes.text)}</p>' if run.notes.text else ""
        return f"{note}<p class=note>The board is read-only.</p>"
    forms = []
    if run.is_running:
        forms.append(button("Stop with a checkpoint", "/api/stop", {"run": run.id}, f"halfbyte stop {folder}"))
        command = f"halfbyte stop {folder} --now"
        question = "End the run at once, without a checkpoint of its last step?"
        forms.append(button("Stop now", "/api/stop", {"run": run.id, "now": "1"}, command, confirm=question))
    else:
        question = "Move the folder of this run into the trash folder beside it?"
        trash = "mv to .halfbyte-trash"
        forms.append(button("Move to the trash", "/api/trash", {"run": run.id}, trash, confirm=question))
    links = f'<p><a href="/new?from={run.id}">New run from this one</a> <a href="/chat?run={run.id}">Chat</a></p>'
    hidden = " checked" if run.notes.hidden else ""
    notes = (
        f'<form class="notes" data-post="/api/notes"><input type="hidden" name="run" value="{run.id}">'
        f'<label>Notes <textarea name="text" rows="2">{text(run.notes.text)}</textarea></label>'
        f'<label>Tags, separated by commas <input name="tags" value="{text(", ".join(run.notes.tags))}"></label>'
        f'<label><input type="checkbox" name="hidden" value="1"{hidden}> hide in lists</label><button>Save</button>'
        "</form>"
    )
    return f'<details class="actions"><summary>Actions and notes</summary>{"".join(forms)}{links}{notes}</details>'


def axis(metrics: Records, name: str) -> tuple[list[float], Callable[[Series], list[float]]]:
    """Return the positions of training records along an axis, and a function that places evaluations on it."""
    train = metrics.train
    if name == "tokens":
        positions = list(accumulate(value if math.isfinite(value) else 0 for value in train.column("tokens")))
    elif name == "time":
        start = train.first("time") or 0.0
        positions = [(value - start) / 60 for value in train.column("time")]
    elif name == "epoch":
        positions = train.column("epoch")
    else:
        return [float(step) for step in train.steps], lambda series: [float(step) for step in series.steps]
    by_step = dict(zip(train.steps, positions, strict=True))
    ordered = sorted(by_step)

    def of_series(series: Series) -> list[float]:
        indices = (bisect_right(ordered, step) - 1 for step in series.steps)
        return [by_step[ordered[index]] if index >= 0 else 0.0 for index in indices]

    return positions, of_series


def cut_line(line: Line, query: Query) -> Line:
    """Return the part of a line that the query's `from` and `to` choose."""
    low, high = (_float(query.get(name)) for name in ("from", "to"))
    if low is None and high is None:
        return line
    pairs = [
        (x, y)
        for x, y in zip(line.xs, line.ys, strict=True)
        if math.isfinite(x) and (low is None or x >= low) and (high is None or x <= high)
    ]
    return Line(line.name, [x for x, _ in pairs], [y for _, y in pairs], line.colour, line.dots)


def _float(value: str | None) -> float | None:
    try:
        parsed = float(value or "")
    except ValueError:
        return None
    return parsed if math.isfinite(parsed) else None


def curve_form(query: Query, hidden: Iterable[tuple[str, str]] = ()) -> str:
    """Return the form that chooses axis, scale and range of curves."""
    fields = "".join(f'<input type="hidden" name="{name}" value="{text(value)}">' for name, value in hidden)
    chosen = AXES if query.get("x") in AXES else {}
    checks = "".join(
        f'<label><input type="checkbox" name="{name}" value="1"{" checked" if query.get(name) else ""}> {label}</label>'
        for name, label in (("log", "log scale"), ("raw", "not smoothed"))
    )
    bounds = "".join(
        f'<label>{name} <input name="{name}" size="6" inputmode="decimal" value="{text(query.get(name, ""))}"></label>'
        for name in ("from", "to")
    )
    options = select("x", AXES, query.get("x", "step") if chosen else "step")
    return f'<form class="filters">{fields}{options}{checks}{bounds}<button>Draw</button></form>'


def _curves_section(contents: Run, metrics: Records, query: Query) -> str:
    train, evals = metrics.train, metrics.evals
    if not train.steps and not evals.steps:
        return report.missing(f"No training steps were recorded ({layout.METRICS} is missing or empty).")
    name = query.get("x", "step") if query.get("x") in AXES else "step"
    positions, of_others = axis(metrics, name)
    held_out = of_others(evals)
    drawn = []
    trained: tuple[Metric, ...] = (*contents.numbers.trained, *contents.numbers.beside)
    labels = {metric.name: metric.label.capitalize() for metric in trained} | OTHER_CURVES
    for key, label in labels.items():
        lines = [Line("training", positions, _scaled(train.column(key), key))]
        if key in evals.columns:
            lines.append(Line("held out", held_out, evals.column(key), colour=1, dots=True))
        lines = [cut for line in lines if (cut := cut_line(line, query)).xs]
        if not any(math.isfinite(y) for line in lines for y in line.ys):
            continue
        svg = curves.chart(
            label, lines, AXES[name], log=bool(query.get("log")), smoothed=key not in STEADY and not query.get("raw")
        )
        drawn.append((label, svg))
    return curve_form(query) + report.figures(*drawn) + evaluations(contents.numbers.evaluated, evals)


def _scaled(values: list[float], key: str) -> list[float]:
    return [value / 2**30 for value in values] if key == "memory_bytes" else values


def evaluations(metrics: Sequence[Metric], evals: Series) -> str:
    """Return the table of the last evaluations."""
    if not evals.steps:
        return ""
    shown = [metric for metric in metrics if metric.name in evals.columns]
    last = range(max(0, len(evals.steps) - 20), len(evals.steps))
    rows = [(f"step {evals.steps[at]:,}", *(number(evals.column(metric.name)[at]) for metric in shown)) for at in last]
    return table(("Evaluation after", *(text(metric.label) for metric in shown)), rows)


def explained(contents: Run, metrics: Records) -> str:
    """Return the findings of `halfbyte explain` as a table."""
    full = Run(**{**vars(contents), "train": records_of(metrics.train), "evals": records_of(metrics.evals)})
    command = f'<p class="note">On the command line: <code>halfbyte explain {text(str(contents.path))}</code></p>'
    return report.findings(explain(full)) + command


def records_of(series: Series, limit: int = 2000) -> list[dict[str, Any]]:
    """Return records of a series as dictionaries, at most about `limit`, evenly spaced, with the last one."""
    count = len(series.steps)
    chosen = [*range(0, count, max(1, count // limit))]
    chosen += [count - 1] if count and chosen[-1] != count - 1 else []
    columns = series.columns.items()
    return [
        {"step": series.steps[at]}
        | {key: column[at] for key, column in columns if at < len(column) and math.isfinite(column[at])}
        for at in chosen
    ]


def answers_by_step(samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the answers of samples.jsonl, for each prompt by step; empty without any."""
    by_prompt: dict[str, dict[int, str]] = {}
    references: dict[str, Any] = {}
    for line in samples:
        prompt, step = line.get("prompt"), line.get("step")
        if isinstance(prompt, str) and isinstance(step, int):
            by_prompt.setdefault(prompt, {})[step] = str(line.get("answer"))
            references[prompt] = line.get("reference")
    cards = []
    for prompt, answers in by_prompt.items():
        ordered = sorted(answers)
        stride = max(1, -(-len(ordered) // SAMPLE_STEPS))
        chosen = sorted({*ordered[::stride], ordered[-1]})
        columns = [(f"step {step:,}", answers[step]) for step in chosen]
        columns += [("reference", str(references[prompt]))] if references[prompt] else []
        shown = "".join(f"<div><h4>{name}</h4><pre>{text(answer)}</pre></div>" for name, answer in columns)
        cards.append(f'<article><h4>prompt</h4><pre>{text(prompt)}</pre><div class="columns">{shown}</div></article>')
    return "".join(cards)


def _files(run: Summary) -> str:
    """Return the names and sizes of the files of a run."""
    rows = []
    try:
        for path in sorted(run.folder.iterdir()):
            if not path.name.startswith("."):
                kind = "folder" if path.is_dir() else size(path.stat().st_size)
                rows.append((text(path.name), kind))
    except OSError:
        return report.missing("The folder cannot be read.")
    return table(("File", "size"), rows[:500])


def with_query(path: str, query: Query, **changed: str) -> str:
    """Return a URL with some of its query changed."""
    values = {name: value for name, value in {**query, **changed}.items() if value}
    return text(f"{path}?{urlencode(values)}")
