"""The pages Compare (several runs) and Data (the documents of a run as the model reads them, by their loss)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report import sections as report
from ..report.run import Run
from ..report.sections import table, text
from . import curves
from .curves import Line
from .folders import Summary
from .pages import (
    AXES,
    OTHER_CURVES,
    STEADY,
    Query,
    axis,
    curve_form,
    cut_line,
    frame,
    guarded,
    number,
    select,
    state,
    with_query,
)
from .series import Records

MOST_RUNS = 12  # that are compared
ROWS = 50  # documents of a page
OUTPUTS = ("output_dir", "resume_from_checkpoint")
ORDERS = {
    "end": "highest loss after training",
    "start": "highest loss before training",
    "learned": "most learned",
    "worse": "most unlearned",
    "tokens": "longest",
    "row": "order of the data",
}


@dataclass
class Member:
    """One of the compared runs."""

    summary: Summary
    contents: Run
    metrics: Records
    samples: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        return self.summary.name

    @property
    def held_out(self) -> str:
        """Identity of its held-out documents: their digest, or the keys that choose them."""
        digest = ((self.contents.environment or {}).get("inputs") or {}).get("eval_dataset")
        if digest:
            return str(digest)
        keys = ("dataset", "eval_dataset", "eval_split_size", "seed", "max_length", "model_name_or_path")
        return json.dumps([self.contents.config.get(key) for key in keys])


# --- Compare ---------------------------------------------------------------------------------------------------------


def compare_page(members: Sequence[Member], query: Query, chosen: Sequence[str], *, saved: bool = False) -> str:
    """Return the comparison of some runs; `saved`: the body of a self-contained file."""
    if len(members) < 2:
        body = "<h1>Compare</h1><p>Choose 2 to 12 runs in the <a href='/'>list of runs</a>.</p>"
        return body if saved else frame("Compare", body)
    hidden = [("run", number) for number in chosen]
    address = "/compare?" + "".join(f"run={number}&" for number in chosen)
    links = "".join(
        f'<a href="{text(f"{address}format={name}")}">{label}</a>'
        for name, label in (("md", "as Markdown"), ("html", "save as one file"))
    )
    form = "" if saved else curve_form(query, hidden)
    nav = "" if saved else f"<nav aria-label='Formats'>{links}</nav>"
    body = (
        f"<h1>{len(members)} runs compared</h1>{nav}"
        f"<section><h2>Numbers</h2>{guarded(lambda: table(*numbers(members)))}</section>"
        f"<section><h2>Curves</h2>{form}{guarded(lambda: _curves(members, query))}</section>"
        f"<section><h2>Keys that differ</h2>{guarded(lambda: table(*differing_keys(members)))}</section>"
        f"<section><h2>Answers</h2>{guarded(lambda: _answers(members))}</section>"
        f"<section><h2>Merges</h2>{guarded(lambda: _merges(members))}</section>"
    )
    return body if saved else frame("Compare", body, live=True)


def numbers(members: Sequence[Member]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of numbers; differences are from the first run."""
    same = len({member.held_out for member in members}) == 1
    first = members[0].metrics
    rows = []
    for member in members:
        train, evals = member.metrics.train, member.metrics.evals
        held_out = number(evals.last("loss"))
        if same and member is not members[0]:
            held_out += _difference(evals.last("loss"), first.evals.last("loss"))
        rows.append(
            [
                f'<a href="/run/{member.summary.id}">{text(member.name)}</a>',
                state(member.summary),
                f"{train.steps[-1]:,}" if train.steps else "–",
                number(train.last("loss"))
                + _difference(train.last("loss"), first.train.last("loss"), member is not members[0]),
                held_out,
                number(train.last("tokens_per_second"), ",.0f"),
                number((train.last("memory_bytes") or math.nan) / 2**30, ".1f"),
            ]
        )
    return ["Run", "state", "step", "loss", "held-out loss", "tok/s", "memory (GiB)"], rows


def _difference(value: float | None, reference: float | None, shown: bool = True) -> str:
    return f" ({value - reference:+.3g})" if shown and value is not None and reference is not None else ""


def _curves(members: Sequence[Member], query: Query) -> str:
    name = query.get("x", "step") if query.get("x") in AXES else "step"
    log, smoothed = bool(query.get("log")), not query.get("raw")
    drawn = []
    for key, label in {"loss": "Training loss", **OTHER_CURVES}.items():
        lines = []
        for colour, member in enumerate(members):
            values = member.metrics.train.column(key)
            values = [value / 2**30 for value in values] if key == "memory_bytes" else values
            lines.append(cut_line(Line(member.name, axis(member.metrics, name)[0], values, colour), query))
        if any(math.isfinite(y) for line in lines for y in line.ys):
            drawn.append(
                (label, curves.chart(label, lines, AXES[name], log=log, smoothed=smoothed and key not in STEADY))
            )
    groups: dict[str, list[tuple[int, Member]]] = {}
    for colour, member in enumerate(members):
        if member.metrics.evals.steps:
            groups.setdefault(member.held_out, []).append((colour, member))
    for count, group in enumerate(groups.values(), 1):
        lines = [
            Line(
                member.name,
                axis(member.metrics, name)[1](member.metrics.evals),
                member.metrics.evals.column("loss"),
                colour,
                dots=True,
            )
            for colour, member in group
        ]
        title = "Held-out loss" if len(groups) == 1 else f"Held-out loss, data {count} of {len(groups)}"
        drawn.append((title, curves.chart(title, [cut_line(line, query) for line in lines], AXES[name], log=log)))
    note = (
        "<p class='note'>The held-out data of these runs differ, so their losses are not on one axis.</p>"
        if len(groups) > 1
        else ""
    )
    return note + report.figures(*drawn)


def differing_keys(members: Sequence[Member]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of keys in which the runs differ."""
    keys = dict.fromkeys(key for member in members for key in member.contents.config)
    rows = []
    for key in keys:
        values = [json.dumps(member.contents.config.get(key), sort_keys=True, default=str) for member in members]
        if key not in OUTPUTS and len(set(values)) > 1:
            rows.append([f"<code>{text(key)}</code>", *(text(value.strip('"')) for value in values)])
    return ["Key", *(text(member.name) for member in members)], rows or [["No key differs.", *[""] * len(members)]]


def _answers(members: Sequence[Member]) -> str:
    """Return the last answers of the runs to prompts that at least two of them share."""
    answers: dict[str, dict[int, str]] = {}
    for index, member in enumerate(members):
        last: dict[str, str] = {}
        for line in member.samples:
            last[str(line.get("prompt"))] = str(line.get("answer"))
        for generation in member.contents.generations or []:
            last[str(generation.get("prompt"))] = str(generation.get("after"))
        for prompt, answer in last.items():
            answers.setdefault(prompt, {})[index] = answer
    cards = []
    for prompt, by_member in answers.items():
        if len(by_member) < 2:
            continue
        columns = "".join(
            f"<div><h4>{text(members[index].name)}</h4><pre>{text(answer)}</pre></div>"
            for index, answer in by_member.items()
        )
        cards.append(f'<article><h4>prompt</h4><pre>{text(prompt)}</pre><div class="columns">{columns}</div></article>')
    return "".join(cards[:20]) or report.missing("These runs have answered no prompt in common.")


def _merges(members: Sequence[Member]) -> str:
    rows = []
    for member in members:
        for merge in member.contents.merges:
            written = (merge.get("targets") or {}).get(merge.get("written")) or {}
            share = ((merge.get("update_kept") or {}).get(merge.get("written")) or {}).get("share")
            target = merge.get("quantize") or merge.get("dtype")
            rows.append((text(member.name), text(target), text(written.get("kl")), text(share)))
    if not rows:
        return report.missing("None of these runs has been merged.")
    return table(("Run", "merged into", "KL divergence", "update kept"), rows)


def as_markdown(members: Sequence[Member]) -> str:
    """Return the tables of a comparison as Markdown."""

    def plain(cell: str) -> str:
        words = re.sub(r"<[^>]+>", "", cell)
        for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#x27;", "'"), ("&amp;", "&")):
            words = words.replace(entity, character)
        return re.sub(r"([\\|`*_\[\]<>])", r"\\\1", " ".join(words.split()))

    blocks = []
    for head, rows in (numbers(members), differing_keys(members)):
        lines = [head, ["---"] * len(head), *rows]
        blocks.append("\n".join(f"| {' | '.join(map(plain, line))} |" for line in lines))
    return "\n\n".join(blocks) + "\n"


# --- Data ------------------------------------------------------------------------------------------------------------


def data_page(run: Summary, contents: Run, query: Query) -> str:
    """Return the data of a run: report, masks, and documents sorted by their losses.

    Args:
        query: `sort` (a key of `ORDERS`), `split`, `q`, `min` and `max` tokens, `page` from 1.
    """
    histogram = ((contents.data or {}).get("train") or {}).pop("length_histogram", None) or {}
    lengths = curves.histogram(
        "Document lengths", histogram.get("edges") or [], histogram.get("counts") or [], "tokens per document"
    )
    parts = (
        ("data", "Sources and splits", lambda: report.data(contents) + report.figures(("Document lengths", lengths))),
        ("masks", "What is trained on", lambda: report.masks(contents)),
        ("rows", "Documents by their loss", lambda: _documents(run, contents.row_losses, query)),
    )
    html = "".join(f'<section id="{name}"><h2>{title}</h2>{guarded(make)}</section>' for name, title, make in parts)
    command = "<p class='note'>On the command line: <code>halfbyte preview run.yaml</code> shows more rows.</p>"
    header = f'<header><p class="eyebrow"><a href="/run/{run.id}">{text(run.name)}</a></p><h1>Data</h1></header>'
    return frame(f"Data of {run.name}", header + html + command)


def _documents(run: Summary, documents: Sequence[Mapping[str, Any]], query: Query) -> str:
    if not documents:
        return report.missing("No losses of documents were recorded (set row_losses: true).")
    shown = sorted(
        (document for document in documents if _chosen(document, query)), key=_order(query.get("sort", "end"))
    )
    pages = max(1, -(-len(shown) // ROWS))
    page = min(max(int(query.get("page", "1") if query.get("page", "1").isdecimal() else 1), 1), pages)
    rows = [_document_row(document) for document in shown[(page - 1) * ROWS : page * ROWS]]
    options = "".join(
        f'<option value="{name}"{" selected" if query.get("sort", "end") == name else ""}>{label}</option>'
        for name, label in ORDERS.items()
    )
    bounds = "".join(
        f'<label>{label} <input name="{name}" size="5" inputmode="numeric" value="{text(query.get(name, ""))}"></label>'
        for name, label in (("min", "tokens from"), ("max", "to"))
    )
    form = (
        f'<form class="filters" action="#rows"><label>sort <select name="sort">{options}</select></label>'
        f"{select('split', ('', 'eval', 'train'), query.get('split', ''))}{bounds}"
        f'<label>Search <input name="q" value="{text(query.get("q", ""))}"></label><button>Show</button></form>'
    )
    path = f"/run/{run.id}/data"
    links = [
        f'<a href="{with_query(path, query, page=str(number))}#rows">{label}</a>'
        for number, label in ((page - 1, "earlier"), (page + 1, "later"))
        if 1 <= number <= pages
    ]
    note = (
        f'<p class="note">{len(shown):,} of {len(documents):,} documents, page {page} of {pages}. {" ".join(links)}</p>'
    )
    head = ("Row", "before", "after", "change", "tokens", "trained", "document")
    return form + note + (table(head, rows) if rows else report.missing("No documents match."))


def _value(document: Mapping[str, Any], name: str) -> float:
    value = document.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _order(name: str) -> Any:
    """Return a sort key; documents without the number come last."""

    def key(document: Mapping[str, Any]) -> tuple[bool, float]:
        change = _value(document, "start") - _value(document, "end")
        values = {
            "learned": -change,
            "worse": change,
            "row": _value(document, "row"),
            "start": -_value(document, "start"),
            "tokens": -_value(document, "tokens"),
        }
        value = values.get(name, -_value(document, "end"))
        return math.isnan(value), value

    return key


def _chosen(document: Mapping[str, Any], query: Query) -> bool:
    split, words = query.get("split", ""), query.get("q", "").lower()
    tokens = _value(document, "tokens")
    bounds = [float(query[name]) if query.get(name, "").isdecimal() else None for name in ("min", "max")]
    content = "".join(str(part[1]) for part in _parts(document)).lower() if words else ""
    return (
        (not split or document.get("split") == split)
        and words in content
        and (bounds[0] is None or tokens >= bounds[0])
        and (bounds[1] is None or tokens <= bounds[1])
    )


def _parts(document: Mapping[str, Any]) -> list[tuple[bool, str]]:
    parts = document.get("text")
    pairs: Iterable[Any] = parts if isinstance(parts, list) else ()
    return [(bool(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def _document_row(document: Mapping[str, Any]) -> tuple[str, ...]:
    marked = "".join(
        f"<{'b' if is_trained else 'i'}>{text(words)}</{'b' if is_trained else 'i'}>"
        for is_trained, words in _parts(document)
    )
    before, after = _value(document, "start"), _value(document, "end")
    return (
        f"{text(document.get('split'))} {text(document.get('row'))}",
        number(before),
        number(after),
        number(after - before, "+.3g"),
        text(document.get("tokens")),
        text(document.get("trained_tokens")),
        f'<pre class="tokens">{marked}</pre>',
    )
