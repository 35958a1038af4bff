"""Time to the first token of a request alone, Sluice beside plain `vllm serve`: `python -m bench.first_token --help`.

`bench.compare` measures runs, and between two of them a shared machine changes by more than the path takes. Here every
prompt goes to both servers, one right after the other and each first as often: what changes more slowly than two
requests falls out of their difference, and many pairs tell its median far more narrowly.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import uvloop

from bench.chat_client import Answer, ChatClient
from bench.load import first_model
from bench.session import ENGINE_HELP, EXIT_STATUS, Session, new_parser, run_session, turns
from bench.summary import differences, median_interval, percentile, ratios
from bench.workload import LoadConfig, request_bodies

PLAIN, CONTROL, SLUICE = "vllm serve", "vllm serve again", "Sluice 1x1"
# Not counted: what is done once per connection, per shape of a step, per cache.
WARM_UP_PAIRS = 8

EPILOG = f"""\
examples:
  python -m bench.first_token                      300 pairs, some eight minutes on two slow cores
  python -m bench.first_token --control            plain vLLM beside itself: the noise of the method
  python -m bench.first_token -- --dtype=float32   with other engine arguments

{ENGINE_HELP}
Of the differences it prints the median, the quartiles, and between which two of them the true median lies, with the
probability of that whatever their distribution.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both servers' answers to one prompt."""

    theirs: Answer
    ours: Answer


async def measure_pairs(theirs: LoadConfig, ours: LoadConfig, on_pair: Callable[[], object]) -> list[Pair]:
    """One request in flight at a time; the configs differ in url and model. Raises RequestFailed."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(ChatClient(each.url, each.timeout_s))) for each in (theirs, ours)
        ]
        pairs = []
        for number, bodies in enumerate(zip(request_bodies(theirs), request_bodies(ours), strict=True)):
            answers = {each: await clients[each].ask(bodies[each]) for each in turns((0, 1), number)}
            pairs.append(Pair(theirs=answers[0], ours=answers[1]))
            on_pair()
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All pairs; this is what `--json` writes."""

    theirs: str
    ours: str
    pairs: tuple[Pair, ...]


def measure(session: Session) -> Measured:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError."""
    options = session.options
    plain = session.plain(PLAIN, 0)
    # Before anything starts: it checks the numbers.
    load = LoadConfig(
        url=plain.url, model=session.model, concurrency=1, requests=options.requests, max_tokens=options.max_tokens
    )
    if options.control:
        contender = session.plain(CONTROL, 1)
    else:
        contender = session.sluice(SLUICE, 1, {"router": {"replicas": 1}, "engine": {"replicas": 1}})
    urls = [session.start(spec).spec.url for spec in (plain, contender)]
    pair = [replace(load, url=url, model=first_model(url)) for url in urls]
    session.stage("warming up")
    few = [replace(each, requests=WARM_UP_PAIRS, seed=load.seed + 1) for each in pair]
    uvloop.run(measure_pairs(few[0], few[1], lambda: None))
    session.stage("measuring")
    session.bar.total = options.requests
    pairs = uvloop.run(measure_pairs(pair[0], pair[1], session.bar.update))
    return Measured(theirs=plain.name, ours=contender.name, pairs=tuple(pairs))


def as_text(measured: Measured) -> str:
    pairs = measured.pairs
    return "\n".join(
        [
            f"{measured.ours} beside {measured.theirs}, {len(pairs)} pairs, one request at a time:",
            _line("to the first token", [(pair.theirs.ttft_s, pair.ours.ttft_s) for pair in pairs]),
            _line("from there to the last", [(sum(pair.theirs.itl_s), sum(pair.ours.itl_s)) for pair in pairs]),
        ]
    )


def _line(name: str, taken_s: Sequence[tuple[float, float]]) -> str:
    theirs_ms, ours_ms = ([1e3 * one_s for one_s in side_s] for side_s in zip(*taken_s, strict=True))
    apart_ms = differences(ours_ms, theirs_ms)
    interval = median_interval(apart_ms, least_coverage=0.95)
    true_median = (
        "too few pairs for an interval"
        if interval is None
        else f"{interval.coverage:.0%}: {interval.low:+.2f} to {interval.high:+.2f}"
    )
    return (
        f"  {name}: {percentile(theirs_ms, 50):.1f} -> {percentile(ours_ms, 50):.1f} ms, "
        f"×{percentile(ratios(ours_ms, theirs_ms), 50):.3f}, {percentile(apart_ms, 50):+.2f} ms "
        f"({true_median}; quartiles {percentile(apart_ms, 25):+.2f} and {percentile(apart_ms, 75):+.2f})"
    )


def _parser() -> argparse.ArgumentParser:
    what = "Pairs single requests to Sluice and to plain `vllm serve`, to tell what the path adds to TTFT."
    parser = new_parser("bench.first_token", what, EPILOG, first_port=18200)
    add = parser.add_argument
    add("--control", action="store_true", help="a second plain vLLM in place of Sluice")
    add("--requests", type=int, default=300, help="prompts, each sent to both (default: %(default)s)")
    add("--max-tokens", type=int, default=32, help="length of every answer in tokens (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.first_token", _parser(), measure, as_text, arguments)


if __name__ == "__main__":
    sys.exit(main())
