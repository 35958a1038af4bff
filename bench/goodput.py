"""Requests in time beyond capacity, Sluice beside `vllm serve` on real engines: `python -m bench.goodput --help`.

What is done, in this order:

1. Targets come from this machine. Plain vLLM is measured with all slots decoding, and with single prompts: tight
   requests want 2 such decode steps a token and the first one within 5 times the mean prompt's reading, loose ones 6
   steps and 50 times.
2. Capacity is the highest rate at which plain vLLM answers 95 % in time.
3. The queue cap of vLLM (`--max-num-queued-tokens`) that suits the highest rate best is picked from five, each in a
   server of its own, with requests that are not used again.
4. All systems are up, one at a time is loaded, the order rotates from round to round. A round gives all of them the
   same requests at each rate.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import uvloop
from tqdm import tqdm

from bench import random_model
from bench.arguments import folder, positive, positive_number, writable_file
from bench.chat_client import TEXT_PATH, Answer, ChatClient
from bench.ending import exit_status
from bench.load import ServerUnusable, error_lines, first_model
from bench.open_loop import LOOSE, TIGHT, Lengths, Outcome, Targets, draw_requests, run_open_loop
from bench.report import markdown_table
from bench.servers import (
    Server,
    ServerSpec,
    gpus_of_an_engine,
    plain_vllm,
    shared_arguments,
    sluice_with_config,
    split_at_dashes,
)
from bench.summary import Spread, differences

PLAIN, CAPPED, SLUICE = "vllm serve", "vllm serve, best cap", "Sluice"
IN_STEPS = {TIGHT: 2.0, LOOSE: 6.0}  # time per token, in decode steps of all slots
IN_READINGS = {TIGHT: 5.0, LOOSE: 50.0}  # first token, in readings of the mean prompt
KEPT_AT_CAPACITY = 0.95
CAPS = (2.5, 5.0, 10.0, 20.0, 40.0)  # queued prompts of mean length at which vLLM refuses
ALONE = 12  # prompts that are read alone, for the targets
FULL_TOKENS = 64  # of each answer while all slots decode
RATE_STEP = 1.25  # between two rates that are tried in search of capacity
BISECTIONS = 2
MOST_TRIES = 12
TIMEOUT_S = 600.0

EPILOG = """\
examples:
  python -m bench.goodput                         a random model of 27 million parameters, some 40 minutes on two cores
  python -m bench.goodput --rounds 1 --requests 100   a first look
  python -m bench.goodput --model Qwen/Qwen3-8B --slots 256 --answer 250 --tight-prompt 400 --loose-prompt 4000
  python -m bench.goodput --also 'Ray Serve LLM=http://127.0.0.1:8001'   a running server of the same model beside them

Both get the same engine arguments, and after them whatever follows `--`. A request is in time if it keeps both its
targets; refused and failed ones are not. Sluice is told the targets as those of its classes; nothing else is set.

exit status: 0 measured, 2 a server or the arguments are unusable, 130 interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Shares of requests: in time, of each class in time, and without an answer."""

    system: str
    load: float
    in_time: float
    tight: float
    loose: float
    unanswered: float
    errors: Mapping[str, int]

    @classmethod
    def of(cls, system: str, load: float, outcomes: Sequence[Outcome], targets: Mapping[str, Targets]) -> Self:
        """`load` is the rate as a multiple of capacity."""
        kept = [(each.slo_class, targets[each.slo_class].kept_by(each.answer)) for each in outcomes]
        return cls(
            system=system,
            load=load,
            in_time=statistics.fmean(met for _, met in kept),
            tight=_share(met for slo_class, met in kept if slo_class == TIGHT),
            loose=_share(met for slo_class, met in kept if slo_class == LOOSE),
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


def capacity_of(kept_at: Callable[[float], float], start: float) -> float:
    """The highest rate at which `kept_at(rate)` is at least KEPT_AT_CAPACITY: in steps, then halved.

    Raises: ServerUnusable: no rate was found in MOST_TRIES.
    """
    rate, below, above = start, None, None
    for _ in range(MOST_TRIES):
        if kept_at(rate) >= KEPT_AT_CAPACITY:
            below = rate
        else:
            above = rate
        if below is not None and above is not None:
            break
        rate = rate / RATE_STEP if below is None else rate * RATE_STEP
    if below is None or above is None:
        raise ServerUnusable(f"between {start:.3g} and {rate:.3g} requests a second there is no capacity to be found")
    for _ in range(BISECTIONS):
        middle = (below * above) ** 0.5
        if kept_at(middle) >= KEPT_AT_CAPACITY:
            below = middle
        else:
            above = middle
    return below


def full_step_s(url: str, slots: int, on_end: Callable[[], object]) -> float:
    """The median gap between tokens while all slots decode. Raises: ServerUnusable: nothing was answered."""
    short = Lengths(tight_prompt=16, loose_prompt=16, answer=FULL_TOKENS)
    requests = draw_requests(4 * slots, 1e6, short, seed=0)  # all at once
    outcomes = uvloop.run(run_open_loop(url, first_model(url), requests, TIMEOUT_S, on_end))
    gaps_s = [gap_s for each in outcomes if each.answer is not None for gap_s in each.answer.itl_s]
    if not gaps_s:
        raise ServerUnusable(f"{url} answered nothing: {outcomes[0].error}")
    return statistics.median(gaps_s)


def prompt_reading_s(url: str, lengths: Lengths) -> float:
    """The median time to the first token of a prompt of mean length, alone. Raises: RequestFailed."""
    mean = round(lengths.mean_prompt)
    alone = Lengths(tight_prompt=mean, loose_prompt=mean, answer=2)
    model = first_model(url)

    async def ask_all() -> list[Answer]:
        client = ChatClient(url, TIMEOUT_S, TEXT_PATH)
        answers = [await client.ask(each.body(model)) for each in draw_requests(ALONE, 1.0, alone, seed=3)]
        client.close()
        return answers

    return statistics.median(answer.ttft_s for answer in uvloop.run(ask_all()))


def targets_of(step_s: float, reading_s: float) -> dict[str, Targets]:
    """Of each class, by what a full decode step and reading a mean prompt take."""
    return {
        slo_class: Targets(ttft_s=IN_READINGS[slo_class] * reading_s, tpot_s=IN_STEPS[slo_class] * step_s)
        for slo_class in (TIGHT, LOOSE)
    }


def busy_rate(slots: int, lengths: Lengths, step_s: float, reading_s: float) -> float:
    """Requests a second at which all slots would be busy with reading and decoding."""
    return slots / (lengths.answer * step_s + slots * reading_s)


class Bench:
    """One whole measurement on servers that share this machine."""

    def __init__(self, options: argparse.Namespace, engine_arguments: Sequence[str], stack: ExitStack) -> None:
        self._options, self._arguments, self._stack = options, tuple(engine_arguments), stack
        self._lengths = Lengths(
            tight_prompt=options.tight_prompt, loose_prompt=options.loose_prompt, answer=options.answer
        )
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        self._logs = options.logs or self._folder
        self._bar = stack.enter_context(tqdm(unit="request", mininterval=0.5, disable=None))
        self._model = options.model
        if self._model is None:
            random_model.write_model(self._folder / "random")
            self._model = str(self._folder / "random")
            self._arguments = (*random_model.engine_arguments(), *self._arguments)  # of two, the later counts

    def run(self) -> Measured:
        """Raises: ServerFailed, ServerUnusable, RequestFailed."""
        plain = self._started(self._plain(PLAIN, self._options.first_port))
        self._bar.set_description("a full decode step, and reading a prompt")
        step_s = full_step_s(plain.spec.url, self._options.slots, self._bar.update)
        reading_s = prompt_reading_s(plain.spec.url, self._lengths)
        targets = targets_of(step_s, reading_s)
        self._say(f"a full decode step takes {1e3 * step_s:.1f} ms, reading a mean prompt {1e3 * reading_s:.0f} ms")
        capacity = self._options.capacity or self._capacity(plain, targets, step_s, reading_s)
        cap = self._best_cap(capacity, targets)
        servers = {PLAIN: plain.spec.url}
        capped = self._started(self._plain(CAPPED, self._options.first_port + 1, f"--max-num-queued-tokens={cap}"))
        servers[CAPPED] = capped.spec.url
        servers[SLUICE] = self._started(self._sluice(targets, self._options.first_port + 2)).spec.url
        servers |= dict(self._options.also)
        return Measured(
            model=self._options.model or "random Qwen3, 27 million parameters",
            engine_arguments=self._arguments,
            lengths=self._lengths,
            requests=self._options.requests,
            targets=targets,
            capacity=capacity,
            cap=cap,
            runs=tuple(self._rounds(servers, capacity, targets)),
        )

    def _rounds(self, servers: Mapping[str, str], capacity: float, targets: Mapping[str, Targets]) -> list[Run]:
        runs, names = [], list(servers)
        for each in names:
            self._loaded(servers[each], 0.5 * capacity, self._options.slots, seed=1)  # connects, compiles, warms caches
        for number in range(self._options.rounds):
            for load in self._options.loads:
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    self._bar.set_description(
                        f"round {number + 1}/{self._options.rounds}, {load:g} of capacity, {name}"
                    )
                    seed = 1000 * (number + 1) + round(100 * load)
                    outcomes = self._loaded(servers[name], load * capacity, self._options.requests, seed)
                    runs.append(Run.of(name, load, outcomes, targets))
                    self._say(f"round {number + 1}, {load:g} of capacity, {name}: {runs[-1].in_time:.3f} in time")
        return runs

    def _loaded(self, url: str, rate: float, count: int, seed: int) -> list[Outcome]:
        requests = draw_requests(count, rate, self._lengths, seed)
        return uvloop.run(run_open_loop(url, first_model(url), requests, TIMEOUT_S, self._bar.update))

    def _capacity(self, plain: Server, targets: Mapping[str, Targets], step_s: float, reading_s: float) -> float:
        start = busy_rate(self._options.slots, self._lengths, step_s, reading_s)
        found = capacity_of(lambda rate: self._kept_at(plain, rate, targets), start)
        self._say(f"{PLAIN} keeps {KEPT_AT_CAPACITY:.0%} at up to {found:.2f} requests a second")
        return found

    def _kept_at(self, server: Server, rate: float, targets: Mapping[str, Targets]) -> float:
        self._bar.set_description(f"in search of capacity, {rate:.2f} requests a second")
        outcomes = self._loaded(server.spec.url, rate, self._options.requests, seed=round(1e6 * rate))
        kept = Run.of(PLAIN, 1.0, outcomes, targets).in_time
        self._say(f"{PLAIN} at {rate:.2f} requests a second: {kept:.3f} in time")
        return kept

    def _best_cap(self, capacity: float, targets: Mapping[str, Targets]) -> int:
        kept = {}
        for prompts in CAPS:
            cap = round(prompts * self._lengths.mean_prompt)
            spec = self._plain(
                f"{PLAIN} with a cap of {cap}", self._options.first_port + 1, f"--max-num-queued-tokens={cap}"
            )
            with Server(spec, self._logs) as server:
                self._bar.set_description(f"starting {spec.name}")
                server.wait_until_ready(self._options.startup_timeout)
                self._loaded(server.spec.url, 0.5 * capacity, self._options.slots, seed=1)
                self._bar.set_description(spec.name)
                outcomes = self._loaded(server.spec.url, max(self._options.loads) * capacity, self._options.requests, 2)
            kept[cap] = Run.of(CAPPED, 1.0, outcomes, targets).in_time
            self._say(f"{spec.name}: {kept[cap]:.3f} in time")
        return max(kept, key=lambda each: kept[each])

    def _plain(self, name: str, port: int, *more: str) -> ServerSpec:
        return plain_vllm(name, self._model, port, (*self._arguments, *more))

    def _sluice(self, targets: Mapping[str, Targets], port: int) -> ServerSpec:
        """With the targets as its classes' and defaults for the rest. JSON is YAML."""
        path = self._folder / "sluice.json"
        classes = {name: {"ttft_s": each.ttft_s, "tpot_s": each.tpot_s} for name, each in targets.items()}
        gpus = gpus_of_an_engine(self._options.num_gpus)
        engine = {"replicas": 1, "num_gpus": gpus}
        path.write_text(json.dumps({"classes": classes, "default_class": LOOSE, "engine": engine}))
        return sluice_with_config(SLUICE, path, port, f"--model={self._model}", "--", *self._arguments)

    def _started(self, spec: ServerSpec) -> Server:
        self._bar.set_description(f"starting {spec.name}")
        server = self._stack.enter_context(Server(spec, self._logs))
        server.wait_until_ready(self._options.startup_timeout)
        return server

    def _say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)


def as_markdown(measured: Measured) -> str:
    return "\n\n".join([_heading(measured), _table(measured), *_failures(measured)]) + "\n"


def _heading(measured: Measured) -> str:
    asked = "; ".join(
        f"{name}: first token within {1e3 * each.ttft_s:.0f} ms, {1e3 * each.tpot_s:.0f} ms a token"
        for name, each in measured.targets.items()
    )
    lengths = measured.lengths
    return (
        f"Model: {measured.model}. All: `{' '.join(measured.engine_arguments)}`.\n"
        f"Half of the requests are tight (prompts of {lengths.tight_prompt} tokens in the mean), half loose "
        f"({lengths.loose_prompt}); answers of {lengths.answer}. Open loop, gaps with a coefficient of variation of 2, "
        f"{measured.requests} requests a run.\n"
        f"Targets: {asked}. Capacity of `{PLAIN}`: {measured.capacity:.2f} requests a second. "
        f"Best cap: {measured.cap} tokens.\n"
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
    """Of each system, what was answered in place of a whole stream."""
    errors: dict[str, Counter[str]] = {}
    for run in measured.runs:
        errors.setdefault(run.system, Counter()).update(run.errors)
    return [f"- {system}: {line}" for system, found in errors.items() for line in error_lines(found)]


def draw(measured: Measured, path: Path) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    own, more = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(own)
    engine_arguments = shared_arguments((f"--max-num-seqs={options.slots}", "--no-enable-prefix-caching", *more))
    return exit_status("bench.goodput", lambda stack: _write(Bench(options, engine_arguments, stack).run(), options))


def _write(measured: Measured, options: argparse.Namespace) -> None:
    markdown = as_markdown(measured)
    print(markdown)
    if options.markdown is not None:
        options.markdown.write_text(markdown)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))
    if options.figure is not None:
        draw(measured, options.figure)


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
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput",
        usage="%(prog)s [options] [-- engine arguments of all]",
        description="Measures requests in time below and beyond capacity, Sluice beside plain `vllm serve`.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="folder or name of the model (default: random weights, nothing to download)")
    add("--slots", type=positive, default=16, help="requests that run at once, --max-num-seqs (default: %(default)s)")
    add(
        "--loads",
        type=positive_number,
        nargs="+",
        default=[0.7, 1.0, 1.3],
        metavar="X",
        help="of capacity (default: 0.7 1 1.3)",
    )
    add(
        "--capacity",
        type=positive_number,
        metavar="RATE",
        help="requests a second, where it is known (default: searched for)",
    )
    add("--requests", type=positive, default=400, help="of a run (default: %(default)s)")
    add("--rounds", type=positive, default=3, help="runs of each system at each load (default: %(default)s)")
    add("--tight-prompt", type=int, default=96, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--loose-prompt", type=int, default=640, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--answer", type=int, default=48, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--also", type=_named_url, nargs="+", default=[], metavar="NAME=URL", help="running servers to measure too")
    add("--num-gpus", type=float, metavar="N", help="of Sluice's engine (default: none on vLLM's CPU build, else 1)")
    add("--first-port", type=int, default=18300, help="the servers take this port and the next two (default: 18300)")
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    add("--logs", type=folder, metavar="FOLDER", help="keep the servers' logs there")
    add("--json", type=writable_file, metavar="FILE", help="write every run")
    add("--markdown", type=writable_file, metavar="FILE", help="write what is printed")
    add("--figure", type=_figure, metavar="FILE", help="draw shares in time against load (.png or .svg)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
