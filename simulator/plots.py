"""Plots of runs and plans, and an HTML page that holds them. Needs matplotlib: the extra `plan`."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.errors import ConfigError
from policies.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#f4f4f4;padding:1rem;overflow-x:auto}}img{{max-width:100%}}</style>
<h1>{title}</h1>
{body}
"""


def figure(rows: int = 1, columns: int = 1) -> "Figure":
    """An empty figure that needs no display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('plots need matplotlib: pip install "sluice-serve[plan]"') from error
    made = Figure(figsize=(5.0 * columns, 3.4 * rows), layout="constrained")
    made.subplots(rows, columns)
    return made


def save(made: "Figure", path: Path) -> None:
    # No date and no version inside, so that the same numbers give the same bytes.
    made.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def draw_lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path, *, x: str, y: str, title: str
) -> None:
    """Named lines, the dotted ones being those whose name starts with "formula"."""
    made = figure()
    axes = made.axes[0]
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, ":" if name.startswith("formula") else ".-", label=name)
    axes.set(xlabel=x, ylabel=y, title=title)
    made.legend(fontsize=7, loc="outside right upper")  # beside the lines, not on them
    save(made, path)


def draw_distributions(runs: Sequence[tuple[str, FloatArray, FloatArray]], path: Path) -> None:
    """Measured and simulated times to first token, as shares of requests."""
    made = figure(1, len(runs))
    for axes, (name, real, ours) in zip(made.axes, runs, strict=True):
        for label, values in (("measured", real), ("simulated", ours)):
            axes.plot(np.sort(values), np.linspace(0, 1, len(values)), label=label)
        axes.set(xlabel="time to first token, s", ylabel="share of requests", title=name)
        axes.legend()
    save(made, path)


def draw_requests(latencies: Mapping[str, FloatArray], path: Path) -> None:
    """Shares of requests by TTFT, TPOT and latency."""
    made = figure(1, len(latencies))
    for axes, (name, values) in zip(made.axes, latencies.items(), strict=True):
        if len(values):
            axes.plot(np.sort(values), np.linspace(0, 1, len(values)))
        axes.set(xlabel=f"{name}, s", ylabel="share of requests")
    save(made, path)


def page(title: str, text: str, plots: Sequence[Path]) -> str:
    """An HTML page with a text and pictures, which needs no other file."""
    parts = [f"<pre>{html.escape(text)}</pre>"]
    for plot in plots:
        encoded = base64.b64encode(plot.read_bytes()).decode()
        parts.append(f'<p><img alt="{html.escape(plot.stem)}" src="data:image/png;base64,{encoded}"></p>')
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))
