"""Write docs/benchmarks.md and its plots from benchmarks/results: `python -m benchmarks.page`.

A section needs at least one result; the tables of `tables.md` follow the sections. Nothing is measured here; the same
results give the same files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import page_plots as plots
from benchmarks.__main__ import CASES
from benchmarks.page_plots import Results, measured, what
from benchmarks.tables import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PAGE = "benchmarks.md"
TABLES = "tables.md"  # in the folder of results: figures that no result has as JSON
VERSIONS = ("torch", "triton", "transformers", "peft", "bitsandbytes", "cuda")

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Args:
        files: regular expression of the results' names.
        text: what is compared and how it was timed.
        draw: name of a plot's file → function that draws it.
        table: returns the rows below the plots, the header first.
    """

    title: str
    files: str
    text: str
    draw: dict[str, plots.Draw] = field(default_factory=dict)
    table: Callable[[Results], Rows] = lambda results: []

    def results(self, all_: Results) -> Results:
        return {name: result for name, result in all_.items() if re.fullmatch(self.files, name)}


def step_table(results: Results) -> Rows:
    rows: Rows = [("", "ms", "of the floor", "tokens/s", "peak GiB", "first step, s")]
    for result in results.values():
        floor = result.get("floor")
        if floor:
            rows.append((f"**{what(result)}**, floor", f"{floor['ms']:.1f}", "", "", "", ""))
        for name, run in measured(result).items():
            label = name if floor else f"**{what(result)}**, {name}"
            share = f"{floor['ms'] / run['ms']:.3f}" if floor else ""
            first = f"{run['first_step_seconds']:.1f}" if "first_step_seconds" in run else ""
            speed = f"{run['tokens_per_second']:,.0f}"
            rows.append((label, f"{run['ms']:.1f}", share, speed, f"{run['peak_gib']:.2f}", first))
    return rows


def kernel_table(results: Results) -> Rows:
    rows: Rows = [("kernel", "by", "MB", "graph µs", "TB/s", "of copy", "called µs", "host µs")]
    for result in results.values():
        for row in result["kernels"]:
            figures = (f"{row[key]:.1f}" for key in ("called_us", "host_us"))
            rate = f"{row['TBps']:.2f}", f"{row['fraction_of_copy']:.0%}"
            size = f"{row['bytes'] / 1e6:.0f}", f"{row['graph_us']:.1f}"
            rows.append((f"{row['kernel']} {row['direction']}", row["by"], *size, *rate, *figures))
    return rows


def gemv_table(results: Results) -> Rows:
    rows: Rows = [("weight", "stored as", "rows of x", "µs", "cuBLAS, 16-bit, µs", "ratio", "of copy")]
    for result in results.values():
        card = f", as on {result['card']}" if result.get("card") else ""
        for row in [*result["rows"], *result.get("peers", [])]:
            times = f"{row['us']:.1f}", f"{row['cublas_us']:.1f}", f"{row['cublas_us'] / row['us']:.2f}"
            weight = row["shape"].replace("x", "×") + card
            rows.append((weight, row["spec"], row["batch"], *times, f"{row['of_copy']:.0%}"))
    return rows


# Tokens a second that Surogate's documentation publishes for Qwen3, 2×2048, 4 micro-batches a step, packed, r = 16
# (docs/reference/benchmarks.md, 2026): card, Surogate's best recipe, Unsloth in NF4.
PUBLISHED = {
    "qwen3-0.6b": ("H200", 65_200, 18_300), "qwen3-1.7b": ("H100", 37_500, 20_000),
    "qwen3-4b": ("H100", 18_700, 12_600), "qwen3-8b": ("H200", 14_000, 8_400), "qwen3-14b": ("H100", 8_000, 5_200),
}  # fmt: skip


def published_table(results: Results) -> Rows:
    rows: Rows = [("model", "recipe", "tokens/s", "s a step", "peak GiB", "published on", "Surogate", "Unsloth")]
    for result in results.values():
        for step in result["steps"]:
            run = min(step["runs"].values(), key=lambda run: run["ms"])
            speed = f"{run['tokens_per_second']:,.0f}", f"{run['ms'] / 1e3:.3f}", f"{run['peak_gib']:.1f}"
            card, *others = PUBLISHED.get(step["model"], ("", "", ""))
            published = (f"{rate:,}" if rate else "" for rate in others)
            rows.append((step["model"], step["recipe"], *speed, card, *published))
    return rows


def decode_table(results: Results) -> Rows:
    rows: Rows = [("batch", *(label for label, _ in plots.DECODING.values()))]
    for result in results.values():
        for row in result["rows"]:
            rows.append((row["batch"], *(f"{row[key]:,.0f}" if row.get(key) else "" for key in plots.DECODING)))
    return rows


def adapter_table(results: Results) -> Rows:
    rows: Rows = [("adapter", "ms a step", "of LoRA in the same process", "peak GiB", "commit")]
    for result in results.values():
        lora = result["runs"]["halfbyte, graph"]
        for name, run in result["runs"].items():
            words = name.split(", ")[1:-1] or ["lora"]
            if name.endswith(", graph"):
                share = run["ms"] / run.get("lora_ms", lora["ms"])  # some were measured in a process of their own
                peak = f"{run['peak_gib']:.1f}" if "peak_gib" in run else ""
                rows.append((*words, f"{run['ms']:.1f}", f"{share:.3f}", peak, run.get("commit", result["commit"])))
    return rows


def format_table(results: Results) -> Rows:
    stored = [row["storage"] for result in results.values() for row in result["rows"]]
    return [(words, *row[:-1]) for words, row in zip(["weights", *stored], decode_table(results), strict=True)]


STEPS = (
    "One QLoRA step (NF4 with nested scales unless stated, r = 16, seven linears, random weights and tokens): "
    "forward, backward and AdamW, median of ten. The floor is the sum of every GEMM and the attention, each timed at "
    "its shape in a CUDA graph; for packed rows, the attention of each document at its own length. Peers ran in the "
    "same run, in their own processes. Peaks are the memory that torch's allocator held."
)


def gpus_table(results: Results) -> Rows:
    rows: Rows = [("a step on each of two GPUs", "ms", "compared with", "peak GiB")]
    for result in results.values():
        for run in result.get("data", []):
            name = f"{run['model']} {run['rows']}×{run['length']}{', CUDA graphs' if run['graphs'] else ''}"
            ms = min(run["ms"]["together"], run["ms"]["together again"])
            apart = min(run["ms"]["apart"], run["ms"]["apart again"])
            beside = f"{run['of_apart']:.3f} of two without communication ({apart:.1f} ms)"
            rows.append((f"**{name}**, data", f"{ms:.1f}", beside, f"{run['peak_gib']:.1f}"))
        for run in result.get("gathers", []):
            beside = f"{run['of_data']:.3f} of data; {run['gathered_gb']:.1f} GB gathered" if "of_data" in run else ""
            rows.append(
                (f"**llama-3.1-8b 4×2048**, {run['way']}", f"{run['ms']:.1f}", beside, f"{run['peak_gib']:.1f}")
            )
        for run in (run for run in result.get("tensor", []) if "speedup" in run):
            ms, peak = f"{run['together']['ms']:.1f}", f"{run['together']['peak_gib']:.1f}"
            rows.append((f"**{run['model']} 4×2048**, tensor", ms, f"{run['speedup']:.2f} × one GPU's speed", peak))
    return rows


SECTIONS = (
    Section(
        "Overview", r"qlora_8b_h200|step_(llama8b|qwen06b)_(2x512|2x2048|4x2048|4x2048_checkpointed|1x8192)_h200",
        "Whole QLoRA steps with the same model, batch and adapters; each is compared with its peer in the same run.",
        {"overview": plots.overview},
    ),
    Section(
        "Training steps", r"(step|packed)_.*", STEPS,
        {"step": plots.step, "memory": plots.memory}, step_table,
    ),
    Section(
        "Other projects' protocols", r"published_.*",
        "Surogate's: 2×2048 tokens, 4 micro-batches a step, r = 16 on the seven linears, NF4 here; the published "
        "figures are tokens a second of other machines. experts4bit-qlora's: qwen3-30b-a3b, 2 micro-batches of 4 rows, "
        "r = 16 on experts and attention, checkpointed; it publishes 2.397 s a step, and 2.544 for Unsloth, on an H100 "
        "NVL with rows of Alpaca, where the rows here have 256 random tokens.",
        {}, published_table,
    ),
    Section(
        "Adapters", r"adapters_.*",
        "Steps of an 8B at 4×2048 with other adapters than LoRA on the seven linears, r = 16, as CUDA graphs. The peak "
        "of a process with several adapters is that of all of them, and left out.",
        {}, adapter_table,
    ),
    Section(
        "Experts by format", r"experts_.*",
        "The step of qwen3-30b-a3b at 4×2048 with 8 of its 48 layers, the experts and linears stored in each format, "
        "launched from Python.",
        {}, step_table,
    ),
    Section(
        "Two GPUs", r"several_gpus_.*|sharded_.*",
        "The same step on each of two H200s of one host, in one run: without communication, with summed gradients "
        "(data), and with sharded frozen weights: every decoder layer gathered in each pass (each call), every other "
        "layer kept gathered (half kept), or all.",
        {}, gpus_table,
    ),
    Section(
        "Longest context", r"context_.*",
        "One step of one row. Inputs of layers are in host memory, MLPs run in tiles, the process is limited to 80 "
        "GiB.",
        {}, step_table,
    ),
    Section(
        "Elementwise kernels", r"kernels_.*",
        "The bytes that a kernel must read and write, over its time in a CUDA graph, as a fraction of a device copy's "
        "bandwidth; the dotted line is 85%. 'Called' is a call from Python, 'host' the host's part of it.",
        {"kernels": plots.kernels}, kernel_table,
    ),
    Section(
        "Dequantizing NF4 to 16 bits", r"dequantize_.*",
        "The same measure. 'nested' has scales quantized to 8 bits. Unsloth writes to one buffer that all weights "
        "share, as its layers do.", {"dequantize": plots.dequantize},
    ),
    Section(
        "GEMV and small-batch GEMM", r"gemv_.*",
        "x·Wᵀ from packed weights, compared with cuBLAS on a bf16 weight of the same shape, in CUDA graphs over "
        "weights that together exceed the L2 cache. The plot shows the largest shape. 'As on' has the kernels and "
        "tiles that are chosen for another card.",
        {"gemv_formats": plots.gemv}, gemv_table,
    ),
    Section(
        "Decoding", r"decode_.*",
        "Tokens per second of the 8B in NF4 after prompts of 128 tokens, all rows of a batch together.",
        {"decode": plots.decode}, decode_table,
    ),
    Section(
        "Decoding other formats", r"formats_decode_.*",
        "The same with weights in other formats, which the same kernel decodes.", {}, format_table,
    ),
    Section(
        "Quality", r"quality_(llama40m|stories260k)",
        "Perplexity on held-out tokens by stored bits, before (hollow) and after (filled) the same short QLoRA run. "
        "Dotted lines: the unquantized model before and after. Tables: [formats.md](formats.md).",
        {"quality": plots.quality},
    ),
)  # fmt: skip
HEAD = """# Benchmarks

`python -m benchmarks.page` writes this page and its plots from `benchmarks/results`; do not edit them. Compare ratios
within one run: times of two runs may be from two machines. [What did not work](what-did-not-work.md) explains the
choices that these numbers led to.

`python -m benchmarks` lists the cases that make the results, with their options; `python -m benchmarks CASE` runs one.
Words in capitals are files of yours. A result records its commit, device and versions. Figures here and on other pages
that name neither a result nor a command were measured by scripts that are in the history.
"""


def provenance(name: str, result: dict[str, Any]) -> str:
    """Return a list item with a result's commit, device and versions."""
    versions = result["versions"] | {"liger": result.get("liger")}
    named = ", ".join(f"{key} {versions[key]}" for key in (*VERSIONS, "liger") if versions.get(key))
    commit = f"commit {result['commit']}" if result["commit"] else "commit not recorded"
    return f"- [`{name}.json`](../benchmarks/results/{name}.json): {commit}, {result['device']}, {named}"


def markdown(rows: Rows) -> str:
    head, *others = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others]) + "\n"


def rendered(folder: Path) -> dict[str, str]:
    """Return the page and its plots, by path below docs/, from the results in `folder`."""
    everything = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    page, files = [HEAD], {}
    for section in SECTIONS:
        results = section.results(everything)
        if not results:
            continue
        page += [f"## {section.title}", section.text + "\n"]
        for name, draw in section.draw.items():
            files[f"plots/{name}.svg"] = plots.svg(draw, results)
            page.append(f"![{section.title}: {name}](plots/{name}.svg)\n")
        rows = section.table(results)
        page += [markdown(rows)] if rows else []
        commands = [f"python -m benchmarks {name}" for name in results if name in CASES]
        page += ["```bash", *commands, "```"] if commands else []
        page += [*(provenance(name, result) for name, result in results.items()), ""]
    if (folder / TABLES).exists():
        page.append((folder / TABLES).read_text(encoding="utf-8"))
    return {PAGE: "\n".join(page).rstrip() + "\n", **files}


def main() -> None:
    made = rendered(RESULTS)
    (DOCS / "plots").mkdir(exist_ok=True)
    for old in (DOCS / "plots").glob("*.svg"):
        old.unlink()
    for path, text in made.items():
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
