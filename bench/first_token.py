"""Time to the first token of a request alone, Sluice beside plain `vllm serve`: `python -m bench.first_token --help`.

`bench.compare` measures runs, and between two of them a shared machine changes by more than the path takes. Here every
prompt goes to both servers, one right after the other and each first as often: what changes more slowly than two
requests falls out of their difference, and many pairs tell its median far more narrowly.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from tqdm import tqdm

from bench.chat_client import Answer, ChatClient
from bench.ending import exit_status
from bench.load import first_model
from bench.servers import (
    ENGINE_ARGUMENTS,
    GPU_ARGUMENTS,
    Server,
    ServerSpec,
    gpus_of_an_engine,
    plain_vllm,
    shared_arguments,
    sluice,
    split_at_dashes,
)
from bench.summary import differences, median_interval, percentile, ratios
from bench.workload import LoadConfig, request_bodies

# Not counted: what is done once per connection, per shape of a step, per cache.
WARM_UP_PAIRS = 8

EPILOG = f"""\
examples:
  python -m bench.first_token                      300 pairs, some eight minutes on two slow cores
  python -m bench.first_token --control            plain vLLM beside itself: the noise of the method
  python -m bench.first_token -- --dtype=float32   with other engine arguments

Both servers get these engine arguments, and after them whatever follows `--`:
  {" ".join(ENGINE_ARGUMENTS)}
Unless the vLLM installed here is its CPU build, also these, for both share the first GPU:
  {" ".join(GPU_ARGUMENTS)}

Of the differences it prints the median, the quartiles, and between which two of them the true median lies, with the
probability of that whatever their distribution.

exit status: 0 measured, 2 a server, a request or the arguments failed, 130 interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both servers' answers to one prompt."""

    theirs: Answer
    ours: Answer


async def measure_pairs(theirs: LoadConfig, ours: LoadConfig, on_pair: Callable[[], object]) -> list[Pair]:
    """One request in flight at a time; the configs differ in url and model.

    Raises: RequestFailed.
    """
    with (
        contextlib.closing(ChatClient(theirs.url, theirs.timeout_s)) as their_client,
        contextlib.closing(ChatClient(ours.url, ours.timeout_s)) as our_client,
    ):
        pairs = []
        bodies = zip(request_bodies(theirs), request_bodies(ours), strict=True)
        for number, (their_body, our_body) in enumerate(bodies):
            if number % 2 == 0:
                their_answer = await their_client.ask(their_body)
                our_answer = await our_client.ask(our_body)
            else:
                our_answer = await our_client.ask(our_body)
                their_answer = await their_client.ask(their_body)
            pairs.append(Pair(theirs=their_answer, ours=our_answer))
            on_pair()
    return pairs


def as_text(pairs: Sequence[Pair], their_name: str, our_name: str) -> str:
    return "\n".join(
        [
            f"{our_name} beside {their_name}, {len(pairs)} pairs, one request at a time:",
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


def main(arguments: Sequence[str] | None = None) -> int:
    own, engine_arguments = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(own)
    arguments_of_engines = shared_arguments(engine_arguments)
    return exit_status("bench.first_token", lambda stack: print(_measured(options, arguments_of_engines, stack)))


def _measured(options: argparse.Namespace, engine_arguments: Sequence[str], stack: ExitStack) -> str:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError."""
    plain, contender = _specs(options, engine_arguments)
    model = options.model
    # Before anything starts: it checks the numbers.
    load = LoadConfig(
        url=plain.url, model=model, concurrency=1, requests=options.requests, max_tokens=options.max_tokens
    )
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
    bar = stack.enter_context(tqdm(total=options.requests, unit="pair", mininterval=0.5, disable=None))
    servers = []
    for spec in (plain, contender):
        bar.set_description(f"starting {spec.name}")
        servers.append(stack.enter_context(Server(spec, logs)))
        servers[-1].wait_until_ready(options.startup_timeout)
    theirs, ours = (replace(load, url=one.spec.url, model=first_model(one.spec.url)) for one in servers)
    few_theirs, few_ours = (replace(one, requests=WARM_UP_PAIRS, seed=load.seed + 1) for one in (theirs, ours))
    bar.set_description("warming up")
    uvloop.run(measure_pairs(few_theirs, few_ours, lambda: None))
    bar.set_description("measuring")
    pairs = uvloop.run(measure_pairs(theirs, ours, bar.update))
    bar.set_description("stopping")
    return as_text(pairs, plain.name, contender.name)


def _specs(options: argparse.Namespace, engine_arguments: Sequence[str]) -> tuple[ServerSpec, ServerSpec]:
    model, port = options.model, options.first_port
    plain = plain_vllm("vllm serve", model, port, engine_arguments)
    if options.control:
        return plain, plain_vllm("vllm serve again", model, port + 1, engine_arguments)
    gpus = gpus_of_an_engine(options.num_gpus)
    return plain, sluice("Sluice 1x1", model, port + 1, 1, 1, engine_arguments, gpus)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.first_token",
        usage="%(prog)s [options] [-- engine arguments of both sides]",
        description="Pairs single requests to Sluice and to plain `vllm serve`, to tell what the path adds to TTFT.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="deployments/demo_model", help="folder or name of the model (default: %(default)s)")
    add("--control", action="store_true", help="a second plain vLLM in place of Sluice")
    add("--num-gpus", type=float, metavar="N", help="of Sluice's engine (default: none on vLLM's CPU build, else 1)")
    add("--requests", type=int, default=300, help="prompts, each sent to both (default: %(default)s)")
    add("--max-tokens", type=int, default=32, help="length of every answer in tokens (default: %(default)s)")
    add("--first-port", type=int, default=18200, help="the servers take this port and the next (default: %(default)s)")
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
