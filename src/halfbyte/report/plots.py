"""Curves and histograms as inline SVG.

Matplotlib draws in placeholder colours that are replaced by CSS variables, so that one drawing works in light and dark
pages. Text stays text, in the page's font. pyplot and its global state are not used.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Sequence
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..methods import Metric
    from .run import Record

SIZE, LETTER = (4.6, 2.5), 0.068  # inches: size of a drawing, width of a digit in labels of 8 points
INK = "#000001"
GRID = "#000002"
FIRST = "#000003"
SECOND = "#000004"
VARIABLES = {INK: "var(--muted)", GRID: "var(--line)", FIRST: "var(--series-1)", SECOND: "var(--series-2)"}

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def by_step(train: list[Record], evals: list[Record], metric: Metric) -> str:
    """A metric of training and held-out data by step."""
    held_out = _series(evals, metric.name)

    def draw(axes: Axes) -> None:
        _noisy(axes, *_series(train, metric.name), name="training")
        if held_out[0]:
            axes.plot(*held_out, color=SECOND, marker="o", markersize=3.5, label="held out")
        _legend_above(axes)

    return _svg(metric.name, f"Training and held-out {metric.label} by step", draw, "step")


def gradient_norm(records: list[Record]) -> str:
    """Gradient norm before clipping, by step."""

    def draw(axes: Axes) -> None:
        _noisy(axes, *_series(records, "grad_norm"))
        axes.set_ylim(bottom=0)

    return _svg("grad-norm", "Gradient norm by step", draw, "step")


def learning_rate(records: list[Record]) -> str:
    """Learning rate by step."""

    def draw(axes: Axes) -> None:
        steps, values = _series(records, "learning_rate")
        axes.plot(steps, values, color=FIRST, marker=_marker(values), markersize=3)
        axes.set_ylim(bottom=0)

    return _svg("learning-rate", "Learning rate by step", draw, "step")


def throughput(records: list[Record]) -> str:
    """Tokens per second by step, with the median."""

    def draw(axes: Axes) -> None:
        steps, values = _series(records, "tokens_per_second")
        middle = statistics.median(values)
        _noisy(axes, steps, values)
        axes.axhline(middle, color=SECOND, linewidth=1, linestyle=(0, (4, 3)), label=f"median {middle:,.0f}")
        axes.set_ylim(0, max(values) * 1.1 or 1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _legend_above(axes)

    return _svg("throughput", "Tokens per second by step", draw, "step")


def step_times(records: list[Record]) -> str:
    """Histogram of step times; the slowest 2% (warm-up, saves) are only counted, in the axis label."""
    seconds = sorted(record["step_seconds"] for record in records)
    limit = seconds[math.ceil(len(seconds) * 0.98) - 1]
    shown = [value for value in seconds if value <= limit]
    beyond = len(seconds) - len(shown)

    def draw(axes: Axes) -> None:
        axes.hist(shown, bins=min(30, max(5, math.isqrt(len(shown)) * 2)), color=FIRST, rwidth=0.9)
        _count_axis(axes)

    label = "seconds per step" + (f" ({beyond} slower than {limit:.3g} s not shown)" if beyond else "")
    return _svg("step-times", "Histogram of step times", draw, label)


def lengths(histogram: dict[str, Any], max_length: int | None) -> str:
    """Histogram of document lengths, with max_length if it is in range."""
    from matplotlib.ticker import MaxNLocator

    edges, counts = histogram["edges"], histogram["counts"]

    def draw(axes: Axes) -> None:
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(edges[:-1], counts, [width * 0.92 for width in widths], align="edge", color=FIRST)
        if max_length and edges[0] <= max_length <= edges[-1] * 1.05:
            axes.axvline(
                max_length, color=SECOND, linewidth=1, linestyle=(0, (4, 3)), label=f"max_length {max_length:,}"
            )
        _legend_above(axes)
        _count_axis(axes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return _svg("lengths", "Histogram of document lengths", draw, "tokens per document")


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of the neighbours of each of `values`, with weights that fall linearly to 0 at a fifteenth of their number.

    Weights beyond an end are left out of the sum and of its divisor: the ends are as smooth as the middle, and lag by a
    third of that distance. Skips NaN and infinite values; a window without finite values is NaN.
    """
    reach = max(3, len(values) // 15)
    sums = _triangular_sums([value if math.isfinite(value) else 0.0 for value in values], reach)
    weights = _triangular_sums([float(math.isfinite(value)) for value in values], reach)
    return [total / weight if weight > 0.5 else math.nan for total, weight in zip(sums, weights, strict=True)]


def _triangular_sums(values: Sequence[float], reach: int) -> list[float]:
    """For each i the sum over k of max(0, reach - |k|) * values[i + k], by second differences of cumulative sums."""
    sums = [0.0] * (reach + 1) + [*accumulate(accumulate([*values, *[0.0] * reach]))]
    return [sums[i + 2 * reach] - 2 * sums[i + reach] + sums[i] for i in range(len(values))]


def _series(records: list[Record], key: str) -> tuple[list[int], list[float]]:
    pairs = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _noisy(axes: Axes, steps: list[int], values: list[float], name: str = "") -> None:
    """Plot a line; many points are drawn faintly under their running mean."""
    if len(values) > 30:
        axes.plot(steps, values, color=FIRST, alpha=0.3, linewidth=0.8)
        axes.plot(steps, smooth(values), color=FIRST, label=name and f"{name} (running mean)")
    else:
        axes.plot(steps, values, color=FIRST, marker=_marker(values), markersize=3, label=name)


def _marker(values: Sequence[float]) -> str:
    return "o" if len(values) < 12 else ""


def _legend_above(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.98), ncols=2, handlelength=1.4, borderpad=0)


def _count_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _svg(name: str, title: str, draw: Any, x_label: str) -> str:
    """Run `draw` on new axes and return the drawing as SVG for a page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"halfbyte-{name}"}):
        figure: Figure = Figure(figsize=SIZE)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_xlabel(x_label)
        if x_label == "step":
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        draw(axes)
        _place(axes)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _for_page(buffer.getvalue(), title)


def _place(axes: Axes) -> None:
    """Reserve space for labels by their number of letters.

    matplotlib's layout engines draw twice to measure its own font, which is not the page's.
    """
    width, height = SIZE
    longest = max(len(label.get_text()) for label in axes.get_yticklabels())
    above = 0.26 if axes.get_legend() else 0.08
    left = (0.13 + LETTER * longest) / width
    axes.set_position((left, 0.42 / height, 1 - left - 0.16 / width, 1 - (0.42 + above) / height))


def _for_page(svg: str, title: str) -> str:
    """Prepare an SVG for a page: no prolog, no unused ids, the page's font and colours, a title for screen readers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([A-Za-z][\w.-]*)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    svg = re.sub(
        r"<svg[^>]*>", f'<svg role="img" aria-label="{escape(title)}" {view[0] if view else ""}>', svg, count=1
    )
    for placeholder, variable in VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    return svg.strip()
