"""vLLM's real scheduler over a model that does not exist: a virtual clock, any number of steps in flight.

The "model" answers each request with tokens that say which they are, so a test sees at once when one is lost, doubled
or out of order; a step takes as long as a `StepTimes` says. The loop is that of vLLM's engine core, with its queue of
batches, which the CPU platform does not let run.
"""

import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.process.vllm_env import cpu_env

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", **{k: v for k, v in cpu_env().items() if k != "LD_PRELOAD"}})

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from deployments.engines.vllm.measurement import loads
from deployments.engines.vllm.request_metadata import RequestMetadata
from deployments.engines.vllm.scheduler.media import encoded
from deployments.engines.vllm.scheduler.plug_in import SluiceScheduler
from policies.types import StepCoefficients, StepResult, StepTimes, chunk_kv_tokens
from tests.fakes import ManualClock

MODEL = Path(__file__).parents[1] / "deployments" / "demo_model"
TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.005, prefill_s=2e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4),
    mixed=StepCoefficients(overhead_s=0.01, prefill_s=2e-5, decode_s=1e-4),
)
STOP_TOKEN = 9
FIRST_TOKEN = 1000
EMPTY_STEP_S = 0.001
LOAD_BYTES, LOAD_S = 1 << 20, 0.001  # of every load from a tier, whatever it brings

init_none_hash(sha256)


@dataclass(slots=True)
class Answer:
    """What a client got."""

    asked_s: float
    prompt_tokens: int
    output_tokens: int
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    ended: bool = False
    aborted: bool = False

    @property
    def whole(self) -> bool:
        """Every token once, in order, ended by the stop token."""
        return self.tokens == [*range(FIRST_TOKEN, FIRST_TOKEN + self.output_tokens - 1), STOP_TOKEN]


@dataclass(frozen=True, slots=True)
class StepLog:
    """What one step held; a request decodes when its prompt was computed before the step."""

    prefill_tokens: int
    prefill_kv_tokens: int
    decodes: int
    budget: int
    runnable: bool

    @property
    def mixed(self) -> bool:
        return self.prefill_tokens > 0 and self.decodes > 0

    @property
    def empty(self) -> bool:
        return not self.prefill_tokens and not self.decodes


class VirtualEngine:
    def __init__(
        self,
        settings: dict[str, Any] | None = None,
        *,
        slots: int = 32,
        blocks: int = 4096,
        block_size: int = 16,
        budget: int = 2048,
        depth: int = 1,
        times: StepTimes = TIMES,
        scheduler: type[Scheduler] = SluiceScheduler,
        windows: tuple[int, ...] = (),
        states: int = 0,
        drafts: int = 0,
        accepted: int = 0,
        **engine_args: Any,
    ) -> None:
        """Args:
        drafts: tokens that are drafted for each request that decodes, and of these how many prove right. They cost as
            much as the request's own.
        """
        if drafts:
            speculates = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
            engine_args["speculative_config"] = speculates
        args = EngineArgs(
            model=str(MODEL),
            max_model_len=2048,
            max_num_seqs=slots,
            max_num_batched_tokens=budget,
            block_size=block_size,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 20,
            additional_config={"sluice": settings} if settings is not None else {},
            **{"enable_prefix_caching": False} | engine_args,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = depth > 1
        shape: dict[str, Any] = dict(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        state = MambaSpec(block_size=2048, shapes=((1, block_size),), dtypes=(torch.float32,))
        specs = [
            FullAttentionSpec(**shape),
            *(SlidingWindowSpec(**shape, sliding_window=window) for window in windows),
            *[state] * states,
        ]
        groups = [KVCacheGroupSpec([f"layer{at}"], spec) for at, spec in enumerate(specs)]
        self.blocks, self.depth, self.times = blocks, depth, times
        self.drafts, self.accepted, self.drafted = drafts, accepted, 0
        self.scheduler: Any = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(spec.block_size for spec in specs),
            hash_block_size=block_size,
            log_stats=False,
        )
        caching = config.cache_config.enable_prefix_caching
        self._block_hasher = get_request_block_hasher(block_size, sha256) if caching else None
        self.clock = ManualClock()
        self.scheduler.clock = self.clock
        self.answers: dict[str, Answer] = {}
        self.log: list[StepLog] = []
        self._results: list[StepResult] = []
        self.preempted = 0
        self.idle_spins = 0
        self._queue: deque[tuple[SchedulerOutput, dict[str, list[int]], float]] = deque()
        self._device_free_s = 0.0
        if isinstance(self.scheduler, SluiceScheduler):
            self.scheduler.on_step = self._results.append

    @property
    def results(self) -> list[StepResult]:
        """The results of all steps so far, if the scheduler is ours."""
        self.scheduler.report()
        return self._results

    # Clients

    def add(self, request_id: str, prompt_tokens: int, output_tokens: int, **params: Any) -> Request:
        request = Request(
            request_id=request_id,
            prompt_token_ids=params.pop("prompt_token_ids", None) or [1] * prompt_tokens,
            sampling_params=SamplingParams(
                max_tokens=params.pop("max_tokens", 1500),
                stop_token_ids=[STOP_TOKEN],
                ignore_eos=True,
                extra_args=params.pop("extra_args", None),
            ),
            pooling_params=None,
            block_hasher=self._block_hasher,
            **params,
        )
        self.answers[request_id] = Answer(self.clock.now(), prompt_tokens, output_tokens)
        self.scheduler.add_request(request)
        return request

    def measure(self) -> "VirtualEngine":
        """As `deployments.engines.vllm.engine.VllmEngine.measure`, without a limit of time."""
        papers = self.scheduler.control({})["papers"]
        self.scheduler.control({"papers": {}})
        self._take_loads()
        self.scheduler.control({"papers": papers})
        return self

    def _take_loads(self) -> None:
        scheduler = self.scheduler
        given = loads(
            slots=scheduler.max_num_running_reqs,
            max_batch_tokens=scheduler.scheduler_config.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            cache_tokens=self.blocks * scheduler.block_size,
        )
        told = RequestMetadata(measures=True).as_extra_args()
        for number, load in enumerate(given):
            decoding = [f"d{number}-{at}" for at in range(load.decoding)]
            for request_id in decoding:
                self.add(request_id, 16, 1400, max_tokens=load.most_steps, extra_args=told)
            while any(len(self.answers[one].tokens) < 12 for one in decoding):
                self.step()
            for at, prompt in enumerate(load.prompts):
                answer = f"p{number}-{at}"
                self.add(answer, prompt, 1, max_tokens=1, extra_args=told)
                while not self.answers[answer].ended:
                    self.step()
            for request_id in decoding:
                self.abort(request_id)
            self.run()
        self.answers.clear()
        self.log.clear()
        self._results.clear()

    def abort(self, request_id: str) -> None:
        self.answers[request_id].aborted = True
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # The engine

    def step(self, times: int = 1) -> None:
        """Turns of the engine core's loop."""
        for _ in range(times):
            self._turn()

    def _turn(self) -> None:
        if self.scheduler.has_requests():
            executed = self._schedule()
            if len(self._queue) < self.depth and (executed or (self.depth > 1 and self.scheduler.has_requests())):
                return
        if self._queue:
            self._finish(*self._queue.popleft())

    def add_all(self, requests: Iterable[tuple[int, int]], **params: Any) -> None:
        """Requests r0, r1, ... of (prompt, output) tokens."""
        for number, (prompt, output) in enumerate(requests):
            self.add(f"r{number}", prompt, output, **params)

    @property
    def by_first_token(self) -> list[str]:
        return sorted(self.answers, key=lambda name: self.answers[name].times_s[0])

    def run(self, *, most_steps: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.busy:
                return
            self._turn()
        raise AssertionError(f"still busy after {most_steps} steps: {self.scheduler.get_request_counts()}")

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self.scheduler.has_requests()

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def all_free(self) -> bool:
        """Every block but the one that vLLM keeps for padding."""
        return self.free_blocks == self.blocks - 1 and not self.scheduler.requests

    def _schedule(self) -> bool:
        runnable = self._runnable()
        chunks = {request.request_id for request in self.scheduler.running if request.is_prefill_chunk}
        output = self.scheduler.schedule()
        starts = chunks | {new.req_id for new in output.scheduled_new_reqs}
        starts |= output.scheduled_cached_reqs.resumed_req_ids
        prefill, prefill_read, decodes, context, sampled = 0, 0, 0, 0, {}
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            if request_id in starts:
                prefill += tokens
                prefill_read += chunk_kv_tokens(tokens, request.num_computed_tokens - tokens)
            else:
                decodes += 1
                context += request.num_computed_tokens - tokens
            drafted = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            self.drafted += drafted
            sampled[request_id] = [] if request.is_prefill_chunk else self._tokens(request, drafted)
        self.log.append(StepLog(prefill, prefill_read, decodes, self.scheduler.max_num_scheduled_tokens, runnable))
        self.preempted += len(output.preempted_req_ids or ())
        took_s = self.times.step_s(
            prefill_tokens=prefill,
            decode_requests=decodes,
            kv_tokens=context,
            prefill_kv_tokens=prefill_read,
            encoder_tokens=encoded(self.scheduler.requests, output.scheduled_encoder_inputs),
        )
        took_s += self.times.mixed.decode_s * sum(map(len, output.scheduled_spec_decode_tokens.values()))
        took_s = took_s or EMPTY_STEP_S * (not self._queue)
        self._device_free_s = max(self._device_free_s, self.clock.now()) + took_s
        self._queue.append((output, sampled, self._device_free_s))
        return bool(output.total_num_scheduled_tokens)

    def moved(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """What vLLM's offloading is to store and load is there at the end of the step."""
        wanted = output.kv_connector_metadata
        if not isinstance(wanted, OffloadingConnectorMetadata):
            return None
        done = OffloadingWorkerMetadata()
        for job_id in (*wanted.load_jobs, *wanted.store_jobs):
            done.mark_completed(job_id)
        for _ in wanted.load_jobs:
            done.transfer_stats.load.record(LOAD_BYTES, LOAD_S)
        came = {job.req_id for job in wanted.load_jobs.values()}
        return KVConnectorOutput(finished_recving=came, kv_connector_worker_meta=done)

    def _tokens(self, request: Request, drafted: int) -> list[int]:
        """Those that a step samples which has just been scheduled; past the end, anything."""
        first = request.num_computed_tokens - request.num_prompt_tokens - drafted
        last = self.answers[request.request_id].output_tokens - 1
        numbers = range(first, first + 1 + min(drafted, self.accepted))
        return [STOP_TOKEN if number == last else FIRST_TOKEN + number for number in numbers]

    def _runnable(self) -> bool:
        """Whether stock vLLM would surely schedule something: a decode not at its end, or a prompt that fits."""
        s = self.scheduler
        for request in s.running:
            ending = request.num_output_placeholders > 0 and (
                request.num_computed_tokens + 2 - request.num_output_placeholders
                >= request.num_prompt_tokens + request.max_tokens
            )
            if not ending:
                return True
        return bool(s.waiting) and not s.running and s.waiting.peek_request().status == RequestStatus.WAITING

    def _finish(self, output: SchedulerOutput, sampled: dict[str, list[int]], end_s: float) -> None:
        self.clock.advance_to(max(self.clock.now(), end_s))
        ids = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.moved(output),
        )
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                answer = self.answers[one.request_id]
                answer.tokens += one.new_token_ids
                answer.times_s += [self.clock.now()] * len(one.new_token_ids)
                answer.ended |= one.finish_reason is not None
        if self.drafts:
            going_on = [request.request_id for request in self.scheduler.running]
            self.scheduler.update_draft_token_ids(DraftTokenIds(going_on, [[1] * self.drafts for _ in going_on]))


def run_closed(engine: VirtualEngine, requests: list[tuple[int, int]], clients: int, **params: Any) -> VirtualEngine:
    """Keep `clients` requests (prompt, output) in the engine until all are done."""
    waiting = deque(enumerate(requests))
    while waiting or engine.busy:
        while waiting and len(engine.scheduler.requests) < clients:
            number, (prompt, output) = waiting.popleft()
            engine.add(f"r{number}", prompt, output, **params)
        engine.step()
    return engine
