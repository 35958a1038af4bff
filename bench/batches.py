"""What a large batch makes of idle engines, and what it costs the requests beside it: `python -m bench.batches --help`.

What is done, in this order:

1. Targets come from this machine, as those of bench.goodput: from plain vLLM with all slots decoding, and with single
   prompts. Tight requests have a reader who waits, loose ones are lenient.
2. Capacity is the highest rate at which Sluice, without a batch, answers 95 % in time.
3. Each load runs twice in every round, with the same requests at the same times: alone, and while a batch of the real
   Batch API runs, which is larger than can be answered meanwhile. Who goes first changes from round to round.
"""

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import openai
import uvloop
from tqdm import tqdm

from bench import random_model
from bench.arguments import folder, positive, positive_number, writable_file
from bench.chat_client import TEXT_PATH
from bench.ending import exit_status
from bench.goodput import (
    KEPT_AT_CAPACITY,
    TIMEOUT_S,
    busy_rate,
    capacity_of,
    full_step_s,
    prompt_reading_s,
    targets_of,
)
from bench.load import ServerUnusable, first_model
from bench.open_loop import LOOSE, Lengths, Outcome, Request, Targets, draw_requests, run_open_loop
from bench.report import markdown_table
from bench.servers import (
    HOST,
    Server,
    ServerSpec,
    gpus_of_an_engine,
    plain_vllm,
    shared_arguments,
    sluice_with_config,
    split_at_dashes,
)
from bench.summary import Spread, differences, ratios

SWING = "swing"
SWING_LOADS = (0.1, 0.9)
SWING_HALF_S = 6.0
TRY_S = 12.0  # of a rate, in search of capacity
LEAD_S = 5.0  # that a batch runs before others come: the number in flight grows from one
BATCH_LOAD = 8.0  # requests of a batch, of what comes in a run at capacity: more than can be answered
DEADLINE_S = 120.0  # for a batch to begin, or to end once it is cancelled
LOOK_S = 0.2
ENDED = ("completed", "failed", "expired", "cancelled")

EPILOG = """\
examples:
  python -m bench.batches                         a random model of 27 million parameters, some 14 minutes on two cores
  python -m bench.batches --rounds 1 --seconds 10 --loads 0.5   a first look
  python -m bench.batches --model Qwen/Qwen3-8B --slots 256 --answer 250 --tight-prompt 400 --loose-prompt 4000

A request is in time if it keeps both its targets. Tokens are those of all answers, of batches too, from the start of a
run to its last answer. The engine gets the arguments that bench.goodput gives, and after them whatever follows `--`.

exit status: 0 measured, 2 a server or the arguments are unusable, 130 interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, once. `tokens` of answers in `seconds`, of batches as well."""

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
    """Requests of a load for so many seconds: a share of capacity, or SWING between two."""
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
        """Of all its answers so far. Raises: ServerUnusable: it has ended, so that nothing ran beside a load."""
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


class Bench:
    """One whole measurement on servers that share this machine."""

    def __init__(self, options: argparse.Namespace, engine_arguments: Sequence[str], stack: ExitStack) -> None:
        self._options, self._arguments, self._stack = options, tuple(engine_arguments), stack
        self._lengths = Lengths(
            tight_prompt=options.tight_prompt, loose_prompt=options.loose_prompt, answer=options.answer
        )
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        self._bar = stack.enter_context(tqdm(unit="request", mininterval=0.5, disable=None))
        self._url = f"http://{HOST}:{options.first_port + 1}"
        self._targets: dict[str, Targets] = {}
        self._model = options.model
        if self._model is None:
            random_model.write_model(self._folder / "random")
            self._model = str(self._folder / "random")
            self._arguments = (*random_model.engine_arguments(), *self._arguments)  # of two, the later counts

    def run(self) -> list[Run]:
        """Raises: ServerFailed, ServerUnusable, RequestFailed, openai.OpenAIError."""
        busy = self._measure_targets()
        with self._up(self._sluice()):
            self._loaded(drawn("0.5", busy, 3.0, self._lengths, seed=1))  # connects, compiles
            capacity = self._options.capacity or self._capacity(busy)
            with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
                return self._rounds(client, capacity)

    def _measure_targets(self) -> float:
        """Returns the rate at which all slots are busy."""
        options = self._options
        with self._up(plain_vllm("vllm serve", self._model, options.first_port, self._arguments)) as server:
            self._bar.set_description("a full decode step, and reading a prompt")
            step_s = full_step_s(server.spec.url, options.slots, self._bar.update)
            reading_s = prompt_reading_s(server.spec.url, self._lengths)
        self._targets = targets_of(step_s, reading_s)
        self._say(f"a full decode step takes {1e3 * step_s:.1f} ms, reading a mean prompt {1e3 * reading_s:.0f} ms")
        for name, each in self._targets.items():
            self._say(f"{name}: first token within {1e3 * each.ttft_s:.0f} ms, {1e3 * each.tpot_s:.0f} ms a token")
        return busy_rate(options.slots, self._lengths, step_s, reading_s)

    def _capacity(self, start: float) -> float:
        found = capacity_of(self._kept_at, start)
        self._say(f"alone, {KEPT_AT_CAPACITY:.0%} are in time at up to {found:.2f} requests a second")
        return found

    def _kept_at(self, rate: float) -> float:
        self._bar.set_description(f"in search of capacity, {rate:.2f} requests a second")
        outcomes = self._loaded(draw_requests(round(rate * TRY_S) + 1, rate, self._lengths, seed=round(1e6 * rate)))
        kept = self._in_time(outcomes) / len(outcomes)
        self._say(f"at {rate:.2f} requests a second: {kept:.3f} in time")
        return kept

    def _rounds(self, client: openai.OpenAI, capacity: float) -> list[Run]:
        options, runs = self._options, list[Run]()
        count = round(BATCH_LOAD * capacity * (options.seconds + LEAD_S)) + 1
        lines = batch_lines(count, first_model(self._url), self._lengths)
        file = client.files.create(file=("batch.jsonl", io.BytesIO(lines)), purpose="batch")
        for number, load in product(range(options.rounds), options.loads):
            requests = drawn(load, capacity, options.seconds, self._lengths, seed=1000 * (number + 1))
            for has_batch in (False, True) if number % 2 == 0 else (True, False):
                way = "with a batch" if has_batch else "alone"
                self._bar.set_description(f"round {number + 1}/{options.rounds}, load {load}, {way}")
                runs.append(self._run(load, requests, client, file.id if has_batch else None))
                run = runs[-1]
                shown = f"{run.share:.3f} of {run.requests} in time, {run.tokens_per_s:.0f} tokens/s"
                self._say(f"round {number + 1}, load {load}, {way}: {shown}")
        return runs

    def _run(self, load: str, requests: Sequence[Request], client: openai.OpenAI, file_id: str | None) -> Run:
        with running_batch(client, file_id) as batch:
            before, began_s = batch.tokens() if batch else 0, time.monotonic()
            outcomes = self._loaded(requests)
            seconds = time.monotonic() - began_s
            of_batch = batch.tokens() - before if batch else 0
        return Run(
            load=load,
            has_batch=file_id is not None,
            requests=len(outcomes),
            in_time=self._in_time(outcomes),
            tokens=of_batch + sum(each.answer.output_tokens for each in outcomes if each.answer is not None),
            seconds=seconds,
        )

    def _loaded(self, requests: Sequence[Request]) -> list[Outcome]:
        return uvloop.run(run_open_loop(self._url, first_model(self._url), requests, TIMEOUT_S, self._bar.update))

    def _in_time(self, outcomes: Sequence[Outcome]) -> int:
        return sum(self._targets[each.slo_class].kept_by(each.answer) for each in outcomes)

    def _sluice(self) -> ServerSpec:
        """With the targets as its classes', beside that of batches, and defaults for the rest. JSON is YAML."""
        path = self._folder / "sluice.json"
        classes: dict[str, dict[str, object]] = {
            name: {"ttft_s": each.ttft_s, "tpot_s": each.tpot_s} for name, each in self._targets.items()
        }
        classes["offline"] = {"ttft_s": 60.0, "fills_idle": True}
        # What ran when a run begins or ends is told within a segment.
        batches = {"folder": str(self._folder / "batches"), "segment_s": 1.0}
        engine = {"replicas": 1, "num_gpus": gpus_of_an_engine(self._options.num_gpus)}
        settings = {"classes": classes, "default_class": LOOSE, "engine": engine, "batches": batches}
        path.write_text(json.dumps(settings))
        port = self._options.first_port + 1
        return sluice_with_config("Sluice", path, port, f"--model={self._model}", "--", *self._arguments)

    @contextmanager
    def _up(self, spec: ServerSpec) -> Iterator[Server]:
        self._bar.set_description(f"starting {spec.name}")
        with Server(spec, self._options.logs or self._folder) as server:
            server.wait_until_ready(self._options.startup_timeout)
            yield server

    def _say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)


@contextmanager
def running_batch(client: openai.OpenAI, file_id: str | None) -> Iterator[RunningBatch | None]:
    """Of that file, under way, and cancelled at the end; none without a file."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    own, more = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(own)
    engine_arguments = shared_arguments((f"--max-num-seqs={options.slots}", "--no-enable-prefix-caching", *more))

    def measure(stack: ExitStack) -> None:
        runs = Bench(options, engine_arguments, stack).run()
        print(as_markdown(runs))
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs)))

    return exit_status("bench.batches", measure, (openai.OpenAIError,))


def _load(text: str) -> str:
    if text != SWING and not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0 or {SWING}, got {text}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.batches",
        usage="%(prog)s [options] [-- engine arguments]",
        description="Measures requests in time and tokens per second, with and without a batch beside them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="folder or name of the model (default: random weights, nothing to download)")
    add("--slots", type=positive, default=16, help="requests that run at once, --max-num-seqs (default: %(default)s)")
    swings = f"of capacity, or {SWING}: {SWING_LOADS[0]:g} and {SWING_LOADS[1]:g} in turns (default: 0.5 0.9 {SWING})"
    add("--loads", type=_load, nargs="+", default=["0.5", "0.9", SWING], metavar="X", help=swings)
    add("--capacity", type=positive_number, metavar="RATE", help="requests a second (default: searched for)")
    add("--seconds", type=positive_number, default=25.0, help="of arrivals in a run (default: %(default)g)")
    add("--rounds", type=positive, default=3, help="runs of each load, alone and with a batch (default: %(default)s)")
    add("--tight-prompt", type=int, default=32, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--loose-prompt", type=int, default=128, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--answer", type=int, default=16, metavar="TOKENS", help="mean length (default: %(default)s)")
    add("--num-gpus", type=float, metavar="N", help="of the engine (default: none on vLLM's CPU build, else 1)")
    add("--first-port", type=int, default=18500, help="the servers take this port and the next (default: 18500)")
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    add("--logs", type=folder, metavar="FOLDER", help="keep the servers' logs there")
    add("--json", type=writable_file, metavar="FILE", help="write every run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
