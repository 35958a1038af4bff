import numpy as np
import pytest

from policies.engine.auto import Auto, AutoConfig
from policies.engine.class_targets import ClassTargets, ClassTargetsConfig
from policies.engine.forecast import ForecastAdmission
from policies.errors import ConfigError
from policies.types import BatchState, FinishedRequest, Limit, Phase, RequestView, RunningRequests, StepResult


def state(running_classes: list[int], waiting_class: int | None = None, total_blocks: int = 4000) -> BatchState:
    waiting = () if waiting_class is None else (
        RequestView(request_id="w", arrival_s=0.0, prompt_tokens=10, class_index=waiting_class),
    )  # fmt: skip
    n = len(running_classes)
    return BatchState(
        now_s=0.0,
        running=RunningRequests.of(prompt_tokens=[100] * n, output_tokens=[1] * n, class_index=running_classes),
        waiting=waiting,
        waiting_count=len(waiting),
        slots=64,
        free_blocks=total_blocks - 8 * n,
        total_blocks=total_blocks,
        block_size=16,
        max_batch_tokens=8192,
        departed=0,
    )


def decoded(step_s: float, requests: int, finished: int = 0) -> StepResult:
    return StepResult(
        now_s=0.0,
        step_s=step_s,
        phase=Phase.MIXED,
        prefill_tokens=0,
        prefill_requests=0,
        decode_requests=requests,
        kv_tokens=100 * requests,
        max_batch_size=64,
        running_count=requests,
        waiting_count=1,
        finished=(FinishedRequest(prompt_tokens=100, output_tokens=100),) * finished,
    )


def test_the_strictest_class_in_the_batch_or_at_the_head_of_the_queue_counts() -> None:
    targets = ClassTargets(ClassTargetsConfig(itl_targets_s=(None, 0.05, 0.2)))
    assert targets.strictest_s(state([0, 0])) is None
    assert targets.strictest_s(state([0, 2])) == 0.2
    assert targets.strictest_s(state([0, 2], waiting_class=1)) == 0.05


def test_a_slow_engine_is_cut_down_only_while_the_class_that_minds_is_there() -> None:
    targets = ClassTargets(ClassTargetsConfig(itl_targets_s=(None, 0.05)))
    for _ in range(200):
        targets.observe(decoded(0.4, requests=32))
    assert targets.plan(state([0, 1])).max_batch_size < 8
    assert targets.plan(state([0, 1])).limited_by is Limit.SLA
    assert targets.plan(state([0, 0])).max_batch_size == 64


def queued(*classes: int) -> tuple[RequestView, ...]:
    return tuple(
        RequestView(request_id=f"w{n}", arrival_s=0.0, prompt_tokens=10, class_index=index)
        for n, index in enumerate(classes)
    )


def test_in_a_batch_beyond_the_strict_limit_strict_requests_start_from_the_head_and_no_others() -> None:
    targets = ClassTargets(ClassTargetsConfig(itl_targets_s=(None, 0.05, 0.2)))
    over = state([0] * 40)._replace(waiting=queued(1, 1, 0, 1), waiting_count=4)
    assert targets.plan(over).admit == ("w0", "w1")
    assert targets.plan(over).max_batch_size == 42
    assert targets.plan(over._replace(waiting=queued(0, 1))).admit == ("w0", "w1")  # no strict one at hand yet
    behind = state([0] * 40 + [1])._replace(waiting=queued(0, 1), waiting_count=2)
    assert targets.plan(behind).admit == ()


def test_strict_requests_alone_do_not_exceed_their_limit() -> None:
    targets = ClassTargets(ClassTargetsConfig(itl_targets_s=(None, 0.05)))
    nearly = state([0] * 10 + [1] * 30)._replace(waiting=queued(1, 1, 1), waiting_count=3)
    assert targets.plan(nearly).admit == ("w0", "w1")
    assert targets.plan(state([1] * 33)._replace(waiting=queued(1), waiting_count=1)).admit == ()


def test_a_full_batch_within_its_limit_waits_for_an_end() -> None:
    targets = ClassTargets(ClassTargetsConfig(itl_targets_s=(None, 0.05)))
    assert targets.plan(state([0] * 32)._replace(waiting=queued(1), waiting_count=1)).admit == ()


def test_a_class_without_any_target_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="itl_targets_s"):
        ClassTargetsConfig(itl_targets_s=())
    with pytest.raises(ConfigError, match="itl_targets_s"):
        ClassTargetsConfig(itl_targets_s=(0.0,))


def test_auto_keeps_what_it_learned_under_new_settings() -> None:
    old = Auto(AutoConfig())
    for _ in range(40):
        old.plan(state([0] * 4))
        old.observe(decoded(0.02, requests=4, finished=1))
    new = Auto(AutoConfig(mode="exclusive", refill=3), old)
    assert new.law is not None and old.law is not None
    assert new.law.quantile(0.5) == old.law.quantile(0.5)
    assert new.phases.step_times() is not None


def test_new_settings_begin_no_search_anew_whose_target_stays() -> None:
    old = Auto(AutoConfig(classes=2, itl_targets_s=(None, 0.1)))
    for _ in range(200):
        old.observe(decoded(0.02, requests=24))
    grown = old.batch_size(state([1]))
    new = Auto(AutoConfig(classes=2, itl_targets_s=(0.5, 0.1), max_wait_s=1.0), old)
    assert grown > 40
    assert new.batch_size(state([1])) == grown
    assert new.batch_size(state([0])) == 32


@pytest.mark.parametrize("part", ["forecast", "phases"])
def test_lengths_are_right_where_steps_bring_several_tokens(part: str) -> None:
    def mean_length(*, speculates: bool) -> float:
        auto, rng = Auto(AutoConfig(speculates=speculates)), np.random.default_rng(1)
        whole, age = rng.integers(150, 450, 256), np.zeros(256, dtype=np.int64)
        for _ in range(600):
            age += rng.integers(1, 6, 256)  # three on average
            ended = age >= whole
            done = tuple(FinishedRequest(prompt_tokens=100, output_tokens=int(tokens)) for tokens in whole[ended])
            auto.observe(decoded(0.02, requests=256)._replace(finished=done))
            whole[ended], age[ended] = rng.integers(150, 450, ended.sum()), 0
        assert isinstance(auto.admission, ForecastAdmission)
        learned = auto.admission if part == "forecast" else auto.phases
        hazard = learned._lengths.table(0, age).constant_hazard()
        assert hazard is not None
        return 1.0 / hazard

    assert 290.0 < mean_length(speculates=True) < 360.0  # those that run make a plain list a little long
    assert mean_length(speculates=False) < 240.0


def test_overcommit_that_is_switched_off_is_nothing_even_if_it_was_learned() -> None:
    old = Auto(AutoConfig())
    assert isinstance(old.admission, ForecastAdmission)
    old.admission.overcommit.share = 2.0
    assert Auto(AutoConfig(overcommit=False), old).overcommit == 0.0


def test_the_number_of_classes_cannot_change_in_flight() -> None:
    with pytest.raises(ConfigError, match="number of classes"):
        Auto(AutoConfig(classes=2), Auto(AutoConfig()))


def test_what_a_replica_offers_shrinks_with_its_memory() -> None:
    auto = Auto(AutoConfig())
    small, large = state([0] * 4, total_blocks=120), state([0] * 4, total_blocks=40_000)
    for _ in range(40):
        auto.plan(small)
        auto.observe(decoded(0.02, requests=4, finished=1))
    assert 4 < auto.batch_size(small) < 16
    assert auto.batch_size(large) == 64


@pytest.mark.parametrize(
    "config", [AutoConfig(overcommit=False), AutoConfig(admission="memory_aware")], ids=["forecast", "equation 12"]
)
def test_what_a_replica_offers_before_it_knows_any_length_is_what_equation_12_admits(config: AutoConfig) -> None:
    auto, tight = Auto(config), state([0] * 4, waiting_class=0, total_blocks=240)
    assert 4 < auto.batch_size(tight) == auto.admission.plan(tight).max_batch_size < 16


def test_a_replica_that_leaves_memory_to_its_engine_offers_what_its_cache_can_start() -> None:
    auto, tight = Auto(AutoConfig(admission="slots")), state([0] * 4, total_blocks=120)
    blocks = -(-int(tight.running.prompt_tokens[0]) // tight.block_size)
    assert 4 < auto.batch_size(tight) == 4 + tight.free_blocks // blocks < 64
    assert auto.batch_size(state([0] * 4, total_blocks=40_000)) == 64


def test_prompts_that_share_their_blocks_leave_room_for_more_like_them() -> None:
    apart = state([0] * 8, total_blocks=120)
    shared = apart._replace(free_blocks=120 - 16)  # six prompts of eight are held once
    auto = Auto(AutoConfig(admission="slots"))
    assert auto.batch_size(apart) - 8 < (auto.batch_size(shared) - 8) / 3


def test_with_one_class_indices_are_ignored() -> None:
    policy = ClassTargets(ClassTargetsConfig(itl_targets_s=(0.05,)))
    assert policy.strictest_s(state([3, 7])) == 0.05


def test_a_latency_target_that_binds_nobody_takes_no_slot_from_those_who_join() -> None:
    auto = Auto(AutoConfig(itl_targets_s=(10.0,)))
    few = state([0])._replace(slots=10)
    assert [auto.batch_size(few, joining) for joining in (0, 5)] == [10, 10]
