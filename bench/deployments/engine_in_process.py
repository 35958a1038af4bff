"""A vLLM engine of this process under Sluice's scheduler, and a closed loop over it.

Settings by environment: SLUICE_BENCH_MODEL is a model's folder or name, SLUICE_BENCH_ARGS further vLLM arguments as
JSON; SLUICE_BENCH_CLOCK is "cpu" (default) where CPU seconds of this process are what is measured.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from bench.random_model import write_config
from bench.summary import percentile
from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.process.vllm_env import cpu_dtype, cpu_env

if TYPE_CHECKING:  # only what runs an engine imports torch and vLLM
    from vllm.v1.engine.llm_engine import LLMEngine

CLOCK = os.environ.get("SLUICE_BENCH_CLOCK", "cpu")
MEASURE_S = 10.0
LONG_ANSWER = 8  # tokens; answers of more have a mean gap that tells something


class Request(NamedTuple):
    prompt_tokens: int
    output_tokens: int


class Told(NamedTuple):
    """What a step brought to a request."""

    number: int
    tokens: int
    ended: bool


class Engine(Protocol):
    """An engine as the loops drive it; requests go by numbers that count from 0 anew in each loop."""

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
        return {
            "seconds": self.seconds,
            "requests": len(self.first_tokens_s),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_per_s": (self.prompt_tokens + self.output_tokens) / self.seconds,
            "output_tokens_per_s": self.output_tokens / self.seconds,
            "ttft_mean_s": statistics.mean(self.first_tokens_s),
            **_percentiles("ttft", self.first_tokens_s),
            **_percentiles("itl", self.gaps_s),
            **_percentiles("tpot", self.means_s),
        }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}_s": percentile(seconds, percent) for percent in (50, 99)}


@dataclass(slots=True)
class _Seen:
    request: Request
    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


def closed_loop(
    engine: Engine,
    given: Iterable[Request],
    *,
    clients: int,
    begin: int = 0,
    end: int | None = None,
    now: Callable[[], float] = time.perf_counter,
    on_begin: Callable[[], None] = lambda: None,
) -> Window:
    """From the first token of the request that is the begin-th to have one until that of the end-th.

    By default from the first request until all have ended.
    """
    window, running, asked, answered, left = Window(), dict[int, _Seen](), 0, 0, iter(given)
    began_s = None if begin else now()
    try:
        while end is None or answered < end:
            while len(running) < clients and (request := next(left, None)) is not None:
                running[asked] = _Seen(request, now())
                engine.add(asked, request)
                asked += 1
            if not running:
                break
            told = engine.step()
            now_s = now()
            for number, tokens, ended in told:
                seen = running[number]
                answered += bool(tokens and not seen.tokens)
                if tokens:
                    _note(window if began_s is not None else Window(), seen, tokens, now_s)
                if ended:
                    del running[number]
                    if began_s is not None and seen.tokens > LONG_ANSWER:
                        window.means_s.append((seen.last_s - seen.first_s) / (seen.tokens - 1))
            if began_s is None and answered >= begin:
                began_s = now_s
                on_begin()
        assert began_s is not None
        window.seconds = now() - began_s if end is None else now_s - began_s
    finally:
        engine.clear()
    return window


def _note(window: Window, seen: _Seen, tokens: int, now_s: float) -> None:
    """Tokens have come to a request."""
    if seen.tokens:
        window.gaps_s.append((now_s - seen.last_s) / tokens)
    else:
        seen.first_s = now_s
        window.first_tokens_s.append(now_s - seen.asked_s)
        window.prompt_tokens += seen.request.prompt_tokens
    window.output_tokens += tokens
    seen.last_s, seen.tokens = now_s, seen.tokens + tokens


def new_engine(folder: Path, **more: Any) -> "LLMEngine":
    """Without a model in the environment it is a random Qwen3 of 34 million parameters, configured in the folder."""
    if CLOCK == "cpu":
        os.environ.update({name: value for name, value in cpu_env().items() if name != "LD_PRELOAD"})
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    model = os.environ.get("SLUICE_BENCH_MODEL")
    own = {
        "load_format": "dummy", "enforce_eager": True, "max_model_len": 2048, "block_size": 32,
        "kv_cache_memory_bytes": 512 << 20, "dtype": "auto" if torch.cuda.is_available() else cpu_dtype(),
    }  # fmt: skip
    given = json.loads(os.environ.get("SLUICE_BENCH_ARGS", "{}"))
    if model is None:
        write_config(folder)
    args = EngineArgs(
        model=model or str(folder),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        scheduler_cls=SCHEDULER_CLASS,
        additional_config={"sluice": {"mode": "stock"}},
        **(own if model is None else {}) | more | given,
    )
    return LLMEngine.from_engine_args(args)


class VllmEngine:
    """A vLLM engine of this process; asynchronous where vLLM is by itself."""

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
        """Measure step times as in an engine that has just started. Returns the seconds that it took."""
        from deployments.engines.vllm.measurement import loads, measure

        config = self.llm.vllm_config
        blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        given = loads(
            slots=self.scheduler.slots.now,
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
