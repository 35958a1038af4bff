"""The files of a part of the bench: its runs as CSV, a table as Markdown, printed as well."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.report import markdown_table
from bench.summary import Spread


def write_runs(path: Path, runs: Sequence[Mapping[str, object]]) -> None:
    """A line for each run; what a run did not measure is left empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for run in runs for name in run)))
        writer.writeheader()
        writer.writerows(runs)


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    text = markdown_table(head, rows)
    path.write_text(f"{text}\n")
    print(f"\n{path}\n\n{text}", flush=True)


def spread(values: Iterable[float]) -> str:
    """A ratio's median [least, most]."""
    found = list(values)
    if len(found) < 2:
        return f"×{found[0]:.2f}" if found else "-"
    return f"×{Spread.of(found):.2f}"
