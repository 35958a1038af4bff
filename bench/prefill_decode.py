"""Inter-token gaps under bursts of long prompts: prefill on a replica of its own against the same two replicas unsplit.

    python -m bench.prefill_decode                 three repeats, some ten minutes on two cores
    python -m bench.prefill_decode --repeats 5 --json gaps.json

Both systems are `sluice serve` with two engines of the demo model; the order alternates from repeat to repeat. Streams
of short questions run throughout; every few seconds a burst of long prompts comes. What counts are the gaps between the
chunks of the short ones' streams, from the first burst until the last has been answered, and the pause after it; a
request that fails ends the whole. On a machine with as many cores as engines or fewer the two engines take each
other's time, whatever is split: read the ratio, not the seconds.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from tqdm import tqdm

from bench.chat_client import TEXT_PATH, ChatClient, RequestFailed
from bench.servers import Server, ServerFailed, ServerSpec, gpus_of_an_engine, sluice_with_config
from bench.summary import Spread, paired_ratios, percentile

VLLM_ARGS = ["--max-model-len", "2048", "--max-num-seqs", "32", "--max-num-batched-tokens", "1024"]
COUNTED = (
    "kv_transfers_total",
    "kv_transfer_fallbacks_total",
    "engine_kv_transfer_bytes_total",
    "engine_kv_transfer_seconds_total",
    "prefill_tokens_total",
    "prefill_padding_tokens_total",
)
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0
WARM_UP_S = 5.0


@dataclass
class Measured:
    """Of one system in one repeat: seconds.

    Attributes:
        gaps_s: between successive chunks of the short questions' answers.
        ttft_s: of the long prompts, their first tokens.
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


def settings(split: bool, num_gpus: float) -> dict[str, Any]:
    """The same two engines: both for everything, or one for prompts."""
    prefill = {"split": "always", "min_prompt_tokens": 256, "max_wait_s": 30}
    engine: dict[str, Any] = {"replicas": 1, "prefill": prefill} if split else {"replicas": 2}
    return {"vllm_args": VLLM_ARGS, "engine": engine | {"num_gpus": num_gpus}}


def spec(options: argparse.Namespace, split: bool, folder: Path) -> ServerSpec:
    path = folder / "sluice.json"  # JSON is YAML
    path.write_text(json.dumps(settings(split, gpus_of_an_engine(options.num_gpus))))
    return sluice_with_config("split" if split else "unsplit", path, options.port)


def counted(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.spec.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sluice_{name}{{"))
        for name in COUNTED
    }


def body(prompt: list[int], max_tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": "sluice-demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def client(url: str) -> contextlib.closing[ChatClient]:
    return contextlib.closing(ChatClient(url, REQUEST_TIMEOUT_S, TEXT_PATH))


class Load:
    """Short questions without a pause, and bursts of long prompts.

    Every task draws prompts of its own from the seed, so that two systems get the same ones however fast they answer.
    """

    def __init__(self, options: argparse.Namespace, url: str, seed: int) -> None:
        self._options, self._url, self._seed = options, url, seed
        self._gaps: list[tuple[float, float]] = []  # when it began and when it ended
        self._asking = True

    async def run(self) -> Measured:
        """Raises: ExceptionGroup of RequestFailed: a stream broke off or held an error."""
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
        """First tokens of all long prompts, when the last has been answered."""
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
                answer = await asking.ask(body(_prompt(rng, 16), 200))
                came_s = list(itertools.accumulate(answer.itl_s, initial=asked_s + answer.ttft_s))
                self._gaps += itertools.pairwise(came_s)

    async def _long(self, name: str) -> float:
        with client(self._url) as asking:
            answer = await asking.ask(body(_prompt(self._random(name), self._options.long_tokens), 8))
        return answer.ttft_s

    def _random(self, task: str) -> random.Random:
        return random.Random(f"{self._seed}, {task}")


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(10, 4000) for _ in range(tokens)]


def measure(options: argparse.Namespace, split: bool, seed: int) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder,
        Server(spec(options, split, Path(folder)), Path(folder)) as server,
    ):
        server.wait_until_ready(START_TIMEOUT_S)
        measured = uvloop.run(Load(options, server.spec.url, seed).run())
        measured.metrics = counted(server) if split else {}
    return measured


def report(repeats: list[dict[str, dict[str, float]]]) -> str:
    lines = [f"{'':<18}{'unsplit':>12}{'split':>12}{'split / unsplit, median [least, most]':>42}"]
    for name in ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "long_ttft_p50_ms"):
        one, two = ([each[system][name] for each in repeats] for system in ("unsplit", "split"))
        shown = f"{paired_ratios(two, one):.2f}"
        lines.append(f"{name:<18}{Spread.of(one).median:>12.1f}{Spread.of(two).median:>12.1f}{shown:>42}")
    return "\n".join(lines)


def measure_all(options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    repeats: list[dict[str, dict[str, float]]] = []
    with tqdm(total=2 * options.repeats, unit="run", disable=None) as bar:
        for number in range(options.repeats):
            found = {}
            for split in (False, True) if number % 2 == 0 else (True, False):
                measured = measure(options, split, seed=number).numbers()
                found["split" if split else "unsplit"] = measured
                bar.write(json.dumps({"repeat": number, "split": split, **measured}))
                bar.update()
            repeats.append(found)
    return repeats


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of both systems (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured in each (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="short questions at once (default: %(default)s)")
    parser.add_argument("--burst", type=int, default=4, help="long prompts at once (default: %(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between bursts (default: %(default)s)")
    parser.add_argument("--long-tokens", type=int, default=1800, help="of a long prompt (default: %(default)s)")
    parser.add_argument("--num-gpus", type=float, help="of each engine (default: 0 on vLLM's CPU build, else 1)")
    parser.add_argument("--port", type=int, default=8123, help="of the server under test (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args(arguments)
    status = 0
    try:
        repeats = measure_all(options)
        print(report(repeats))
        if options.json is not None:
            options.json.write_text(json.dumps(repeats, indent=1) + "\n")
    except* (RequestFailed, ServerFailed) as failed:
        print(f"bench.prefill_decode: {_first(failed)}", file=sys.stderr)
        status = 2
    return status


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
