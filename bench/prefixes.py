"""Sessions whose prompts grow, over two engines that cache prefixes: `python -m bench.prefixes --help`.

Every session sends a prompt, waits for its answer, thinks, and sends the same prompt with more behind it. Compared are
Sluice by its defaults, Sluice that does not look where a prompt is cached (`mode: stock`), two `vllm serve` that take
requests in turn, two behind Ray Serve's prefix-aware router, and two behind vllm-router, by the texts that it sent or
by what the engines say of their caches. All engines are up; one system at a time is loaded, in an order that rotates
from round to round. A round gives all of them the same sessions, with prompts that nobody has seen before.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Self

import numpy as np
import uvloop
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.chat_client import TEXT_PATH, ChatClient
from bench.load import ServerUnusable, first_model
from bench.open_loop import TOKEN_IDS, Request
from bench.report import markdown_table
from bench.servers import ServerSpec, by_kv_events, forward_events, publishing, ray_prefix_router, vllm_router
from bench.session import EXIT_STATUS, Session, new_parser, positive, run_session, turns
from bench.summary import Spread, paired_ratios

SLUICE, BLIND, IN_TURN, RAY = "Sluice", "Sluice, mode: stock", "vllm serve, in turn", "vllm serve, prefix router of Ray"
RUST, RUST_KV = "vllm serve, vllm-router", "vllm serve, vllm-router by KV events"
SYSTEMS = {
    "sluice": SLUICE,
    "stock": BLIND,
    "vllm": IN_TURN,
    "ray": RAY,
    "vllm-router": RUST,
    "vllm-router-kv": RUST_KV,
}
ENGINES = 2
# Ports of a system: its router's, its engines', the router's for metrics, those of the engines' events, in and out.
PLACES = 3 * ENGINES + 2
ANSWER_TOKENS = 8
# Counters of tokens that engines found in their caches, as each kind of server names them.
HITS = ("sluice_engine_prefix_cache_hit_tokens", "vllm:prefix_cache_hits")
PREDICTED = "sluice_predicted_hit_tokens"

EPILOG = f"""\
examples:
  python -m bench.prefixes                    a random model of 27 million parameters, some 20 minutes on two cores
  python -m bench.prefixes --rounds 1 --sessions 8 --turns 4   a first look
  python -m bench.prefixes --systems sluice,ray,vllm-router    beside other routers that look at prefixes alone

All engines get the same arguments, and after them whatever follows `--`.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`prompts`: token ids, each beginning as the one before. `pauses_s` come before each."""

    prompts: tuple[list[int], ...]
    pauses_s: tuple[float, ...]


def draw_sessions(count: int, turns: int, first: int, more: int, think_s: float, seed: int) -> list[Conversation]:
    """Prompts begin with `first` tokens in the mean and grow by `more` a turn, each drawn between half and one and a
    half of that; pauses are exponential with mean `think_s`."""
    rng = random.Random(seed)
    sessions = []
    for _ in range(count):
        prompt, prompts = list[int](), []
        for turn in range(turns):
            mean = first if turn == 0 else more
            prompt = [*prompt, *rng.choices(TOKEN_IDS, k=rng.randint(mean // 2, mean + mean // 2))]
            prompts.append(prompt)
        sessions.append(
            Conversation(prompts=tuple(prompts), pauses_s=tuple(rng.expovariate(1 / think_s) for _ in prompts))
        )
    return sessions


def seen_before(sessions: Sequence[Conversation]) -> int:
    """Prompt tokens that a session has sent before."""
    return sum(len(prompt) for session in sessions for prompt in session.prompts[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Seconds until the first token; shares of the tokens that could be found: that engines found, and that routers
    predicted, None where none does."""

    system: str
    mean_s: float
    p50_s: float
    p99_s: float
    hits: float
    predicted: float | None

    @classmethod
    def of(cls, system: str, ttft_s: Sequence[float], added: Mapping[str, float], findable: int) -> Self:
        predicted = added.get(PREDICTED)
        return cls(
            system=system,
            mean_s=statistics.fmean(ttft_s),
            p50_s=float(np.quantile(ttft_s, 0.5)),
            p99_s=float(np.quantile(ttft_s, 0.99)),
            hits=sum(added.get(name, 0.0) for name in HITS) / findable,
            predicted=None if predicted is None else predicted / findable,
        )

    def __str__(self) -> str:
        predicted = "" if self.predicted is None else f", {self.predicted:.1%} predicted"
        times = f"mean {self.mean_s:.3f}, median {self.p50_s:.3f}, p99 {self.p99_s:.3f} s"
        return f"{times}, {self.hits:.1%} found{predicted}"


async def run_sessions(
    urls: Sequence[str], model: str, sessions: Sequence[Conversation], on_end: Callable[[], object]
) -> list[float]:
    """Seconds until the first token of every request; with several addresses they take requests in turn.

    Raises: RequestFailed: a request got no whole answer.
    """
    turn = itertools.cycle(urls)

    async def hold(session: Conversation) -> list[float]:
        with ExitStack() as stack:
            clients = {url: stack.enter_context(closing(ChatClient(url, path=TEXT_PATH))) for url in urls}
            times_s = []
            for prompt, pause_s in zip(session.prompts, session.pauses_s, strict=True):
                await asyncio.sleep(pause_s)
                request = Request(arrival_s=0.0, slo_class="", prompt_token_ids=prompt, max_tokens=ANSWER_TOKENS)
                times_s.append((await clients[next(turn)].ask(request.body(model))).ttft_s)
                on_end()
            return times_s

    of_sessions = await asyncio.gather(*map(hold, sessions))
    return [ttft_s for times_s in of_sessions for ttft_s in times_s]


def counters(urls: Sequence[str]) -> dict[str, float]:
    """Sums over all servers and replicas of those of HITS and PREDICTED that are there."""
    found: dict[str, float] = {}
    for url in urls:
        for family in _families(url):
            if family.name in (*HITS, PREDICTED):
                total = sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
                found[family.name] = found.get(family.name, 0.0) + total
    return found


def _families(url: str) -> list[Metric]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`urls` take requests, with several in turn; `counting` tell what engines found in their caches."""

    urls: tuple[str, ...]
    counting: tuple[str, ...]


def measure(session: Session) -> list[Run]:
    """Raises: ServerFailed, ServerUnusable, RequestFailed."""
    options, runs = session.options, list[Run]()
    systems = {SYSTEMS[name]: _started(session, name) for name in options.systems}
    for system in systems.values():  # connects, compiles
        _ask(session, system, draw_sessions(4, 2, options.first, options.more, 0.5, seed=1))
    for number in range(options.rounds):
        lengths = (options.sessions, options.turns, options.first, options.more, options.think)
        sessions = draw_sessions(*lengths, seed=100 + number)
        for name in turns(list(systems), number):
            session.stage(f"round {number + 1}/{options.rounds}, {name}")
            before = counters(systems[name].counting)
            times_s = _ask(session, systems[name], sessions)
            time.sleep(2.0)  # routers show what they counted with their next heartbeat
            after = counters(systems[name].counting)
            added = {key: value - before.get(key, 0.0) for key, value in after.items()}
            runs.append(Run.of(name, times_s, added, seen_before(sessions)))
            session.say(f"round {number + 1}, {name}: {runs[-1]}")
    return runs


def _ask(session: Session, system: System, sessions: Sequence[Conversation]) -> list[float]:
    return uvloop.run(run_sessions(system.urls, first_model(system.counting[0]), sessions, session.bar.update))


def _started(session: Session, name: str) -> System:
    """Every system has ports of its own."""
    place = PLACES * list(SYSTEMS).index(name)
    if name in ("sluice", "stock"):
        settings = {"mode": "full" if name == "sluice" else "stock", "engine": {"replicas": ENGINES}}
        url = session.start(session.sluice(SYSTEMS[name], place, settings)).spec.url
        return System(urls=(url,), counting=(url,))
    port, says = session.options.first_port + place, name == "vllm-router-kv"
    events = [port + ENGINES + 2 + n if says else None for n in range(ENGINES)]
    specs = [_plain(session, place + 1 + n, events[n]) for n in range(ENGINES)]
    engines = tuple(session.start(spec).spec.url for spec in specs)
    if name == "vllm":
        return System(urls=engines, counting=engines)
    if name == "ray":
        before = ray_prefix_router(SYSTEMS[name], port, engines)
    elif says:
        sources = {url: port + 2 * ENGINES + 2 + n for n, url in enumerate(engines)}
        for number, url in enumerate(engines):
            forward_events(port + ENGINES + 2 + number, sources[url])
        policy = by_kv_events(first_model(engines[0]), block_tokens(engines[0]), sources)
        before = vllm_router(SYSTEMS[name], port, engines, policy)
    else:
        before = vllm_router(SYSTEMS[name], port, engines)
    return System(urls=(session.start(before).spec.url,), counting=engines)


def _plain(session: Session, place: int, events_port: int | None) -> ServerSpec:
    """It counts hits only with its other statistics; Sluice's engines count them in any case."""
    spec = session.plain(f"vllm serve {place}", place)
    said = () if events_port is None else publishing(events_port)
    return replace(spec, command=(*(each for each in spec.command if each != "--disable-log-stats"), *said))


def block_tokens(url: str) -> int:
    """Of an engine's cache, as its server says."""
    for family in _families(url):
        for sample in family.samples:
            if "block_size" in sample.labels:
                return int(sample.labels["block_size"])
    raise ServerUnusable(f"{url} does not say the size of its cache's blocks")


def as_markdown(runs: Sequence[Run]) -> str:
    """Medians over the rounds, in brackets the least and the greatest; then Sluice's ratios to the others."""
    return f"{_measures(runs)}\n{ratios_as_markdown(runs)}"


def _measures(runs: Sequence[Run]) -> str:
    rows = []
    for system in dict.fromkeys(run.system for run in runs):
        mine = [run for run in runs if run.system == system]
        cells = [[run.mean_s for run in mine], [run.p50_s for run in mine], [run.p99_s for run in mine]]
        predicted = [run.predicted for run in mine if run.predicted is not None]
        rows.append(
            [
                system,
                *(f"{Spread.of(values):.3f}" for values in cells),
                f"{Spread.of([run.hits for run in mine]):.1%}",
                f"{Spread.of(predicted):.1%}" if predicted else "",
            ]
        )
    heads = ["system", "first token, mean s", "median", "99th percentile", "tokens found", "predicted"]
    return markdown_table(heads, rows) + "\n"


def ratios_as_markdown(runs: Sequence[Run]) -> str:
    """Sluice's times over those of each other system, round by round: median, least and greatest; "" without both."""
    ours, rows = [run for run in runs if run.system == SLUICE], []
    others = dict.fromkeys(run.system for run in runs if run.system != SLUICE)
    if not ours or not others:
        return ""
    for system in others:
        theirs = [run for run in runs if run.system == system]
        measures = (attrgetter(name) for name in ("mean_s", "p50_s", "p99_s"))
        spreads = (paired_ratios([*map(each, ours)], [*map(each, theirs)]) for each in measures)
        rows.append([system, *(f"{spread:.2f}" for spread in spreads)])
    return markdown_table(["Sluice / this one", "first token, mean", "median", "99th percentile"], rows) + "\n"


def systems(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"no system {unknown[0]!r}: choose of {', '.join(SYSTEMS)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"a system is named twice in {text}")
    return names


def _parser() -> argparse.ArgumentParser:
    what = "Measures first tokens of growing prompts over two engines, by where requests go."
    parser = new_parser("bench.prefixes", what, EPILOG, first_port=18400, model=None)
    add, pause = parser.add_argument, "mean pause before a request (default: %(default)s)"
    names = f"of {', '.join(SYSTEMS)}, separated by commas (default: sluice,stock,vllm)"
    add("--sessions", type=positive, default=24, help="that run side by side (default: %(default)s)")
    add("--turns", type=positive, default=8, help="requests of a session (default: %(default)s)")
    add("--first", type=positive, default=300, metavar="TOKENS", help="mean of a first prompt (default: %(default)s)")
    add("--more", type=positive, default=160, metavar="TOKENS", help="mean that a turn adds (default: %(default)s)")
    add("--think", type=float, default=6.0, metavar="SECONDS", help=pause)
    add("--systems", type=systems, default=("sluice", "stock", "vllm"), metavar="NAMES", help=names)
    add("--rounds", type=positive, default=3, help="runs of each system (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.prefixes", _parser(), measure, as_markdown, arguments)


if __name__ == "__main__":
    sys.exit(main())
