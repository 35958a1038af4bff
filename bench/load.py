"""Closed-loop streaming load on an OpenAI-compatible server: `python -m bench.load --help`.

`concurrency` clients each keep one request in flight until `requests` have been answered. Prompts are drawn from a
seed, so that two servers can be given the very same ones. A request that fails is counted under its reason and enters
no other figure.
"""

import argparse
import asyncio
import collections
import contextlib
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import uvloop
from tqdm import tqdm

from bench.chat_client import Answer, ChatClient, RequestFailed
from bench.summary import percentile
from bench.workload import LoadConfig, request_bodies

SHOWN_ERROR_KINDS = 5
# The 99th percentile of fewer values is in practice the greatest of them.
LEAST_FOR_P99 = 100

EPILOG = """\
examples:
  python -m bench.load --url http://127.0.0.1:8000 --concurrency 16 --requests 200
  python -m bench.load --url http://127.0.0.1:8000 --concurrency 1 --requests 20 --json > one.json

reading the figures:
  TTFT   from sending the request to the first token        ITL   gap between two chunks of one answer
  e2e    from sending the request to the end of the answer  p50, p99: half / 99 of 100 are at or below this
  p99 is left out (-) where there are fewer than 100 values: it would be about the greatest.
  chunks per output token fall below 1 where the server put several tokens into a chunk because a reader was behind.
  client CPU is what this program itself used: it shares the machine with a local server.

exit status: 0 all answered, 1 some requests failed, 2 the server or the arguments are unusable, 130 interrupted.
"""


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
    end_to_end_p50_s: float | None
    end_to_end_p99_s: float | None
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
    end_to_end_s = [answer.end_to_end_s for answer in answers]
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
        end_to_end_p50_s=percentile(end_to_end_s, 50),
        end_to_end_p99_s=_p99(end_to_end_s),
        chunks_per_token=chunks / output_tokens if output_tokens else None,
        client_cpu_s=client_cpu_s,
    )


def _p99(values_s: Sequence[float]) -> float | None:
    return percentile(values_s, 99) if len(values_s) >= LEAST_FOR_P99 else None


def as_text(report: LoadReport) -> str:
    lines = [
        f"concurrency {report.concurrency}: "
        f"{report.answered} answered, {report.failed} failed in {report.duration_s:.1f} s",
        f"{report.requests_per_s:8.2f} requests/s   {report.output_tokens_per_s:10.1f} output tokens/s",
        f"TTFT  p50 {_ms(report.ttft_p50_s)}   p99 {_ms(report.ttft_p99_s)}",
        f"ITL   p50 {_ms(report.itl_p50_s)}   p99 {_ms(report.itl_p99_s)}",
        f"e2e   p50 {_ms(report.end_to_end_p50_s)}   p99 {_ms(report.end_to_end_p99_s)}",
        *([] if report.chunks_per_token is None else [f"{report.chunks_per_token:.3f} chunks per output token"]),
        f"client CPU {report.client_cpu_s:.2f} s",
        *error_lines(report.errors),
    ]
    return "\n".join(lines)


def error_lines(errors: Mapping[str, int]) -> list[str]:
    """The most frequent reasons first, the rest as one count."""
    ranked = collections.Counter(errors).most_common()
    shown = [f"error ×{count}: {reason}" for reason, count in ranked[:SHOWN_ERROR_KINDS]]
    hidden = sum(count for _, count in ranked[SHOWN_ERROR_KINDS:])
    return [*shown, f"error ×{hidden}: of {len(ranked) - len(shown)} further kinds"] if hidden else shown


def _ms(value_s: float | None) -> str:
    return "      - ms" if value_s is None else f"{value_s * 1e3:7.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        config = LoadConfig(
            url=options.url,
            model=options.model or first_model(options.url),
            concurrency=options.concurrency,
            requests=options.requests,
            max_tokens=options.max_tokens,
            prompt_words=tuple(options.prompt_words),
            seed=options.seed,
            timeout_s=options.timeout,
        )
        report = _measure_with_bar(config)
    except (ServerUnusable, ValueError) as error:
        print(f"bench.load: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.load: interrupted, nothing reported", file=sys.stderr)
        return 130
    print(msgspec.json.encode(report).decode() if options.json else as_text(report))
    return 1 if report.errors else 0


def _measure_with_bar(config: LoadConfig) -> LoadReport:
    with tqdm(total=config.requests, unit="request", mininterval=0.5, disable=None) as bar:
        return uvloop.run(measure(config, bar.update))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load",
        description="Streams chat completions from an OpenAI-compatible server and reports rates and latencies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server address (default: %(default)s)")
    add("--model", help="model name in the requests (default: the first of /v1/models)")
    add("--concurrency", type=int, default=16, help="requests in flight at any time (default: %(default)s)")
    add("--requests", type=int, default=200, help="requests altogether (default: %(default)s)")
    add("--max-tokens", type=int, default=128, help="length of every answer in tokens (default: %(default)s)")
    add("--prompt-words", type=int, nargs=2, default=(16, 96), metavar=("LEAST", "MOST"), help="default: 16 96")
    add("--seed", type=int, default=0, help="same seed, same prompts (default: %(default)s)")
    add("--timeout", type=float, default=120.0, help="seconds until a request counts as failed (default: %(default)s)")
    add("--json", action="store_true", help="print the report as one JSON object, in seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
