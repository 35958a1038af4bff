"""An open loop: requests come when they come, whether or not those before them have been answered.

Half of the requests are tight (short prompts, a reader who waits), half are loose (long prompts). Gaps between arrivals
have a coefficient of variation of 2, so that they come in bursts as people's do. The same seed gives every server the
same requests at the same times.
"""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bench.chat_client import PATIENCE_S, TEXT_PATH, Answer, ChatClient, RequestFailed

TIGHT, LOOSE = "tight", "loose"
ARRIVAL_CV = 2.0
TOKEN_IDS = range(300, 4000)  # below are bytes and what a tokenizer uses for itself; every vocabulary has these


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens: mean lengths of the prompts of both classes, and of all answers. Each is drawn between half and one and a
    half of its mean."""

    tight_prompt: int = 96
    loose_prompt: int = 640
    answer: int = 48

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2 tokens, got {getattr(self, name)}")

    @property
    def mean_prompt(self) -> float:
        return (self.tight_prompt + self.loose_prompt) / 2


class Arrival(Protocol):
    """A request of an open loop. `arrival_s` counts from the start of the run; results are told by `kind`."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def slo_class(self) -> str: ...
    @property
    def kind(self) -> str: ...

    def body(self, model: str) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`arrival_s` counts from the start of the run."""

    arrival_s: float
    slo_class: str
    prompt_token_ids: list[int]
    max_tokens: int

    @property
    def kind(self) -> str:
        return self.slo_class

    def body(self, model: str) -> bytes:
        return msgspec.json.encode(
            {
                "model": model,
                "prompt": self.prompt_token_ids,
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds: until the first token, of each further one in the mean of an answer, and until the last one; None is no
    target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def kept_by(self, answer: Answer | None) -> bool:
        """None was refused or failed."""
        if answer is None:
            return False
        further, after_first_s = answer.output_tokens - 1, sum(answer.itl_s)
        took_s = (answer.ttft_s, after_first_s / further if further else 0.0, answer.ttft_s + after_first_s)
        asked_s = (self.ttft_s, self.tpot_s, self.e2e_s)
        return all(asked is None or took <= asked for took, asked in zip(took_s, asked_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`answer` is None where there is none, and `error` says why."""

    slo_class: str
    answer: Answer | None
    error: str | None = None


def draw_requests(count: int, rate: float, lengths: Lengths, seed: int) -> list[Request]:
    """Requests at `rate` a second in the mean, in order of arrival."""
    rng, drawn = random.Random(seed), []
    for now_s in arrivals(rng, count, rate):
        slo_class = rng.choice((TIGHT, LOOSE))
        mean_prompt = lengths.tight_prompt if slo_class == TIGHT else lengths.loose_prompt
        prompt = rng.choices(TOKEN_IDS, k=around(rng, mean_prompt))
        request = Request(
            arrival_s=now_s, slo_class=slo_class, prompt_token_ids=prompt, max_tokens=around(rng, lengths.answer)
        )
        drawn.append(request)
    return drawn


def arrivals(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Seconds from the start, at `rate` a second in the mean, in bursts."""
    now_s, shape = 0.0, 1 / ARRIVAL_CV**2
    for _ in range(count):
        now_s += rng.gammavariate(shape, 1 / (rate * shape))
        yield now_s


def around(rng: random.Random, mean: int) -> int:
    """Between half and one and a half of the mean."""
    return rng.randint(mean // 2, mean + mean // 2)


class _Clients:
    """Connections to one server that are kept open between requests."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._free: defaultdict[str, list[ChatClient]] = defaultdict(list)

    @contextlib.contextmanager
    def one(self, slo_class: str) -> Iterator[ChatClient]:
        free = self._free[slo_class]
        client = free.pop() if free else ChatClient(self._url, self._timeout_s, TEXT_PATH, slo_class)
        yield client
        free.append(client)

    def close(self) -> None:
        for free in self._free.values():
            for client in free:
                client.close()


async def run_open_loop(
    url: str,
    model: str,
    requests: Sequence[Arrival],
    on_end: Callable[[], object] = lambda: None,
    timeout_s: float = PATIENCE_S,
) -> list[Outcome]:
    """Outcomes in order of arrival, when the last request is over."""
    bodies = [request.body(model) for request in requests]

    async def ask(request: Arrival, body: bytes, began_s: float) -> Outcome:
        await asyncio.sleep(began_s + request.arrival_s - time.perf_counter())
        with clients.one(request.slo_class) as client:
            try:
                outcome = Outcome(slo_class=request.slo_class, answer=await client.ask(body))
            except RequestFailed as error:
                outcome = Outcome(slo_class=request.slo_class, answer=None, error=str(error))
        on_end()
        return outcome

    with contextlib.closing(_Clients(url, timeout_s)) as clients:
        began_s = time.perf_counter()
        pairs = zip(requests, bodies, strict=True)
        return await asyncio.gather(*(ask(request, body, began_s) for request, body in pairs))
