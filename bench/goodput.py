"""Requests in time beyond capacity, Sluice beside `vllm serve` on real engines: `python -m bench.goodput --help`.

Targets and capacity are those of `bench.capacity`, by plain vLLM. The queue cap of vLLM (`--max-num-queued-tokens`)
that suits the highest rate best is picked from five, each in a server of its own, with requests that are not used
again. Then all systems are up, and a round gives all of them the same requests at each rate.
"""

import argparse
import importlib.util
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.capacity import OpenLoop, add_options, classes_of, engine_arguments, targets_in_words
from bench.load import error_lines
from bench.open_loop import LOOSE, TIGHT, Lengths, Outcome, Targets, draw_requests
from bench.report import markdown_table
from bench.session import EXIT_STATUS, Session, new_parser, positive, positive_number, run_session, turns, writable_file
from bench.summary import Spread, differences

PLAIN, CAPPED, SLUICE = "vllm serve", "vllm serve, best cap", "Sluice"
CAPS = (2.5, 5.0, 10.0, 20.0, 40.0)  # queued prompts of mean length at which vLLM refuses

EPILOG = f"""\
examples:
  python -m bench.goodput                         a random model of 27 million parameters, some 40 minutes on two cores
  python -m bench.goodput --rounds 1 --requests 100   a first look
  python -m bench.goodput --model Qwen/Qwen3-8B --slots 256 --answer 250 --tight-prompt 400 --loose-prompt 4000
  python -m bench.goodput --also 'Ray Serve LLM=http://127.0.0.1:8001'   a running server of the same model beside them

All get the same engine arguments, and after them whatever follows `--`. A request is in time if it keeps both its
targets; refused and failed ones are not. Sluice is told the targets as those of its classes; nothing else is set.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Shares of requests: in time, in time by class, and without an answer."""

    system: str
    load: float
    in_time: float
    tight: float
    loose: float
    unanswered: float
    errors: Mapping[str, int]

    @classmethod
    def of(cls, system: str, load: float, outcomes: Sequence[Outcome], kept: Sequence[bool]) -> "Run":
        """`load` is the rate as a multiple of capacity; `kept` tells which outcomes are in time."""
        by_class = [(each.slo_class, met) for each, met in zip(outcomes, kept, strict=True)]
        return cls(
            system=system,
            load=load,
            in_time=statistics.fmean(kept),
            tight=_share(met for slo_class, met in by_class if slo_class == TIGHT),
            loose=_share(met for slo_class, met in by_class if slo_class == LOOSE),
            unanswered=statistics.fmean(each.answer is None for each in outcomes),
            errors=Counter(each.error for each in outcomes if each.error is not None),
        )


def _share(met: Iterable[bool]) -> float:
    values = list(met)
    return statistics.fmean(values) if values else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything; this is what `--json` writes. `capacity` is in requests a second, `cap` in prompt tokens."""

    model: str
    engine_arguments: tuple[str, ...]
    lengths: Lengths
    requests: int
    targets: Mapping[str, Targets]
    capacity: float
    cap: int
    runs: tuple[Run, ...]


def measure(session: Session) -> Measured:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError."""
    loop, options = OpenLoop(session), session.options
    plain = session.start(session.plain(PLAIN, 0)).spec.url
    loop.measure_targets(plain)
    capacity = loop.capacity(plain, lambda rate: options.requests)
    cap = _best_cap(loop, capacity)
    settings = {"classes": classes_of(loop.targets), "default_class": LOOSE, "engine": {"replicas": 1}}
    servers = {
        PLAIN: plain,
        CAPPED: session.start(session.plain(CAPPED, 1, _cap_argument(cap))).spec.url,
        SLUICE: session.start(session.sluice(SLUICE, 2, settings)).spec.url,
        **dict(options.also),
    }
    return Measured(
        model=options.model or "random Qwen3, 27 million parameters",
        engine_arguments=session.engine_arguments,
        lengths=loop.lengths,
        requests=options.requests,
        targets=loop.targets,
        capacity=capacity,
        cap=cap,
        runs=tuple(_rounds(loop, servers, capacity)),
    )


def _cap_argument(tokens: int) -> str:
    return f"--max-num-queued-tokens={tokens}"


def _warm_up(loop: OpenLoop, url: str, capacity: float) -> None:
    """Connects, compiles, warms caches."""
    loop.ask(url, draw_requests(loop.slots, 0.5 * capacity, loop.lengths, seed=1))


def _best_cap(loop: OpenLoop, capacity: float) -> int:
    session, kept = loop.session, dict[int, float]()
    for prompts in CAPS:
        cap = round(prompts * loop.lengths.mean_prompt)
        spec = session.plain(f"{PLAIN} with a cap of {cap}", 1, _cap_argument(cap))
        with session.running(spec) as server:
            _warm_up(loop, server.spec.url, capacity)
            session.stage(spec.name)
            rate = max(session.options.loads) * capacity
            outcomes = loop.ask(server.spec.url, draw_requests(session.options.requests, rate, loop.lengths, seed=2))
        kept[cap] = statistics.fmean(loop.in_time(outcomes))
        session.say(f"{spec.name}: {kept[cap]:.3f} in time")
    return max(kept, key=kept.__getitem__)


def _rounds(loop: OpenLoop, servers: Mapping[str, str], capacity: float) -> list[Run]:
    options, session, runs = loop.session.options, loop.session, list[Run]()
    for url in servers.values():
        _warm_up(loop, url, capacity)
    for number, load in product(range(options.rounds), options.loads):
        seed = 1000 * (number + 1) + round(100 * load)
        requests = draw_requests(options.requests, load * capacity, loop.lengths, seed)
        for name in turns(list(servers), number):
            session.stage(f"round {number + 1}/{options.rounds}, {load:g} of capacity, {name}")
            outcomes = loop.ask(servers[name], requests)
            runs.append(Run.of(name, load, outcomes, loop.in_time(outcomes)))
            session.say(f"round {number + 1}, {load:g} of capacity, {name}: {runs[-1].in_time:.3f} in time")
    return runs


def as_markdown(measured: Measured) -> str:
    return "\n\n".join([_heading(measured), _table(measured), *_failures(measured)]) + "\n"


def _heading(measured: Measured) -> str:
    lengths = measured.lengths
    return (
        f"Model: {measured.model}. All: `{' '.join(measured.engine_arguments)}`.\n"
        f"Half of the requests are tight (prompts of {lengths.tight_prompt} tokens in the mean), half loose "
        f"({lengths.loose_prompt}); answers of {lengths.answer}. Open loop, gaps with a coefficient of variation of 2, "
        f"{measured.requests} requests a run.\n"
        f"Targets: {targets_in_words(measured.targets)}. "
        f"Capacity of `{PLAIN}`: {measured.capacity:.2f} requests a second. Best cap: {measured.cap} tokens.\n"
        "Shares of all requests: medians over the rounds, in brackets the least and the greatest; differences are "
        "paired."
    )


def _table(measured: Measured) -> str:
    head = ["of capacity", "system", "in time", f"beside {PLAIN}", "tight", "loose", "unanswered"]
    loads = dict.fromkeys(run.load for run in measured.runs)
    systems = dict.fromkeys(run.system for run in measured.runs)
    rows = []
    for load in loads:
        plain = [run.in_time for run in _runs_of(measured, PLAIN, load)]
        for system in systems:
            runs = _runs_of(measured, system, load)
            in_time = [run.in_time for run in runs]
            rows.append(
                [
                    f"{load:g}",
                    system,
                    f"{Spread.of(in_time):.3f}",
                    "" if system == PLAIN else f"{Spread.of(differences(in_time, plain)):+.3f}",
                    *(f"{statistics.median(values):.3f}" for values in _shares(runs)),
                ]
            )
    return markdown_table(head, rows)


def _runs_of(measured: Measured, system: str, load: float) -> list[Run]:
    """In the order of the rounds."""
    return [run for run in measured.runs if (run.system, run.load) == (system, load)]


def _shares(runs: Sequence[Run]) -> list[list[float]]:
    return [[run.tight for run in runs], [run.loose for run in runs], [run.unanswered for run in runs]]


def _failures(measured: Measured) -> list[str]:
    """What each system answered in place of a whole stream."""
    errors: dict[str, Counter[str]] = {}
    for run in measured.runs:
        errors.setdefault(run.system, Counter()).update(run.errors)
    return [f"- {system}: {line}" for system, found in errors.items() for line in error_lines(found)]


def write_figure(measured: Measured, path: Path) -> None:
    """Share in time against load, a line a system."""
    from matplotlib.figure import Figure

    loads = sorted({run.load for run in measured.runs})
    made = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = made.subplots()
    for system in dict.fromkeys(run.system for run in measured.runs):
        spreads = [Spread.of([run.in_time for run in _runs_of(measured, system, load)]) for load in loads]
        low, high = ([abs(getattr(each, end) - each.median) for each in spreads] for end in ("low", "high"))
        axes.errorbar(loads, [each.median for each in spreads], yerr=(low, high), fmt=".-", capsize=3, label=system)
    axes.set(xlabel=f"rate, of the capacity of {PLAIN}", ylabel="share of requests in time", ylim=(0, 1.02))
    axes.legend(fontsize=7)
    made.savefig(path, dpi=110)


def _named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http://")):
        raise argparse.ArgumentTypeError(f"must look like NAME=http://127.0.0.1:8001, got {text!r}")
    return name, url


def _figure(text: str) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError('a figure needs matplotlib: pip install "sluice-serve[plan]"')
    return writable_file(text)


def _parser() -> argparse.ArgumentParser:
    what = "Measures requests in time below and beyond capacity, Sluice beside plain `vllm serve`."
    parser = new_parser("bench.goodput", what, EPILOG, first_port=18300, model=None)
    add_options(parser, Lengths(), "each system")
    add, of_capacity = parser.add_argument, "of capacity (default: 0.7 1 1.3)"
    add("--loads", type=positive_number, nargs="+", default=[0.7, 1.0, 1.3], metavar="X", help=of_capacity)
    add("--requests", type=positive, default=400, help="of a run (default: %(default)s)")
    add("--also", type=_named_url, nargs="+", default=[], metavar="NAME=URL", help="running servers to measure too")
    add("--figure", type=_figure, metavar="FILE", help="draw shares in time against load (.png or .svg)")
    return parser


def _measured(session: Session) -> Measured:
    found = measure(session)
    if session.options.figure is not None:
        write_figure(found, session.options.figure)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.goodput", _parser(), _measured, as_markdown, arguments, engine_arguments=engine_arguments)


if __name__ == "__main__":
    sys.exit(main())
