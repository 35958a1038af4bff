"""Rounds of open loops, paired over systems: which requests were in time, as a table and a figure.

The queue cap of vLLM (`--max-num-queued-tokens`) that suits the highest rate best is picked from five, each in a server
of its own, with requests that are not used again. Then all systems are up, and a round gives all of them the same
requests at each rate.
"""

import argparse
import importlib.util
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.capacity import OpenLoop
from bench.load import error_lines
from bench.open_loop import Outcome
from bench.report import markdown_table
from bench.session import positive, positive_number, turns, writable_file
from bench.summary import Spread, differences

PLAIN, CAPPED = "vllm serve", "vllm serve, best cap"
CAPS = (2.5, 5.0, 10.0, 20.0, 40.0)  # queued prompts of mean length at which vLLM refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Shares of requests: in time, in time by kind, and without an answer.

    Attributes:
        load: the rate as a multiple of capacity.
    """

    system: str
    load: float
    in_time: float
    by_kind: Mapping[str, float]
    unanswered: float
    errors: Mapping[str, int]

    @classmethod
    def of(
        cls, system: str, load: float, kinds: Sequence[str], outcomes: Sequence[Outcome], kept: Sequence[bool]
    ) -> "Run":
        """Args:
        kinds: of the requests, in the order of their outcomes.
        kept: which of them are in time.
        """
        of_kind = {kind: [met for each, met in zip(kinds, kept, strict=True) if each == kind] for kind in set(kinds)}
        return cls(
            system=system,
            load=load,
            in_time=statistics.fmean(kept),
            by_kind={kind: statistics.fmean(met) for kind, met in sorted(of_kind.items())},
            unanswered=statistics.fmean(each.answer is None for each in outcomes),
            errors=Counter(each.error for each in outcomes if each.error is not None),
        )


def cap_argument(tokens: int) -> str:
    return f"--max-num-queued-tokens={tokens}"


def warm_up(loop: OpenLoop, url: str, capacity: float) -> None:
    """Connects, compiles, warms caches."""
    loop.ask(url, loop.draw(loop.slots, 0.5 * capacity, seed=1))


def best_cap(loop: OpenLoop, capacity: float) -> int:
    """In prompt tokens; as given, or the best of five."""
    session, kept = loop.session, dict[int, float]()
    if (given := session.options.cap) is not None:
        return int(given)
    for prompts in CAPS:
        cap = round(prompts * loop.lengths.mean_prompt)
        spec = session.plain(f"{PLAIN} with a cap of {cap}", 1, cap_argument(cap))
        with session.running(spec) as server:
            warm_up(loop, server.spec.url, capacity)
            session.stage(spec.name)
            rate = max(session.options.loads) * capacity
            outcomes = loop.ask(server.spec.url, loop.draw(session.options.requests, rate, seed=2))
        kept[cap] = statistics.fmean(loop.in_time(outcomes))
        session.say(f"{spec.name}: {kept[cap]:.3f} in time")
    return max(kept, key=kept.__getitem__)


def paired_runs(loop: OpenLoop, servers: Mapping[str, str], capacity: float) -> list[Run]:
    """Args:
    servers: the addresses of systems that are up and warm, by name.
    """
    options, session, runs = loop.session.options, loop.session, list[Run]()
    for number, load in product(range(options.rounds), options.loads):
        seed = 1000 * (number + 1) + round(100 * load)
        requests = loop.draw(options.requests, load * capacity, seed)
        for name in turns(list(servers), number):
            session.stage(f"round {number + 1}/{options.rounds}, {load:g} of capacity, {name}")
            outcomes = loop.ask(servers[name], requests)
            kinds = [each.kind for each in requests]
            runs.append(Run.of(name, load, kinds, outcomes, loop.in_time(outcomes)))
            session.say(f"round {number + 1}, {load:g} of capacity, {name}: {runs[-1].in_time:.3f} in time")
    return runs


def table(runs: Sequence[Run]) -> str:
    """Medians over the rounds, a row for each load and system."""
    kinds = list(runs[0].by_kind)
    head = ["of capacity", "system", "in time", f"beside {PLAIN}", *kinds, "unanswered"]
    loads, systems = (dict.fromkeys(values) for values in zip(*((run.load, run.system) for run in runs), strict=True))
    rows = []
    for load, system in product(loads, systems):
        plain, these = (runs_of(runs, name, load) for name in (PLAIN, system))
        in_time = [run.in_time for run in these]
        beside = differences(in_time, [run.in_time for run in plain])
        shares = [*([run.by_kind.get(kind, 1.0) for run in these] for kind in kinds), [run.unanswered for run in these]]
        rows.append(
            [
                f"{load:g}",
                system,
                f"{Spread.of(in_time):.3f}",
                "" if system == PLAIN else f"{Spread.of(beside):+.3f}",
                *(f"{statistics.median(values):.3f}" for values in shares),
            ]
        )
    return markdown_table(head, rows)


def runs_of(runs: Sequence[Run], system: str, load: float) -> list[Run]:
    """In the order of the rounds."""
    return [run for run in runs if (run.system, run.load) == (system, load)]


def failures(runs: Sequence[Run]) -> list[str]:
    """What each system answered in place of a whole stream."""
    errors: dict[str, Counter[str]] = {}
    for run in runs:
        errors.setdefault(run.system, Counter()).update(run.errors)
    return [f"- {system}: {line}" for system, found in errors.items() for line in error_lines(found)]


def write_figure(runs: Sequence[Run], path: Path) -> None:
    """Share in time against load, a line a system."""
    from matplotlib.figure import Figure

    loads = sorted({run.load for run in runs})
    made = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = made.subplots()
    for system in dict.fromkeys(run.system for run in runs):
        spreads = [Spread.of([run.in_time for run in runs_of(runs, system, load)]) for load in loads]
        low, high = ([abs(getattr(each, end) - each.median) for each in spreads] for end in ("low", "high"))
        axes.errorbar(loads, [each.median for each in spreads], yerr=(low, high), fmt=".-", capsize=3, label=system)
    axes.set(xlabel=f"rate, of the capacity of {PLAIN}", ylabel="share of requests in time", ylim=(0, 1.02))
    axes.legend(fontsize=7)
    made.savefig(path, dpi=110)


def named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http://")):
        raise argparse.ArgumentTypeError(f"must look like NAME=http://127.0.0.1:8001, got {text!r}")
    return name, url


def _figure(text: str) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('a figure needs matplotlib: pip install "sluice-serve[plan]"')
    return writable_file(text)


def add_run_options(parser: argparse.ArgumentParser, *, loads: Sequence[float], requests: int) -> None:
    """Of paired runs at several loads."""
    add, shown = parser.add_argument, " ".join(f"{load:g}" for load in loads)
    of_capacity = f"of capacity (default: {shown})"
    add("--loads", type=positive_number, nargs="+", default=list(loads), metavar="X", help=of_capacity)
    add("--requests", type=positive, default=requests, help="of a run (default: %(default)s)")
    add("--cap", type=positive, metavar="TOKENS", help=f"queued prompts of {CAPPED!r} (default: the best of five)")
    add("--also", type=named_url, nargs="+", default=[], metavar="NAME=URL", help="running servers to measure too")
    add("--figure", type=_figure, metavar="FILE", help="draw shares in time against load (.png or .svg)")
