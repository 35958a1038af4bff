"""In place of the routed client, below vLLM's front end."""

import asyncio
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from policies.errors import AdmissionError, StateStoreError
from router.admission import Tenant
from router.timing import RequestTiming

ROOM = {"standard": 4096, "narrow": 50}


class Routed:
    """What it is told to raise, it raises for every request; else it answers with two tokens, or where it stalls with
    one and never the next; where it fails, with an error."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.stalls = self.fails = False
        self.running: set[str] = set()
        self.checks_until_cut_off: int | None = None
        self.asked: list[Any] = []
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def check_room(self, slo_class: str, requests: int, timing: RequestTiming, tenant: Tenant | None = None) -> None:
        timing.key = tenant.name if tenant else ""
        if self.checks_until_cut_off == 0:
            timing.outcome = "error"
            raise StateStoreError("Redis is away")
        if self.checks_until_cut_off is not None:
            self.checks_until_cut_off -= 1
        if requests > ROOM[slo_class]:
            timing.outcome = "refused"
            raise AdmissionError("no room", retry_after_s=6.5)

    async def submit(self, request: Any, **_: Any) -> None:
        if self.raises is not None:
            raise self.raises
        self.asked.append(request)
        self.running.add(request.request_id)
        output = EngineCoreOutput(request.request_id, [300], prefill_stats=PrefillStats(num_prompt_tokens=1))
        if not self.stalls:
            output.new_token_ids = [300, 301]
            output.finish_reason = FinishReason.ERROR if self.fails else FinishReason.STOP
            self._end([request.request_id], "stop")
        await self._outputs.put(EngineCoreOutputs(outputs=[output]))

    async def cancel(self, request_ids: list[str], outcome: str) -> None:
        self._end(request_ids, outcome)

    def _end(self, request_ids: list[str], outcome: str) -> None:
        self.running.difference_update(request_ids)

    async def next_outputs(self) -> Any:
        return await self._outputs.get()
