"""Confusion matrices as in figure 10 of paper 000."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from predictor.evaluation import BIN_COUNTS, Judgement, confusion


def draw_confusion(judgement: Judgement, title: str, path: Path, counts: Sequence[int] = BIN_COUNTS) -> None:
    """One matrix for each number of bins; a row is an actual bin and adds up to 100 %."""
    figure, axes = pyplot.subplots(1, len(counts), figsize=(3.6 * len(counts), 3.6))
    for axis, count in zip(axes, counts, strict=True):
        table = confusion(judgement, count)
        axis.imshow(table, cmap="Blues", vmin=0.0, vmax=1.0)
        for row in range(count):
            for column in range(count):
                colour = "white" if table[row, column] > 0.5 else "black"
                text = f"{100 * table[row, column]:.0f}"
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
        axis.set(title=f"{count} bins", xlabel="predicted bin", ylabel="actual bin")
        axis.set_xticks(range(count), range(1, count + 1))
        axis.set_yticks(range(count), range(1, count + 1))
    figure.suptitle(f"{title} (% of each actual bin)")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
