"""Streams and new requests while hosts, cables and the head are lost, as a table.

    python -m tests.hosts                       every fault, some three quarters of an hour
    python -m tests.hosts "cut off for 5 s"     those with this in their names
    python -m tests.hosts --list

As root, or within `unshare --map-root-user --net`: see tests/hosts/lab.py.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.report import markdown_table
from tests.hosts.cluster import cluster
from tests.hosts.faults import FAULTS, first_run, undergo
from tests.hosts.lab import why_there_is_none
from tests.hosts.outcome import Outcome

HEAD = ("fault", "whole / broken / lost", "longest gap", "new requests, longest wait", "refused")


def row(name: str, made: Outcome) -> tuple[str, ...]:
    refused = ", ".join(f"{count} by {answer}" for answer, count in sorted(made.answers.items())) or "none"
    streams = f"{made.whole} / {made.broken} / {made.lost}" + (f", {made.wrong} wrong" if made.wrong else "")
    return name, streams, f"{made.longest_gap_s:.1f} s", f"{made.longest_wait_s:.1f} s", refused


def table(outcomes: Mapping[str, Outcome]) -> str:
    return markdown_table(HEAD, [row(name, made) for name, made in outcomes.items()])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="a part of its name")
    parser.add_argument("--repeats", type=int, default=1, help="how often each is done (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each stream and request got")
    parser.add_argument("--list", action="store_true", help="name the faults, and do none")
    options = parser.parse_args()
    chosen = [each for each in FAULTS if not options.faults or any(part in each.name for part in options.faults)]
    if options.list:
        print("\n".join(fault.name for fault in chosen))
        return 0
    if (why := why_there_is_none()) is not None:
        print(why, file=sys.stderr)
        return 2
    with cluster() as made:
        trial, outcomes = first_run(made), {}
        for fault in chosen:
            for number in range(options.repeats):
                name = fault.name if options.repeats == 1 else f"{fault.name} ({number + 1})"
                outcomes[name] = undergo(trial, fault)
                print(row(name, outcomes[name]), file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(trial.found))
    print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
