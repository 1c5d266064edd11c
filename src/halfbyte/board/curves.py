"""Curves and histograms as inline SVG in the report's colours, by CSS classes: no script and no inline style.

A curve of any length is reduced to the smallest and largest value of each column of a screen, in their order, so that
spikes stay visible. A range of steps is drawn from the records in it, with all their detail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..report.plots import smooth
from ..report.sections import text

WIDTH, HEIGHT = 460, 240  # of a drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34
HALF_DIGIT = 3.2  # width of half a digit
COLUMNS = 400  # of the screen, that a curve is reduced to
SERIES = 12  # colours


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: in the legend.
        xs, ys: numbers, equally many; a y that is not finite leaves a gap.
        colour: number of the colour, from 0.
        dots: whether the points are marked.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dots: bool = False


def chart(title: str, lines: Sequence[Line], x_label: str, *, log: bool = False, smoothed: bool = True) -> str:
    """Return curves over one another with axes, and a sentence for screen readers.

    Args:
        log: logarithmic vertical axis; values of 0 and below are gaps.
        smoothed: draw a running mean over curves of more than 30 points.
    """
    shown = [_logarithms(line) if log else line for line in lines]
    drawn = [reduced(line.xs, line.ys) for line in shown]
    finite = [(x, y) for points in drawn for x, y in points if math.isfinite(y)]
    if not finite:
        return '<p class="missing">no numbers</p>'
    x_range = _range([x for x, _ in finite])
    y_range = _range([y for _, y in finite], margin=0.04)
    parts, dots = [], []
    for line, points in zip(shown, drawn, strict=True):
        colour, many = f"s{line.colour % SERIES}", smoothed and len(line.ys) > 30
        reading = f'data-name="{text(line.name)}"{" data-reduced" if len(line.ys) > 2 * COLUMNS else ""}'
        parts.append(_path(points, x_range, y_range, f"{colour} faint" if many else colour, reading))
        if many:
            means = _means(line.xs, line.ys)
            middle = list(zip([x for x, _ in means], smooth([y for _, y in means]), strict=True))
            parts.append(_path(middle, x_range, y_range, colour))
        if line.dots or len(line.ys) < 12:
            for x, y in points:
                if math.isfinite(y):
                    center = f'cx="{_x(x, x_range):.1f}" cy="{_y(y, y_range):.1f}"'
                    dots.append(f'<circle class="{colour}" {center} r="2.2"/>')
    label = text(_sentence(title, lines))
    legend = "".join(f'<li><i class="k{line.colour % SERIES}"></i>{text(line.name)}</li>' for line in lines)
    ranges = (
        f'data-x="{x_range[0]!r} {x_range[1]!r}" data-y="{y_range[0]!r} {y_range[1]!r}"{" data-log" if log else ""}'
    )
    svg = (
        f'<svg class="chart" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" {ranges}'
        f' data-label="{text(x_label)}">{"".join(_axes(x_range, y_range, x_label, log))}'
        f'<g class="plot"><g class="lines">{"".join(parts)}{"".join(dots)}</g></g></svg>'
    )
    return svg + (f'<ul class="legend">{legend}</ul>' if len(lines) > 1 else "")


def sparkline(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Return a curve without axes, for a cell of a table."""
    finite = [y for y in ys if math.isfinite(y)]
    if len(finite) < 2:
        return ""
    low, high = _range(finite, margin=0.05)
    width = (xs[-1] - xs[0]) or 1
    at = [(90 * (x - xs[0]) / width, 22 - 20 * (y - low) / (high - low)) for x, y in zip(xs, ys, strict=True)]
    return f'<svg class="spark" aria-hidden="true" viewBox="0 0 90 24"><path class="s0" d="{_segments(at)}"/></svg>'


def histogram(title: str, edges: Sequence[float], counts: Sequence[float], x_label: str) -> str:
    """Return bars between `edges`, one more than `counts`."""
    if not any(counts) or len(edges) != len(counts) + 1:
        return '<p class="missing">no numbers</p>'
    x_range, y_range = (edges[0], max(edges[-1], edges[0] + 1e-9)), (0.0, max(counts) * 1.04)
    parts = _axes(x_range, y_range, x_label, False)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        x, top = _x(left, x_range), _y(count, y_range)
        width = max((_x(right, x_range) - x) * 0.92, 0.5)
        size = f'width="{width:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        parts.append(f'<rect class="f0" x="{x:.1f}" y="{top:.1f}" {size}/>')
    label = f'aria-label="{text(title)}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="chart" role="img" {label}>{"".join(parts)}</svg>'


def _sentence(title: str, lines: Sequence[Line]) -> str:
    ends = []
    for line in lines:
        first = next((y for y in line.ys if math.isfinite(y)), None)
        last = next((y for y in reversed(line.ys) if math.isfinite(y)), None)
        if first is not None:
            ends.append(f"{line.name or 'it'} goes from {first:.4g} to {last:.4g}")
    return f"{title}: {'; '.join(ends)}"


def _logarithms(line: Line) -> Line:
    ys = [math.log10(y) if math.isfinite(y) and y > 0 else math.nan for y in line.ys]
    return Line(line.name, line.xs, ys, line.colour, line.dots)


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    space = (high - low) * margin or (abs(high) * 0.05 or 1.0) * (margin > 0 or high == low)
    return low - space, high + space


def _x(value: float, bounds: tuple[float, float]) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (value - bounds[0]) / (bounds[1] - bounds[0])


def _y(value: float, bounds: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bounds[0]) / (bounds[1] - bounds[0])


def _path(
    points: Sequence[tuple[float, float]],
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    classes: str,
    attributes: str = "",
) -> str:
    at = [(_x(x, x_range), _y(y, y_range) if math.isfinite(y) else math.nan) for x, y in points]
    return f'<path class="{classes}" {attributes} d="{_segments(at)}"/>'


def _columns(count: int) -> list[tuple[int, int]]:
    """Return the bounds of the screen's columns among `count` points."""
    size = count / COLUMNS
    return [(int(column * size), int((column + 1) * size)) for column in range(COLUMNS)]


def reduced(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return points by x with the lowest and the highest of each screen column, in their order; gaps stay."""
    if len(ys) <= 2 * COLUMNS:
        return list(zip(xs, ys, strict=True))
    points = [(xs[0], ys[0])]
    for begin, end in _columns(len(ys)):
        column = ys[begin:end]
        if not math.isfinite(sum(column)):
            finite = [y for y in column if math.isfinite(y)]
            points.append((xs[begin], math.nan))
            if not finite:
                continue
            extremes = {column.index(min(finite)), column.index(max(finite))}
        else:
            extremes = {column.index(min(column)), column.index(max(column))}
        points += [(xs[begin + index], column[index]) for index in sorted(extremes)]
    return [*points, (xs[-1], ys[-1])]


def _means(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Return the means of each screen column; of few points, the points."""
    if len(ys) <= 2 * COLUMNS:
        return list(zip(xs, ys, strict=True))
    means = []
    for begin, end in _columns(len(ys)):
        finite = ys[begin:end]
        if not math.isfinite(sum(finite)):
            finite = [y for y in finite if math.isfinite(y)]
        means.append((xs[(begin + end) // 2], sum(finite) / len(finite) if finite else math.nan))
    return means


def _segments(points: Sequence[tuple[float, float]]) -> str:
    """Return the path through points, interrupted at gaps."""
    commands, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{x:.1f} {y:.2f}")
        pen = "L"
    return "".join(commands)


def _axes(x_range: tuple[float, float], y_range: tuple[float, float], x_label: str, log: bool) -> list[str]:
    """Return grid, numbers and the label of the horizontal axis."""
    parts = []
    for value in _ticks(*y_range):
        y, label = _y(value, y_range), f"{10**value:.3g}" if log else _number(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 3:.1f}">{label}</text>')
    for value in _ticks(*x_range):
        x, label = _x(value, x_range), _number(value)
        is_last = x + HALF_DIGIT * len(label) > WIDTH  # it would be cut at the edge
        at = f'class="end tick" x="{WIDTH}"' if is_last else f'class="middle tick" x="{x:.1f}"'
        parts.append(f'<text {at} y="{HEIGHT - 20}">{label}</text>')
    parts.append(f'<text class="middle" x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 5}">{text(x_label)}</text>')
    return parts


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within a range."""
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"
