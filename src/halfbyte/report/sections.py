"""Sections of the report: functions from a Run to HTML. All values from files are escaped by `text`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from ..config.schema import RunKeys
from ..plan.memory_plan import flat_plan
from ..runs.layout import CHECKS, DATA_REPORT, ENVIRONMENT, MEMORY, METRICS, RESOLVED_CONFIG
from ..runs.metrics import describe_best
from ..utils.text import size, visible
from . import plots
from .explain import SEVERITIES, Finding, explain
from .run import Run
from .terminal import MEMORY_PARTS, expert_usage_line, measured_parts, memory_parts, threads

Section = tuple[str, str, str]  # anchor, title, HTML

PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+")  # of a prompt, in generations.json
SAMPLED = 3  # best and worst answers shown per generation


def sections(run: Run) -> list[Section]:
    """Return every section of the report, in reading order."""
    blocks = [
        ("training", "Training", training),
        *([("explain", "What stands out", stands_out)] if run.train or run.problems else []),
        ("memory", "Memory", memory),
        ("data", "Data", data),
        ("masks", "What is trained on", masks),
        ("answers", "Answers before and after", answers),
        *([("sampled", "Answers it was trained on", sampled)] if run.sampled else []),
        *([("experts", "Experts", experts)] if run.experts else []),
        ("checks", "Merge and checks", checks),
        ("environment", "Environment", environment),
        ("configuration", "Configuration", configuration),
    ]
    return [(anchor, title, shown(section, run)) for anchor, title, section in blocks]


def shown(section: Callable[[Run], str], run: Run) -> str:
    """Render a part of the page; if a file of the run has malformed values, only this part is replaced by a note."""
    try:
        return section(run)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return missing(f"This cannot be shown from the run's files: {type(error).__name__}: {error}")


def text(value: Any) -> str:
    """Format `value` for display, escaped for HTML text and attributes."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return escape(f"{value:.5g}")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return escape(visible(", ".join(value))) or "–"
    return escape(visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))


def missing(file: str) -> str:
    """A note in place of missing content."""
    return f'<p class="missing">{text(file)}</p>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of ready HTML cells; the first column is a row header, the others are numbers or words."""
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    lines = []
    for first, *cells in rows:
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(map(_cell, cells))}</tr>')
    header = f"<thead><tr>{titles}</tr></thead>" if titles else ""
    return f'<div class="scroll"><table>{header}<tbody>{"".join(lines)}</tbody></table></div>'


def _cell(html: str) -> str:
    """A table cell; short ones that start with a digit are numbers and are not wrapped."""
    return f'<td class="number">{html}</td>' if html[:1].isdigit() and len(html) < 24 else f"<td>{html}</td>"


def figures(*pairs: tuple[str, str]) -> str:
    """Plots with their titles, side by side on wide pages."""
    drawn = (f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in pairs)
    return f'<div class="figures">{"".join(drawn)}</div>'


def training(run: Run) -> str:
    """Plots of metrics by step, and the evaluations."""
    if not run.train:
        return missing(f"No training steps were recorded ({METRICS} is missing or empty).")
    trained = (*run.numbers.trained, *run.numbers.beside)
    drawn = [(metric.label.capitalize(), plots.by_step(run.train, run.evals, metric)) for metric in trained]
    drawn.append(("Learning rate", plots.learning_rate(run.train)))
    if any(record.get("grad_norm") is not None for record in run.train):
        drawn.append(("Gradient norm", plots.gradient_norm(run.train)))
    drawn.append(("Tokens per second", plots.throughput(run.train)))
    drawn.append(("Step time", plots.step_times(run.train)))
    if run.evals:
        return figures(*drawn, ("Evaluations", evaluations(run)))
    return figures(*drawn) + missing(
        "Nothing was held out, so there is no evaluation (set eval_split_size or eval_dataset)."
    )


def stands_out(run: Run) -> str:
    """Findings of the rules of `explain`."""
    return findings(explain(run))


def findings(listed: Iterable[Finding]) -> str:
    """Table of findings with their evidence and the keys to change."""
    rows = [
        (
            f"{text(finding.problem)}<br><small>{SEVERITIES[finding.severity]}</small>",
            text(finding.evidence),
            f"{text(finding.effect)}: <code>{text(finding.keys)}</code>",
        )
        for finding in listed
    ]
    if not rows:
        return "<p class='note'>No rule of <code>halfbyte explain</code> finds anything to change.</p>"
    return table(("Problem", "evidence", "what to change"), rows)


def evaluations(run: Run) -> str:
    """Table of held-out metrics by step."""
    metrics = run.numbers.evaluated
    rows = (
        (f"step {text(record['step'])}", *(metric.shown(record) for metric in metrics), text(record.get("tokens")))
        for record in run.evals
    )
    remark = f'<p class="note">{text(describe_best(run.best))}</p>' if run.best else ""
    return table(("after", *(metric.label for metric in metrics), "tokens"), rows) + remark


def memory(run: Run) -> str:
    """Bars of predicted and measured bytes by component, to the same scale."""
    if not run.memory:
        return missing(f"No {MEMORY} in this run.")
    plan = flat_plan(run.memory)
    predicted = {name: plan.get(name) or 0 for name in MEMORY_PARTS}
    measured = measured_parts(run.memory.get("measured") or {})
    predicted = {"base": measured["base"], **predicted}  # the measured peak includes the process, so both bars do
    scale = max(sum(predicted.values()), sum(measured.values()), 1)
    names = {component: shown.name for component, shown in memory_parts(plan).items()}
    html = bar("predicted", predicted, names, scale)
    if run.memory.get("measured"):
        html += bar("measured", measured, names, scale)
    else:
        html += missing("Nothing was measured.")
    words = [f"Device {text(run.memory.get('device'))}"]
    if plan.get("capacity_bytes"):
        peak = (run.peak_bytes or sum(predicted.values())) - measured["base"]  # capacity excludes it
        words[0] += (
            f" with {size(plan['capacity_bytes'])}, of which {peak / plan['capacity_bytes']:.0%} was in use at the peak"
        )
    if plan.get("activation_checkpointing") is not None:
        state = "on" if plan["activation_checkpointing"] else "off"
        words.append(f"Activation checkpointing {state}{': ' + text(plan['reason']) if plan.get('reason') else ''}")
    return html + f"<p class='note'>{'. '.join(words)}.</p>" + _processes(run)


def _processes(run: Run) -> str:
    """Memory and times of each rank; empty for a single process."""
    ranks = (run.memory or {}).get("ranks")
    if not ranks:
        return ""
    names = {"after_load_bytes": "after loading", "peak_bytes": "peak", "reserved_bytes": "reserved"}
    shown = {key: name for key, name in names.items() if all(key in rank_record for rank_record in ranks)}
    rows = ((str(rank), *(size(rank_record[key]) for key in shown)) for rank, rank_record in enumerate(ranks))
    html = table((f"Process, of {text((run.environment or {}).get('parallel'))}", *shown.values()), rows)
    step_times = [
        (rank_record["fastest_seconds"], rank_record["slowest_seconds"])
        for rank_record in run.train
        if "slowest_seconds" in rank_record
    ]
    if step_times:
        fastest, slowest = (sum(rank_record) / len(step_times) for rank_record in zip(*step_times, strict=True))
        took = f"a step took the fastest process {fastest:.3g} s and the slowest {slowest:.3g} s"
        html += f"<p class='note'>Before gradients are summed, {took}.</p>"
    for key, cause in (("gather_share", "weights are being gathered"), ("idle_share", "a pipeline stage is idle")):
        if shares := [rank_record[key] for rank_record in run.train if key in rank_record]:
            html += f"<p class='note'>For {statistics.median(shares):.1%} of a step {cause}.</p>"
    return html


def bar(title: str, bytes_by_component: Mapping[str, float], names: Mapping[str, str], scale: float) -> str:
    """One stacked bar with its legend; widths are shares of `scale` in percent."""
    present = {component: count for component, count in bytes_by_component.items() if count > 0}
    pieces = "".join(
        f'<i class="{component}" style="width:{count / scale:.4%}" title="{names[component]} {size(count)}"></i>'
        for component, count in present.items()
    )
    legend = "".join(
        f'<li><i class="{component}"></i>{names[component]} <b>{size(count)}</b></li>'
        for component, count in present.items()
    )
    return (
        f'<div class="bar"><p><span>{title}</span> <b>{size(sum(bytes_by_component.values()))}</b></p>'
        f'<div class="pieces">{pieces}</div><ul class="legend">{legend}</ul></div>'
    )


def data(run: Run) -> str:
    """Sources, splits, document lengths and the chat template."""
    if not run.data:
        return missing(f"No {DATA_REPORT} in this run.")
    sources = table(
        ("Source", "rows", "layout"),
        (
            (
                text(source.get("path")),
                text(source.get("rows")),
                f"{text(source.get('format'))}: {text(source.get('why'))}",
            )
            for source in run.data.get("sources") or []
        ),
    )
    shares = [
        (text(entry.get("path")), text(entry.get("rows")), text(entry.get("drawn")), f"{entry.get('share', 0):.1%}")
        for entry in (run.data.get("train") or {}).get("mixture") or []
    ]
    mixture = table(("Dataset", "rows", "drawn", "share of the rows"), shares) if shares else ""
    splits = {name: run.data[key] for key, name in (("train", "training"), ("eval", "held out")) if run.data.get(key)}
    counts = table(("Split", *splits), _split_rows(splits))
    drawn = []
    histogram = (run.data.get("train") or {}).get("length_histogram")
    if histogram and sum(histogram["counts"]):
        drawn.append(("Document lengths", plots.lengths(histogram, run.config.get("max_length"))))
    counts_and_plots = f'<div class="beside">{counts}{figures(*drawn)}</div>'
    note = f'<p class="note">Masks: {text(run.data.get("mask"))}.{_ending(run.data)}</p>'
    return sources + mixture + counts_and_plots + note + _template(run.data.get("template"))


def _ending(report: Mapping[str, Any]) -> str:
    """Return whether stop tokens are trained, and which."""
    if report.get("eos_trained") is None:
        return ""
    if not report["eos_trained"]:
        return ' <span class="bad">EOS not trained ✗</span>'
    tokens = "".join(f" <code>{text(token)}</code>" for token in report.get("stop_tokens") or [])
    return f' <span class="good">EOS trained ✓</span>{tokens}'


def _template(template: str | None) -> str:
    """The chat template: its name, or its source in a collapsed block."""
    if not template:
        return ""
    if "\n" not in template and "{" not in template:
        return f'<p class="note">Chat template: {text(template)}</p>'
    return f"<details><summary>Chat template</summary><pre>{text(template)}</pre></details>"


def _split_rows(splits: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """One row per fact, one cell per split."""
    facts = {
        "documents": lambda split: text(split.get("documents")),
        "rows": lambda split: text(split.get("rows")),
        "tokens": lambda split: text(split.get("tokens")),
        "trained tokens": lambda split: f"{text(split.get('trained_tokens'))}{_share(split)}",
        "packing": lambda split: (
            "–" if split.get("packing_efficiency") is None else f"{split['packing_efficiency']:.1%} full"
        ),
        "truncated": lambda split: text(split.get("truncated")),
        "empty answers": lambda split: text(split.get("empty_answers", 0)),
        "dropped": lambda split: text(sum((split.get("dropped") or {}).values())),
    }
    if any("mean_tokens" in split for split in splits.values()):
        facts |= _answer_facts(splits)
    rows = [[fact, *(value(split) for split in splits.values())] for fact, value in facts.items()]
    reasons = dict.fromkeys(reason for split in splits.values() for reason in split.get("dropped") or {})
    for reason in reasons:
        rows.append(
            [f"– {text(reason)}", *(text((split.get("dropped") or {}).get(reason, 0)) for split in splits.values())]
        )
    return rows


def _answer_facts(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Facts about rows with prompts and answers, each a function of a split."""

    def mean(name: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda split: f"{(split.get('mean_tokens') or {}).get(name, 0):,.1f}"

    names = dict.fromkeys(name for split in splits.values() for name in split.get("mean_tokens") or {})
    facts = {f"mean tokens: {name}": mean(name) for name in names}
    if "chosen" in names:
        facts["chosen is longer"] = lambda split: f"{split.get('chosen_longer', 0):.1%}"
    if any("desirable" in split for split in splits.values()):
        facts["desirable"] = lambda split: text(split.get("desirable", 0))
    if any("computed_tokens" in split for split in splits.values()):
        facts["tokens, each prompt once"] = _computed
    return {**facts, "contradicting": lambda split: text(split.get("contradicting", 0))}


def _computed(split: Mapping[str, Any]) -> str:
    """Tokens that a forward of a split computes, and the share saved by computing each prompt once."""
    computed, repeated = split.get("computed_tokens"), split.get("tokens_apart")
    return f"{computed:,} ({1 - computed / repeated:.0%} fewer computed)" if computed and repeated else "–"


def _share(split: Mapping[str, Any]) -> str:
    return f" ({split['trained_tokens'] / split['tokens']:.1%})" if split.get("tokens") else ""


def masks(run: Run) -> str:
    """The first documents with their loss masks."""
    samples = (run.data or {}).get("samples")
    if not samples:
        return missing(f"No samples were recorded ({DATA_REPORT} is missing or has none).")
    key = '<span class="tokens"><b>trained</b> <i>masked</i></span> The first documents, token by token.'
    return f'<p class="note">{key}</p>' + "".join(f'<pre class="tokens">{_tokens(sample)}</pre>' for sample in samples)


def _tokens(sample: Mapping[str, Any]) -> str:
    """Tokens as <b> (trained) or <i> (masked); line breaks get a visible mark."""
    html = []
    for token, trained in zip(sample["tokens"], sample["trained"], strict=False):
        tag = "b" if trained else "i"
        html.append(f"<{tag}>{escape(token).replace(chr(10), '↵' + chr(10))}</{tag}>")
    return "".join(html)


def answers(run: Run) -> str:
    """Answers to held-out prompts before and after training."""
    if not run.generations:
        return missing("No answers were generated (sample_prompts was 0, or the run stopped before).")
    cards = []
    for generation in run.generations:
        columns = [("before", generation.get("before")), ("after", generation.get("after"))]
        if generation.get("reference"):
            columns.append(("reference", generation["reference"]))
        shown = "".join(
            f"<div class='{name}'><h4>{name}</h4><pre>{text(answer)}</pre></div>" for name, answer in columns
        )
        pictures = "".join(
            f"<img src='{picture}' alt='image {number}'>"
            for number, picture in enumerate(generation.get("images") or (), 1)
            if PICTURE.fullmatch(str(picture))
        )
        prompt = f"<h4>prompt</h4>{pictures}<pre>{text(generation.get('prompt'))}</pre>"
        cards.append(f'<article>{prompt}<div class="columns">{shown}</div></article>')
    return "".join(cards)


def sampled(run: Run) -> str:
    """Best and worst sampled answers of the first and the last generation, with their rewards."""
    rows = []
    for step in dict.fromkeys(record["step"] for record in run.sampled):
        ordered = sorted(
            (record for record in run.sampled if record["step"] == step), key=lambda record: -record["advantage"]
        )
        for record in [*ordered[:SAMPLED], *ordered[SAMPLED:][-SAMPLED:]]:
            rewards = "; ".join(f"{name} {text(value)}" for name, value in record["rewards"].items())
            ended = "" if record["ended"] else " (cut off)"
            answer = f"<pre>{text(record['completion'])}</pre>{ended}"
            prompt = f"<pre>{text(record['prompt'])}</pre>"
            rows.append((f"step {text(step)}", prompt, answer, rewards, f"{record['advantage']:+.2f}"))
    return table(("drawn before", "prompt", "answer", "rewards", "advantage"), rows)


def experts(run: Run) -> str:
    """Balance of expert choices in each layer, and experts that were never chosen."""
    use = run.experts or {}
    rows = []
    for name, usage in use["layers"].items():
        used, all_ = usage["used"], max(sum(usage["used"]), 1)
        shares = (f"{chosen / all_:.1%}" for chosen in (max(used), statistics.median(used), min(used)))
        rows.append((text(name), f"{usage['entropy']:.3f}", *shares, text([str(at) for at in usage["dead"]])))
    head = ("Layer", "entropy, of equal use's", "most used", "median", "least used", "never chosen")
    return f"<p class='note'>{text(expert_usage_line(use))}.</p>" + table(head, rows)


def checks(run: Run) -> str:
    """Fidelity of each merge, and self-checks with their numbers."""
    merge = run.merge or (run.checks or {}).get("merge")
    html = merge_fidelity(merge) if merge else missing("Not merged yet: halfbyte merge compares the merge targets.")
    if run.merges:
        html = (html if merge else "") + merge_targets(run.merges)
    results = {name: values for name, values in (run.checks or {}).items() if name != "merge"}
    if not results:
        return html + missing(f"No self-checks were recorded ({CHECKS} is missing).")
    rows = []
    for name, values in results.items():
        values = values if isinstance(values, dict) else {"result": values}
        numbers = "<br>".join(f"{text(key.replace('_', ' '))} <b>{text(value)}</b>" for key, value in values.items())
        rows.append((text(name.replace("_", " ")), numbers))
    return html + table(("Self-check", "result"), rows)


def merge_fidelity(merge: Mapping[str, Any]) -> str:
    """Table that compares merges onto the original and the dequantized base."""
    closer = merge.get("closer")
    rows = [
        (
            f"onto the {text(name)} base" + (' <span class="good">closer</span>' if name == closer else ""),
            text(values.get("kl")),
            text(values.get("max_logit_difference")),
        )
        for name, values in (merge.get("targets") or {}).items()
    ]
    return table(("Merge, against the 4-bit base with its adapter", "KL divergence", "largest logit difference"), rows)


def merge_targets(merges: Iterable[Mapping[str, Any]]) -> str:
    """Table of merged models, one row per format."""
    rows = []
    for merge in merges:
        written = (merge.get("targets") or {}).get(merge.get("written")) or {}
        kept_share = ((merge.get("update_kept") or {}).get(merge.get("written")) or {}).get("share")
        stored = merge.get("quantize") or "16bit"
        rows.append(
            (
                text(merge.get("dtype") if stored == "16bit" else stored),
                text(merge.get("written")),
                size(merge.get("bytes")),
                text(written.get("kl")),
                text(written.get("max_logit_difference")),
                text(kept_share),
                text((written.get("loss") or {}).get("excess")),
            )
        )
    measures = ("KL divergence", "largest logit difference", "update kept", "loss above the 16-bit merge's")
    head = ("Merge target", "onto the base", "weights", *measures)
    return table(head, rows)


def environment(run: Run) -> str:
    """Machine, versions and notices."""
    if not run.environment:
        return missing(f"No {ENVIRONMENT} in this run.")
    facts = run.environment
    cpu, compute, kernels = (facts.get(name) or {} for name in ("cpu", "compute_dtype", "kernels"))
    halfbyte = facts.get("halfbyte") or {}
    commit = f" ({text(halfbyte['commit'])})" if halfbyte.get("commit") else ""
    rows = [("halfbyte", f"{text(halfbyte.get('version'))}{commit}")]
    rows += [("GPU", _gpu(gpu)) for gpu in facts.get("gpus") or []]
    cpu_words = (text(cpu.get("model")), text(threads(cpu)), size(cpu.get("memory_bytes")))
    rows.append(("CPU", ", ".join(cpu_words)))
    rows.append(("instruction sets", text(cpu.get("instruction_sets"))))
    rows.append(("computes in", f"{text(compute.get('dtype'))}: {text(compute.get('reason'))}"))
    rows.append(("kernels", f"{'on' if kernels.get('enabled') else 'off'}: {text(kernels.get('reason'))}"))
    rows.append(("system", f"{text(facts.get('platform'))}, Python {text(facts.get('python'))}"))
    versions = (facts.get("versions") or {}).items()
    rows.append(("versions", ", ".join(f"{text(name)} {text(version)}" for name, version in versions if version)))
    html = table((), rows)
    notices = "".join(f"<li>{text(message)}</li>" for message in (facts.get("notices") or {}).values())
    return html + (
        f"<h3>Notices</h3><ul class='plain'>{notices}</ul>" if notices else "<p class='note'>No notices.</p>"
    )


def _gpu(gpu: Mapping[str, Any]) -> str:
    words = [text(gpu.get("name")), size(gpu.get("memory_bytes"))]
    words += [f"{name} {text(gpu[name])}" for name in ("capability", "driver") if gpu.get(name)]
    return ", ".join(words)


def configuration(run: Run) -> str:
    """Keys that differ from the defaults, then every key."""
    if not run.config_text:
        return missing(f"No {RESOLVED_CONFIG} in this run.")
    defaults = {name: field.get_default(call_default_factory=True) for name, field in RunKeys.model_fields.items()}
    changed = [
        (f"<code>{text(key)}</code>", text(value if isinstance(value, str) else json.dumps(value)))
        for key, value in run.config.items()
        if key not in defaults or value != defaults[key]
    ]
    all_keys = f"<details><summary>Every key</summary><pre>{text(run.config_text)}</pre></details>"
    return table(("Set or chosen", "value"), changed) + all_keys
