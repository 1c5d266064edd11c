"""The drawings of docs/benchmarks.md: each takes results as the benchmarks wrote them, and fills a matplotlib figure.

Colours are legible on white and on black; the background is transparent. The same results give the same bytes with one
version of matplotlib: nothing depends on the day, and ids are hashed with a fixed salt.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = dict[str, dict[str, Any]]  # file name without its suffix → what the file holds
Draw = Callable[["Figure", Results], None]

INK, GRID = "#7b858f", "#7b858f50"
COLOURS = {
    "halfbyte": "#3b82f6", "halfbyte, graph": "#0ea5a0", "unsloth": "#f0883e",
    "bitsandbytes": "#c9608f", "HF, PEFT, bitsandbytes": "#c9608f", "liger": "#f0883e", "torch.compile": "#9a7fd1",
}  # fmt: skip
QLORA_BATCH = 2, 2048  # rows and tokens of benchmarks.qlora_8b, packed and checkpointed
LINES = ("#3b82f6", "#0ea5a0", "#84a83a", "#f0883e", "#c9608f", "#9a7fd1")
DECODING = {  # key of a row → label, colour
    "limit": ("all weights read at a copy's speed", "#7b858f"),
    "base": ("halfbyte", "#3b82f6"),
    "fp8_cache": ("halfbyte, FP8 cache", "#0ea5a0"),
    "lora": ("halfbyte, adapter not merged", "#84a83a"),
    "peer": ("transformers, bitsandbytes", "#f0883e"),
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "halfbyte",
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def svg(draw: Draw, results: Results) -> str:
    """The drawing of `results`, as a file of its own."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure: Figure = Figure(layout="constrained")
        draw(figure, results)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def what(result: dict[str, Any]) -> str:
    """A step's model and shape in a few words: '8B 4×2048, checkpointed'."""
    model = result["model"].rsplit("-", 1)[-1].upper()
    if "predicted_gib" in result:  # of benchmarks.qlora_8b
        words = [f"{model} {QLORA_BATCH[0]}×{QLORA_BATCH[1]} packed, checkpointed"]
    elif "documents" in result:
        words = [f"{model} packed, {len(result['documents'])} in {result['tokens']}"]
    else:
        words = [f"{model} {result['batch']}×{result['length']}"]
    policy = result.get("policy")
    if result.get("checkpointing") or policy == "checkpoint":
        words.append("checkpointed")
    elif policy:
        words.append(policy)
    if result.get("memory_limit_gib"):
        words.append(f"within {result['memory_limit_gib']:g} GiB")
    if result.get("recipe", "bf16") != "bf16":
        words.append(result["recipe"])
    if result.get("storage", "nf4") != "nf4" and "," not in result["storage"]:
        words.append(f"{result['storage']} weights")
    return ", ".join(words)


def measured(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs that have numbers: a peer that failed has none."""
    return {name: run for name, run in result["runs"].items() if "ms" in run}


def bars(axes: Axes, groups: Sequence[tuple[str, dict[str, tuple[float, str]]]], start: float = 0.0) -> None:
    """Horizontal bars from `start`, in groups: (label, {series: (value, what to write beside it)}), first on top."""
    y, ticks, seen = 0.0, [], set()
    for _, series in groups:
        ticks.append(y + (len(series) - 1) / 2)
        for name, (value, words) in series.items():
            label = None if name in seen else name
            axes.barh(y, value - start, left=start, height=0.86, color=COLOURS[name], label=label)
            axes.annotate(words, (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
            seen.add(name)
            y += 1
        y += 0.8
    axes.set_yticks(ticks, [label for label, _ in groups])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(axis="x")


def legend_above(axes: Axes, columns: int = 4) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderpad=0)


def height(groups: Sequence[tuple[str, dict[str, Any]]]) -> float:
    """Inches for bars of these groups."""
    return 0.7 + sum(0.17 * len(series) + 0.14 for _, series in groups)


def step(figure: Figure, results: Results) -> None:
    """Step times as multiples of their floors."""
    groups = [
        (what(result), {n: (run["ms"] / floor["ms"], f"{run['ms']:.0f} ms") for n, run in measured(result).items()})
        for result in results.values()
        if (floor := result.get("floor"))
    ]
    figure.set_size_inches(7, height(groups))
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    bars(axes, groups, start=1.0)
    axes.set_xlim(1, axes.get_xlim()[1] * 1.15)
    axes.set_xticks([1, 1.5, 2, 3, 4, 6, 8, 12], ["floor", "1.5", "2", "3", "4", "6", "8", "12"], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("a step's time, in floors (logarithmic)")
    legend_above(axes)


def memory(figure: Figure, results: Results) -> None:
    """Peaks of the same steps."""
    groups = [
        (what(result), {n: (run["peak_gib"], f"{run['peak_gib']:.1f}") for n, run in measured(result).items()})
        for result in results.values()
    ]
    figure.set_size_inches(7, height(groups))
    axes = figure.add_subplot()
    bars(axes, groups)
    axes.set_xlabel("peak GiB of a step")
    legend_above(axes)


def overview(figure: Figure, results: Results) -> None:
    """Tokens a second and peak memory of whole steps, beside Unsloth and Hugging Face with bitsandbytes."""
    speed: list[tuple[str, dict[str, tuple[float, str]]]] = []
    memory_: list[tuple[str, dict[str, tuple[float, str]]]] = []
    for result in results.values():
        runs = _compared(result)
        if len(runs) > 1:
            label = what(result).replace(", ", ",\n", 1)
            speed.append((label, {name: (rate, f"{rate:,.0f}") for name, (rate, _) in runs.items()}))
            memory_.append((label, {name: (peak, f"{peak:.1f}") for name, (_, peak) in runs.items()}))
    figure.set_size_inches(7, height(speed))
    left, right = figure.subplots(1, 2, sharey=True)
    bars(left, speed)
    bars(right, memory_)
    left.invert_yaxis()  # the two share an axis, and `bars` turns it each time
    left.set_xlabel("tokens a second")
    right.set_xlabel("peak GiB")
    left.set_xlim(0, left.get_xlim()[1] * 1.15)
    right.set_xlim(0, right.get_xlim()[1] * 1.15)
    legend_above(left)


def _compared(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Who → (tokens a second, GiB); halfbyte's is the faster of its ways to launch the step."""
    if "step_ms" in next(iter(result["runs"].values())):
        names = {"halfbyte": "halfbyte", "peer": "HF, PEFT, bitsandbytes"}
        tokens = QLORA_BATCH[0] * QLORA_BATCH[1]
        runs = {names[key]: run for key, run in result["runs"].items() if key in names}
        return {name: (tokens / run["step_ms"] * 1e3, run["peak_gib"]) for name, run in runs.items()}
    runs = measured(result)
    best = min((name for name in runs if name.startswith("halfbyte")), key=lambda name: runs[name]["ms"])
    shown = {"halfbyte": runs[best]} | {name: run for name, run in runs.items() if not name.startswith("halfbyte")}
    return {name: (run["tokens_per_second"], run["peak_gib"]) for name, run in shown.items()}


def kernels(figure: Figure, results: Results) -> None:
    """Elementwise kernels in a graph: fraction of copy bandwidth, forward and backward."""
    rows = [row for result in results.values() for row in result["kernels"]]
    sides = []
    for direction in ("forward", "backward"):
        groups: dict[str, dict[str, tuple[float, str]]] = {}
        for row in (row for row in rows if row["direction"] == direction):
            value = row["fraction_of_copy"]
            groups.setdefault(row["kernel"], {})[row["by"]] = (value, f"{value:.0%}")
        sides.append((direction, list(groups.items())))
    figure.set_size_inches(7, max(height(groups) for _, groups in sides))
    for axes, (direction, groups_) in zip(figure.subplots(1, 2, sharey=True), sides, strict=True):
        bars(axes, groups_)
        axes.set_xlim(0, 1.2)
        axes.axvline(0.85, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"{direction}, of a copy's bandwidth")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        if direction == "forward":
            axes.invert_yaxis()  # the two share an axis, and `bars` turns it each time
            legend_above(axes)


def dequantize(figure: Figure, results: Results) -> None:
    """Dequantizing in a graph: fraction of copy bandwidth."""
    groups = []
    for result in results.values():
        for row in result["rows"]:
            projects = [name for name in ("halfbyte", "bitsandbytes", "unsloth") if name in row]
            moved = row["TBps"] * row["halfbyte"]["graph_us"]
            rates = {name: moved / row[name]["graph_us"] for name in projects}
            series = {name: (rate / result["copy_TBps"], f"{rate:.2f} TB/s") for name, rate in rates.items()}
            scales = ", nested" if row["nested"] else ""
            groups.append((f"{row['shape'].replace('x', '×')}, {row['dtype'].removeprefix('torch.')}{scales}", series))
    figure.set_size_inches(7, height(groups))
    axes = figure.add_subplot()
    bars(axes, groups)
    axes.set_xlim(0, 1.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("of a copy's bandwidth")
    legend_above(axes)


def gemv(figure: Figure, results: Results) -> None:
    """Products of few rows, at the largest shape: against cuBLAS on a 16-bit weight, and of copy bandwidth."""
    figure.set_size_inches(7, 2.7)
    lines: dict[str, list[dict[str, Any]]] = {}
    for result in results.values():
        if result.get("card"):
            continue
        largest = max((row["shape"] for row in result["rows"]), key=lambda shape: math.prod(map(int, shape.split("x"))))
        for row in result["rows"]:
            if row["shape"] == largest:
                lines.setdefault(row["spec"], []).append(row)
    left, right = figure.subplots(1, 2)
    for (style, colour), (label, rows) in zip(product(("-", "--", ":"), LINES), lines.items(), strict=False):
        batches = [row["batch"] for row in rows]
        look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 3}
        left.plot(batches, [row["cublas_us"] / row["us"] for row in rows], label=label, **look)
        right.plot(batches, [row["of_copy"] for row in rows], **look)
    for axes, label in ((left, "cuBLAS's time over halfbyte's"), (right, "of a copy's bandwidth")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, list(map(str, batches)))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows of x")
        axes.set_ylabel(label)
        axes.grid(axis="y")
    left.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(loc="outside upper left", ncols=6)


def decode(figure: Figure, results: Results) -> None:
    """Tokens a second by batch."""
    figure.set_size_inches(7, 2.9)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results.values(), strict=True):
        rows = result["rows"]
        shown = [key for key in DECODING if any(row.get(key) for row in rows)]
        for place, key in enumerate(shown):
            label, colour = DECODING[key]
            values = [
                (i + (place - (len(shown) - 1) / 2) * 0.16, row[key]) for i, row in enumerate(rows) if row.get(key)
            ]
            axes.bar(*zip(*values, strict=True), width=0.14, color=colour, label=label)
            for x, value in values:
                axes.annotate(f"{value:.0f}", (x, value), (0, 1), textcoords="offset points", ha="center", fontsize=6)
        axes.set_yscale("log")
        axes.set_xticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
        axes.set_ylabel("tokens a second (logarithmic)")
        axes.grid(axis="y")
    legend_above(panels[0], 2)


def quality(figure: Figure, results: Results) -> None:
    """Bits per weight against perplexity, of the registry's names: all of them, and those of four bits and more."""
    figure.set_size_inches(7, 3.2 * len(results))
    for panels, result in zip(figure.subplots(len(results), 2, squeeze=False), results.values(), strict=True):
        rows = {name: row for name, row in result["stored_as"].items() if not set(name) & {":", " "}}
        wide = {name: row for name, row in rows.items() if row["bits_per_weight"] >= 4}
        narrow = rows.keys() - wide.keys()
        whole = result["stored_as"]["as it is"]
        _quality(panels[0], rows, whole, narrow, apart=0.0)
        _quality(panels[1], wide, whole, wide.keys(), apart=0.035)
        panels[0].set_title(f"{result['model']}: all")
        panels[1].set_title(f"{result['model']}: four bits and more")
        panels[0].set_yscale("log")
        panels[0].minorticks_off()
        low, high = panels[0].get_ylim()
        ticks = [tick for tick in (5, 10, 25, 30, 40, 60, 100, 300, 800) if low <= tick <= high]
        panels[0].set_yticks(ticks, list(map(str, ticks)))
        panels[0].legend(loc="upper right")


def _quality(
    axes: Axes, rows: dict[str, dict[str, Any]], whole: dict[str, Any], named: Collection[str], apart: float
) -> None:
    """Before QLoRA hollow, after it filled; `named` are written beside the hollow ones, `apart` of the axis or more."""
    for key, face, label in (("perplexity", "none", "as stored"), ("perplexity_after_qlora", None, "after QLoRA")):
        points = [(row["bits_per_weight"], row[key]) for row in rows.values() if row.get(key)]
        colour = COLOURS["halfbyte" if face is None else "unsloth"]
        if points:
            look = {"s": 14, "edgecolors": colour, "facecolors": face or colour, "linewidths": 0.9}
            axes.scatter(*zip(*points, strict=True), **look, label=label)
        if whole.get(key):
            axes.axhline(whole[key], color=colour, linewidth=0.8, linestyle=":")
    axes.margins(x=0.13)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    placed: list[tuple[float, float]] = []
    for y, name in sorted((rows[name]["perplexity"], name) for name in named):
        x = rows[name]["bits_per_weight"]
        for other_x, other_y in placed:
            if abs(x - other_x) < 0.17 * (right - left):
                y = max(y, other_y + apart * (high - low))
        placed.append((x, y))
        axes.annotate(name, (x, y), (x + 0.015 * (right - left), y), fontsize=6, va="center")
    axes.set_xlabel("bits per weight")
    axes.set_ylabel("perplexity")
    axes.grid()
