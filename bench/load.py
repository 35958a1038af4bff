"""Closed-loop streaming load on an OpenAI-compatible server.

`concurrency` clients each keep one request in flight until `requests` have been answered. Prompts are drawn from a
seed, so that two servers can be given the very same ones. A request that fails is counted under its reason and enters
no other figure.
"""

import asyncio
import collections
import contextlib
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from bench.chat_client import Answer, ChatClient, RequestFailed
from bench.summary import percentile
from bench.workload import LoadConfig, request_bodies

SHOWN_ERROR_KINDS = 5
# The 99th percentile of fewer values is in practice the greatest of them.
LEAST_FOR_P99 = 100


class ServerUnusable(Exception):
    """The server does not answer, or serves no model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one run saw. Rates are over the whole run.

    Medians are None when no request was answered, 99th percentiles when there are fewer than LEAST_FOR_P99 values.
    `chunks_per_token` tells how far `itl` is that of single tokens; None: no tokens.
    """

    concurrency: int
    answered: int
    errors: Mapping[str, int]
    duration_s: float
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    chunks_per_token: float | None
    client_cpu_s: float

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def first_model(url: str, timeout_s: float = 10.0) -> str:
    """The first model that `/v1/models` lists.

    Raises: ServerUnusable: no answer, or no model in it.
    """
    address = f"{url.rstrip('/')}/v1/models"
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            models = msgspec.json.decode(answer.read())
        return str(models["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
        raise ServerUnusable(f"{address} gave no model: {error}") from None


async def measure(config: LoadConfig, on_request_end: Callable[[], object] = lambda: None) -> LoadReport:
    """Runs the closed loop to its end."""
    bodies = iter(request_bodies(config))
    answers: list[Answer] = []
    errors: collections.Counter[str] = collections.Counter()

    async def ask_until_none_is_left() -> None:
        with contextlib.closing(ChatClient(config.url, config.timeout_s)) as client:
            for body in bodies:
                try:
                    answers.append(await client.ask(body))
                except RequestFailed as error:
                    errors[str(error)] += 1
                on_request_end()

    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as clients:
        for _ in range(min(config.concurrency, config.requests)):
            clients.create_task(ask_until_none_is_left())
    duration_s, client_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return summarise(config.concurrency, answers, errors, duration_s, client_cpu_s)


def summarise(
    concurrency: int, answers: Sequence[Answer], errors: Mapping[str, int], duration_s: float, client_cpu_s: float
) -> LoadReport:
    output_tokens = sum(answer.output_tokens for answer in answers)
    ttft_s = [answer.ttft_s for answer in answers]
    itl_s = [gap_s for answer in answers for gap_s in answer.itl_s]
    chunks = sum(1 + len(answer.itl_s) for answer in answers)
    return LoadReport(
        concurrency=concurrency,
        answered=len(answers),
        errors=dict(errors),
        duration_s=duration_s,
        output_tokens=output_tokens,
        requests_per_s=len(answers) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=_p99(ttft_s),
        itl_p50_s=percentile(itl_s, 50),
        itl_p99_s=_p99(itl_s),
        chunks_per_token=chunks / output_tokens if output_tokens else None,
        client_cpu_s=client_cpu_s,
    )


def _p99(values_s: Sequence[float]) -> float | None:
    return percentile(values_s, 99) if len(values_s) >= LEAST_FOR_P99 else None


def error_lines(errors: Mapping[str, int]) -> list[str]:
    """The most frequent reasons first, the rest as one count."""
    ranked = collections.Counter(errors).most_common()
    shown = [f"error ×{count}: {reason}" for reason, count in ranked[:SHOWN_ERROR_KINDS]]
    hidden = sum(count for _, count in ranked[SHOWN_ERROR_KINDS:])
    return [*shown, f"error ×{hidden}: of {len(ranked) - len(shown)} further kinds"] if hidden else shown
