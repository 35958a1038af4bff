"""One policy for each promised time per token: which of them decide, and what is remembered."""

from math import inf

from policies.papers.by_promise import ByPromise
from policies.papers.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.types import BatchState, Limit, RunningRequests
from tests.policies.states import queue_of, result_of, state_of

made: list[float] = []


def policy_of(target_s: float) -> SlaConstrained:
    made.append(target_s)
    return SlaConstrained(SlaConstrainedConfig(itl_target_s=target_s, window_steps=2))


def state(*tpot_s: float, waiting: float = inf) -> BatchState:
    running = RunningRequests.of(prompt_tokens=[10] * len(tpot_s), output_tokens=[1] * len(tpot_s), tpot_s=tpot_s)
    return state_of(running=running, waiting=queue_of(1, tpot_s=waiting))


def slow(policy: ByPromise, *tpot_s: float, updates: int = 1) -> None:
    for _ in range(2 * updates):
        policy.plan(state(*tpot_s))
        policy.observe(result_of(step_s=0.1, decode_requests=50, running_count=50))


def test_without_a_promise_there_is_no_policy_and_no_bound() -> None:
    plan = ByPromise(policy_of).plan(state(inf, inf))
    assert (plan.max_batch_size, plan.limited_by) == (256, Limit.SLOTS)


def test_those_of_running_requests_and_of_the_next_one_decide() -> None:
    policy = ByPromise(policy_of)
    slow(policy, 0.05)
    assert policy.plan(state(0.05)).max_batch_size < 50
    assert policy.plan(state(inf, waiting=0.05)).max_batch_size < 50
    assert policy.plan(state(0.2)).max_batch_size == 256
    assert policy.plan(state(0.2, 0.05)).max_batch_size < 50
    assert policy.strictest_s == 0.05


def test_a_promise_out_of_reach_leaves_the_next_one_to_bind() -> None:
    policy = ByPromise(policy_of)
    for _ in range(40):
        policy.plan(state(0.001, 0.2))
        policy.observe(result_of(step_s=0.1, decode_requests=1, running_count=1))
    assert policy.out_of_reach == "a batch of 1 misses 0.001 s between tokens, so no batch is cut for it"
    assert policy.strictest_s == 0.2


def test_a_promise_that_comes_again_is_known_and_many_are_forgotten() -> None:
    policy = ByPromise(policy_of)
    made.clear()
    for target_s in (0.1, 0.2, 0.1):
        policy.plan(state(target_s))
    assert made == [0.1, 0.2]
    for number in range(20):
        policy.plan(state(1.0 + number))
    policy.plan(state(0.1))
    assert made[-1] == 0.1
