"""The scheduler plug-in on vLLM's real scheduler, with one step and with two steps in flight."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.config.application import AppConfig
from deployments.config.live import EngineTerms, with_live
from deployments.engines.features import Cause
from deployments.engines.vllm.request_metadata import RequestMetadata
from deployments.engines.vllm.scheduler import plug_in
from deployments.engines.vllm.scheduler.plug_in import core_control, core_status
from deployments.engines.vllm.scheduler.snapshot import _last_token_in_flight
from policies.engine.standing_plan import StandingPlan
from policies.errors import ConfigError, SluiceError
from policies.types import BatchState, Phase, StepCoefficients, StepPlan, StepTimes
from tests.slow_connector import SlowConnector, arrive
from tests.tutorial import POLICY, put_on_path
from tests.virtual_engine import FIRST_TOKEN, STOP_TOKEN, TIMES, VirtualEngine, run_closed

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "mixed": {"mode": "mixed"},
    "exclusive k=1": {"mode": "exclusive", "papers": {"refill": 1}},
    "exclusive k=4": {"mode": "exclusive", "papers": {"refill": 4}},
    "exclusive k=16": {"mode": "exclusive", "papers": {"refill": 16}, "admission": "slots"},
    "exclusive k*": {"mode": "exclusive"},
    "auto that searches": {"mode": "auto", "papers": {"sla": "search", "itl_target_s": 0.05}},
    "auto with promises": {"mode": "auto", "ttft_s": 1.0, "tpot_s": 0.02},
    "auto with whole answers": {"mode": "auto", "ttft_s": 1.0, "tpot_s": 0.02, "e2e_s": 2.0},
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight cache": {"blocks": 120},
    "windows": {"blocks": 200, "windows": (48, 48)},
    "states": {"blocks": 200, "states": 2},
    "windows and states": {"blocks": 200, "windows": (48,), "states": 2},
    "budget below most prompts": {"budget": 64},
    "few slots": {"slots": 4},
    "prefix cache": {"enable_prefix_caching": True},
}
both_depths = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
every_setting = pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))


def workload(count: int, seed: int = 1) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(8, 300), min(400, 1 + int(rng.expovariate(1 / 50)))) for _ in range(count)]


def check_steps(engine: VirtualEngine, settings: dict[str, Any]) -> None:
    """None empty while something could run, none over its budget, none mixed where phases are exclusive."""
    assert not [log for log in engine.log if log.empty and log.runnable]
    assert not [log for log in engine.log if log.prefill_tokens + log.decodes > log.budget]
    if settings["mode"] == "exclusive":
        assert not [log for log in engine.log if log.mixed]


def check_answers(engine: VirtualEngine) -> None:
    assert all(answer.aborted or (answer.ended and answer.whole) for answer in engine.answers.values())
    assert engine.all_free


def every_combination() -> Iterator[Any]:
    """Each setting with each engine, at both depths. `make test` has each engine and each setting a time or two, with
    steps in flight."""
    for (number, engine), (of, setting), depth in product(enumerate(ENGINES), enumerate(SETTINGS), (1, 2)):
        is_short = depth == 2 and (engine == "tight cache" or number % len(SETTINGS) == of)
        marks = () if is_short else (pytest.mark.long,)
        yield pytest.param(depth, SETTINGS[setting], ENGINES[engine], id=f"{engine}-{setting}-{depth}", marks=marks)


@pytest.mark.parametrize(("depth", "settings", "args"), every_combination())
def test_every_answer_is_whole_and_every_step_as_planned(
    depth: int, settings: dict[str, Any], args: dict[str, Any]
) -> None:
    engine = run_closed(VirtualEngine(settings, depth=depth, **args), workload(60), clients=48)
    check_answers(engine)
    check_steps(engine, settings)


def run_by_stop_tokens(engine: VirtualEngine) -> None:
    run_closed(engine, workload(130), clients=48)


def run_to_limits(engine: VirtualEngine) -> None:
    """Whole batches end together, whatever is in flight."""
    for number, (prompt, _) in enumerate(workload(120)):
        engine.add(f"r{number}", prompt, 10**6, max_tokens=(4, 40, 80)[number % 3])
    engine.run()


def run_with_one_prefix(engine: VirtualEngine) -> None:
    run_closed(engine, [(1600, 6 + number % 15) for number in range(100)], clients=32)


def run_second_turns(engine: VirtualEngine) -> None:
    """Most of a prompt comes from the cache, more than any step computes, and the cache cannot hold all answers."""
    run_closed(engine, [(60, 250 + number) for number in range(40)], clients=32)
    prompts = [[1000 + 1237 * number + 3 * at for at in range(1200)] for number in range(25)]
    for number, prompt in enumerate(prompts):
        engine.add(f"first{number}", 1200, 2, prompt_token_ids=prompt, max_tokens=2)
    engine.run()
    while prompts:
        for _ in range(3):
            if prompts:
                engine.add(f"second{len(prompts)}", 1220, 300, prompt_token_ids=[*prompts.pop(), *[7] * 20])
        engine.step()
    engine.run()


def run_sessions_beside_answers(engine: VirtualEngine) -> None:
    """Twelve of them send their next part at the same time, again and again."""
    run_closed(engine, [(30, 30)] * 40, clients=40)
    for wave in range(8):
        for number in range(12):
            engine.add(f"s{number}", 40, 5, resumable=True)
        if wave == 1:
            for number in range(20):
                engine.add(f"long{number}", 40, 400)
        engine.step(31 + wave)
    for number in range(12):
        engine.abort(f"s{number}")
    engine.run()


def run_many_in_a_short_cache(engine: VirtualEngine) -> None:
    """Some 170 run, and one or two of them end at each step."""
    rng = random.Random(3)
    jobs = [(rng.randint(8, 60), min(600, 1 + int(rng.expovariate(1 / 80)))) for _ in range(700)]
    run_closed(engine, jobs, clients=300)


_STEEP = StepCoefficients(overhead_s=0.006, prefill_s=2e-5, decode_s=4e-4)
STEEP = StepTimes(prefill=_STEEP, decode=_STEEP, mixed=_STEEP)


def run_short_answers(engine: VirtualEngine) -> None:
    rng = random.Random(2)
    run_closed(engine, [(rng.randint(20, 200), 1 + int(rng.expovariate(1 / 30))) for _ in range(500)], clients=300)


def run_sessions_of_queued_parts(engine: VirtualEngine) -> None:
    """Every part is there before the one before it has been answered."""
    run_closed(engine, [(30, 30)] * 40, clients=40)
    for number in range(20):
        engine.add(f"long{number}", 40, 300)
    for number in range(12):
        for _ in range(8):
            engine.add(f"s{number}", 21, 21, resumable=True)
    engine.step(400)
    for number in range(12):
        engine.abort(f"s{number}")
    engine.run()


LOADS: dict[str, tuple[Callable[[VirtualEngine], None], dict[str, Any]]] = {
    "stop tokens": (run_by_stop_tokens, {}),
    "limits": (run_to_limits, {}),
    "long prompts": (run_by_stop_tokens, {"budget": 128}),
    "one prefix": (run_with_one_prefix, {"enable_prefix_caching": True}),
    "second turns": (run_second_turns, {"enable_prefix_caching": True, "blocks": 2100, "budget": 1024}),
    "sessions": (run_sessions_beside_answers, {}),
    "queued parts": (run_sessions_of_queued_parts, {}),
    "a short cache": (run_many_in_a_short_cache, {"slots": 256, "blocks": 1300}),
    "a short cache and a target": (run_short_answers, {"slots": 256, "blocks": 700, "budget": 8192, "times": STEEP}),
}
STANDING: dict[str, dict[str, Any]] = {name: SETTINGS[name] for name in ("mixed", "exclusive k=4")}


@pytest.mark.long
@both_depths
@pytest.mark.parametrize("name", list(STANDING))
@pytest.mark.parametrize("load", list(LOADS))
def test_plans_that_stand_cost_next_to_nothing(
    load: str, name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive, args = LOADS[load]

    def run() -> tuple[VirtualEngine, int]:
        engine = VirtualEngine(STANDING[name], depth=depth, **args)
        policy, plans = engine.scheduler.planner.policy, []
        monkeypatch.setattr(policy, "plan", lambda state, plan=policy.plan: plans.append(state) or plan(state))
        drive(engine)
        return engine, len(plans)

    standing, few = run()
    monkeypatch.setattr(StandingPlan, "stands", lambda self, **given: False)
    asked, all_of_them = run()
    assert few < all_of_them
    assert standing.clock.now() < 1.03 * asked.clock.now()
    reckoned, read = ([result.kv_tokens for result in engine.results] for engine in (standing, asked))
    assert sum(reckoned) == pytest.approx(sum(read), rel=0.05)


@both_depths
@pytest.mark.parametrize("mode", ["mixed", "exclusive"])
def test_the_queue_that_is_shown_is_the_one_that_vllm_has(
    depth: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = VirtualEngine({"mode": mode}, slots=8, blocks=60, depth=depth, budget=256)
    taker, rng = engine.scheduler.planner._taker, random.Random(5)

    def take(now_s: float, *, in_flight: bool, take: Callable[..., Any] = taker.take) -> Any:
        snapshot = take(now_s, in_flight=in_flight)
        queue = [request.request_id for request in engine.scheduler.waiting]
        shown = [view.request_id for view in snapshot.state.waiting]
        assert shown == queue[: len(shown)]
        assert bool(shown) == bool(queue)
        return snapshot

    monkeypatch.setattr(taker, "take", take)
    for number, (prompt, output) in enumerate(workload(300)):
        due = RequestMetadata(ttft_left_s=rng.choice([1.0, 1.0, 0.01, -5.0])).as_extra_args()
        engine.add(f"r{number}", prompt, output, extra_args=due)
        engine.step(rng.choice([0, 0, 3, 6]))
        if rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
    engine.run()
    check_answers(engine)
    assert engine.preempted


@both_depths
def test_a_target_cuts_no_prompt_where_nobody_decodes(depth: int) -> None:
    # With two steps in flight somebody always has its last token on the way.
    engine = VirtualEngine({"mode": "mixed", "admission": "slots", "tpot_s": 0.5}, slots=256, depth=depth)
    engine.add_all([(100, 1)] * 400, max_tokens=1)
    engine.run()
    assert [step.prefill_tokens for step in engine.log][:19] == [2048] * 19


def test_a_target_cuts_no_prompt_behind_a_last_token_of_a_plan_that_is_kept() -> None:
    engine = VirtualEngine({"mode": "mixed", "admission": "slots", "tpot_s": 0.5}, depth=2)
    engine.add("ends", 40, 10**6, max_tokens=3)
    engine.step(3)
    engine.add("comes", 900, 4)
    engine.run()
    assert [step.prefill_tokens for step in engine.log if step.prefill_tokens] == [40, 900]


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_prompt_in_progress_takes_nothing_of_what_decodes_need(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where those that decode started after it, as behind one that was held back, and where one of them gets
    nothing more because its last token is in flight."""
    engine = VirtualEngine({"mode": "mixed"}, budget=64, depth=2)
    for name, most in (("a", 100), ("b", 100), ("ends", 12)):
        engine.add(name, 20, 10**6, max_tokens=most)
    engine.step(8)
    engine.add("long", 1000, 5)
    scheduler, policy = engine.scheduler, engine.scheduler.planner.policy
    while not _last_token_in_flight(scheduler.requests["ends"]):
        engine.step()
    assert scheduler.requests["long"].is_prefill_chunk

    def planned(state: BatchState, plan: Callable[[BatchState], StepPlan] = policy.plan) -> StepPlan:
        return plan(state)._replace(max_prefill_tokens=tokens, steps=1)

    monkeypatch.setattr(policy, "plan", planned)
    scheduler.planner._standing = None
    scheduler.running.insert(0, scheduler.running.pop())
    steps = len(engine.log)
    while len(engine.log) == steps:
        engine.step()
    assert engine.log[-1].decodes == 2
    assert engine.log[-1].prefill_tokens == (tokens and tokens + 1)  # and that of the one that gets nothing


@both_depths
def test_what_decodes_read_is_known_while_a_plan_is_kept(depth: int) -> None:
    # A long prompt ends, and another one begins, in a step whose plan is kept.
    engine = VirtualEngine({"mode": "mixed", "admission": "slots"}, depth=depth, budget=512)
    engine.add("long", 1900, 30)
    engine.add("short", 40, 60)
    engine.run()
    both = [result.kv_tokens for result in engine.results if result.decode_requests == 2]
    assert both[0] == pytest.approx(1940, rel=0.01)
    assert both[-1] == pytest.approx(1940 + 2 * len(both), rel=0.01)


@both_depths
def test_what_chunks_read_is_the_prompt_before_them_also_where_it_comes_from_the_cache(depth: int) -> None:
    engine = VirtualEngine({"mode": "mixed", "admission": "slots"}, depth=depth, budget=512, enable_prefix_caching=True)
    for name in ("first", "second"):
        engine.add(name, 1600, 30)
        engine.add(f"{name} short", 40, 60, prompt_token_ids=[2] * 40)
        engine.run()
    prefills = [result.prefill_kv_tokens for result in engine.results if result.prefill_tokens]
    assert prefills == [step.prefill_kv_tokens for step in engine.log if step.prefill_tokens]
    assert prefills[1] == 512 * (512 + 256)
    # Of the second one a block at least is computed, and reads all the rest.
    assert 16 * 1592 <= prefills[-1] + prefills[-2] < 512 * 1600


def test_aborted_requests_are_let_go_at_once() -> None:
    engine = VirtualEngine({"mode": "mixed"})
    requests = [weakref.ref(engine.add(f"r{number}", 50, 50)) for number in range(8)]
    engine.step(10)
    for number in range(8):
        engine.abort(f"r{number}")
    engine.scheduler.status()
    gc.collect()
    assert [request() for request in requests] == [None] * 8


def test_what_ended_before_a_change_of_mode_is_told() -> None:
    engine = VirtualEngine({"mode": "mixed"})
    for number in range(40):
        engine.add(f"r{number}", 50, 20 + number)
    engine.step(50)
    ended, steps = sum(answer.ended for answer in engine.answers.values()), len(engine.log)
    assert ended
    for mode in ("stock", "mixed"):
        engine.scheduler.control({"mode": mode})
    told = engine.scheduler.telemetry.of_steps()
    assert (told["finished"], sum(told["steps"].values())) == (ended, steps)


@both_depths
@every_setting
def test_aborts_at_any_moment_lose_nothing_of_the_others(depth: int, settings: dict[str, Any]) -> None:
    rng = random.Random(3)
    engine = VirtualEngine(settings, depth=depth, blocks=300, budget=256)
    for number, (prompt, output) in enumerate(workload(100)):
        engine.add(f"r{number}", prompt, output)
        engine.step(rng.randint(0, 6))
        alive = list(engine.scheduler.requests)
        if alive and rng.random() < 0.5:
            engine.abort(rng.choice(alive))
    engine.step(20)
    for request_id in list(engine.scheduler.requests)[::2]:
        engine.abort(request_id)
    engine.run()
    check_answers(engine)
    check_steps(engine, settings)


@both_depths
@every_setting
def test_aborting_everything_in_the_middle_of_a_prompt_frees_everything(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth, budget=64)
    engine.add_all([(500, 20)] * 8)
    engine.step(3)
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    engine.run()
    assert engine.all_free


@both_depths
@every_setting
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_holds_and_a_resume_goes_on(depth: int, settings: dict[str, Any], state: PauseState) -> None:
    engine = VirtualEngine(settings, depth=depth, slots=8)
    engine.add_all(workload(40))
    engine.step(30)
    waiting = len(engine.scheduler.waiting)
    engine.scheduler.set_pause_state(state)
    engine.step(2000)
    assert len(engine.scheduler.waiting) == waiting > 0
    assert len(engine.scheduler.running) == 0 or state is PauseState.PAUSED_ALL
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    check_answers(engine)


@every_setting
def test_a_cache_reset_that_preempts_everyone_loses_nothing(settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=1, enable_prefix_caching=True)
    engine.add_all(workload(60))
    for turn in range(600):
        engine.step()
        if turn % 25 == 0:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    check_answers(engine)


@both_depths
@every_setting
def test_requests_whose_grammar_is_not_ready_hold_nobody_up(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth)
    late = engine.add("late", 50, 10)
    late.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    late.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
    engine.scheduler.deferred_waiting.add(late)
    engine.add_all(workload(30))
    engine.step(1000)
    assert [request_id for request_id, answer in engine.answers.items() if not answer.ended] == ["late"]
    late.structured_output_request.grammar = SimpleNamespace(accept_tokens=lambda *_: True)
    engine.run()
    check_answers(engine)


@both_depths
@every_setting
def test_streaming_input_sessions_hold_their_slot_and_nobody_else(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth, slots=4)
    for name in ("s0", "s1"):
        engine.add(name, 40, 5, resumable=True)
    engine.add_all(workload(20))
    engine.step(1500)
    assert all(answer.ended for answer in engine.answers.values())
    assert engine.scheduler.status()["batch_size"] == 4  # a router counts the two that wait
    for name in ("s0", "s1"):
        tokens = engine.answers[name].tokens
        engine.add(name, 30, 7, resumable=True)
        engine.step(40)
        assert tokens == [*range(FIRST_TOKEN, FIRST_TOKEN + 4), STOP_TOKEN]
        assert engine.answers[name].whole
        engine.add(name, 1, 1, resumable=False)
    engine.run()
    assert engine.all_free
    ended = [finished for result in engine.results for finished in result.finished]
    assert sorted(one.output_tokens for one in ended if not one.aborted) == sorted(
        [output for _, output in workload(20)] + [5, 5]
    )
    assert [one.output_tokens for one in ended if one.aborted] == [7, 7]


@both_depths
@every_setting
@pytest.mark.parametrize("slots", [1, 4])
def test_a_batch_that_ends_as_one_makes_room_for_no_more_than_the_slots(
    depth: int, settings: dict[str, Any], slots: int
) -> None:
    """With two steps in flight all of them have their last token on the way while the next ones wait."""
    engine = VirtualEngine(settings, depth=depth, slots=slots)
    engine.add_all([(20, 1000)] * 12, max_tokens=6)
    engine.run()
    for answer in engine.answers.values():
        assert answer.ended
        assert answer.tokens == [*range(FIRST_TOKEN, FIRST_TOKEN + 6)]
    assert engine.all_free


@both_depths
@every_setting
def test_sessions_that_wait_in_every_slot_let_nobody_else_in(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth, slots=4)
    for number in range(4):
        engine.add(f"s{number}", 40, 5, resumable=True)
    engine.step(60)
    engine.add("late", 20, 5)
    engine.step(60)
    assert engine.scheduler.num_waiting_for_streaming_input == 4
    assert not engine.answers["late"].tokens
    engine.add("s0", 1, 1, resumable=False)
    engine.step(60)
    assert engine.answers["late"].whole


@both_depths
@every_setting
def test_more_adapters_than_a_batch_may_hold_take_turns(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth, slots=8, enable_lora=True, max_loras=2)
    for number, (prompt, output) in enumerate(workload(60)):
        adapter = 1 + number % 4
        engine.add(
            f"r{number}", prompt, output, lora_request=LoRARequest(f"a{adapter}", adapter, f"/adapters/{adapter}")
        )
    engine.run()
    check_answers(engine)


def _mixed_steps(engine: VirtualEngine, adapters: int = 0) -> int:
    for number, (prompt, output) in enumerate(workload(60)):
        adapter = number % adapters + 1 if adapters else 0
        more = {"lora_request": LoRARequest(f"a{adapter}", adapter, f"/adapters/{adapter}")} if adapter else {}
        engine.add(f"r{number}", prompt, output, **more)
    engine.run()
    check_answers(engine)
    return sum(step.mixed for step in engine.log)


@both_depths
def test_phases_go_on_beside_as_many_adapters_as_a_batch_may_hold(depth: int) -> None:
    exclusive = {"mode": "exclusive", "papers": {"refill": 4}}
    lora = {"enable_lora": True, "max_loras": 2}
    assert _mixed_steps(VirtualEngine(exclusive, depth=depth, slots=8, **lora), adapters=2) == 0
    assert _mixed_steps(VirtualEngine(exclusive, depth=depth, slots=8, **lora), adapters=3) > 0


@both_depths
def test_phases_go_on_beside_a_connector_that_loads_nothing(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowConnector, "get_num_new_matched_tokens", lambda *_: (0, False))
    engine = VirtualEngine({"mode": "exclusive", "papers": {"refill": 4}}, depth=depth, slots=8, **REMOTE)
    assert _mixed_steps(engine) == 0


def test_beside_phases_a_request_whose_cache_has_come_starts_in_the_next_step() -> None:
    engine = VirtualEngine({"mode": "exclusive", "papers": {"refill": 4}}, slots=8, **REMOTE)
    engine.add_all([(20, 200)] * 4)
    engine.step()
    arrive(engine.scheduler, *(f"r{number}" for number in range(4)))
    engine.step(20)
    engine.add("late", 20, 5)
    while not engine.scheduler.kv_holding_waiting:  # it begins to load with the next phase of prompts
        engine.step()
    arrive(engine.scheduler, "late")
    engine.step(2)
    assert engine.answers["late"].tokens
    engine.run()
    check_answers(engine)


def test_a_prompt_whose_chunks_must_end_at_a_block_is_not_kept_out_by_a_small_budget() -> None:
    """As hybrid models need it, whose state is kept at the ends of blocks: here by hand, on a model without one."""
    engine = VirtualEngine({"mode": "stock", "tpot_s": 0.05}, slots=64)
    engine.scheduler.need_mamba_block_aligned_split = True
    engine.scheduler.cache_config.block_size = 544
    engine.scheduler.control({"mode": "mixed"})
    engine.add_all([(20, 1000)] * 40)
    engine.step(30)
    engine.add("late", 1500, 5)
    engine.step(10)
    assert engine.answers["late"].tokens


def test_batches_that_overlap_without_asynchronous_scheduling_are_refused() -> None:
    with pytest.raises(ConfigError, match="--async-scheduling"):
        VirtualEngine({"mode": "mixed"}, depth=1, pipeline_parallel_size=2)


@both_depths
@every_setting
def test_priorities_are_vllms_own(depth: int, settings: dict[str, Any]) -> None:
    engine = VirtualEngine(settings, depth=depth, slots=2, scheduling_policy="priority")
    for number in range(10):
        engine.add(f"low{number}", 20, 20, priority=5)
    engine.add("high", 20, 20, priority=0)
    engine.run()
    check_answers(engine)
    first = engine.by_first_token
    assert first.index("high") <= 2


def test_the_waiting_queue_goes_by_deadline() -> None:
    engine = VirtualEngine({"mode": "mixed"}, slots=1)
    for name, left_s in (("late", 300.0), ("soon", 100.0), ("middle", 200.0)):
        engine.add(name, 20, 5, extra_args=RequestMetadata(ttft_left_s=left_s).as_extra_args())
    engine.run()
    assert engine.by_first_token == ["soon", "middle", "late"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_in_progress_waits_for_a_short_one_that_would_be_late(depth: int) -> None:
    def first_tokens(short_left_s: float) -> tuple[float, float]:
        engine = VirtualEngine({"mode": "mixed"}, budget=128, depth=depth, blocks=512).measure()
        for name, left_s in (("long", 60.0), ("short", short_left_s)):
            engine.add(
                name, 1900 if name == "long" else 100, 5, extra_args=RequestMetadata(ttft_left_s=left_s).as_extra_args()
            )
            engine.step(3)
        engine.run()
        check_answers(engine)
        long, short = (engine.answers[name].times_s[0] for name in ("long", "short"))
        return long, short

    long_s, short_s = first_tokens(short_left_s=0.1)
    assert short_s < long_s
    patient_long_s, patient_short_s = first_tokens(short_left_s=60.0)
    assert patient_long_s < patient_short_s


@pytest.mark.parametrize("told", [None, {"sluice": 3}, {"sluice": {"ttft_left_s": "soon"}}, {"sluice": {"odd": 1}}])
def test_metadata_that_is_missing_or_wrong_harms_nobody(told: dict[str, Any] | None) -> None:
    engine = VirtualEngine({"mode": "auto", "classes": ["fast"]})
    engine.add("r", 20, 5, extra_args=told)
    engine.add("nan", 20, 5, extra_args=RequestMetadata(ttft_left_s=float("nan")).as_extra_args())
    engine.run()
    check_answers(engine)


@both_depths
@pytest.mark.parametrize(
    "settings", [SETTINGS["auto with promises"], SETTINGS["exclusive k*"], SETTINGS["exclusive k=16"]]
)
def test_at_light_load_a_request_starts_as_soon_as_under_stock(depth: int, settings: dict[str, Any]) -> None:
    """One request runs, another comes: it must not wait for company."""
    ttft_s = {}
    for name, chosen in (("stock", {"mode": "stock"}), ("planned", settings)):
        engine = VirtualEngine(chosen, depth=depth)
        for number in range(60):
            engine.add(f"r{number}", 100, 30)
            engine.step(12)
        engine.run()
        waits = [answer.times_s[0] - answer.asked_s for answer in engine.answers.values()]
        ttft_s[name] = sum(waits) / len(waits)
    assert ttft_s["planned"] <= 1.001 * ttft_s["stock"]


@both_depths
def test_live_control_may_change_anything_at_any_step(depth: int) -> None:
    rng = random.Random(5)
    engine = VirtualEngine({"mode": "auto"}, depth=depth, blocks=300, budget=256)
    changes: list[dict[str, Any]] = [
        {"mode": "stock"},
        {"mode": "mixed", "max_batch_size": 5},
        {"mode": "exclusive", "papers": {"refill": 3}, "max_batch_size": None},
        {"mode": "exclusive", "papers": {}},
        {"mode": "auto", "papers": {"sla": "search", "itl_target_s": 0.02}},
        {"mode": "auto", "papers": {"memory": "exact"}},
    ]
    for number, (prompt, output) in enumerate(workload(200)):
        engine.add(f"r{number}", prompt, output)
        engine.step(5)
        if number % 3 == 0:
            engine.scheduler.control(rng.choice(changes))
    engine.run()
    check_answers(engine)


@both_depths
def test_settings_change_while_nothing_runs(depth: int) -> None:
    engine = VirtualEngine({"mode": "auto"}, depth=depth)
    for number, mode in enumerate(("mixed", "exclusive", "stock", "auto")):
        engine.add(f"r{number}", 40, 5)
        while engine.scheduler.has_unfinished_requests():  # and not the empty step after it
            engine.step()
        engine.scheduler.control({"mode": mode})
        assert engine.scheduler.status()["mode"] == mode
    engine.add("last", 40, 5)
    engine.run()
    check_answers(engine)


@pytest.fixture
def _keep_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch)


@pytest.mark.usefixtures("_keep_free")
@both_depths
def test_a_policy_of_the_user_s_own_plans_every_step(depth: int) -> None:
    settings = {"policy": POLICY, "policy_args": {"fraction": 0.5}}
    engine = VirtualEngine(settings, depth=depth, blocks=120)
    engine.add_all([(160, 20)] * 16)
    engine.step()
    status = engine.scheduler.status()
    assert (status["policy"], status["limited_by"]) == (POLICY, "memory")
    assert len(engine.scheduler.running) == status["max_batch_size"] == 5, "ten blocks each, of the half of 119"
    assert engine.scheduler.status()["batch_size"] == 5, "what memory holds back is not offered"
    engine.run()
    check_answers(engine)
    stock = VirtualEngine({"mode": "stock"}, depth=depth, blocks=120)
    run_closed(stock, workload(150), clients=48)
    run_closed(engine, workload(150), clients=48)
    check_answers(engine)
    assert engine.preempted < stock.preempted / 4
    kept = engine.scheduler.planner.policy
    engine.scheduler.control({"max_batch_size": 4})
    assert engine.scheduler.planner.policy is kept, "with what it has learned"
    engine.scheduler.control({"mode": "stock"})
    assert "policy" not in engine.scheduler.status()
    engine.scheduler.control({"mode": "auto"})
    assert engine.scheduler.status()["policy"] == POLICY


@pytest.mark.usefixtures("_keep_free")
def test_live_control_runs_nobody_s_code() -> None:
    engine, own = VirtualEngine({"mode": "auto"}), VirtualEngine({"policy": POLICY})
    for scheduler in (engine.scheduler, own.scheduler):
        before = scheduler.settings
        for changes in ({"policy": "theirs:Policy"}, {"policy_args": {"args": ["false"]}}):
            with pytest.raises(ConfigError, match="cannot change while the engine runs"):
                scheduler.control(changes)
        assert scheduler.settings == before
    with pytest.raises(ConfigError, match="policy keep_free:KeepFree decides"):
        own.scheduler.control({"mode": "exclusive"})


def test_a_policy_that_parts_phases_is_carried_out_mixed_where_they_cannot_be_parted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        "policy": "exclusive_mixed_literal",
        "policy_args": {"mode": "exclusive", "phase_rule": "fixed", "refill": 4},
    }
    parted = VirtualEngine(settings)
    monkeypatch.setattr(plug_in, "causes_of_scheduler", lambda _: {Cause.DATA_PARALLEL})
    mixed = VirtualEngine(settings)
    for engine in (parted, mixed):
        run_closed(engine, workload(60), clients=48)
        check_answers(engine)
    assert not [step for step in parted.log if step.mixed]
    assert [step for step in mixed.log if step.mixed]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"speed": 11}, r"sluice\.speed"),
        ({"mode": "fast"}, r"sluice\.mode"),
        ({"measure_s": 5.0}, "measure_s cannot change"),  # it was measured at its start
    ],
)
def test_a_wrong_change_changes_nothing(wrong: dict[str, Any], said: str) -> None:
    engine = VirtualEngine({"mode": "mixed", "papers": {"refill": 2}})
    before = engine.scheduler.settings
    with pytest.raises(ConfigError, match=said):
        engine.scheduler.control(wrong)
    assert engine.scheduler.settings is before
    if "measure_s" not in wrong:
        with pytest.raises(ConfigError, match=said):
            VirtualEngine(wrong)


def of_class(name: str) -> dict[str, Any]:
    return RequestMetadata(slo_class=name).as_extra_args()


def completions(engine: VirtualEngine) -> dict[str | None, int]:
    """By class, of which lengths are known."""
    engine.scheduler.report()
    lengths = engine.scheduler.planner.policy.admission._lengths
    return {name: lengths.count(at) for at, name in enumerate(engine.scheduler.settings.class_names)}


@both_depths
def test_a_class_that_comes_or_goes_gives_no_other_its_lengths(depth: int) -> None:
    """`b` stands between the others: going by its index would take one class for the other."""
    engine = VirtualEngine({"mode": "mixed", "classes": ["a", "c"]}, depth=depth)
    for number in range(9):
        engine.add(f"a{number}", 20, 5, extra_args=of_class("a"))
    for number in range(4):
        engine.add(f"c{number}", 20, 50, extra_args=of_class("c"))
    engine.run()
    assert completions(engine) == {None: 0, "a": 9, "c": 4}
    engine.scheduler.control({"classes": ["a", "b", "c"]})
    engine.add("b", 20, 5, extra_args=of_class("b"))
    engine.run()
    assert completions(engine) == {None: 0, "a": 9, "b": 1, "c": 4}
    engine.scheduler.control({"classes": ["c"]})
    assert completions(engine) == {None: 0, "c": 4}
    check_answers(engine)


@both_depths
def test_requests_of_a_class_that_goes_end_as_those_of_no_class(depth: int) -> None:
    engine = VirtualEngine({"mode": "mixed", "classes": ["a", "b"]}, depth=depth)
    for name in ("a", "b"):
        engine.add(name, 20, 9, extra_args=of_class(name))
        engine.add(f"{name} aborted", 20, 9, extra_args=of_class(name))
    engine.step(4)
    engine.abort("b aborted")
    engine.scheduler.control({"classes": ["b"]})
    engine.abort("a aborted")
    engine.run()
    assert completions(engine) == {None: 1, "b": 1}


def test_a_policy_of_ones_own_keeps_the_classes_that_it_began_with() -> None:
    """It was told once how many there are, and one beyond would end the engine."""
    engine = VirtualEngine({"policy": "forecast_admission", "policy_args": {"classes": 2}, "classes": ["b"]})
    engine.scheduler.control({"classes": ["a", "b"]})
    for name in ("a", "b"):
        engine.add(name, 20, 5, extra_args=of_class(name))
    engine.run()
    engine.scheduler.report()
    lengths = engine.scheduler.planner.policy._lengths
    assert [lengths.count(0), lengths.count(1)] == [1, 1]


def test_a_changed_patience_with_late_requests_reaches_the_queue_of_an_engine_that_runs() -> None:
    """From the routers' `user_config`, by what they tell their engines."""
    config = AppConfig(model="m")
    told = EngineTerms.of(config, with_live(config, {"router": {"late_patience_s": 3.0}}), "decode").scheduler
    assert told is not None
    engine = VirtualEngine({"mode": "mixed"})
    queue = engine.scheduler.waiting.promised
    engine.scheduler.control(told)
    assert engine.scheduler.waiting.promised is queue
    assert queue._late_patience_s.now == 3.0


def test_steps_of_an_engine_that_speculates_are_not_counted_as_tokens() -> None:
    plain, drafts = VirtualEngine({"mode": "mixed"}), VirtualEngine({"mode": "mixed"})
    drafts.scheduler.num_spec_tokens = 3
    drafts.scheduler.control({})
    assert not plain.scheduler.planner.policy.config.speculates
    assert drafts.scheduler.planner.policy.config.speculates


@pytest.mark.parametrize(("depth", "own"), [(1, Scheduler), (2, AsyncScheduler)])
@pytest.mark.parametrize("mode", ["stock", "mixed"])
def test_requests_are_kept_account_of_as_by_the_class_that_vllm_takes(
    mode: str, depth: int, own: type[Scheduler]
) -> None:
    """Tokens in flight where steps overlap, and nothing of the kind where they do not."""
    scheduler = VirtualEngine({"mode": mode}, depth=depth).scheduler
    assert scheduler._base is own
    assert scheduler._update_request_with_output.__func__ is own._update_request_with_output


def test_stock_plans_nothing() -> None:
    scheduler = VirtualEngine({"mode": "stock"}).scheduler
    assert scheduler.planner is None
    scheduler.control({"mode": "mixed"})
    assert scheduler.planner is not None
    scheduler.control({"mode": "stock"})
    assert scheduler.planner is None


def test_stock_holds_no_request_that_has_ended() -> None:
    engine = VirtualEngine({"mode": "auto"}, depth=2)
    engine.add_all([(40, 30)] * 8)
    engine.step(5)
    requests = [weakref.ref(request) for request in engine.scheduler.requests.values()]
    engine.scheduler.control({"mode": "stock"})
    engine.run()
    gc.collect()
    assert len(requests) == 8
    assert not any(request() for request in requests)


@both_depths
def test_looking_for_prefills_alone_above_a_watermark_leaves_few_steps_empty(depth: int) -> None:
    engine = VirtualEngine({"mode": "auto"}, slots=256, blocks=1200, depth=depth)
    engine.scheduler.kv_cache_manager.watermark_blocks = 60
    run_closed(engine, workload(1200), clients=300)
    assert sum(step.empty and step.runnable for step in engine.log) < 0.03 * len(engine.log)


@both_depths
def test_mixed_without_limits_takes_the_very_steps_of_stock(depth: int) -> None:
    logs = [
        run_closed(VirtualEngine(settings, depth=depth, blocks=300), workload(150), clients=48).log
        for settings in ({"mode": "stock"}, {"mode": "mixed", "admission": "slots"})
    ]
    assert logs[0] == logs[1]


def test_the_forecast_keeps_preemptions_near_zero_where_they_are_dear() -> None:
    dear = StepTimes(
        prefill=StepCoefficients(overhead_s=0.003, prefill_s=1.5e-4),
        decode=StepCoefficients(overhead_s=0.005, decode_s=2e-4, kv_s=8e-7),
        mixed=StepCoefficients(overhead_s=0.005, prefill_s=1.5e-4, decode_s=2e-4, kv_s=8e-7),
    )
    took_s, preempted = {}, {}
    for mode in ("stock", "mixed"):
        engine = VirtualEngine({"mode": mode}, slots=128, blocks=600, times=dear)
        run_closed(engine, workload(500), clients=128)
        took_s[mode], preempted[mode] = engine.clock.now(), engine.preempted
    assert preempted["mixed"] < preempted["stock"] / 5
    assert took_s["mixed"] < took_s["stock"]


def test_the_forecast_takes_windows_for_what_they_hold() -> None:
    """Taken to grow with every token, three groups of a window would leave a quarter of the pool for the batch; kept
    for everybody who waits, the windows would leave nothing of it."""
    rng = random.Random(1)
    jobs = [(rng.randint(8, 60), rng.randint(200, 900)) for _ in range(80)]
    batch, preempted = {}, {}
    for mode in ("stock", "mixed"):
        engine = VirtualEngine({"mode": mode}, slots=64, blocks=900, windows=(64, 64, 64), budget=512)
        run_closed(engine, jobs, clients=64)
        batch[mode] = sum(log.decodes for log in engine.log) / len(engine.log)
        preempted[mode] = engine.preempted
    assert preempted["mixed"] < preempted["stock"] / 3
    assert batch["mixed"] > 0.75 * batch["stock"]


@pytest.mark.parametrize(("block_size", "states", "fit"), [(256, 3, 124), (256, 8, 55), (16, 3, 27)])
def test_states_do_not_hold_the_batch_down_behind_a_queue(block_size: int, states: int, fit: int) -> None:
    """Kept for everybody who waits, they would leave no room for a token, and one request would run after the other."""
    engine = VirtualEngine({"mode": "mixed"}, slots=256, blocks=500, block_size=block_size, states=states, budget=8192)
    for number in range(40):
        engine.add(f"early{number}", 30, 200)
    engine.run()
    assert engine.scheduler.status()["batch_size"] <= 499 // (states + 1), "no more than their states can start"
    before = len(engine.log)
    engine.add_all([(30, 200)] * 256)
    engine.step(400)
    decodes = [log.decodes for log in engine.log[before:]]
    assert sum(decodes) / len(decodes) > 0.5 * fit
    assert engine.preempted < 256 / 3


REMOTE = {
    "kv_transfer_config": KVTransferConfig(
        kv_connector="SlowConnector", kv_connector_module_path="tests.slow_connector", kv_role="kv_consumer"
    )
}


def offer(engine: VirtualEngine) -> int:
    """To routers, which send no more than that."""
    return int(engine.scheduler.status()["batch_size"])


def test_who_waits_with_states_of_their_own_is_offered_one_slot_each() -> None:
    """Counted twice, those whose caches are on their way made the replica ask for as many again, and so on."""
    engine = VirtualEngine({"mode": "mixed"}, slots=256, blocks=500, block_size=256, states=3, **REMOTE)
    fit = 499 // 4  # three states and a block of tokens each
    assert offer(engine) == fit
    engine.add_all([(30, 20)] * 60)
    engine.step()
    assert (engine.free_blocks, offer(engine)) == (499 - 240, fit), "on their way"
    arrive(engine.scheduler, *(f"r{number}" for number in range(30)))
    assert offer(engine) == fit, "some have come"
    state = engine.scheduler.planner.snapshot().state
    assert (state.slots, state.free_blocks) == (30 + 64, 499 - 240), "who has begun needs no more states to start"
    engine.step()
    assert (len(engine.scheduler.running), offer(engine)) == (30, fit), "some run"
    while len(engine.answers) < offer(engine):
        engine.add(f"r{len(engine.answers)}", 30, 20)
        engine.step()
    assert len(engine.answers) == fit
    arrive(engine.scheduler, *(f"r{number}" for number in range(30, fit)))
    engine.run()
    check_answers(engine)
    assert engine.preempted == 0


def test_sessions_that_wait_for_input_with_states_of_their_own_are_offered_one_slot_each() -> None:
    engine = VirtualEngine({"mode": "mixed"}, slots=256, blocks=500, block_size=256, states=3)
    for number in range(60):
        engine.add(f"s{number}", 30, 5, resumable=True)
    engine.step(200)
    assert (engine.free_blocks, offer(engine)) == (499 - 240, 499 // 4)
    assert engine.scheduler.planner.snapshot().state.slots == 64, "a batch has none of them"


def test_what_memory_held_back_is_not_offered_before_more_have_run() -> None:
    engine = run_closed(VirtualEngine({"mode": "mixed"}, slots=64, blocks=120), workload(200), clients=64)
    held = offer(engine)
    assert held < 48, "also once nobody is there"
    for number in range(held + 4):
        engine.add(f"short{number}", 10, 3)
        engine.step()
    engine.run()
    for number in range(held + 4):
        engine.add(f"tiny{number}", 1, 3)
    engine.step(2)
    assert offer(engine) > held
    engine.run()


def test_a_latency_target_holds_the_mean_gap_that_decoders_sit_through() -> None:
    slow = StepTimes(
        prefill=StepCoefficients(overhead_s=0.005, prefill_s=1e-4),
        decode=StepCoefficients(overhead_s=0.01, decode_s=1e-3),
        mixed=StepCoefficients(overhead_s=0.01, prefill_s=1e-4, decode_s=1e-3),
    )
    for mode in ("mixed", "exclusive"):
        engine = VirtualEngine({"mode": mode, "papers": {"sla": "search", "itl_target_s": 0.03}}, slots=64, times=slow)
        run_closed(engine, workload(500), clients=64)
        late = [a for a in engine.answers.values() if a.output_tokens > 20][100:-60]
        gaps = [(a.times_s[-1] - a.times_s[0]) / (a.output_tokens - 1) for a in late]
        assert 0.5 * 0.03 < sum(gaps) / len(gaps) < 1.15 * 0.03


def test_before_the_first_request_a_search_has_cut_nothing() -> None:
    """Steps of the measurement take four times the target."""
    slow = replace(TIMES, decode=StepCoefficients(overhead_s=0.04, decode_s=5e-3))
    engine = VirtualEngine({"mode": "auto", "papers": {"sla": "search", "itl_target_s": 0.05}}, slots=32, times=slow)
    status = engine.measure().scheduler.status()
    assert (status["max_batch_size"], status["limited_by"], status["batch_size"]) == (32, "slots", 32)


def test_a_search_begins_where_it_would_without_a_measurement_and_a_target_out_of_reach_bounds_nothing() -> None:
    slow = replace(TIMES, decode=StepCoefficients(overhead_s=0.02, decode_s=1e-4))
    engine = VirtualEngine(
        {"mode": "mixed", "papers": {"sla": "search", "itl_target_s": 0.001}}, slots=64, times=slow
    ).measure()
    assert engine.scheduler.status()["out_of_reach"] is None
    run_closed(engine, workload(200), clients=64)
    status = engine.scheduler.status()
    assert "misses 0.001 s between tokens" in status["out_of_reach"]
    assert status["max_batch_size"] == 64 and max(step.decodes for step in engine.log) > 32


@both_depths
@pytest.mark.parametrize("mode", ["mixed", "exclusive"])
def test_promised_times_per_token_are_kept_beside_requests_without_a_promise(mode: str, depth: int) -> None:
    slow = replace(TIMES, decode=StepCoefficients(overhead_s=0.01, decode_s=1e-3))
    engine = VirtualEngine({"mode": mode}, slots=64, times=slow, depth=depth).measure()
    told = RequestMetadata(tpot_s=0.03).as_extra_args()
    for number, (prompt, output) in enumerate(workload(300)):
        engine.add(f"r{number}", prompt, output, extra_args=told if number % 2 else None)
        while len(engine.scheduler.requests) > 64:
            engine.step()
    engine.run()
    check_answers(engine)
    means = [
        (answer.times_s[-1] - answer.times_s[0]) / (answer.output_tokens - 1)
        for name, answer in engine.answers.items()
        if answer.output_tokens > 20 and int(name[1:]) % 2
    ]
    assert sum(mean <= 1.05 * 0.03 for mean in means) > 0.9 * len(means)


def test_who_can_be_in_time_goes_before_who_cannot() -> None:
    engine = VirtualEngine({"mode": "mixed"}, slots=1)
    engine.add("running", 20, 100)
    engine.step(40)
    engine.add("resumed", 20, 3, extra_args=RequestMetadata(resumed=True).as_extra_args())
    for name, left_s in (("late", -1.0), ("later", 50.0), ("sooner", 10.0)):
        engine.add(name, 20, 3, extra_args=RequestMetadata(ttft_left_s=left_s).as_extra_args())
    engine.add("idle", 20, 3, extra_args=RequestMetadata(fills_idle=True).as_extra_args())
    engine.run()
    check_answers(engine)
    first = engine.by_first_token
    assert first[1:] == ["resumed", "sooner", "later", "late", "idle"]


@both_depths
@pytest.mark.parametrize("mode", ["mixed", "exclusive"])
def test_late_ones_start_beside_others_while_fewer_than_half_of_the_slots_run(depth: int, mode: str) -> None:
    engine = VirtualEngine({"mode": mode}, slots=8, depth=depth)
    for name in ("a", "b"):
        engine.add(name, 20, 1000)
    engine.step(40)
    for number in range(4):
        engine.add(f"late{number}", 20, 500, extra_args=RequestMetadata(ttft_left_s=-1.0).as_extra_args())
    engine.step(200)
    started = [bool(engine.answers[f"late{number}"].tokens) for number in range(4)]
    assert started == [True, True, False, False]
    engine.run()
    check_answers(engine)


def test_what_is_read_from_the_cache_is_no_work_ahead() -> None:
    engine = VirtualEngine({"mode": "mixed"}, enable_prefix_caching=True, slots=1)
    engine.add("first", 800, 3)
    engine.run()
    engine.add("running", 20, 100)
    engine.step()
    engine.add("again", 800, 3)
    assert engine.scheduler.planner.queue.promised.head().unread_tokens == 16
    assert engine.scheduler.status()["unread_prompt_tokens"] == 16
    engine.run()


def test_measuring_shows_every_kind_of_step_and_no_lengths() -> None:
    for mode in ("auto", "mixed"):
        engine = VirtualEngine({"mode": mode}, times=STEEP).measure()
        policy = engine.scheduler.planner.policy
        assert policy.law is None
        assert all(policy.phases.model.measured(kind) for kind in Phase)
        found = policy.phases.model.times()
        for holds in ({"prefill_tokens": 500}, {"decode_requests": 20, "kv_tokens": 800}):
            assert found.step_s(**holds) == pytest.approx(STEEP.step_s(**holds), rel=0.1)
        assert engine.all_free


def test_the_status_says_what_it_does_and_why() -> None:
    engine = run_closed(
        VirtualEngine({"mode": "exclusive", "papers": {"refill": 4}}, blocks=200), workload(150), clients=40
    )
    core = SimpleNamespace(scheduler=engine.scheduler)
    status = core_status(core)
    assert status["mode"] == "exclusive"
    assert status["refill"] == 4
    assert status["preemptions"] == engine.preempted
    assert status["steps"]["mixed"] == 0 < status["steps"]["prefill"] < status["steps"]["decode"]
    assert status["limited_by"] in ("memory", "sla", "slots")
    assert status["step_times"]["decode"]["overhead_s"] == pytest.approx(0.01, rel=0.2)
    assert 10 < status["output_tokens"]["p50"] < 100
    assert status["finished"] == 150
    assert 0 < status["batch_size"] <= 32


def test_live_control_of_plain_vllm_is_refused() -> None:
    engine = VirtualEngine(scheduler=AsyncScheduler)
    core = SimpleNamespace(scheduler=engine.scheduler)
    assert "mode" not in core_status(core)
    with pytest.raises(SluiceError, match="own scheduler"):
        core_control(core, {"mode": "auto"})


@pytest.mark.long
@both_depths
def test_ten_thousand_requests_with_random_aborts_leave_nothing_behind(depth: int) -> None:
    rng = random.Random(11)
    engine = VirtualEngine({"mode": "auto"}, depth=depth, slots=64, blocks=500, enable_prefix_caching=True)
    for number in range(10_000):
        engine.add(f"r{number}", rng.randint(1, 120), 1 + int(rng.expovariate(1 / 12)))
        while len(engine.scheduler.requests) > 90:
            engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        if number % 500 == 0:
            engine.scheduler.control({"mode": rng.choice(["mixed", "exclusive", "auto"])})
    engine.run()
    check_answers(engine)
    assert sum(answer.ended for answer in engine.answers.values()) > 8000
    assert not [log for log in engine.log if log.empty and log.runnable]
    engine.scheduler.report()
    taker = engine.scheduler.planner._taker
    assert not taker._known
    assert not engine.scheduler.planner.queue.promised
