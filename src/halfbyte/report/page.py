"""report.html: headline figures and sections in one self-contained page.

The page loads nothing and runs no script; its content security policy forbids both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..plan.memory_plan import flat_plan
from ..runs.layout import REPORT, RESOLVED_CONFIG
from ..utils.files import write_text
from ..utils.text import duration, size
from .run import Run, read_run
from .sections import sections, shown, table, text
from .style import CSS
from .terminal import comparable_bytes, deviation, excess_reason, method, storage

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(run_dir: Path | str) -> Path:
    """Read the files of a run directory and write report.html into it.

    Args:
        run_dir: a run's output_dir. Any of its files may be missing; the section that needs it reports that.

    Returns:
        The path of report.html.

    Raises:
        TrainingError: report.html cannot be written.
    """
    run = read_run(run_dir)
    return write_text(run.path / REPORT, page(run))


def summary(run_dir: Path | str) -> str:
    """Return the headline figures of a run as an HTML table for a notebook, with the path of its report."""
    run = read_run(run_dir)
    rows = [(text(name), text(figure), text(aside)) for name, figure, aside in headline(run)]
    return f"<p><b>{text(run.model)}</b>, {text(str(run.path / REPORT))}</p>{table((), rows)}"


def page(run: Run) -> str:
    """Return the report as HTML."""
    blocks = sections(run)
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title, _ in blocks)
    body = "".join(f'<section id="{anchor}"><h2>{title}</h2>{html}</section>' for anchor, title, html in blocks)
    items = "".join(f"<li>{text(problem)}</li>" for problem in run.problems)
    problems = f'<ul class="problems">{items}</ul>' if items else ""
    return document(
        run.model,
        f"{shown(header, run)}{shown(tiles, run)}"
        f"{problems}<nav>{links}</nav>{body}"
        f"<footer>{shown(footer, run)}</footer>",
    )


def document(title: str, body: str) -> str:
    """Return a page with this title and these HTML elements."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} · halfbyte</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def header(run: Run) -> str:
    """Header with model, method, data and start time."""
    dataset = run.config.get("dataset", "unknown data")
    datasets = dataset if isinstance(dataset, list) else [dataset]
    paths = (entry.get("path") if isinstance(entry, dict) else entry for entry in datasets)
    names = ", ".join(Path(str(path)).name for path in paths)
    started = run.moment("started")
    when = f" · {started.day} {started:%B %Y, %H:%M %Z}" if started else ""
    summary = f"{method(run.config)} on {names}" if run.config else f"a run without {RESOLVED_CONFIG}"
    return (
        f'<header><p class="eyebrow">halfbyte run{when}</p><h1>{text(Path(run.model).name)}</h1>'
        f'<p class="lead">{text(summary)}</p></header>'
    )


def tiles(run: Run) -> str:
    """Tiles of the known headline figures."""
    shown = "".join(
        f'<div><dt>{name}</dt><dd class="figure">{text(figure)}</dd><dd class="aside">{text(aside)}</dd></div>'
        for name, figure, aside in headline(run)
    )
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


def headline(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name, figure and remark of each headline figure."""
    if run.final_loss is not None:
        since = run.last_steps[0]["step"]
        loss = run.numbers.trained[0]
        figure = format(run.final_loss, loss.format)
        yield f"Final training {loss.label}", figure, f"mean from step {since:,} to {run.train[-1]['step']:,}"
    if run.evals:
        initial, final = run.evals[0], run.final_evaluation
        loss, *metrics = run.numbers.evaluated
        several = len(run.evals) > 1
        was = f"from {loss.shown(initial)} at step {initial['step']}" if several else f"at step {final['step']}"
        yield f"Held-out {loss.label}", loss.shown(final), was
        for metric in metrics:
            yield f"Held-out {metric.label}", metric.shown(final), f"from {metric.shown(initial)}" if several else ""
    if run.throughput:
        yield "Throughput", f"{run.throughput:,.0f} tok/s", f"{run.step_seconds:.3g} s per step (median)"
    if run.peak_bytes:
        yield _memory_tile(run)
    if run.wall_seconds is not None:
        last = run.train[-1] if run.train else None
        yield (
            "Wall time",
            duration(run.wall_seconds),
            f"{last['step']:,} steps, {last['epoch']:.3g} epochs" if last else "",
        )
    split = (run.data or {}).get("train")
    if split and split.get("tokens"):
        share = split["trained_tokens"] / split["tokens"]
        yield (
            "Training data",
            f"{split['tokens']:,} tokens",
            f"{split['documents']:,} documents, {share:.1%} trained on",
        )
    if run.config.get("use_peft", True) and "r" in run.config:
        rank, base = f"rank {run.config['r']}", storage(run.config)
        yield "Adapter", rank, f"{base} base, learning rate {run.config['learning_rate']:g}"


def _memory_tile(run: Run) -> tuple[str, str, str]:
    """Peak memory on top of the process before the run, comparable with the plan."""
    measured = (run.memory or {}).get("measured") or {}
    plan = flat_plan(run.memory or {})
    predicted, added = comparable_bytes(plan, measured | {"peak_bytes": run.peak_bytes})
    remarks = [f"{deviation(predicted, added)} the predicted {size(predicted)}"] if predicted else []
    if why := excess_reason(predicted, added, plan):
        remarks.append(why)
    if base := measured.get("base_bytes"):
        remarks.append(f"in addition to the process's {size(base)}")
    return "Peak memory of the run", size(added), ", ".join(remarks)


def footer(run: Run) -> str:
    """Footer with halfbyte's version."""
    version = ((run.environment or {}).get("halfbyte") or {}).get("version") or ""
    return f"Written by halfbyte {text(version)} from the files in {text(run.path.name)}."
