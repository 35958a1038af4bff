"""Inter-token gaps under bursts of long prompts: prefill on a replica of its own against the same two replicas unsplit.

    python -m bench.prefill_decode                 three repeats, some ten minutes on two cores
    python -m bench.prefill_decode --repeats 5 --json gaps.json

Both systems are Sluice with two engines; the order alternates from repeat to repeat. Streams of short questions run
throughout; every few seconds a burst of long prompts comes. What counts are the gaps between the chunks of the short
ones' streams, from the first burst until the last has been answered, and the pause after it; a request that fails ends
the whole. On a machine with as many cores as engines or fewer the two engines take each other's time in both systems:
read the ratio, not the seconds.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

from bench.chat_client import TEXT_PATH, ChatClient
from bench.load import first_model
from bench.open_loop import Request
from bench.report import markdown_table
from bench.servers import Server, ServerFailed
from bench.session import EXIT_STATUS, Session, new_parser, positive, run_session, turns
from bench.summary import Spread, paired_ratios, percentile

# Both have the same two engines: both for everything, or one for prompts.
SYSTEMS = {
    "unsplit": {"replicas": 2},
    "split": {"replicas": 1, "prefill": {"split": "always", "min_prompt_tokens": 256, "max_wait_s": 30}},
}
ENGINE_ARGUMENTS = ("--max-num-seqs=32", "--max-num-batched-tokens=1024")
COUNTED = (
    "kv_transfers_total",
    "kv_transfer_fallbacks_total",
    "engine_kv_transfer_bytes_total",
    "engine_kv_transfer_seconds_total",
    "prefill_tokens_total",
    "prefill_padding_tokens_total",
)
WARM_UP_S = 5.0
MEASURES = ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "long_ttft_p50_ms")


@dataclass
class Measured:
    """What one system did in one repeat: seconds.

    Attributes:
        gaps_s: between successive chunks of the short questions' answers.
        ttft_s: until the first tokens of the long prompts.
    """

    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        return {
            "gap_p50_ms": _ms(self.gaps_s, 50),
            "gap_p99_ms": _ms(self.gaps_s, 99),
            "gap_max_ms": _ms(self.gaps_s, 100),
            "long_ttft_p50_ms": _ms(self.ttft_s, 50),
            "gaps": len(self.gaps_s),
            **self.metrics,
        }


def _ms(seconds: list[float], percent: float) -> float:
    """Raises: ServerFailed: nothing was measured."""
    found = percentile(seconds, percent)
    if found is None:
        raise ServerFailed("not one chunk came while it was measured")
    return 1e3 * found


def counted(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.spec.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sluice_{name}{{"))
        for name in COUNTED
    }


def body(model: str, prompt: list[int], max_tokens: int) -> bytes:
    return Request(arrival_s=0.0, slo_class="", prompt_token_ids=prompt, max_tokens=max_tokens).body(model)


def client(url: str) -> contextlib.closing[ChatClient]:
    return contextlib.closing(ChatClient(url, path=TEXT_PATH))


class Load:
    """Short questions without a pause, and bursts of long prompts.

    Every task draws prompts of its own from the seed, so that two systems get the same ones however fast they answer.
    """

    def __init__(self, options: argparse.Namespace, url: str, model: str, seed: int) -> None:
        self._options, self._url, self._model, self._seed = options, url, model, seed
        self._gaps: list[tuple[float, float]] = []  # when it began and when it ended
        self._asking = True

    async def run(self) -> Measured:
        """Raises: RequestFailed: a stream broke off or held an error."""
        try:
            return await self._run()
        except ExceptionGroup as failed:
            raise _first(failed) from None

    async def _run(self) -> Measured:
        async with asyncio.TaskGroup() as streams:
            for number in range(self._options.streams):
                streams.create_task(self._ask_on(number))
            await asyncio.sleep(WARM_UP_S)
            async with asyncio.TaskGroup() as first:  # connects the replicas
                for number in range(2):
                    first.create_task(self._long(f"warm-up {number}"))
            from_s = time.perf_counter()
            ttft_s = await self._bursts(math.ceil(self._options.seconds / self._options.every))
            until_s = time.perf_counter()
            self._asking = False  # what is in flight is read to its end: a gap is known when its answer is whole
        gaps_s = [end_s - start_s for start_s, end_s in self._gaps if from_s <= start_s and end_s <= until_s]
        return Measured(gaps_s=gaps_s, ttft_s=ttft_s)

    async def _bursts(self, count: int) -> list[float]:
        """Seconds until the first token of every long prompt, when the last has been answered."""
        tasks: list[asyncio.Task[float]] = []
        async with asyncio.TaskGroup() as bursts:
            for burst in range(count):
                names = [f"burst {burst}, {number}" for number in range(self._options.burst)]
                tasks += [bursts.create_task(self._long(name)) for name in names]
                await asyncio.sleep(self._options.every)
        return [task.result() for task in tasks]

    async def _ask_on(self, number: int) -> None:
        rng = self._random(f"stream {number}")
        with client(self._url) as asking:
            while self._asking:
                asked_s = time.perf_counter()
                answer = await asking.ask(body(self._model, _prompt(rng, 16), 200))
                came_s = list(itertools.accumulate(answer.itl_s, initial=asked_s + answer.ttft_s))
                self._gaps += itertools.pairwise(came_s)

    async def _long(self, name: str) -> float:
        with client(self._url) as asking:
            answer = await asking.ask(body(self._model, _prompt(self._random(name), self._options.long_tokens), 8))
        return answer.ttft_s

    def _random(self, task: str) -> random.Random:
        return random.Random(f"{self._seed}, {task}")


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 4000) for _ in range(tokens)]


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def measure(session: Session) -> list[dict[str, dict[str, float]]]:
    """Numbers by system, repeat by repeat. Raises: ServerFailed, ServerUnusable, RequestFailed."""
    repeats: list[dict[str, dict[str, float]]] = []
    for number in range(session.options.repeats):
        found: dict[str, dict[str, float]] = {}
        for system in turns(list(SYSTEMS), number):
            with session.running(session.sluice(system, 0, {"engine": SYSTEMS[system]})) as server:
                session.stage(f"repeat {number + 1}/{session.options.repeats}, {system}")
                url = server.spec.url
                measured = uvloop.run(Load(session.options, url, first_model(url), seed=number).run())
                measured.metrics = counted(server) if system == "split" else {}
            found[system] = measured.numbers()
            session.say(json.dumps({"repeat": number, "system": system, **found[system]}))
        repeats.append(found)
    return repeats


def as_markdown(repeats: Sequence[dict[str, dict[str, float]]]) -> str:
    rows = []
    for name in MEASURES:
        unsplit, split = ([each[system][name] for each in repeats] for system in SYSTEMS)
        medians = (f"{Spread.of(values).median:.1f}" for values in (unsplit, split))
        rows.append([name, *medians, f"{paired_ratios(split, unsplit):.2f}"])
    return markdown_table(["", *SYSTEMS, "split / unsplit, median [least, most]"], rows)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.prefill_decode", __doc__, EXIT_STATUS, first_port=18600)
    add = parser.add_argument
    add("--repeats", type=positive, default=3, help="of both systems (default: %(default)s)")
    add("--seconds", type=float, default=30.0, help="measured in each (default: %(default)s)")
    add("--streams", type=int, default=4, help="short questions at once (default: %(default)s)")
    add("--burst", type=int, default=4, help="long prompts at once (default: %(default)s)")
    add("--every", type=float, default=5.0, help="seconds between bursts (default: %(default)s)")
    add("--long-tokens", type=int, default=1800, help="of a long prompt (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session(
        "bench.prefill_decode", _parser(), measure, as_markdown, arguments, engine_arguments=lambda _: ENGINE_ARGUMENTS
    )


if __name__ == "__main__":
    sys.exit(main())
