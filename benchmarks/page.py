"""Makes docs/benchmarks.md and its plots from benchmarks/results alone: `python -m benchmarks.page`.

A section is there when a result for it is. Nothing is measured here, and the same results give the same files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page_plots as plots
from benchmarks.page_plots import Results, measured, what
from benchmarks.tables import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PAGE = "benchmarks.md"
VERSIONS = ("torch", "triton", "transformers", "peft", "bitsandbytes", "cuda")

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Section:
    """Plots, what they show, and the results they are made from.

    Args:
        files: pattern of the results' names.
        text: what is compared, and how it was timed.
        draw: name of a plot's file → what draws it.
        table: rows below the plots, the first the head; empty: the plots say all.
        command: how one of the results was made.
    """

    title: str
    files: str
    text: str
    draw: dict[str, plots.Draw]
    table: Callable[[Results], Rows]
    command: Callable[[str, dict[str, Any]], str]

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


def no_table(results: Results) -> Rows:
    return []


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
        for row in result["rows"]:
            times = f"{row['us']:.1f}", f"{row['cublas_us']:.1f}", f"{row['cublas_us'] / row['us']:.2f}"
            stored = row.get("spec", "nf4")
            rows.append((row["shape"].replace("x", "×"), stored, row["batch"], *times, f"{row['of_copy']:.0%}"))
    return rows


def decode_table(results: Results) -> Rows:
    rows: Rows = [("batch", *(label for label, _ in plots.DECODING.values()))]
    for result in results.values():
        for row in result["rows"]:
            rows.append((row["batch"], *(f"{row[key]:,.0f}" if row.get(key) else "" for key in plots.DECODING)))
    return rows


def head_table(results: Results) -> Rows:
    rows: Rows = [("tokens × vocabulary × hidden", "by", "ms", "of the two products' time", "GiB over the inputs")]
    for result in results.values():
        for shape in result["shapes"]:
            size = "×".join(map(str, shape["shape"]))
            for name, run in shape["rows"].items():
                rows.append(
                    (size, name, f"{run['ms']:.1f}", f"{run['x_gemms']:.3f}", f"{run['peak_bytes'] / 2**30:.2f}")
                )
    return rows


def step_command(name: str, result: dict[str, Any]) -> str:
    """The command line of benchmarks.step or benchmarks.packed, from the options that the result holds."""
    packed = "documents" in result
    words = [f"python -m benchmarks.{'packed' if packed else 'step'} --model {result['model']}"]
    if packed:
        words.append(f"--documents {len(result['documents'])} --tokens {result['tokens']}")
    else:
        words.append(f"--batch {result['batch']} --length {result['length']}")
    given = {"policy": None, "memory_limit_gib": None, "recipe": "bf16", "storage": "nf4"}
    words += ["--checkpointing"] if result.get("checkpointing") else []
    for key, default in given.items():
        value = result.get(key) or default
        if value != default:
            words.append(f"--{key.replace('_', '-')} {value if isinstance(value, str) else format(value, 'g')}")
    words += ["--graph"] if "halfbyte, graph" in result["runs"] else []
    words += [] if packed or result.get("floor") else ["--no-floor"]
    words += ["--steps 0"] if all(len(run.get("losses", ())) == 1 for run in result["runs"].values()) else []
    peers = [run for run in result["runs"] if not run.startswith("halfbyte")]
    words += [f"--peers {','.join(peers)}"] if peers else []
    return " ".join([*words, f"--json benchmarks/results/{name}.json"])


def command(line: str) -> Callable[[str, dict[str, Any]], str]:
    """A command line in which {file} stands for the result."""
    return lambda name, result: line.format(file=f"benchmarks/results/{name}.json", **result)


def overview_command(name: str, result: dict[str, Any]) -> str:
    if name.startswith("qlora"):
        line = "python -m benchmarks.qlora_8b --data gsm8k.jsonl --tokenizer llama3/ --work DIR"
        return f"{line} --json benchmarks/results/{name}.json"
    return step_command(name, result)


STEPS = (
    "One QLoRA step (NF4 with nested scales unless said, r = 16, seven linears, random weights and tokens): forward, "
    "backward and AdamW, median of ten. The floor is every matrix product and the attention timed alone in CUDA graphs "
    "at their shapes, added up; for packed rows, each document's attention alone at its own length. Peers ran in the "
    "same run, in processes of their own. Peaks are what torch's allocator held."
)


GPU_PARTS = (
    "link",
    "data",
    "peers",
    "tensor",
    "context",
    "gathers",
    "graphs",
    "ways",
    "seventy",
)  # of the two benchmarks


def gpus_command(name: str, result: dict[str, Any]) -> str:
    parts = " ".join(part for part in GPU_PARTS if part in result)
    module = "sharded" if name.startswith("sharded") else "several_gpus"
    return f"torchrun --nproc-per-node 2 -m benchmarks.{module} {parts} --json benchmarks/results/{name}.json"


def gpus_table(results: Results) -> Rows:
    rows: Rows = [("a step on each of two GPUs", "ms", "beside", "peak GiB")]
    for result in results.values():
        for run in result.get("data", []):
            name = f"{run['model']} {run['rows']}×{run['length']}{', CUDA graphs' if run['graphs'] else ''}"
            ms = min(run["ms"]["together"], run["ms"]["together again"])
            apart = min(run["ms"]["apart"], run["ms"]["apart again"])
            beside = f"{run['of_apart']:.3f} of two that do not speak ({apart:.1f} ms)"
            rows.append((f"**{name}**, data", f"{ms:.1f}", beside, f"{run['peak_gib']:.1f}"))
        for run in (run for run in result.get("peers", []) if run["theirs_ms"]):
            beside = (
                f"Hugging Face, PEFT, bitsandbytes and DDP take {run['theirs_ms']:.0f} ms: {run['times']:.2f} times"
            )
            rows.append(
                (f"**{run['model']} {run['rows']}×{run['length']}**, data", f"{run['ours_ms']:.1f}", beside, "")
            )
        for run in result.get("gathers", []):
            beside = f"{run['of_data']:.3f} of data; {run['gathered_gb']:.1f} GB gathered" if "of_data" in run else ""
            rows.append(
                (f"**llama-3.1-8b 4×2048**, {run['way']}", f"{run['ms']:.1f}", beside, f"{run['peak_gib']:.1f}")
            )
        for run in result.get("ways", []):
            rows += ways_rows(run)
    return rows


def ways_rows(run: dict[str, Any]) -> Rows:
    """A step as Python launches it and one as a CUDA graph, where each call of a layer gathers it in one way."""
    long, short = run["ms"]["4x2048"], run["ms"]["2x512 as a graph"]
    gathered = "us" in run
    way = f"each call, by {run['way']}" if gathered else run["way"]
    beside = f"{run['of_data']['4x2048']:.3f} of data; a gather takes {run['us']:.0f} µs" if gathered else ""
    return [
        (f"**llama-3.1-8b 4×2048**, {way}", f"{long:.1f}", beside, ""),
        (f"**llama-3.1-8b 2×512, CUDA graphs**, {way}", f"{short:.1f}", f"{run['of_alone']:.2f} × one GPU's time", ""),
    ]


SECTIONS = (
    Section(
        "Beside others", r"qlora_8b_h200|step_(llama8b|qwen06b)_(2x512|2x2048|4x2048|4x2048_checkpointed|1x8192)_h200",
        "Whole QLoRA steps of the same model, batch and adapters, each with its peer in the same run.",
        {"overview": plots.overview}, no_table, overview_command,
    ),
    Section(
        "Training steps", r"(step|packed)_(?!attention).*", STEPS, {"step": plots.step, "memory": plots.memory},
        step_table, step_command,
    ),
    Section(
        "Two GPUs", r"(several_gpus|sharded)_.*",
        "The same step on each of two H200s of one host, in one run: without a word to each other, with gradients "
        "summed (data), and with frozen weights in slices: each decoder layer gathered for each call, every other one "
        "kept whole, or all; then by NCCL's collective, and read from its owner's memory by copy engines ('handles', "
        "what a run on one host does; 'symmetric memory' maps it by other means).",
        {}, gpus_table, gpus_command,
    ),
    Section(
        "The longest context", r"context_.*",
        "One step of one row, inputs of layers in host memory, MLPs in tiles, within 80 GiB of the device.",
        {}, step_table, step_command,
    ),
    Section(
        "The loss of a frozen head", r"head_.*",
        "Mean loss and dX, by turns; the two products are the whole matrices' alone. 'halfbyte' had a kernel in CUDA "
        "then, which has gone since: 'halfbyte, Triton' is what runs now.",
        {}, head_table,
        lambda name, result: "python -m benchmarks.head --shapes "
                             + ",".join("x".join(map(str, each["shape"])) for each in result["shapes"])
                             + f" --json benchmarks/results/{name}.json",
    ),
    Section(
        "Elementwise kernels", r"kernels_.*",
        "Bytes that must be read and written over the time in a CUDA graph, as a part of what a device copy reaches; "
        "the dotted line is 85%. 'Called' is a call as Python makes it, 'host' the part of it that Python takes.",
        {"kernels": plots.kernels}, kernel_table, command("python -m benchmarks.kernels {file}"),
    ),
    Section(
        "Dequantizing to bf16", r"dequantize_.*h200",
        "The same measure. 'nested' has scales quantized to 8 bits.",
        {"dequantize": plots.dequantize}, no_table,
        lambda name, result: f"python -m benchmarks.dequantize {'--planes ' if 'formats' in result else ''}"
                             f"--json benchmarks/results/{name}.json",
    ),
    Section(
        "GEMV and small-batch GEMM", r"gemv_(?!formats).*",
        "x·Wᵀ from packed NF4 with nested scales, against cuBLAS on a bf16 weight of the same shape; in CUDA graphs, "
        "over weights that rotate, so that none stays in the cache.",
        {"gemv": plots.gemv}, gemv_table, command("python -m benchmarks.gemv --json {file}"),
    ),
    Section(
        "GEMV and small-batch GEMM, other formats", r"gemv_formats.*",
        "The same measure at the largest shape; the table has all.",
        {"gemv_formats": plots.gemv}, gemv_table, command("python -m benchmarks.gemv_formats --json {file}"),
    ),
    Section(
        "Decoding", r"decode_(?!layers).*h200",
        "Tokens a second of 8B in NF4 after prompts of 128 tokens; all rows of a batch together.",
        {"decode": plots.decode}, decode_table, command("python -m benchmarks.decode --peers --json {file}"),
    ),
    Section(
        "Quality", r"quality_(?!hqq).*",
        "Perplexity on held-out tokens by stored bits, before (hollow) and after (filled) the same short QLoRA run; "
        "dotted: the model as it is, before and after. Tables: [formats.md](formats.md).",
        {"quality": plots.quality}, no_table,
        command(
            "python -m benchmarks.quality {model} {text} --tokens {tokens} --steps {steps} --device {on} --json {file}"
        ),
    ),
)  # fmt: skip
HEAD = """# Benchmarks

Made by `python -m benchmarks.page` from `benchmarks/results`; edit neither this page nor its plots. What was tried on
the way, and why a number is what it is: [log.md](log.md). A ratio within one run counts; times of two runs may be those
of two machines.
"""


def provenance(name: str, result: dict[str, Any]) -> str:
    """Where a result comes from, as an item of a list."""
    versions = result["versions"] | {"liger": result.get("liger")}
    named = ", ".join(f"{key} {versions[key]}" for key in (*VERSIONS, "liger") if versions.get(key))
    commit = f"commit {result['commit']}" if result["commit"] else "commit not recorded"
    return f"- [`{name}.json`](../benchmarks/results/{name}.json): {commit}, {result['device']}, {named}"


def markdown(rows: Rows) -> str:
    head, *others = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others]) + "\n"


def rendered(folder: Path) -> dict[str, str]:
    """Path below docs/ → text, of the page and its plots, from the results in `folder`."""
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
        page += ["```bash", *(section.command(name, result) for name, result in results.items()), "```"]
        page += [*(provenance(name, result) for name, result in results.items()), ""]
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
