"""What steps may hold under promised times per token."""

from dataclasses import replace

import numpy as np
import pytest

from policies.engine.auto import Auto, AutoConfig
from policies.engine.step_budget import StepBudget
from policies.types import (
    BatchState,
    Left,
    Limit,
    Phase,
    RequestView,
    RunningRequests,
    StepCoefficients,
    StepResult,
    StepTimes,
    Unread,
)
from tests.policies.states import queue_of, result_of, state_of

FORM = StepCoefficients(overhead_s=0.005, prefill_s=1e-5, decode_s=1e-4)
TIMES = StepTimes(prefill=FORM, decode=FORM, mixed=FORM)
FAR = replace(FORM, prefill_kv_s=1e-10)


def state(*tpot_s: float, prefilling: int = 0, waiting: int = 1, first_token_s: float = 0.0) -> BatchState:
    decoding = len(tpot_s)
    running = RunningRequests.of(
        prompt_tokens=[100] * (decoding + prefilling),
        output_tokens=[100] * decoding + [0] * prefilling,
        prefill_tokens_left=[0] * decoding + [500] * prefilling,
        predicted_output_tokens=[1000.0] * (decoding + prefilling),
        first_token_s=[first_token_s] * decoding + [np.nan] * prefilling,
        tpot_s=[*tpot_s, *[0.02] * prefilling],
    )
    return state_of(now_s=1.0, running=running, waiting=queue_of(waiting, tpot_s=0.02))


def result(step_s: float, *, prompt: int = 0, waiting: int = 0) -> StepResult:
    return result_of(step_s=step_s, decode_requests=10, prefill_tokens=prompt, waiting_count=waiting)


def budget() -> StepBudget:
    return StepBudget(lambda: TIMES)


def test_prompts_get_what_decodes_leave_of_the_strictest_promise() -> None:
    plan = budget().plan(state(0.1, 0.02, np.inf))
    # 20 ms less 5 ms and three decodes of 0.1 ms.
    assert plan.max_prefill_tokens == pytest.approx(1470, abs=1)
    assert (plan.limited_by, plan.max_batch_size) == (Limit.SLA, 150)


def test_what_steps_have_overdrawn_is_paid_back() -> None:
    # A hundred tokens at 20 ms may take 2 s; 5 ms of them are left for this step, or it is over.
    for elapsed_s, tokens in ((1.985, 980), (1.99, 480), (2.01, 0)):
        plan = budget().plan(state(0.1, 0.02, first_token_s=1.0 - elapsed_s))
        assert plan.max_prefill_tokens == pytest.approx(tokens, abs=2)


def test_a_step_in_flight_is_paid_for_before_the_next_one() -> None:
    # 15 ms are left for both; the one in flight takes 6 ms, of which 2 ms are over.
    before = state(0.1, 0.02, first_token_s=1.0 - 1.985)
    for so_far_s, tokens in ((0.002, 580), (0.006, 980), (0.05, 980)):
        plan = budget().plan(before._replace(in_flight=(result(so_far_s),)))
        assert plan.max_prefill_tokens == pytest.approx(tokens, abs=2)


def test_what_steps_have_left_is_spent_where_more_are_in_time_by_it() -> None:
    mixed = replace(FORM, overhead_s=0.013)
    many = Unread([1.3] * 10, [1500] * 10)

    def tokens(unread: Unread, first_token_s: float) -> int:
        policy = StepBudget(lambda: StepTimes(prefill=FORM, decode=FORM, mixed=mixed))
        return policy.plan(state(0.02, first_token_s=first_token_s)._replace(unread=unread)).max_prefill_tokens or 0

    assert tokens(Unread(), 0.5) == pytest.approx(690, abs=1)  # 20 ms less 13 ms and a decode
    assert tokens(many, 0.5) > 8_000, "a hundred tokens in half a second"
    assert tokens(many, -0.975) == 0, "25 ms: it saves up"
    unpromised = Unread(late_tokens=15_000)
    assert tokens(unpromised, 0.5) > 8_000
    assert tokens(unpromised, -0.975) == 0, "in parts each would pay for mixing"


def test_beside_whole_answers_every_step_reads_as_much_as_they_allow() -> None:
    """They save nothing up: to wait for more than a step of theirs would be to wait until all of them have ended."""
    mixed = replace(FORM, overhead_s=0.013)
    policy = StepBudget(lambda: StepTimes(prefill=FORM, decode=FORM, mixed=mixed))
    for n in range(256):
        policy.answers.come(n / 200, n / 200 + 8.0, 400, Left(250.0, 250.0, 250.0))
    running = RunningRequests.of(
        prompt_tokens=[100] * 10, output_tokens=[10] * 10, ends_by_s=[9.0] * 10, predicted_output_tokens=[250.0] * 10
    )
    waiting = state_of(now_s=1.28, running=running, waiting=queue_of(9, deadline_s=8.0, ends_by_s=9.0))
    plan = policy.plan(waiting._replace(unread=Unread([9.0] * 10, [1500] * 10, late_tokens=50_000)))
    assert 0.013 < policy.strictest_s < TIMES.step_s(prefill_tokens=8192)
    assert plan.max_prefill_tokens is not None
    read_s = mixed.step_s(prefill_tokens=plan.max_prefill_tokens, decode_requests=10)
    assert read_s == pytest.approx(policy.strictest_s, rel=0.01)


def test_nothing_is_bound_without_a_promise_while_nobody_decodes_or_for_who_is_late() -> None:
    plan = budget().plan(state(np.inf, np.inf, waiting=0))
    assert (plan.max_prefill_tokens, plan.limited_by) == (None, Limit.SLOTS)
    assert budget().plan(state(prefilling=2)).max_prefill_tokens is None
    # A hundred tokens in twenty seconds: a mean of 20 ms over a thousand is out of reach.
    assert budget().plan(state(0.02, first_token_s=-19.0)).max_prefill_tokens is None


def test_a_batch_that_grew_without_a_promise_drains_to_where_the_next_one_is_kept() -> None:
    plan = budget().plan(state(*[np.inf] * 200))
    assert (plan.max_batch_size, plan.starts, plan.limited_by) == (150, 0, Limit.SLA)


def test_a_promise_that_not_even_one_request_could_keep_bounds_nobody() -> None:
    hopeless = state(*[np.inf] * 200)
    hopeless = hopeless._replace(waiting=(hopeless.waiting[0]._replace(tpot_s=0.004),))
    plan = budget().plan(hopeless)
    assert (plan.max_batch_size, plan.max_prefill_tokens) == (256, None)


def test_a_promise_that_decodes_alone_break_is_given_up_until_they_keep_it() -> None:
    policy = budget()

    def strictest(decodes: int) -> float:
        policy.plan(state(*[0.015] * decodes, first_token_s=0.9))
        return policy.strictest_s

    assert [strictest(n) for n in (99, 104, 108, 103, 99)] == [0.015, 0.015, np.inf, np.inf, 0.015]


def test_a_chunk_far_into_a_prompt_gets_fewer_tokens_than_its_beginning() -> None:
    policy = StepBudget(lambda: StepTimes(prefill=FAR, decode=FAR, mixed=FAR))
    # 20 ms less 5 ms and one decode of 0.1 ms; a token costs 10 us, and 10 us more at 100 000 tokens.
    given = {computed: policy.plan(_in_progress(computed)).max_prefill_tokens for computed in (0, 50_000, 100_000)}
    assert given == {
        0: pytest.approx(1479, abs=1),
        50_000: pytest.approx(990, abs=1),
        100_000: pytest.approx(742, abs=1),
    }
    assert policy.seconds_per_token == pytest.approx(0.02 / 742, rel=0.01)


def test_what_waits_with_most_of_its_prompt_in_the_cache_begins_far_into_it() -> None:
    policy = StepBudget(lambda: StepTimes(prefill=FAR, decode=FAR, mixed=FAR))
    cached = RequestView("w", arrival_s=0.0, prompt_tokens=110_000, cached_tokens=100_000)
    assert policy.plan(state(0.02)._replace(waiting=(cached,))).max_prefill_tokens == pytest.approx(742, abs=1)


def test_without_a_promise_too_the_pace_of_reading_is_that_far_into_the_prompt() -> None:
    policy = StepBudget(lambda: StepTimes(prefill=FAR, decode=FAR, mixed=FAR))
    paces = []
    for computed in (0, 100_000):
        policy.plan(_in_progress(computed, tpot_s=np.inf))
        paces.append(policy.seconds_per_token)
    assert paces[1] == pytest.approx(paces[0] + 1e-10 * 100_000)


def _in_progress(computed: int, tpot_s: float = 0.02) -> BatchState:
    """One request that decodes, and a prompt with `computed` tokens computed and 10 000 left."""
    running = RunningRequests.of(
        prompt_tokens=[100, computed + 10_000],
        output_tokens=[100, 0],
        prefill_tokens_left=[0, 10_000],
        predicted_output_tokens=[1000.0, 1000.0],
        first_token_s=[0.0, np.nan],
        tpot_s=[tpot_s, np.inf],
    )
    return state(waiting=0)._replace(running=running)


def test_a_prompt_in_progress_is_read_on_in_any_case() -> None:
    busy = [0.015] * 100
    assert budget().plan(state(*busy)).max_prefill_tokens == 0
    assert budget().plan(state(*busy, prefilling=1)).max_prefill_tokens == 16


def test_where_no_prompt_can_be_cut_one_may_start_all_the_same() -> None:
    assert budget().plan(state(*[0.015] * 100)._replace(cuts_prompts=False)).max_prefill_tokens == 16


def test_predictions_are_lengthened_by_what_they_fell_short_of() -> None:
    policy = budget()
    for error in (0.0, 0.1, 0.1, 0.1) * 8:
        policy.observe(result((1.0 + error) * 0.006))
    assert policy.margin == pytest.approx(0.1, abs=0.01)
    assert (policy.plan(state(0.02)).max_prefill_tokens or 0) < 1350
    for _ in range(64):
        policy.observe(result(0.012))
    assert policy.margin == pytest.approx(1.0), "however long they are"
    for _ in range(64):
        policy.observe(result(0.003))
    assert policy.margin == 0.0


def test_the_pace_of_reading_is_that_of_the_plan_or_the_slower_one_behind_a_queue() -> None:
    policy = budget()
    assert policy.seconds_per_token is None
    policy.plan(state(0.02, 0.02, 0.02))
    planned = policy.seconds_per_token
    assert planned == pytest.approx(0.02 / 1470, rel=0.01)
    for _ in range(32):
        policy.observe(result(0.02, prompt=100, waiting=5))
    assert policy.seconds_per_token == pytest.approx(0.02 / 100)
    policy.observe(result(0.02, prompt=100))
    assert policy.seconds_per_token == planned


def test_promises_are_asked_about_at_every_step_while_prompts_wait() -> None:
    assert budget().plan(state(0.02)).steps == 1
    assert budget().plan(state(0.02, waiting=0)).steps > 1


class TestPhases:
    def auto(self) -> Auto:
        policy = Auto(AutoConfig(mode="exclusive", step_times=TIMES))
        policy.phases.cycle_s = 0.5
        return policy

    def test_they_are_taken_where_nothing_is_promised(self) -> None:
        free = state(np.inf, np.inf)._replace(waiting=(RequestView("w", arrival_s=0.0, prompt_tokens=10),))
        assert self.auto().plan(free).phase is not Phase.MIXED

    def test_not_while_a_time_per_token_binds(self) -> None:
        assert self.auto().plan(state(0.02)).phase is Phase.MIXED

    @pytest.mark.parametrize(("due_in_s", "mixed"), [(0.4, True), (0.6, False), (-1.0, False)])
    def test_nor_where_who_is_next_cannot_wait_for_a_cycle(self, due_in_s: float, mixed: bool) -> None:
        urgent = RequestView("w", arrival_s=0.0, prompt_tokens=10, deadline_s=1.0 + due_in_s)
        plan = self.auto().plan(state(np.inf)._replace(waiting=(urgent,)))
        assert (plan.phase is Phase.MIXED) is mixed


def test_a_prompt_with_an_image_waits_until_the_accounts_have_its_encoder() -> None:
    times = replace(TIMES, encoder_s=1e-4)  # ten times as much as a token of the prompt

    def tokens(encoder_tokens: int, elapsed_s: float, **head: float) -> int | None:
        before = state(0.1, 0.02, first_token_s=1.0 - elapsed_s)._replace(encoder_tokens=encoder_tokens)
        before = before._replace(waiting=queue_of(1, tpot_s=0.02, **{"deadline_s": 9.0, **head}))
        return StepBudget(lambda: times).plan(before).max_prefill_tokens

    # A hundred tokens at 20 ms may take 2 s: 15 ms are left, of which a decode of two takes 5.2.
    assert tokens(0, 1.985) == pytest.approx(980, abs=2)
    assert tokens(50, 1.985) == pytest.approx(480, abs=2)
    assert tokens(200, 1.985) == 0, "it takes 20 ms"
    assert tokens(200, 1.9) == pytest.approx(1480, abs=2), "of 100 ms, but no step may be longer than 20 without it"
    assert tokens(200, 1.985, deadline_s=1.02) == pytest.approx(980, abs=2), "its first token is due"
    for waited_s, found in ((0.3, 0), (0.4, 980)):  # ten times its step of 35 ms
        assert tokens(200, 1.985, deadline_s=np.inf, arrival_s=1.0 - waited_s) == pytest.approx(found, abs=2)


def test_a_prompt_with_an_image_that_has_begun_is_read_on() -> None:
    times = replace(TIMES, encoder_s=1.0)
    plan = StepBudget(lambda: times).plan(_in_progress(400)._replace(encoder_tokens=50))
    assert plan.max_prefill_tokens is not None and plan.max_prefill_tokens >= 16


def test_a_step_that_encoded_is_believed_to_have_taken_that() -> None:
    policy = StepBudget(lambda: replace(TIMES, encoder_s=1e-4))
    policy.observe(result(0.005 + 10 * 1e-4 + 100 * 1e-5 + 0.02, prompt=100)._replace(encoder_tokens=200))
    assert policy.margin == pytest.approx(0.0, abs=1e-9)
    assert policy.believed_step_s == pytest.approx(0.027)
