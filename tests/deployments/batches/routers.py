"""Routers of a small application, for the runner of batches."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deployments.batches.results import Reply
from deployments.batches.state import BatchRequest
from policies.batches.in_flight import Load
from policies.errors import ReplicaLostError
from router.trail import TraceHeaders

COMPLETIONS = "/v1/completions"


def answer(prompt: str) -> Reply:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return Reply(200, json.dumps({"text": prompt[::-1], "usage": usage}, indent=1).encode())


class Routers:
    """Answer what `answer` makes of a prompt, after `pause_s`, and remember who asked what."""

    def __init__(self, answer: Callable[[str], Reply] = answer, pause_s: float = 0.0, load: Load | None = None) -> None:
        self._answer, self._pause_s, self.load = answer, pause_s, load or Load(slots=64)
        self.asked: Counter[str] = Counter()
        self.keys: list[str | None] = []
        self.traces: list[TraceHeaders | None] = []
        self.in_flight, self.most_in_flight, self.are_away = 0, 0, False

    async def answer(self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None) -> Reply:
        if self.are_away:
            raise ReplicaLostError("no router")
        prompt = json.loads(body)["prompt"]
        self.asked[prompt] += 1
        self.keys.append(key)
        self.traces.append(trace)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self._pause_s)
            return self._answer(prompt)
        finally:
            self.in_flight -= 1

    async def loads(self) -> Mapping[str, Load]:
        if self.are_away:
            raise ReplicaLostError("no router")
        return {"m": self.load}


def asking(input_file_id: str, **more: Any) -> BatchRequest:
    return BatchRequest(**{"endpoint": COMPLETIONS, "input_file_id": input_file_id, "completion_window": "1m", **more})


def lines(ids: Iterable[str]) -> bytes:
    return b"".join(line(each) for each in ids)


def line(custom_id: str, **body: Any) -> bytes:
    asked = {"model": "m", "prompt": custom_id, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": asked}).encode() + b"\n"
