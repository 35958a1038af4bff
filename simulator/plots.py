"""Plots of experiments as pictures. Needs matplotlib: the extra `plan`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policies.errors import ConfigError
from policies.types import FloatArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    from matplotlib import rc_context

    # No date, no version and no random names inside, so that the same numbers give the same bytes.
    metadata = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}.get(path.suffix)
    with rc_context({"svg.hashsalt": "sluice", "svg.fonttype": "none"}):
        made.savefig(path, dpi=110, metadata=metadata)


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


def draw_panels(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], path: Path, *, x: str, y: str
) -> None:
    """Named lines over shares, a panel for each title; one legend, since all panels have the same names."""
    made = figure(1, len(panels))
    for axes, (title, series) in zip(made.axes, panels.items(), strict=True):
        for name, (xs, ys) in series.items():
            axes.plot(xs, ys, ".-", label=name)
        axes.set(xlabel=x, ylabel=y, title=title, ylim=(0, 1.02))
    made.axes[0].legend(fontsize=7)
    save(made, path)
