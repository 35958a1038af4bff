"""Exclusive phases by the share that prompts have of all tokens (003), and batches out of bins (000), in one engine.

    python -m bench.deployments.prompt_shares OUT --model MODEL [--clients 64] [--minutes 10] [--engine JSON]

OUT/shares.jsonl has a line for each mode and load, OUT/bins.jsonl one for each number of bins; both are written as they
are measured. The modes change in the running engine, so that the start is paid once.

Shares. A closed loop keeps the batch full. Prompts make 20, 40, 60 and 80 % of the tokens that a request has; their
lengths are uniform, those of answers geometric, drawn in blocks that have the mean exactly. All modes get the same
requests. What is counted begins when the batch and half of another have their first token and ends when as many as
fill it another two and a half times have theirs: so every mode has read the same prompts. Before the first mode that
plans, steps are measured as in an engine that has just started.

Bins. Answers of 1 to N tokens, each length once, in batches of 8 that the engine runs one after another: those of a
batch come from one of k bins of equal width. "Single" is the same requests, 8 at a time, each in the place of one that
ended.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench.deployments.engine_steps import StepRecorder
from bench.summary import percentile
from policies.types import StepResult

if TYPE_CHECKING:  # a process that only counts imports neither torch nor vLLM
    from vllm.v1.engine.llm_engine import LLMEngine

SHARES = (0.2, 0.4, 0.6, 0.8)
REQUEST_TOKENS = 640
MODES: dict[str, dict[str, Any]] = {
    "stock": {"mode": "stock"},
    "mixed": {"mode": "mixed"},
    "exclusive": {"mode": "exclusive"},
    "auto": {"mode": "auto"},
}
BLOCK = 32  # requests whose lengths have the mean exactly
WARM_UP, COUNTED = 1.5, 2.5  # in requests for each client
BATCH = 8
BINS = (1, 4, 32)
BIN_PROMPT_TOKENS = 32
MEASURE_S = 10.0


class Request(NamedTuple):
    prompt_tokens: int
    output_tokens: int


def requests(prompt_mean: int, output_mean: int, seed: int = 5) -> Iterator[Request]:
    """Endless: prompts uniform from half to one and a half of their mean, answers geometric."""
    rng = random.Random(seed)
    middles = [(at + 0.5) / BLOCK for at in range(BLOCK)]
    prompts = [round(prompt_mean * (0.5 + middle)) for middle in middles]
    drawn = [-math.log1p(-middle) for middle in middles]
    outputs = [max(1, round(output_mean * each / statistics.mean(drawn))) for each in drawn]
    while True:
        rng.shuffle(prompts)
        rng.shuffle(outputs)
        yield from map(Request, prompts, outputs)


class Told(NamedTuple):
    """What a step brought of a request."""

    number: int
    tokens: int
    ended: bool


class Engine(Protocol):
    """As the loops drive it; requests go by numbers that count from 0 anew in each loop."""

    def add(self, number: int, request: Request) -> None: ...

    def step(self) -> list[Told]: ...

    def clear(self) -> None:
        """Give up what runs."""


@dataclass(slots=True)
class Window:
    """What came between two moments of a closed loop, seconds."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    means_s: list[float] = field(default_factory=list)  # between tokens, of each answer that ended

    def figures(self) -> dict[str, Any]:
        tokens = self.prompt_tokens + self.output_tokens
        return {
            "seconds": self.seconds,
            "requests": len(self.first_tokens_s),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_per_s": tokens / self.seconds,
            "output_tokens_per_s": self.output_tokens / self.seconds,
            "ttft_mean_s": statistics.mean(self.first_tokens_s),
            "ttft_p50_s": percentile(self.first_tokens_s, 50),
            "ttft_p99_s": percentile(self.first_tokens_s, 99),
            "itl_p50_s": percentile(self.gaps_s, 50),
            "itl_p99_s": percentile(self.gaps_s, 99),
            "tpot_p50_s": percentile(self.means_s, 50),
            "tpot_p99_s": percentile(self.means_s, 99),
        }


@dataclass(slots=True)
class _Seen:
    request: Request
    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


def closed_loop(
    engine: Engine,
    given: Iterator[Request],
    *,
    clients: int,
    begin: int,
    end: int,
    now: Callable[[], float] = time.perf_counter,
    on_begin: Callable[[], None] = lambda: None,
) -> Window:
    """From the first token of the request that is the begin-th to have one until that of the end-th."""
    window, running, asked, answered = Window(), dict[int, _Seen](), 0, 0
    began_s: float | None = None
    try:
        while answered < end:
            while len(running) < clients:
                running[asked] = _Seen(request := next(given), now())
                engine.add(asked, request)
                asked += 1
            told = engine.step()
            now_s = now()
            for number, tokens, ended in told:
                seen = running[number]
                if not seen.tokens and tokens:
                    answered += 1
                    seen.first_s = now_s
                    if began_s is not None:
                        window.first_tokens_s.append(now_s - seen.asked_s)
                        window.prompt_tokens += seen.request.prompt_tokens
                elif tokens and began_s is not None:
                    window.gaps_s.append((now_s - seen.last_s) / tokens)
                if tokens:
                    seen.last_s, seen.tokens = now_s, seen.tokens + tokens
                    window.output_tokens += tokens if began_s is not None else 0
                if ended:
                    del running[number]
                    if began_s is not None and seen.tokens > 8:
                        window.means_s.append((seen.last_s - seen.first_s) / (seen.tokens - 1))
            if began_s is None and answered >= begin:
                began_s = now_s
                on_begin()
        assert began_s is not None
        window.seconds = now_s - began_s
    finally:
        engine.clear()
    return window


def batches(lengths: Sequence[int], bins: int, size: int = BATCH) -> list[list[int]]:
    """In the order in which they are full; last what fills none. Bins have equal widths, from 0 to the longest."""
    longest, open_, formed = max(lengths), defaultdict[int, list[int]](list), list[list[int]]()
    for length in lengths:
        batch = open_[(length - 1) * bins // longest]
        batch.append(length)
        if len(batch) == size:
            formed.append(list(batch))
            batch.clear()
    return formed + [batch for _, batch in sorted(open_.items()) if batch]


def run_batches(engine: Engine, formed: Sequence[Sequence[int]], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of all, one after another."""
    began_s, number = now(), 0
    for batch in formed:
        for length in batch:
            engine.add(number, Request(BIN_PROMPT_TOKENS, length))
            number += 1
        left = len(batch)
        while left:
            left -= sum(told.ended for told in engine.step())
    return now() - began_s


def run_singly(
    engine: Engine, lengths: Sequence[int], clients: int = BATCH, now: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of all, so many at a time."""
    began_s, queue, running = now(), deque(enumerate(lengths)), 0
    while queue or running:
        while queue and running < clients:
            number, length = queue.popleft()
            engine.add(number, Request(BIN_PROMPT_TOKENS, length))
            running += 1
        running -= sum(told.ended for told in engine.step())
    return now() - began_s


class VllmEngine:
    """A vLLM engine of this process under Sluice's scheduler; asynchronous where vLLM is by itself."""

    def __init__(self, llm: "LLMEngine") -> None:
        self.llm = llm
        self.core = llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self._internal: dict[int, str] = {}
        self._added = 0

    def add(self, number: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._added += 1
        first = 10 + 7919 * self._added % 1000
        prompt = [first, *(10 + (first + 31 * at) % 1000 for at in range(1, request.prompt_tokens))]
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=request.output_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        added = self.llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
        self._internal[number] = str(added)

    def step(self) -> list[Told]:
        told = []
        for out in self.llm.step():
            number = int(out.request_id)
            told.append(Told(number, len(out.outputs[0].token_ids), out.finished))
            if out.finished:
                del self._internal[number]
        return told

    def clear(self) -> None:
        self.llm.abort_request(list(self._internal.values()), internal=True)
        self._internal.clear()
        while self.llm.has_unfinished_requests() or self.scheduler.has_requests() or self.core.batch_queue:
            self.llm.step()

    def set_mode(self, mode: dict[str, Any], clients: int) -> None:
        self.scheduler.control({"max_batch_size": clients} | mode)

    def measure(self) -> float:
        """As an engine that has just started is. Returns the seconds that it took."""
        from deployments.engines.vllm.measurement import loads, measure

        config = self.llm.vllm_config
        blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        given = loads(
            slots=self.scheduler._slots(self.scheduler.settings),
            max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
            max_model_len=config.model_config.max_model_len,
            cache_tokens=blocks * config.cache_config.block_size,
        )
        took_s = asyncio.run(measure(_ForMeasurement(self.llm.engine_core), given, MEASURE_S))
        self.clear()
        return took_s


class _ForMeasurement:
    """vLLM's client of an engine core in this process, as `measure` wants it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def add(self, request: Any) -> None:
        self._client.add_request(request)

    async def abort(self, request_ids: list[str]) -> None:
        self._client.abort_requests(request_ids)

    async def next_outputs(self) -> Any:
        await asyncio.sleep(0)  # where the time can be up
        return self._client.get_output()

    async def status(self) -> dict[str, Any]:
        return {}


def kind(step: StepResult) -> str:
    if not step.decode_requests:
        return "prefill"
    return "mixed" if step.prefill_tokens else "decode"


def of_steps(steps: Sequence[StepResult]) -> dict[str, Any]:
    """How many there were of each kind, and their mean seconds."""
    seconds = defaultdict[str, list[float]](list)
    for step in steps:
        seconds[kind(step)].append(step.step_s)
    counts = Counter({name: len(each) for name, each in seconds.items()})
    return {"steps": dict(counts), "mean_step_s": {name: statistics.mean(each) for name, each in seconds.items()}}


def measured_share(
    engine: VllmEngine, share: float, clients: int, *, request_tokens: int = REQUEST_TOKENS
) -> tuple[dict[str, Any], list[StepResult]]:
    """In the mode that is set."""
    prompt = round(share * request_tokens)
    began = Counter[str]()
    recorder = StepRecorder(engine.scheduler, time.perf_counter)
    try:
        window = closed_loop(
            engine,
            requests(prompt, request_tokens - prompt),
            clients=clients,
            begin=round(WARM_UP * clients),
            end=round((WARM_UP + COUNTED) * clients),
            on_begin=lambda: began.update(at=len(recorder.steps)),
        )
    finally:
        recorder.close()
    steps = recorder.steps[began["at"] :]
    return window.figures() | of_steps(steps), steps


def status_of(engine: VllmEngine) -> dict[str, Any]:
    """What the plug-in says of itself, in short."""
    names = ("mode", "exclusive", "phase_steps", "refill", "batch_size", "steps", "preemptions", "planning_seconds")
    said = engine.scheduler.status()
    return {name: said[name] for name in (*names, "step_times", "output_tokens") if name in said}


def sweep(
    engine: VllmEngine,
    clients: int,
    note: Callable[..., None],
    *,
    shares: Sequence[float] = SHARES,
    modes: Sequence[str] = tuple(MODES),
    request_tokens: int = REQUEST_TOKENS,
    has_time: Callable[[], bool] = lambda: True,
) -> None:
    """All modes by each share; every load begins with nothing learned."""
    for share in shares:
        engine.set_mode(MODES["stock"], clients)
        stock: float | None = None
        learned = False
        for name in modes:
            if not has_time():
                note(share=share, mode=name, left_out="no time")
                continue
            engine.set_mode(MODES[name], clients)
            took_s = None
            if name != "stock" and not learned:
                took_s, learned = engine.measure(), True
            figures, steps = measured_share(engine, share, clients, request_tokens=request_tokens)
            stock = figures["tokens_per_s"] if name == "stock" else stock
            note(
                share=share,
                clients=clients,
                mode=name,
                to_stock=None if stock is None else figures["tokens_per_s"] / stock,
                **figures,
                status=status_of(engine),
                measured_s=took_s,
                step_list=steps,
            )
    engine.set_mode(MODES["stock"], clients)


def bins(
    engine: VllmEngine,
    longest: int,
    note: Callable[..., None],
    *,
    bins: Sequence[int] = BINS,
    has_time: Callable[[], bool] = lambda: True,
) -> None:
    lengths = list(range(1, longest + 1))
    random.Random(11).shuffle(lengths)
    engine.set_mode(MODES["stock"], BATCH)
    run_batches(engine, [[4] * BATCH])  # the first ones meet what is done once
    for count in (*bins, None):
        if not has_time():
            note(bins=count, left_out="no time")
            continue
        formed = [] if count is None else batches(lengths, count)
        seconds = run_singly(engine, lengths) if count is None else run_batches(engine, formed)
        note(
            bins=count or "single",
            longest=longest,
            requests=len(lengths),
            batches=len(formed),
            tokens=sum(lengths),
            seconds=seconds,
            requests_per_s=len(lengths) / seconds,
            tokens_per_s=sum(lengths) / seconds,
            steps_of_longest=sum(map(max, formed)),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60.0 * options.minutes
    if options.model is not None:
        os.environ["SLUICE_BENCH_MODEL"] = options.model
    os.environ["SLUICE_BENCH_ARGS"] = options.engine
    from bench.deployments.test_modes_on_this_machine import engine as made

    engine = VllmEngine(made(options.out, max_num_seqs=max(options.clients, BATCH) + 1))

    def note_in(name: str) -> Callable[..., None]:
        def note(*, step_list: Sequence[StepResult] = (), **row: Any) -> None:
            with (options.out / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({key: value for key, value in row.items() if not isinstance(value, dict)}, file=sys.stderr)

        return note

    has_time = lambda: time.monotonic() < end_s  # noqa: E731
    sweep(engine, options.clients, note_in("shares"), request_tokens=options.tokens, has_time=has_time)
    bins(engine, options.longest, note_in("bins"), has_time=has_time)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.deployments.prompt_shares", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of results")
    parser.add_argument("--model", help="folder or name (default: random weights, nothing to download)")
    parser.add_argument("--engine", default="{}", metavar="JSON", help="further vLLM arguments")
    parser.add_argument("--clients", type=int, default=64, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=REQUEST_TOKENS, help="of a request (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=256, help="answer of the batches (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="no run begins after them (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
