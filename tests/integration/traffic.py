"""Clients that ask all the time, while a test does something to the application, and what became of their requests."""

import asyncio
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from tests.waiting import wait_until

PATIENCE_S = 180.0
PROBE_EVERY_S = 0.2


@dataclass(frozen=True)
class Stream:
    """One stream; whole with all of its tokens and its end, else with why not."""

    prompt: int
    text: str
    why_not: str | None
    longest_gap_s: float
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Probe:
    """A new request on a connection of its own: a status, or the name of what the client got instead of one."""

    began_s: float
    seconds: float
    answer: int | str
    retry_after: str | None
    url: str


class Served(Protocol):
    """An application, and where it is."""

    @property
    def url(self) -> str: ...


class Traffic:
    """Streams one after another, and small new requests, for the time of the block; then each has ended.

    more_urls: other addresses of the application; clients and new requests go round all of them.
    patience_s: a stream or an answer of which nothing comes for so long is given up.
    """

    def __init__(
        self,
        sluice: Served,
        *,
        more_urls: Sequence[str] = (),
        streams: int = 6,
        tokens: int = 300,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._urls, self._clients, self._tokens = (sluice.url, *more_urls), streams, tokens
        self._patience_s = patience_s
        self._enough = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._running: set[int] = set()
        self.streams: list[Stream] = []
        self.probes: list[Probe] = []

    def __enter__(self) -> "Traffic":
        self._thread.start()
        wait_until(lambda: len(self._running) == self._clients and self.probes, PATIENCE_S, "all streams run")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(max(PATIENCE_S, 2 * self._patience_s))
        assert not self._thread.is_alive(), "somebody still waits for an answer"

    def wait_for_a_new_answer(self) -> float:
        """Until a request that begins now, or later, is answered; returns for how many seconds none was."""
        now_s = time.monotonic()
        wait_until(lambda: any(p.began_s >= now_s and p.answer == 200 for p in self.probes), PATIENCE_S, "an answer")
        return min(p.began_s + p.seconds for p in self.probes if p.began_s >= now_s and p.answer == 200) - now_s

    def wait_for_whole_streams(self, more: int) -> None:
        """Until this many more have ended, from now on."""
        least = len(self.streams) + more
        wait_until(lambda: len(self.streams) >= least, PATIENCE_S, "streams end")

    def check_streams(self) -> None:
        """All are whole, and all streams of one prompt have the same text."""
        assert [stream for stream in self.streams if stream.why_not] == []
        texts = defaultdict(set)
        for stream in self.streams:
            texts[stream.prompt].add(stream.text)
        assert {prompt: len(found) for prompt, found in texts.items() if len(found) > 1} == {}

    @property
    def answers(self) -> set[int | str]:
        return {probe.answer for probe in self.probes}

    @property
    def nine_of_ten_s(self) -> float:
        """The seconds that nine of ten new requests took at most: on a busy machine some wait for the engines."""
        return statistics.quantiles((probe.seconds for probe in self.probes), n=10)[-1]

    async def _run(self) -> None:
        alone = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=alone, timeout=self._patience_s, trust_env=False) as client:
            streaming = [self._stream_on(client, number) for number in range(self._clients)]
            await asyncio.gather(self._probe_on(client), *streaming)

    async def _stream_on(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._enough.is_set():
            self.streams.append(await self._stream(client, number))

    async def _stream(self, client: httpx.AsyncClient, number: int) -> Stream:
        body = self._body(f"Tell me the story of number {number}.", self._tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events: list[dict[str, Any]] = []
        last_s, gap_s, why_not = time.monotonic(), 0.0, None
        began_s = last_s
        try:
            async with client.stream("POST", self._url_of(number), json=body) as response:
                async for line in response.aiter_lines():
                    gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                        self._running.add(number)
            why_not = self._why_not_whole(response.status_code, events)
        except httpx.HTTPError as error:
            why_not = type(error).__name__
            await asyncio.sleep(PROBE_EVERY_S)
        ended_s = time.monotonic()
        text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
        return Stream(number, text, why_not, max(gap_s, ended_s - last_s), began_s, ended_s)

    def _url_of(self, number: int) -> str:
        return f"{self._urls[number % len(self._urls)]}/v1/completions"

    def _why_not_whole(self, status: int, events: Sequence[dict[str, Any]]) -> str | None:
        if status != 200 or not events or "error" in events[-1]:
            return f"{status}: {events[-1:]}"
        usage = events[-1].get("usage") or {}
        return None if usage.get("completion_tokens") == self._tokens else f"it ends with {events[-1]}"

    async def _probe_on(self, client: httpx.AsyncClient) -> None:
        number = 0
        async with asyncio.TaskGroup() as group:  # one that waits keeps no other from being asked
            while not self._enough.is_set():
                group.create_task(self._probe(client, self._url_of(number)))
                number += 1
                await asyncio.sleep(PROBE_EVERY_S)

    async def _probe(self, client: httpx.AsyncClient, url: str) -> None:
        began_s = time.monotonic()
        try:
            response = await client.post(url, json=self._body("Hello", 2))
            answer: int | str = response.status_code
            retry_after = response.headers.get("retry-after")
        except httpx.HTTPError as error:
            answer, retry_after = type(error).__name__, None
        self.probes.append(Probe(began_s, time.monotonic() - began_s, answer, retry_after, url))

    @staticmethod
    def _body(prompt: str, tokens: int) -> dict[str, Any]:
        asked = {"model": "sluice-demo", "prompt": prompt, "max_tokens": tokens}
        return {**asked, "ignore_eos": True, "temperature": 0}


@contextmanager
def undisturbed(sluice: Served, **options: int) -> Iterator[Traffic]:
    """Traffic of which nothing may be lost: all streams are whole, and every new request is answered."""
    with Traffic(sluice, **options) as traffic:
        yield traffic
    traffic.check_streams()
    assert traffic.answers == {200}
