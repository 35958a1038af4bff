"""The report of `sluice simulate`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from policies.types import Phase
from simulator import html_page
from simulator.charts import LEAST_S, Chart, Line, Mark, seconds, shares, svg
from simulator.curves import Curve
from simulator.html_page import shown_number, shown_seconds, shown_share
from simulator.inputs import Group
from simulator.report import EVERY_CLASS, everything

_MOST_POINTS = 160  # of a curve: no eye tells more apart
_PERCENTILES = ("mean", "p50", "p90", "p99")
_TIMES = {
    "first token": "ttft_s",
    "a token after it, mean of an answer": "tpot_s",
    "gap between two tokens": "itl_s",
    "whole answer": "latency_s",
}
_CLASS_HEADS = (
    "class",
    "requests",
    "refused",
    "in time",
    "first token in time",
    "tokens in time",
    "whole answer in time",
    "in time/s",
    "first token, p99",
)


def run_page(
    numbers: Mapping[str, Any],
    drawn: Mapping[str, Mapping[str, Curve]],
    given: Mapping[str, Group],
    command_line: str,
    style: str,
) -> str:
    """Args:
    numbers: a run's `summary`, with `system`, `engine` and `workload`.
    drawn: its curves.
    given: what went in, by title.
    """
    about = f"{numbers['system']} on {numbers['engine']}"
    body = (
        html_page.section("What came out", html_page.tiles(_tiles(numbers))),
        html_page.section("Who was in time", html_page.table(_CLASS_HEADS, _classes(numbers))),
        html_page.section(
            "What requests took",
            html_page.charts(svg(distribution(kind, curves)) for kind, curves in drawn.items()),
            html_page.table(("", *_PERCENTILES), _times(numbers)),
        ),
        html_page.section("What engines did", html_page.groups(_engines(numbers))),
        html_page.section("What went in", html_page.groups(given), html_page.command_line(command_line)),
    )
    return html_page.page(f"Simulation of {numbers['workload']}", about, body, style)


def distribution(kind: str, curves: Mapping[str, Curve]) -> Chart:
    """Share of requests over seconds, by class, with the classes' targets."""
    lines, marks = list[Line](), list[Mark]()
    for index, (slo_class, curve) in enumerate(curves.items()):
        name = _class_name(slo_class)
        lines.append(Line(name=name, points=list(_sampled(name, curve))))
        if curve.target is not None and 0 < curve.target < math.inf:
            marks.append(Mark(text=f"target of {name}: {shown_seconds(curve.target)}", x=curve.target, line=index))
    times = [x for line in lines for x, *_ in line.points] + [mark.x for mark in marks if mark.x]
    x = seconds(f"{kind}, seconds", times)
    return Chart(title=kind.capitalize(), x=x, y=shares("share of requests"), lines=lines, marks=marks)


def _sampled(name: str, curve: Curve) -> Iterator[tuple[float, float, str]]:
    """Evenly by rank, with the first and the last."""
    served = len(curve.values)
    ranks = np.unique(np.linspace(0, served - 1, min(served, _MOST_POINTS)).round().astype(int))
    for value, share in zip(curve.values[ranks].tolist(), curve.shares[ranks].tolist(), strict=True):
        yield max(value, LEAST_S), share, f"{name}: {share:.1%} within {shown_seconds(value)}"


def _class_name(slo_class: str) -> str:
    return "all requests" if slo_class == EVERY_CLASS else slo_class


def _tiles(numbers: Mapping[str, Any]) -> dict[str, str]:
    in_time = numbers["in_time"]
    return {
        "in time": shown_share(in_time["attainment"]),
        "in time, requests/s": shown_number(in_time["goodput_per_s"]),
        "requests/s": shown_number(numbers["requests_per_s"]),
        "tokens/s": shown_number(numbers["output_tokens_per_s"]),
        "first token, p99": shown_seconds(numbers["ttft_s"]["p99"]),
        "a token after it, mean": shown_seconds(numbers["tpot_s"]["mean"]),
    }


def _classes(numbers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """All together last, where there are several."""
    for name, one in numbers["classes"].items():
        yield _class_row(_class_name(name), one)
    if len(numbers["classes"]) > 1:
        yield _class_row("all", everything(numbers))


def _class_row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    kept = (shown_share(one[key]) for key in ("attainment", "ttft_met", "tpot_met", "e2e_met"))
    counts = (shown_number(one[key]) for key in ("requests", "refused"))
    return (name, *counts, *kept, shown_number(one["goodput_per_s"]), shown_seconds(one["ttft_p99_s"]))


def _times(numbers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, key in _TIMES.items():
        yield name, *(shown_seconds(numbers[key][each]) for each in _PERCENTILES)


def _engines(numbers: Mapping[str, Any]) -> dict[str, Group]:
    return {
        "Steps": {
            "length of the run": shown_seconds(numbers["makespan_s"]),
            "steps": shown_number(numbers["steps"]),
            "requests in a step": shown_number(numbers["batch_size_mean"]),
            "busy": shown_share(numbers["busy_fraction"]),
        },
        "Time by what a step holds": {
            phase.value: shown_share(numbers["phase_fractions"][phase.value]) for phase in Phase
        },
        "KV cache": {
            "in use, mean": shown_share(numbers["kv_used_mean_fraction"]),
            "in use, peak": shown_share(numbers["kv_used_peak_fraction"]),
            "prompts found in it": shown_share(numbers["prefix_reuse_fraction"]),
        },
        "Done twice": {
            "preemptions": shown_number(numbers["preemptions"]),
            "tokens computed again": shown_share(numbers["recomputed_fraction"]),
            "requests that moved": shown_number(numbers["moved"]),
        },
    }
