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
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.deployments.engine_in_process import Engine, Request, VllmEngine, closed_loop, new_engine
from bench.deployments.engine_steps import StepRecorder
from policies.types import StepResult

SHARES = (0.2, 0.4, 0.6, 0.8)
REQUEST_TOKENS = 640
MODES = ("stock", "mixed", "exclusive", "auto")
BLOCK = 32  # requests whose lengths have the mean exactly
WARM_UP, COUNTED = 1.5, 2.5  # in requests for each client
BATCH = 8
BINS = (1, 4, 32)
BIN_PROMPT_TOKENS = 32


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
    """Seconds of all batches, one after another."""
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
    """Seconds of all, with this many clients."""
    began_s, queue, running = now(), deque(enumerate(lengths)), 0
    while queue or running:
        while queue and running < clients:
            number, length = queue.popleft()
            engine.add(number, Request(BIN_PROMPT_TOKENS, length))
            running += 1
        running -= sum(told.ended for told in engine.step())
    return now() - began_s


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
    modes: Sequence[str] = MODES,
    request_tokens: int = REQUEST_TOKENS,
    has_time: Callable[[], bool] = lambda: True,
) -> None:
    """All modes by each share; every load begins with nothing learned."""
    for share in shares:
        engine.set_mode({"mode": "stock"}, clients)
        stock: float | None = None
        learned = False
        for name in modes:
            if not has_time():
                note(share=share, mode=name, left_out="no time")
                continue
            engine.set_mode({"mode": name}, clients)
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
    engine.set_mode({"mode": "stock"}, clients)


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
    engine.set_mode({"mode": "stock"}, BATCH)
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
    engine = VllmEngine(new_engine(options.out, max_num_seqs=max(options.clients, BATCH) + 1))

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
