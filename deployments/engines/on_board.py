"""The requests that an engine holds: where each came from, and how far its answer is."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.engines.prefill_slots import PrefillSlots
from deployments.engines.router_link import RouterLink
from deployments.engines.slot_ledger import SlotLedger
from deployments.engines.traces import ReplicaTrace
from deployments.engines.unread_prompts import UnreadPrompts
from policies.errors import ReplicaLostError
from policies.router.placement import ReplicaSpeed
from policies.types import StepTimes
from router.clock import Clock
from router.codec import Output


class StepSpeed:
    """Measures engine steps against the model of step times, from one batch of outputs to the next while requests are
    on board."""

    def __init__(self, step_times: StepTimes, clock: Clock) -> None:
        self._step_times, self._clock = step_times, clock
        self._policy = ReplicaSpeed()
        self._last_s: float | None = None

    @property
    def slowness(self) -> float:
        """Measured seconds for one predicted second."""
        return self._policy.slowness

    @property
    def prompt_token_s(self) -> float:
        """Seconds to read a prompt token."""
        return self._step_times.prefill.prefill_s * self.slowness

    def idle(self) -> None:
        self._last_s = None

    def ended(self, *, prefill_tokens: int, decode_requests: int, kv_tokens: int) -> None:
        """A step that brought tokens, or several steps of which only the last did.

        Args:
            prefill_tokens: prompt tokens of the requests that got their first token.
            decode_requests: requests that got a further token.
            kv_tokens: what those hold together.
        """
        if not prefill_tokens and not decode_requests:
            return  # the time counts with the tokens that it was for
        now_s = self._clock.now()
        if self._last_s is not None:
            predicted_s = self._step_times.step_s(
                prefill_tokens=prefill_tokens, decode_requests=decode_requests, kv_tokens=kv_tokens
            )
            self._policy.observe(now_s - self._last_s, predicted_s)
        self._last_s = now_s


@dataclass(slots=True)
class Held:
    """One request in the engine; `trace` is None where it is not traced."""

    request_id: str
    engine_id: str
    link: RouterLink
    prompt_tokens: int
    trace: ReplicaTrace | None
    output_tokens: int = 0


class OnBoard:
    """Requests from their arrival to their end.

    Inside the engine every arrival has an id of its own: a request that comes again, over a new connection, must not
    meet what is left of itself. (vLLM's core ends itself on an id that it holds already.)

    Attributes:
        slots: whose slots are to be released.
        prompts: what the engine has to read.
        prefill: of a replica that only reads prompts, how many it takes; else None.
        speed: None takes every replica for equally fast.
        changed: set when the shared state should hear of something before the next heartbeat.
        idle: set while the engine holds nothing.
    """

    def __init__(self, *, prompts: UnreadPrompts, prefill: PrefillSlots | None, speed: StepSpeed | None) -> None:
        self.prompts, self.prefill, self.speed = prompts, prefill, speed
        self.slots = SlotLedger()
        self.changed, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._held: dict[str, Held] = {}  # by the engine's id
        self._by_request: dict[str, Held] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def slowness(self) -> float:
        return 1.0 if self.speed is None else self.speed.slowness

    @property
    def prompt_lengths(self) -> list[int]:
        return [held.prompt_tokens for held in self._held.values()]

    @property
    def answering(self) -> tuple[str, ...]:
        """Requests that have a part of their answer, so that their prompt is read."""
        return tuple(held.request_id for held in self._held.values() if held.output_tokens)

    def came(
        self, request_id: str, link: RouterLink, prompt_tokens: int, unread_tokens: int, trace: ReplicaTrace | None
    ) -> str:
        """Returns the id by which the engine is to know it."""
        self._arrivals += 1
        engine_id = f"{request_id}~{self._arrivals}"
        self._by_request[request_id] = self._held[engine_id] = Held(request_id, engine_id, link, prompt_tokens, trace)
        if self.prefill is not None:
            self.prefill.came(prompt_tokens, unread_tokens)
        self.prompts.came(request_id, unread_tokens, max(0, prompt_tokens - unread_tokens))  # images count as more
        link.request_ids.add(request_id)
        self.slots.came(request_id)
        self.idle.clear()
        return engine_id

    def step(self, outputs: Sequence[Output], now_s: float) -> Mapping[RouterLink, list[Output]]:
        """Note what a step brought, and sort it by connection.

        What was stopped is not on board any more. So an engine that aborts what is has been told to end, and its
        answers would be cut short.

        Raises:
            ReplicaLostError: the engine ends; nothing of this step is to be told, so all of it is computed elsewhere.
        """
        by_link: defaultdict[RouterLink, list[Output]] = defaultdict(list)
        prefill_tokens = decode_requests = kv_tokens = 0
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                continue
            if held.output_tokens:
                decode_requests += 1
                kv_tokens += held.prompt_tokens + held.output_tokens
            else:
                prefill_tokens += held.prompt_tokens
                self._note_first_token(held, now_s)
            held.output_tokens += len(output.new_token_ids)
            output.request_id = held.request_id
            by_link[held.link].append(output)
            if output.finish_reason is not None:
                if str(output.finish_reason) == "abort":
                    raise ReplicaLostError("the engine ends: it aborts what is still running")
                if held.trace is not None:
                    held.trace.finish = output.finish_reason
                self._end(held)
        if self.speed is not None and self._held:
            self.speed.ended(prefill_tokens=prefill_tokens, decode_requests=decode_requests, kv_tokens=kv_tokens)
        return by_link

    def _note_first_token(self, held: Held, now_s: float) -> None:
        if held.trace is not None:
            held.trace.first_s = now_s
        if self.prompts.read(held.request_id):
            self.changed.set()

    def before_status(self) -> Callable[[Mapping[str, Any]], None]:
        """To be called before the engine is asked for its status. Returns what takes its answer: what has come or ended
        meanwhile the engine does not know of, for all one knows."""
        came_tokens = self.prompts.came_tokens
        ended_tokens = 0 if self.prefill is None else self.prefill.ended_tokens

        def answered(status: Mapping[str, Any]) -> None:
            self.prompts.told(status, came_tokens, None if self.speed is None else self.speed.prompt_token_s)
            if self.prefill is not None:
                self.prefill.told(status, ended_tokens)

        return answered

    def stopped(self, request_ids: Iterable[str], *, frees_slots: bool = True) -> list[str]:
        """End them before their answer is whole. Returns the ids that the engine is to abort."""
        stopped = [self._by_request[request_id] for request_id in request_ids]
        for held in stopped:
            self._end(held, frees_slot=frees_slots)
        return [held.engine_id for held in stopped]

    def _end(self, held: Held, *, frees_slot: bool = True) -> None:
        del self._held[held.engine_id], self._by_request[held.request_id]
        self.prompts.left(held.request_id)
        if held.trace is not None:
            held.trace.end(held.output_tokens, time.monotonic())
        if self.prefill is not None:
            self.prefill.ended(held.prompt_tokens)
        held.link.request_ids.remove(held.request_id)
        self.slots.ended(held.request_id, frees_slot=frees_slot)
        if frees_slot:
            self.changed.set()
        if not self._held:
            self.idle.set()
            if self.speed is not None:
                self.speed.idle()
