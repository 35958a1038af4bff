"""What a large batch makes of idle engines, and what it costs the requests beside it: `python -m bench.batches --help`.

Targets are those of `bench.capacity`, by plain vLLM; capacity is that of Sluice without a batch. Each load runs twice
in every round, with the same requests at the same times: alone, and while a batch of the real Batch API runs, which is
larger than can be answered meanwhile. Who goes first changes from round to round.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

import msgspec
import numpy as np
import openai

from bench.capacity import OpenLoop, add_options, classes_of, engine_arguments, lengths_of
from bench.chat_client import TEXT_PATH
from bench.load import ServerUnusable, first_model
from bench.open_loop import LOOSE, Lengths, Request, draw_requests
from bench.report import markdown_table
from bench.session import EXIT_STATUS, Session, new_parser, positive_number, run_session, turns
from bench.summary import Spread, differences, ratios

SWING = "swing"
SWING_LOADS = (0.1, 0.9)
SWING_HALF_S = 6.0
TRY_S = 12.0  # of a rate, in search of capacity
LEAD_S = 5.0  # that a batch runs before others come: the number in flight grows from one
BATCH_LOAD = 8.0  # requests of a batch, as a multiple of what comes in a run at capacity: more than can be answered
DEADLINE_S = 120.0  # for a batch to begin, or to end once it is cancelled
LOOK_S = 0.2
ENDED = ("completed", "failed", "expired", "cancelled")
WAYS = {False: "alone", True: "with a batch"}

EPILOG = f"""\
examples:
  python -m bench.batches                         a random model of 27 million parameters, some 14 minutes on two cores
  python -m bench.batches --rounds 1 --seconds 10 --loads 0.5   a first look
  python -m bench.batches --model Qwen/Qwen3-8B --slots 256 --answer 250 --tight-prompt 400 --loose-prompt 4000

A request is in time if it keeps both its targets. Tokens are those of all answers, of batches too, from the start of a
run to its last answer. The engine gets the arguments that bench.goodput gives, and after them whatever follows `--`.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, once: `tokens` of all answers in `seconds`, those of a batch as well."""

    load: str
    has_batch: bool
    requests: int
    in_time: int
    tokens: int
    seconds: float

    @property
    def share(self) -> float:
        return self.in_time / self.requests

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def drawn(load: str, capacity: float, seconds: float, lengths: Lengths, seed: int) -> list[Request]:
    """Requests of a load that come within these seconds: a share of capacity, or SWING between two."""
    low, high = SWING_LOADS if load == SWING else (float(load), float(load))
    mean = (low + high) / 2
    requests = draw_requests(max(1, round(mean * capacity * seconds)), mean * capacity, lengths, seed)
    halves = np.arange(int(requests[-1].arrival_s / SWING_HALF_S) + 3)
    at_one_pace = np.cumsum(np.where(halves % 2, high, low)) / mean * SWING_HALF_S  # when a half ends, had it been
    arrivals_s = np.interp(
        [each.arrival_s for each in requests], [0.0, *at_one_pace], [0.0, *((halves + 1) * SWING_HALF_S)]
    )
    return [replace(each, arrival_s=float(at_s)) for each, at_s in zip(requests, arrivals_s, strict=True)]


def batch_lines(count: int, model: str, lengths: Lengths) -> bytes:
    """The file of a batch, of requests like those beside it."""
    bodies = (
        {"model": model, "prompt": each.prompt_token_ids, "max_tokens": each.max_tokens, "ignore_eos": True}
        for each in draw_requests(count, 1.0, lengths, seed=5)
    )
    lines = (
        {"custom_id": str(number), "method": "POST", "url": TEXT_PATH, "body": {**body, "temperature": 0}}
        for number, body in enumerate(bodies)
    )
    return b"\n".join(map(msgspec.json.encode, lines))


class RunningBatch:
    """A batch of the application at `client`, from its first answers on."""

    def __init__(self, client: openai.OpenAI, file_id: str) -> None:
        self._client = client
        self._id = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id

    def wait_for_answers(self) -> None:
        """Raises: ServerUnusable: it ended, or answered nothing in time."""
        self._until(lambda: self.tokens() > 0, "has answered nothing")
        time.sleep(LEAD_S)

    def tokens(self) -> int:
        """Tokens of all its answers so far. Raises: ServerUnusable: it has ended, so that nothing ran beside a load."""
        batch = self._client.batches.retrieve(self._id)
        if batch.status in ENDED:
            raise ServerUnusable(
                f"the batch is {batch.status} while it should run: {batch.errors or batch.request_counts}"
            )
        return 0 if batch.usage is None else batch.usage.output_tokens

    def cancel(self) -> None:
        """Returns once nothing of it runs. Raises: ServerUnusable."""
        self._client.batches.cancel(self._id)
        self._until(lambda: self._client.batches.retrieve(self._id).status in ENDED, "does not end")

    def _until(self, is_so: Callable[[], bool], otherwise: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if time.monotonic() > end_s:
                raise ServerUnusable(f"the batch {otherwise} within {DEADLINE_S:g} s")
            time.sleep(LOOK_S)


def measure(session: Session) -> list[Run]:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError, openai.OpenAIError."""
    loop = OpenLoop(session, lengths_of(session.options))
    with session.running(session.plain("vllm serve", 0)) as plain:
        loop.measure_targets(plain.spec.url)
    settings = {
        "classes": {**classes_of(loop.targets), "offline": {"ttft_s": 60.0, "fills_idle": True}},
        "default_class": LOOSE,
        "engine": {"replicas": 1},
        # What ran when a run begins or ends is told within a segment.
        "batches": {"folder": str(session.folder / "batches"), "segment_s": 1.0},
    }
    url = session.start(session.sluice("Sluice", 1, settings)).spec.url
    loop.ask(url, drawn("0.5", loop.busy_rate, 3.0, loop.lengths, seed=1))  # connects, compiles
    capacity = loop.capacity(url, lambda rate: round(rate * TRY_S) + 1)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return _rounds(loop, url, client, capacity)


def _rounds(loop: OpenLoop, url: str, client: openai.OpenAI, capacity: float) -> list[Run]:
    session, options, runs = loop.session, loop.session.options, list[Run]()
    count = round(BATCH_LOAD * capacity * (options.seconds + LEAD_S)) + 1
    lines = batch_lines(count, first_model(url), loop.lengths)
    file = client.files.create(file=("batch.jsonl", io.BytesIO(lines)), purpose="batch")
    for number, load in product(range(options.rounds), options.loads):
        requests = drawn(load, capacity, options.seconds, loop.lengths, seed=1000 * (number + 1))
        for has_batch in turns((False, True), number):
            session.stage(f"round {number + 1}/{options.rounds}, load {load}, {WAYS[has_batch]}")
            with running_batch(client, file.id if has_batch else None) as batch:
                runs.append(_run(loop, url, load, requests, batch))
            shown = f"{runs[-1].share:.3f} of {runs[-1].requests} in time, {runs[-1].tokens_per_s:.0f} tokens/s"
            session.say(f"round {number + 1}, load {load}, {WAYS[has_batch]}: {shown}")
    return runs


def _run(loop: OpenLoop, url: str, load: str, requests: Sequence[Request], batch: "RunningBatch | None") -> Run:
    before, began_s = batch.tokens() if batch else 0, time.monotonic()
    outcomes = loop.ask(url, requests)
    seconds = time.monotonic() - began_s
    of_batch = batch.tokens() - before if batch else 0
    return Run(
        load=load,
        has_batch=batch is not None,
        requests=len(outcomes),
        in_time=sum(loop.in_time(outcomes)),
        tokens=of_batch + sum(each.answer.output_tokens for each in outcomes if each.answer is not None),
        seconds=seconds,
    )


@contextmanager
def running_batch(client: openai.OpenAI, file_id: str | None) -> Iterator[RunningBatch | None]:
    """A batch of that file, under way, and cancelled at the end; none without a file."""
    if file_id is None:
        yield None
        return
    batch = RunningBatch(client, file_id)
    batch.wait_for_answers()
    yield batch
    batch.cancel()  # where something fails instead, its server is stopped


def as_markdown(runs: Sequence[Run]) -> str:
    """Medians over the rounds, in brackets the least and the greatest; differences and ratios are paired."""
    heads = ["load", "requests", "in time alone", "with a batch", "points", "tokens/s alone", "with a batch", "ratio"]
    rows = [_row(load, [run for run in runs if run.load == load]) for load in dict.fromkeys(run.load for run in runs)]
    return markdown_table(heads, rows) + f"\n\n{_all_requests(runs)}\n"


def _row(load: str, runs: Sequence[Run]) -> list[str]:
    alone, beside = _split(runs)
    shares = [run.share for run in alone], [run.share for run in beside]
    rates = [run.tokens_per_s for run in alone], [run.tokens_per_s for run in beside]
    points = [100 * each for each in differences(shares[1], shares[0])]
    return [
        load,
        str(sum(run.requests for run in alone)),
        *(f"{Spread.of(values):.3f}" for values in shares),
        f"{Spread.of(points):+.1f}",
        *(f"{Spread.of(values):.0f}" for values in rates),
        f"×{Spread.of(ratios(rates[1], rates[0])):.2f}",
    ]


def _split(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Those alone and those with a batch, in the order of the rounds."""
    return [run for run in runs if not run.has_batch], [run for run in runs if run.has_batch]


def _all_requests(runs: Sequence[Run]) -> str:
    alone, beside = _split(runs)
    count = sum(run.requests for run in alone)
    shares = [sum(run.in_time for run in each) / count for each in (alone, beside)]
    in_time = f"{shares[0]:.3f} were in time alone, {shares[1]:.3f} with a batch"
    return f"Of all {count} requests {in_time}: {100 * (shares[1] - shares[0]):+.1f} points."


def _load(text: str) -> str:
    if text != SWING and not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0 or {SWING}, got {text}")
    return text


def _parser() -> argparse.ArgumentParser:
    what = "Measures requests in time and tokens per second, with and without a batch beside them."
    parser = new_parser("bench.batches", what, EPILOG, first_port=18500, model=None)
    add_options(parser, Lengths(tight_prompt=32, loose_prompt=128, answer=16), "each way")
    swings = f"of capacity, or {SWING}: {SWING_LOADS[0]:g} and {SWING_LOADS[1]:g} in turns (default: 0.5 0.9 {SWING})"
    add = parser.add_argument
    add("--loads", type=_load, nargs="+", default=["0.5", "0.9", SWING], metavar="X", help=swings)
    add("--seconds", type=positive_number, default=25.0, help="of arrivals in a run (default: %(default)g)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session(
        "bench.batches",
        _parser(),
        measure,
        as_markdown,
        arguments,
        engine_arguments=engine_arguments,
        unusable=(openai.OpenAIError,),
    )


if __name__ == "__main__":
    sys.exit(main())
