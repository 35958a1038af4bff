"""Every key of bins, order, classes and logs changes a decision somewhere.

Those of engine.scheduler are in tests/deployments/engines/vllm/scheduler/test_every_setting.py, those of the predictor
in tests/deployments/serving/test_every_predictor_key.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest

from deployments.config.application import AppConfig
from deployments.config.classes import ClassSection, OrderSection
from deployments.config.engine import GangSection
from deployments.config.lengths import BinsSection
from deployments.config.section import Section
from deployments.config.services import LogsSection
from policies.engine.step_budget import StepBudget
from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.router.admission import Queue, no_room
from policies.router.multi_bin import MultiBin
from policies.router.order import deadline_keys
from policies.types import BatchState, RunningRequests, StepCoefficients, StepTimes
from router.admission import Door, Tenant

STEPS = StepCoefficients(overhead_s=0.01, prefill_s=1e-4, decode_s=1e-4)
LATER_AND_SHORTER = LaneView(slo_class="", bin_index=0, keys=[2.0], waited_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value of a key, what else is set, and a decision that it changes."""

    value: Any
    decide: Callable[[Any], Any]
    base: Mapping[str, Any] = field(default_factory=dict)


def edges(bins: BinsSection) -> object:
    """After answers that become ten times as long, one a second."""
    multi = MultiBin(bins.build(GangSection()))
    lengths = np.random.default_rng(1).lognormal(4.0, 1.0, 200)
    lengths[100:] *= 10.0
    for second, length in enumerate(lengths):
        multi.note_time(float(second))
        multi.observe(float(length))
    return multi.edges


def buckets(bins: BinsSection) -> object:
    """The bucket of the last of two hundred prompts."""
    kept = bins.buckets(GangSection(), 4096)
    return kept and [kept.assign(50 if number % 3 else 3000) for number in range(200)]


def first_batch(bins: BinsSection) -> object:
    """The first batch, while requests of a long bin that came first and of a short one wait."""
    config = AppConfig(model="demo", bins=bins)
    if config.gang is None:
        return "requests go one by one"
    gang = GangConfig(batch_size=1, max_wait_s=0.0, patience_s=config.gang_patience_s)
    return next_batch([LaneView(slo_class="", bin_index=3, keys=[1.0], waited_s=2.0), LATER_AND_SHORTER], gang)


def keys(order: OrderSection) -> object:
    """Keys of a short prompt that comes late and of a long one that came before."""
    policy = order.build()
    requests = ((10.0, 2.0, 50), (9.0, 9.0, 4000))
    if policy is None:
        return [deadline_keys(arrival_s, 1.0).key for arrival_s, _, _ in requests]
    return [policy.key(arrival_s, None, work_s, tokens) for arrival_s, work_s, tokens in requests]


def place_in_queue(section: ClassSection) -> object:
    return deadline_keys(
        0.0, section.ttft_s, fills_idle=section.order if section.fills_idle else None, prompt_tokens=100
    )


def refusal(section: ClassSection) -> object:
    """The refusal of a request that would be late and whose key has as many waiting as all others."""
    limits = Door({"chat": section.limits()}).limits("chat", Tenant(name="one"), 1.0, spare_s=1.0)
    return no_room(limits, Queue(waiting=2000, wait_s=9.0, of_key=1000, of_key_s=5.0))


def prompt_tokens_in_a_step(section: ClassSection) -> object:
    running = RunningRequests.of(prompt_tokens=[100], output_tokens=[5], tpot_s=[section.promise().tpot_s or inf])
    state = BatchState(
        now_s=0.0, running=running, waiting=(), waiting_count=0, slots=8, free_blocks=90, total_blocks=100,
        block_size=16, max_batch_tokens=2048, departed=0,
    )  # fmt: skip
    return StepBudget(lambda: StepTimes(prefill=STEPS, decode=STEPS, mixed=STEPS)).plan(state).max_prefill_tokens


def kept_by_a_slow_answer(section: ClassSection) -> object:
    return section.promise().kept(0.5, None, 30.0)


def replicas(section: ClassSection) -> object:
    return AppConfig(model="demo", classes={"chat": section}, default_class="chat").engine_replicas


CASES: dict[type[Section], dict[str, Case]] = {
    BinsSection: {
        "count": Case(value=2, decide=edges),
        "dispatch": Case(value="batches", decide=first_batch),
        "serving": Case(value="shortest_first", decide=first_batch, base={"dispatch": "batches"}),
        "seconds_per_token": Case(value=0.001, decide=edges),
        "rule": Case(value="equal_mass", decide=edges),
        "edges": Case(value=(0.0, 10.0, 20.0, 30.0, 40.0), decide=edges, base={"rule": "fixed"}),
        "refit_every": Case(value=7, decide=edges),
        "prompt_buckets": Case(value=4, decide=buckets),
    },
    OrderSection: {
        "policy": Case(value="sjf", decide=keys),
        "policy_args": Case(value={"default_s": 4.0}, decide=keys, base={"policy": "tests.own_order:ByClass"}),
    },
    ClassSection: {
        "ttft_s": Case(value=0.1, decide=place_in_queue),
        "tpot_s": Case(value=0.02, decide=prompt_tokens_in_a_step),
        "e2e_s": Case(value=10.0, decide=kept_by_a_slow_answer),
        "max_waiting": Case(value=1500, decide=refusal),
        "when_late": Case(value="refuse", decide=refusal),
        "max_key_share": Case(value=0.2, decide=refusal),
        "fills_idle": Case(value=True, decide=place_in_queue),
        "order": Case(value="shortest_first", decide=place_in_queue, base={"fills_idle": True}),
        "own_replicas": Case(value=2, decide=replicas),
    },
    LogsSection: {
        "to": Case(value="stdout", decide=LogsSection.settings),
        "format": Case(value="human", decide=LogsSection.settings),
        "level": Case(value="DEBUG", decide=LogsSection.settings),
    },
}


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section in CASES for key in section.model_fields], ids=lambda of: str(of)
)
def test_every_key_changes_a_decision(section: type[Section], key: str) -> None:
    """A new one needs a case: a value, and a decision that it changes."""
    case = CASES[section][key]
    assert case.decide(section(**case.base)) != case.decide(section(**{**case.base, key: case.value}))
