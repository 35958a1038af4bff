"""The report of `sluice plan`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from simulator import html_page
from simulator.charts import Chart, Line, Mark, from_zero, shares, svg
from simulator.html_page import shown_number, shown_seconds, shown_share
from simulator.inputs import Group
from simulator.planner import Change, Point, Tried

_HEADS = (
    *("engine and system", "replicas", "cost", "worst class in time"),
    *("all in time", "in time/s", "a GPU", "first token, p99"),
)


class Answered(NamedTuple):
    """One load.

    Attributes:
        text: the answer in words.
        at: the point that it names.
        features: what each adds there.
    """

    load: float
    tried: Sequence[Tried]
    text: str
    at: Point
    features: Mapping[str, Change]


def plan_page(
    workload: str,
    loads: Sequence[Answered],
    attainment: float,
    given: Mapping[str, Group],
    command_line: str,
    style: str,
) -> str:
    """Args:
    attainment: share of every class that was asked for.
    given: what went in, by title.
    """
    body = [_section(each, attainment) for each in loads]
    body.append(html_page.section("What went in", html_page.groups(given), html_page.command_line(command_line)))
    return html_page.page(f"Plan for {workload}", "the cheapest that keeps its promises", body, style)


def _section(answered: Answered, attainment: float) -> str:
    best = next(index for index, each in enumerate(answered.tried) if each.point == answered.at)
    changes = list(next(iter(answered.features.values())))
    return html_page.section(
        f"At load ×{answered.load:g}",
        html_page.text(answered.text),
        html_page.charts([svg(costs(answered.tried, attainment))]),
        html_page.table(_HEADS, map(_row, answered.tried), best),
        html_page.heading(f"What each feature of Sluice adds at {answered.at.replicas} × {answered.at.engine}"),
        html_page.table(("", *(name.replace("_", " ") for name in changes)), _features(answered.features)),
    )


def costs(tried: Sequence[Tried], attainment: float) -> Chart:
    """The share in time of the worst class over cost, a line for each engine and system."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for each in sorted(tried, key=lambda each: each.cost):
        name = _name(each.point)
        text = f"{each.point.replicas} × {name}: cost {each.cost:.3g}, {each.attainment:.1%} in time"
        found.setdefault(name, []).append((each.cost, each.attainment, text))
    return Chart(
        title="What it takes",
        x=from_zero("cost", (each.cost for each in tried)),
        y=shares("share in time of the worst class"),
        lines=[Line(name=name, points=points, dots=True) for name, points in found.items()],
        marks=[Mark(text=f"good enough: {attainment:.1%}", y=attainment)],
    )


def _name(point: Point) -> str:
    return f"{point.engine} {point.system}"


def _row(tried: Tried) -> tuple[str, ...]:
    return (
        _name(tried.point),
        shown_number(tried.point.replicas),
        f"{tried.cost:.2f}",
        shown_share(tried.attainment),
        shown_share(tried.in_time),
        f"{tried.goodput_per_s:.2f}",
        f"{tried.goodput_per_gpu_s:.2f}",
        shown_seconds(tried.numbers["ttft_s"]["p99"]),
    )


def _features(changes: Mapping[str, Change]) -> Iterator[tuple[str, ...]]:
    for feature, change in changes.items():
        yield feature, *("–" if value is None else f"{value:+.1%}" for value in change.values())
