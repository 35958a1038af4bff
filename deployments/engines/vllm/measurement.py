"""What steps cost on an engine that has just started, before it takes requests.

Whether exclusive batching pays follows from step times of all three kinds: prompts alone, decodes alone, both. Served
requests show two of them at most, as the mode in use has it. So a new engine is given some prompts one by one, first by
themselves and then beside few and beside many requests that decode. The scheduler plug-in times these steps as it does
any others, and learns no lengths from them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

from deployments.engines.vllm.frames import RelayedRequest, RequestFields
from deployments.engines.vllm.request_metadata import RequestMetadata
from policies.engine.step_time import StepTimeConfig

# Prompts of each load: as many steps as a form needs to count as measured.
_PROMPTS = StepTimeConfig().min_steps
# Of requests that decode: enough of a context to start from, and steps that they take alone before prompts come.
_SHORT_PROMPT, _ALONE_STEPS = 16, 12
# Of the cache and of the budget of a step, what is used: nothing may be preempted, and no prompt be cut.
_FRACTION = 0.5
# A prompt no longer than this, however large the budget: four sizes up to here span what a straight line needs.
_LONGEST_PROMPT = 2048


class Load(NamedTuple):
    """Prompts that are read one after another.

    Attributes:
        decoding: requests that decode meanwhile.
        prompts: tokens of each.
        tokens_per_step: most that one of those gets from a step.
    """

    decoding: int
    prompts: tuple[int, ...]
    tokens_per_step: int = 1

    @property
    def most_steps(self) -> int:
        """Steps that it takes, with two in flight and a few to spare."""
        return 4 * (_ALONE_STEPS + len(self.prompts))

    @property
    def output_tokens(self) -> int:
        """Of each that decodes: enough for all steps."""
        return self.most_steps * self.tokens_per_step


def loads(
    *, slots: int, max_batch_tokens: int, max_model_len: int, cache_tokens: int, draft_tokens: int = 0
) -> list[Load]:
    """As many as this engine has room for. draft_tokens: most of a decode."""
    room = int(_FRACTION * cache_tokens)
    longest = max(1, min(int(_FRACTION * max_batch_tokens), max_model_len - 2, room // 2, _LONGEST_PROMPT))
    prompts = tuple(max(1, longest * (1 + at % 4) // 4) for at in range(_PROMPTS))
    tokens_per_step = 1 + draft_tokens
    each = _SHORT_PROMPT + Load(0, prompts, tokens_per_step).output_tokens
    most = min(slots - 1, (room - longest) // each, (max_batch_tokens - longest) // tokens_per_step)
    sizes = {size for size in (most // 4, most) if size >= 1} if each < max_model_len else set()
    return [Load(0, prompts), *(Load(size, prompts, tokens_per_step) for size in sorted(sizes))]


class Measured(Protocol):
    """What of an engine this needs."""

    async def add(self, request: RelayedRequest) -> None: ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def next_outputs(self) -> Any: ...

    async def status(self) -> dict[str, Any]: ...


async def measure(engine: Measured, given: list[Load], seconds: float) -> float:
    """Take these loads, as far as the seconds reach; the engine is idle before and after. Returns what it took, s."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            for number, load in enumerate(given):
                await _Run(engine, f"measurement-{number}").take(load)
    except TimeoutError:
        pass  # what has been measured by then counts
    return time.monotonic() - began_s


class _Run:
    """One load on one engine."""

    def __init__(self, engine: Measured, name: str) -> None:
        self._engine, self._name = engine, name
        self._tokens: dict[str, int] = {}
        self._ended: set[str] = set()

    async def take(self, load: Load) -> None:
        async with self._decoding(load) as decoding:
            for number, prompt_tokens in enumerate(load.prompts):
                request_id = f"{self._name}-p{number}"
                await self._add(request_id, prompt_tokens, output_tokens=1)
                await self._until(lambda one=request_id: one in self._ended or decoding <= self._ended)

    @asynccontextmanager
    async def _decoding(self, load: Load) -> AsyncIterator[set[str]]:
        """Requests that decode meanwhile, all of them."""
        ids = {f"{self._name}-d{number}" for number in range(load.decoding)}
        try:
            for request_id in ids:
                await self._add(request_id, _SHORT_PROMPT, output_tokens=load.output_tokens)
            await self._until(lambda: all(self._tokens.get(one, 0) > _ALONE_STEPS for one in ids))
            yield ids or {""}
        finally:
            await self._engine.abort([*ids, *(f"{self._name}-p{number}" for number in range(len(load.prompts)))])

    async def _add(self, request_id: str, prompt_tokens: int, output_tokens: int) -> None:
        told = RequestMetadata(measures=True)
        fields = RequestFields(
            request_id=request_id,
            prompt_token_ids=[1 + at % 7 for at in range(prompt_tokens)],
            mm_features=None,
            sampling_params={
                "temperature": 0.0,
                "ignore_eos": True,
                "max_tokens": output_tokens,
                "extra_args": told.as_extra_args(),
            },
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=request_id,  # a prefix of no other request
            data_parallel_rank=None,
        )
        await self._engine.add(RelayedRequest(fields))

    async def _until(self, done: Any) -> None:
        while not done():
            for output in (await self._engine.next_outputs()).outputs:
                self._tokens[output.request_id] = self._tokens.get(output.request_id, 0) + len(output.new_token_ids)
                if output.finish_reason is not None:
                    self._ended.add(output.request_id)
