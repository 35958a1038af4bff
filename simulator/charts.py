"""Line charts as SVG inside an HTML page; `charts.js` shows the values at the pointer, `charts.css` has the colours."""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
LEAST_S = 1e-6  # what a logarithmic axis takes for 0
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 10, 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values; a logarithmic one lies above 0."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False
    is_share: bool = False

    def at(self, value: float) -> float:
        """Between 0 and 1 within the range."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def shown(self, value: float) -> str:
        return f"{value:.0%}" if self.is_share else f"{value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Attributes:
    points: x, y and what the pointer is told there; in the order in which they are joined.
    dots: whether each point shows, as few of them do that were tried one by one.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A target, dashed: across at `y`, or upright at `x` in the colour of a line."""

    text: str
    x: float | None = None
    y: float | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()


def shares(label: str) -> Axis:
    return Axis(label=label, low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0), is_share=True)


def seconds(label: str, values: Iterable[float]) -> Axis:
    """Logarithmic, from a round number below the least of them to one above the greatest."""
    known = sorted(values) or [1.0]
    ticks = _round_numbers(max(known[0], LEAST_S), max(known[-1], LEAST_S))
    return Axis(label=label, low=ticks[0], high=ticks[-1], ticks=_fewer(ticks), logarithmic=True)


def from_zero(label: str, values: Iterable[float]) -> Axis:
    most = max(values, default=0.0) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(most))
    step = next(step for step in (0.2 * magnitude, 0.5 * magnitude, magnitude, 2 * magnitude) if most <= 6 * step)
    ticks = [float(f"{step * number:.6g}") for number in range(math.ceil(most / step - 1e-9) + 1)]
    return Axis(label=label, low=0.0, high=ticks[-1], ticks=ticks)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten: from the last one not above `low` to the first one above `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ladder = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return ladder[bisect_right(ladder, low) - 1 : bisect_right(ladder, high) + 1]


def _fewer(ticks: list[float]) -> list[float]:
    """Powers of ten alone where all would not fit."""
    powers = [tick for tick in ticks if f"{tick:e}".startswith("1.000000e")]
    return ticks if len(ticks) <= 7 else powers


def svg(chart: Chart) -> str:
    """With its title and, where there is more than one line, a legend."""
    parts = [*_grid(chart), *(_mark(chart, mark) for mark in chart.marks)]
    points = [
        [*_place(chart, x, y), text, index] for index, line in enumerate(chart.lines) for x, y, text in line.points
    ]
    parts += [_line(chart, index, line) for index, line in enumerate(chart.lines)]
    parts.append('<circle class="here" r="4" visibility="hidden"/>')
    names = ", ".join(line.name for line in chart.lines)
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{chart.title}: {names}")}" '
        f'data-points="{escape(json.dumps(points, separators=(",", ":")))}">{"".join(parts)}</svg>'
        f'<output class="tip" hidden></output>{_legend(chart)}</figure>'
    )


def _place(chart: Chart, x: float, y: float) -> tuple[float, float]:
    """In the units of the picture."""
    across, up = chart.x.at(x), chart.y.at(y)
    return (
        round(_LEFT + across * (_WIDTH - _LEFT - _RIGHT), 1),
        round(_HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM), 1),
    )


def _grid(chart: Chart) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in chart.y.ticks:
        _, y = _place(chart, chart.x.low, tick)
        yield f'<path class="grid" d="M{_LEFT} {y}H{right}"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 4}" text-anchor="end">{chart.y.shown(tick)}</text>'
    for tick in chart.x.ticks:
        x, _ = _place(chart, tick, chart.y.low)
        yield f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 14}" text-anchor="middle">{chart.x.shown(tick)}</text>'
    middle = (_LEFT + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(chart.x.label)}</text>'
    turned = f'transform="rotate(-90)" x="{-(_TOP + bottom) / 2}" y="14"'
    yield f'<text {turned} text-anchor="middle">{escape(chart.y.label)}</text>'


def _mark(chart: Chart, mark: Mark) -> str:
    x, y = _place(chart, mark.x or chart.x.low, mark.y or chart.y.low)
    path = f"M{x} {_TOP}V{_HEIGHT - _BOTTOM}" if mark.x is not None else f"M{_LEFT} {y}H{_WIDTH - _RIGHT}"
    colour = "mark" if mark.line is None else f"mark c{mark.line % COLOURS}"
    return f'<path class="{colour}" d="{path}"><title>{escape(mark.text)}</title></path>'


def _line(chart: Chart, index: int, line: Line) -> str:
    places = [_place(chart, x, y) for x, y, _ in line.points]
    path = "".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(places))
    dots = "".join(f'<circle class="dot c{index % COLOURS}" cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    return f'<path class="line c{index % COLOURS}" d="{path}"/>{dots if line.dots else ""}'


def _legend(chart: Chart) -> str:
    """Names of lines, and what the dashed ones are."""
    names = [(f"line c{index % COLOURS}", line.name) for index, line in enumerate(chart.lines)]
    marks = [("mark" if each.line is None else f"mark c{each.line % COLOURS}", each.text) for each in chart.marks]
    rows = (
        f'<li><svg viewBox="0 0 20 8"><path class="{kind}" d="M0 4H20"/></svg>{escape(text)}</li>'
        for kind, text in (*(names if len(names) > 1 else ()), *marks)
    )
    return f'<ul class="legend">{"".join(rows)}</ul>'
