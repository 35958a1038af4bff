"""An engine for any causal language model that Transformers loads, behind the same relay as vLLM's.

It has no continuous batching: an idle replica is given a whole batch of one bin (`policies.gang.batches`), waits a
moment until its requests have arrived, and runs them to the end of the longest; what comes meanwhile waits for the next
batch. The model runs in a thread of the replica's own process, where PyTorch leaves the relay its share of the
interpreter.

The front end is vLLM's all the same, so that requests and outputs are vLLM's structures.
"""

import asyncio
import logging
import threading
import time
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import CancelledError, TimeoutError
from dataclasses import asdict
from typing import Any

import psutil
import torch

from deployments.config.engine import GangSection
from deployments.engines.base import RowOutput
from deployments.engines.features import Cause, switched_off
from deployments.engines.transformers.batch import GangRunner, Row
from deployments.engines.transformers.model import GangModel, load
from deployments.engines.transformers.sampling import RowSampling
from deployments.engines.transformers.step import unsupported
from deployments.engines.vllm.codec import VllmCodec, step_outputs
from deployments.engines.vllm.request_metadata import metadata_of
from deployments.engines.vllm.version import ENGINE_VERSION
from policies.errors import ConfigError, ReplicaLostError
from policies.gang.batches import memory_safe_gang, rows_that_fit

logger = logging.getLogger(__name__)

UNREAD_STEPS = 1024  # steps that the relay may fall behind before the model waits for it
POLL_S = 0.5  # between two looks of a model that waits whether the engine closes
GATHER_S = 0.01  # without an arrival ends a batch's gathering: its requests may come from several routers
JOIN_TIMEOUT_S = 30.0  # for the step that runs: a replica that ends waits no longer for it
# Of the memory that is free once the model is loaded: the rest is for activations, and on a CPU for everybody else.
CPU_CACHE_SHARE, ACCELERATOR_CACHE_SHARE = 0.5, 0.8
# Answers of a bin that are remembered, and how many of them say something: a 95 % quantile needs 20.
SEEN_ANSWERS, ENOUGH_ANSWERS = 512, 20
SELDOM_EXCEEDED = 0.95


class TransformersEngine:
    """`deployments.engines.relay.Engine`; to be made in the event loop that reads its outputs, or given that loop."""

    engine_version = ENGINE_VERSION
    kv_layout = ""  # its caches stay where they are

    def __init__(self, args: Namespace, gang: GangSection, loop: asyncio.AbstractEventLoop) -> None:
        """Loads the model and blocks until it is ready: run it in a thread.

        Args:
            args: of `vllm serve`; of them model, dtype, revision, trust_remote_code and max_model_len are obeyed.

        Raises:
            ConfigError: Transformers cannot load the model, or it cannot be run in batches.
        """
        self.codec = VllmCodec()
        loaded = load(
            args.model,
            dtype=args.dtype,
            revision=args.revision,
            trust_remote_code=bool(args.trust_remote_code),
            flash_attention=gang.flash_attention,
        )
        self.max_model_len = _max_model_len(loaded.config.get_text_config(), args.max_model_len)
        self.max_batch_tokens = gang.max_pass_tokens
        self._gang, self._loop = gang, loop
        self._model = GangModel(loaded, gang.prefill_config())
        self._capacity_tokens = gang.kv_cache_tokens or _cache_tokens(self._model)
        self._seen = _SeenAnswers()
        self._gang_sizes: tuple[int, ...] = ()
        self._waiting: deque[Row] = deque()
        self._cancelled: set[str] = set()
        self._running: list[Row] = []
        self._pass_began_s = 0.0
        loaded.register_forward_pre_hook(self._note_pass)
        self._changed = threading.Condition()
        self._closing = self._died = False
        self._outputs: asyncio.Queue[Any] = asyncio.Queue(UNREAD_STEPS)
        self._runner = GangRunner(
            model=self._model,
            max_model_len=self.max_model_len,
            shrink=gang.shrink,
            emit=self._emit,
            is_cancelled=self._cancelled.__contains__,
        )
        self._thread = threading.Thread(target=self._run, name="gangs", daemon=True)
        self._thread.start()

    # For the relay

    @property
    def slots(self) -> int:
        return self._gang.batch_size

    @property
    def gang_sizes(self) -> tuple[int, ...]:
        return self._gang_sizes

    @property
    def dead(self) -> bool:
        return self._died

    async def add(self, request: Any) -> None:
        row = self._row(request)
        if row is None:
            await self._outputs.put(step_outputs([RowOutput(request.request_id, [], finish="error")]))
            return
        with self._changed:
            self._waiting.append(row)
            self._changed.notify()

    async def abort(self, request_ids: list[str]) -> None:
        """Those that run leave at the next step."""
        ids = set(request_ids)
        with self._changed:
            self._cancelled |= ids & {row.request_id for row in self._running}
            self._waiting = deque(row for row in self._waiting if row.request_id not in ids)

    async def next_outputs(self) -> Any:
        """Raises ReplicaLostError when the model's thread has died."""
        batch = await self._outputs.get()
        if isinstance(batch, BaseException):
            raise ReplicaLostError(f"the model failed: {type(batch).__name__}: {batch}") from batch
        return batch

    async def cached_blocks(self, since: int | None) -> None:
        """It keeps no prefixes."""

    async def status(self) -> dict[str, Any]:
        """It answers while the model computes, and tells for how long that is at its forward pass: `pass_s`."""
        return {
            "running": sum(not row.ended for row in self._running),
            "waiting": len(self._waiting),
            "mode": self._gang.prefill,
            "kv_cache_tokens": self._capacity_tokens,
            "off": switched_off({Cause.TRANSFORMERS}),
            "pass_s": round(time.monotonic() - self._pass_began_s, 3) if self._running else 0.0,
            **asdict(self._runner.counts),
        }

    async def load_adapters(self) -> None:
        """It serves none."""

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Raises ConfigError: there is no scheduler to be told."""
        raise ConfigError(f"engine.kind transformers has no scheduler to change: {sorted(changes)}")

    def shutdown(self) -> None:
        """Ends with the step that runs."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._cancelled |= {row.request_id for row in self._running}
            self._changed.notify()
        self._thread.join(JOIN_TIMEOUT_S)

    def _row(self, request: Any) -> Row | None:
        """None for what the front end should have refused."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if unsupported(request) or len(prompt) >= self.max_model_len:
            logger.error("request %s asks for what this engine does not do", request.request_id)
            return None
        return Row(
            request_id=request.request_id,
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=params.max_tokens or self.max_model_len,
            sampling=RowSampling(params, len(prompt), self._model.vocab_size, self._model.device),
            eos_token_id=params.eos_token_id,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            bin_index=metadata_of(params.extra_args).bin_index,
        )

    # In the model's thread

    def _run(self) -> None:
        try:
            while self._next_batch():
                self._runner.run(self._running)
                for row in self._running:
                    if row.request_id not in self._cancelled:
                        self._seen.observe(row)
                self._gang_sizes = self._seen.gang_sizes(self._capacity_tokens, self._gang.batch_size)
        except Exception as error:  # of whatever kind: the relay must hear of it
            logger.exception("the model failed")
            self._died = True
            self._put(error)

    def _next_batch(self) -> bool:
        """Waits for a batch and takes it; False when the engine closes."""
        with self._changed:
            self._cancelled.clear()
            self._running = []
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._gather()
            if self._closing:
                return False
            first = [self._waiting[index] for index in range(min(len(self._waiting), self._gang.batch_size))]
            usual = self._seen.usual_tokens(first)
            self._note_pass()
            prompts, answers = [row.prompt_tokens for row in first], [self._most_answer(row) for row in first]
            for _ in range(rows_that_fit(prompts, answers, usual, self._capacity_tokens) if first else 0):
                self._running.append(self._waiting.popleft())
        return True

    def _note_pass(self, *_: Any) -> None:
        self._pass_began_s = time.monotonic()

    def _gather(self) -> None:
        """Until the batch is full, or nothing has come for a moment: its requests may come from several routers."""
        seen = -1
        while seen < len(self._waiting) < self._gang.batch_size and not self._closing:
            seen = len(self._waiting)
            self._changed.wait(GATHER_S)

    def _most_answer(self, row: Row) -> int:
        return min(row.max_tokens, self.max_model_len - row.prompt_tokens)

    def _emit(self, outputs: list[RowOutput]) -> None:
        self._put(step_outputs(outputs))

    def _put(self, batch: Any) -> None:
        """Waits while the relay is far behind, unless no router is going to read any more."""
        sent = asyncio.run_coroutine_threadsafe(self._outputs.put(batch), self._loop)
        while not self._closing:
            try:
                sent.result(POLL_S)
                return
            except TimeoutError:
                continue
            except CancelledError:
                return


class _SeenAnswers:
    """The latest lengths of prompts and answers by bin: what the memory-safe size of a batch goes by."""

    def __init__(self) -> None:
        self._of_bin: defaultdict[int | None, deque[tuple[int, int]]] = defaultdict(lambda: deque(maxlen=SEEN_ANSWERS))

    def observe(self, row: Row) -> None:
        if row.output_tokens:
            self._of_bin[row.bin_index].append((row.prompt_tokens, row.output_tokens))

    def gang_sizes(self, capacity_tokens: float, most: int) -> tuple[int, ...]:
        """By bin; `most` where too little was seen to say anything."""
        safe = {
            number: memory_safe_gang([sum(lengths) for lengths in seen], capacity_tokens, most)
            for number, seen in self._of_bin.items()
            if number is not None and len(seen) >= ENOUGH_ANSWERS
        }
        return tuple(safe.get(number, most) for number in range(max(safe, default=-1) + 1))

    def usual_tokens(self, rows: Iterable[Row]) -> float:
        """What 95 of 100 answers of their bins did not exceed; infinite until enough were seen to say so."""
        most = 0.0
        for seen in {row.bin_index: self._of_bin[row.bin_index] for row in rows}.values():
            if len(seen) < ENOUGH_ANSWERS:
                return float("inf")
            answers = sorted(answer for _, answer in seen)
            most = max(most, answers[int(SELDOM_EXCEEDED * len(answers))])
        return most


def _max_model_len(config: Any, asked: int | None) -> int:
    """Raises ConfigError when more is asked for than the model has positions that rows of a batch can share."""
    own = _positions(config)
    if asked is None or asked <= 0:
        if own is None:
            raise ConfigError("the model does not say how long its contexts may be: set --max-model-len in vllm_args")
        return own
    if own is not None and asked > own:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {own} positions")
    return asked


def _positions(config: Any) -> int | None:
    """Positions that the model has. With LongRoPE only those before it stretches: Transformers would stretch the whole
    batch."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    own: int | None = getattr(config, "max_position_embeddings", None)
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            of_model: int | None = getattr(config, "original_max_position_embeddings", own)
            return kind.get("original_max_position_embeddings") or of_model
    return own


def _cache_tokens(model: GangModel) -> int:
    """What a share of the free memory holds."""
    if model.device.type == "cpu":
        free = psutil.virtual_memory().available * CPU_CACHE_SHARE
    else:
        free = torch.accelerator.get_memory_info(model.device)[0] * ACCELERATOR_CACHE_SHARE
    return int(free / model.cache_bytes_per_token)
