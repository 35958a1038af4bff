"""Throughput of gang batches against the number of bins: paper 000, figures 7 and 11, with a model that really runs.

All requests are there at once, as in the paper, so that batches never wait: every bin's full batches first, by
`policies.gang.batches`, then what is left. Edges by the rule that serves gang batches ("optimal"), from answers seen
before.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams

from deployments.engines.transformers.batch import GangRunner, Row
from deployments.engines.transformers.model import GangModel
from deployments.engines.transformers.sampling import RowSampling
from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.router.multi_bin import MultiBin, MultiBinConfig


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its prompt's tokens, how many it generates, and how many it is thought to."""

    prompt: list[int]
    output_tokens: int
    predicted_output_tokens: float


def gang_batches(asked: Sequence[Asked], seen: Sequence[int], bins: int, batch_size: int) -> Iterator[list[Asked]]:
    """Batches in the order in which an idle replica would take them."""
    assigning = MultiBin(MultiBinConfig(bins=bins, batch_size=batch_size, window_requests=len(seen), refit_every=10**9))
    for length in seen:
        assigning.observe(length)
    assigning.refit()
    lanes: list[list[int]] = [[] for _ in range(bins)]
    for index, each in enumerate(asked):
        lanes[assigning.assign(each.predicted_output_tokens)].append(index)
    full, rest = GangConfig(batch_size=batch_size, max_wait_s=math.inf), GangConfig(batch_size=batch_size, max_wait_s=0)
    for config in (full, rest):
        while (lane := next_batch(_views(lanes), config)) is not None:
            taken = lanes[lane.bin_index][:batch_size]
            lanes[lane.bin_index] = lanes[lane.bin_index][batch_size:]
            yield [asked[index] for index in taken]


def _views(lanes: Sequence[Sequence[int]]) -> Iterator[LaneView]:
    for number, lane in enumerate(lanes):
        if lane:
            yield LaneView(slo_class="standard", bin_index=number, keys=[float(index) for index in lane], waited_s=0.0)


def counted(batches: Sequence[Sequence[Asked]]) -> dict[str, float]:
    """What `Runs.measure` would find of static gangs if every step took a second: each batch steps to its longest."""
    steps = [max(each.output_tokens for each in batch) for batch in batches]
    return {"s": float(sum(steps)), "requests": float(sum(map(len, batches)))}


class Runs:
    """One model, run through batches; `shrink` as in the engine."""

    def __init__(self, model: GangModel, max_model_len: int) -> None:
        self._model, self._max_model_len = model, max_model_len

    def measure(self, batches: Sequence[Sequence[Asked]], shrink: bool) -> dict[str, float]:
        """Seconds of CPU, steps and computed row-steps for all of these batches."""
        runner = GangRunner(
            model=self._model,
            max_model_len=self._max_model_len,
            shrink=shrink,
            emit=lambda outputs: None,
            is_cancelled=lambda request_id: False,
        )
        start_s = time.thread_time()
        for batch in batches:
            runner.run([self._row(each) for each in batch])
        counts = runner.counts
        return {
            "s": time.thread_time() - start_s,
            "steps": float(counts.decode_steps),
            "row_steps": float(counts.row_steps),
            "wasted_row_steps": float(counts.wasted_row_steps),
            "requests": float(counts.finished),
        }

    def _row(self, each: Asked) -> Row:
        params: Any = SamplingParams(temperature=0.0, max_tokens=each.output_tokens)
        return Row(
            request_id="",
            token_ids=list(each.prompt),
            prompt_tokens=len(each.prompt),
            max_tokens=each.output_tokens,
            sampling=RowSampling(params, len(each.prompt), self._model.vocab_size, torch.device(self._model.device)),
        )
