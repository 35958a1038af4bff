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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`arrival_s` counts from the start of the run."""

    arrival_s: float
    slo_class: str
    prompt_token_ids: list[int]
    max_tokens: int

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
    """Seconds: until the first token, and of each further one in the mean of an answer."""

    ttft_s: float
    tpot_s: float

    def kept_by(self, answer: Answer | None) -> bool:
        """None was refused or failed."""
        if answer is None:
            return False
        further = answer.output_tokens - 1
        return answer.ttft_s <= self.ttft_s and (not further or sum(answer.itl_s) / further <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`answer` is None where there is none, and `error` says why."""

    slo_class: str
    answer: Answer | None
    error: str | None = None


def draw_requests(count: int, rate: float, lengths: Lengths, seed: int) -> list[Request]:
    """Requests at `rate` a second in the mean, in order of arrival."""
    rng, now_s = random.Random(seed), 0.0
    shape = 1 / ARRIVAL_CV**2
    drawn = []
    for _ in range(count):
        now_s += rng.gammavariate(shape, 1 / (rate * shape))
        slo_class = rng.choice((TIGHT, LOOSE))
        mean_prompt = lengths.tight_prompt if slo_class == TIGHT else lengths.loose_prompt
        prompt = rng.choices(TOKEN_IDS, k=_around(rng, mean_prompt))
        request = Request(
            arrival_s=now_s, slo_class=slo_class, prompt_token_ids=prompt, max_tokens=_around(rng, lengths.answer)
        )
        drawn.append(request)
    return drawn


def _around(rng: random.Random, mean: int) -> int:
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
    requests: Sequence[Request],
    on_end: Callable[[], object] = lambda: None,
    timeout_s: float = PATIENCE_S,
) -> list[Outcome]:
    """Outcomes in order of arrival, when the last request is over."""
    bodies = [request.body(model) for request in requests]

    async def ask(request: Request, body: bytes, began_s: float) -> Outcome:
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
