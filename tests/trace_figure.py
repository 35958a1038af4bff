"""python -m tests.trace_figure [FILE]: draws docs/figures/trace-resumed.png.

An application of two engine replicas runs here, one is killed under streams, and what is drawn are the spans that a
receiver of OTLP got of one stream that went on.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tests.integration.traced import resumed_trace, streams_that_lose_a_replica, traced_application
from tests.otlp_receiver import Received

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "trace-resumed.png"
COLOURS = {"resume": "#c44e52", "queue": "#dd8452", "prefill": "#8172b3", "decode": "#55a868", "replica": "#64b5cd"}
OTHER = "#4c72b0"
MOST_CHARS = 8  # of a replica's id


def rows(spans: Sequence[Received]) -> list[tuple[int, Received]]:
    """As a tree, with the depth of each; what has no parent here is the root."""
    ids = {span.span_id for span in spans}

    def below(parent: Received, depth: int) -> Iterator[tuple[int, Received]]:
        yield depth, parent
        for child in sorted((span for span in spans if span.parent == parent.span_id), key=lambda span: span.began_s):
            yield from below(child, depth + 1)

    (root,) = (span for span in spans if span.parent not in ids)
    return list(below(root, 0))


def label(depth: int, span: Received) -> str:
    replica = span.attributes.get("sluice.replica", "")
    where = f" @{replica[-MOST_CHARS:]}" if replica and span.name in ("engine", "replica", "resume") else ""
    return f"{'   ' * depth}{span.name}{where}"


def described(span: Received) -> str:
    """How long, and of one that went on what its client had."""
    seconds = span.ended_s - span.began_s
    time = f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
    return f"{time}, {span.attributes['sluice.sent_tokens']} tokens sent" if span.name == "resume" else time


def draw(spans: Sequence[Received], path: Path) -> None:
    tree = rows(spans)
    start_s, end_s = tree[0][1].began_s, max(span.ended_s for _, span in tree)
    made = Figure(figsize=(7.2, 0.24 * len(tree) + 0.8), layout="constrained")
    axes = made.subplots()
    for row, (_, span) in enumerate(tree):
        # What is shorter than a pixel would not be seen.
        seconds = max(span.ended_s - span.began_s, (end_s - start_s) / 400)
        began_s = span.began_s - start_s
        axes.barh(row, seconds, left=began_s, color=COLOURS.get(span.name, OTHER), height=0.7)
        is_long = 2 * seconds > end_s - start_s
        at_s = began_s + (0.5 * seconds if is_long else seconds + (end_s - start_s) / 100)
        colour, side = ("white", "center") if is_long else ("black", "left")
        axes.text(at_s, row, described(span), va="center", ha=side, color=colour, fontsize=8)
    axes.set_yticks(range(len(tree)), [label(depth, span) for depth, span in tree], fontsize=8, ha="left")
    axes.tick_params(axis="y", pad=185, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the request came")
    axes.spines[["top", "right", "left"]].set_visible(False)
    made.savefig(path, dpi=100, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trace_figure", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=FIGURE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, traced_application(Path(folder)) as (sluice, receiver):
        streams = asyncio.run(streams_that_lose_a_replica(sluice))
        draw(resumed_trace(receiver, streams), options.file)


if __name__ == "__main__":
    main()
