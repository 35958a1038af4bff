"""What the next step holds: vLLM's scheduler over a batch of arrays and a queue, within a policy's plan.

In vLLM's order: decodes first, then prompts already begun, then admissions while slots, token budget and blocks last.
A step that had to preempt admits none. Departure from vLLM: at admission only the whole prompt's room is asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from policies.engine.promised_queue import PromisedQueue, Waiting
from policies.engine.standing_plan import StandingPlan
from policies.router.tiers import NOTHING, Load
from policies.types import Left, Paced, Phase, RequestView, StepPlan
from simulator.batch import Batch, Rows
from simulator.metrics import EngineTotals
from simulator.prefix_cache import PrefixCache
from simulator.requests import Request
from simulator.tier import Tier


@dataclass(slots=True)
class Step:
    """What a step holds while it runs."""

    plan: StepPlan
    decoding: Rows
    decodes: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    prefill_requests: int = 0
    completed: tuple[int, ...] = ()
    preempted: int = 0
    started: int = 0
    step_s: float = 0.0
    before_s: float = 0.0

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefill_tokens


class Scheduler:
    """The running batch, the queue behind it, and the prefixes kept from requests that ended.

    Attributes:
        departed: requests that have left the batch: ended, preempted or called back.
    """

    def __init__(
        self,
        *,
        slots: int,
        total_blocks: int,
        block_size: int,
        watermark_blocks: int,
        ordered: bool,
        totals: EngineTotals,
        kept_fraction: float = 0.0,
        tier: Tier | None = None,
        pace_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Args:
        tier: from which prefixes are loaded, if there is one.
        pace_s: seconds in which a prompt token is read, as far as that is known.
        watermark_blocks: kept free when a request starts beside others.
        ordered: whether the queue goes by promises, not as requests came.
        totals: where recomputed tokens are counted.
        kept_fraction: of the cache, what sessions that come back may keep through their pauses.
        """
        self.batch = Batch(slots, total_blocks, block_size)
        self.prefixes = PrefixCache(block_size, int(kept_fraction * total_blocks * block_size))
        self.waiting: PromisedQueue[Request] = PromisedQueue()
        self.departed = 0
        self._slots, self._watermark_blocks, self._ordered = slots, watermark_blocks, ordered
        self._totals, self._tier, self._pace_s = totals, tier, pace_s
        self._loading: dict[Request, float] = {}  # until when, in order of their begin
        self._head: tuple[RequestView, ...] | None = ()

    def __len__(self) -> int:
        """Requests that run or wait."""
        return len(self.batch) + len(self.waiting) + len(self._loading)

    def add(self, request: Request, now_s: float, left: Left) -> None:
        """left: of its answer, as far as that is known."""
        self.waiting.add(
            Waiting(
                request,
                arrival_s=request.arrival_s if self._ordered else now_s,
                deadline_s=request.deadline_s if self._ordered else inf,
                ends_by_s=request.ends_by_s if self._ordered else inf,
                unread_tokens=request.view().prefill_tokens,
                fills_idle=self._ordered and request.fills_idle,
                left=left,
            )
        )
        self._head = None

    def return_chance(self, now_s: float) -> float:
        """As of its prefix cache."""
        self.prefixes.now_s = now_s
        return self.prefixes.return_chance(self.batch.free_blocks * self.batch.block_size)

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of its prompt that are cached here."""
        return request.cached_tokens if request.session is None else self.prefixes.known_tokens(request)

    def head(self) -> tuple[RequestView, ...]:
        """The first requests of the queue, as many as there are slots."""
        if self._head is None:
            self._head = tuple(one.item.view() for one in islice(self.waiting, self._slots))
        return self._head

    def sort_by_promises(self, now_s: float, policy: Paced, mean_context_tokens: float) -> list[Request]:
        """Returns the prompts in progress that would make others late. Without a pace nothing is sorted."""
        seconds_per_token = policy.seconds_per_prompt_token
        needs_sorting = self.waiting.changed or self.batch.prefilling
        if not self._ordered or seconds_per_token is None or not needs_sorting:
            return []
        self._head = None
        return self.waiting.split(
            now_s,
            seconds_per_token,
            list(self._reading(policy)),
            answer_price=policy.answer_price(mean_context_tokens),
            step_s=policy.answers.seconds_per_token,
        )

    def _reading(self, policy: Paced) -> Iterator[Waiting[Request]]:
        """Prompts in progress, with what is left of them."""
        for request, unread_tokens in self.batch.prompts_left():
            predicted, made = request.predicted_output_tokens, request.generated_tokens
            yield Waiting(
                request,
                arrival_s=request.arrival_s,
                deadline_s=request.deadline_s,
                ends_by_s=request.ends_by_s,
                unread_tokens=unread_tokens,
                left=policy.answers.left(request.class_index, predicted, made),
                resumed=request.first_token_s is not None,
                fills_idle=request.fills_idle,
                reads=True,
            )

    def clear(self) -> list[Request]:
        """All requests, oldest first: they keep their tokens, but no KV."""
        running = [self.batch.preempt() for _ in range(len(self.batch))][::-1]
        self._note_lost(running)
        held = running + [*self._loading] + [one.item for one in self.waiting]
        self.waiting, self._loading, self._head = PromisedQueue(), {}, ()
        return held

    def take(self, request: Request) -> bool:
        """Take one request out, with its tokens; whether it was here."""
        waiting = next((one for one in self.waiting if one.item is request), None)
        if request in self.batch.requests:
            self.batch.take(request)
            self._note_lost([request])
            self.departed += 1
        elif waiting is not None:
            self.waiting.remove(waiting)
        elif self._loading.pop(request, None) is not None:
            request.cached_tokens = 0
        else:
            return False
        self._head = None
        return True

    def schedule(self, standing: StandingPlan[Request], now_s: float) -> Step:
        plan = standing.plan
        step = Step(plan, slice(0, 0))
        budget = plan.max_batch_tokens
        if plan.phase is not Phase.PREFILL:
            self._preempt(step, self.batch.make_room(budget))
            step.decoding, step.decodes, step.kv_tokens = self.batch.decode(budget)
            budget = plan.budget(step.decodes) - step.decodes
        if self._loading:
            self._take_loaded(now_s)
        if plan.phase is not Phase.DECODE:
            budget = self._continue_prompts(step, budget, standing.held)
            if not step.preempted:
                self._admit(step, budget, standing, now_s)
        return step

    def _preempt(self, step: Step, lost: list[Request]) -> None:
        for request in lost:
            request.preemptions += 1
            unread_tokens = request.view().prefill_tokens
            self.waiting.put_back(Waiting(request, arrival_s=request.arrival_s, unread_tokens=unread_tokens))
        if lost:
            self._note_lost(lost)
            self.departed += len(lost)
            step.preempted += len(lost)
            self._head = None

    def _note_lost(self, requests: list[Request]) -> None:
        """Their KV is gone and will be computed anew."""
        self._totals.recomputed_tokens += sum(each.prompt_tokens + each.generated_tokens for each in requests)

    def _continue_prompts(self, step: Step, budget: int, held: Sequence[Request]) -> int:
        """Chunks of the prompts that were begun, oldest first, but for those held back; without a free block the
        youngest gives way."""
        for row in self.batch.prefilling_rows():
            if budget <= 0 or row >= len(self.batch):
                break
            if self.batch.requests[row] in held:
                continue
            while not (tokens := self._compute(step, row, budget)) and row < len(self.batch) - 1:
                if not step.decodes:
                    self._preempt(step, [self.batch.preempt()])
                else:
                    break
            budget -= tokens
        return budget

    def _compute(self, step: Step, row: int, budget: int) -> int:
        tokens, kv_tokens, complete = self.batch.prefill(row, budget)
        if tokens:
            step.prefill_tokens += tokens
            step.prefill_kv_tokens += kv_tokens
            step.prefill_requests += 1
            if complete:
                step.completed += (row,)
        return tokens

    def _admit(self, step: Step, budget: int, standing: StandingPlan[Request], now_s: float) -> None:
        """Start the head of the queue until cap, budget or blocks run out."""
        running = len(self.batch)
        most = self.waiting.cap(running, standing.plan.most(self._slots))
        cap = min(standing.cap(running), most, self._slots)
        while self.waiting and len(self.batch) < cap and budget > 0:
            request = self.waiting.head().item
            if not self.batch.fits(request, self._watermark_blocks):
                return
            self.waiting.pop()
            self._head = None
            if not self._find_prefix(request, now_s):
                continue
            if request.started_s is None:
                request.started_s = now_s
            self.batch.admit(request)
            step.started += 1
            budget -= self._compute(step, len(self.batch) - 1, budget)

    def _find_prefix(self, request: Request, now_s: float) -> bool:
        """False where it has to wait until a part of its prompt is loaded."""
        if request.session is None or request.loaded_tokens and request.cached_tokens:  # what was loaded has come
            return True
        self.prefixes.now_s = now_s
        self._shrink_prefixes()
        load = self.load(request, now_s)
        request.cached_tokens, request.loaded_tokens = self.prefixes.take(request) + load.tokens, load.tokens
        if self._tier is None or not load.parts:
            return True
        self._loading[request] = self._tier.begin(request, load, now_s)
        return False

    def load(self, request: Request, now_s: float, prompt_token_s: float | None = None) -> Load:
        """What it would load from beyond the GPU.

        Args:
            prompt_token_s: seconds in which a prompt token is read, where the engine does not know.
        """
        if self._tier is None or request.session is None:
            return NOTHING
        pace_s = self._pace_s()
        pace_s = prompt_token_s if pace_s is None else pace_s
        return self._tier.load(request, self.prefixes.known_tokens(request), now_s, pace_s)

    def _take_loaded(self, now_s: float) -> None:
        """Those whose prompts have been loaded start before all others."""
        come = [request for request, ready_s in self._loading.items() if ready_s <= now_s]
        for request in reversed(come):
            del self._loading[request]
            unread_tokens = request.view().prefill_tokens
            self.waiting.put_back(Waiting(request, arrival_s=request.arrival_s, unread_tokens=unread_tokens))
            self._head = None

    def finish(self, now_s: float) -> list[Request]:
        """Take out what has all its tokens; what it had computed may be found until others need the room."""
        finished, self.prefixes.now_s = self.batch.finish(now_s), now_s
        for request in finished:
            self.prefixes.keep(request, request.prompt_tokens + request.output_tokens)
            if self._tier is not None:
                self._tier.keep(request, request.prompt_tokens + request.output_tokens)
        self._shrink_prefixes()
        self.departed += len(finished)
        return finished

    def _shrink_prefixes(self) -> None:
        self.prefixes.shrink(self.batch.free_blocks * self.batch.block_size)
