"""Classes out of other packages: found and made, or refused with what is wrong, and held to what drivers need."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from policies.engine.plans import capped_plan
from policies.errors import ConfigError, PolicyError
from policies.plug_ins import CheckedBatchPolicy, CheckedOrder
from policies.registry import Family, build_of, kinds
from policies.router.order import SJF
from policies.types import BatchState, Limit, Phase, StepPlan
from tests.policies.states import batch_of, queue_of, state_of

MODULE = """
from typing import Any

from policies.engine.plans import capped_plan
from policies.types import Limit


class Fixed:
    def __init__(self, *, size: int = 4) -> None:
        if size < 1:
            raise ValueError(f"size must be 1 or more, got {size}")
        self.size, self.seen = size, 0

    def plan(self, state):
        return capped_plan(state, self.size, Limit.SLOTS)

    def observe(self, result):
        self.seen += 1


class Answers:
    "What it is told to."

    def __init__(self, answer: Any = None, offers: int = 1) -> None:
        self.answer, self.offers = answer, offers

    def plan(self, state):
        return self.answer

    def observe(self, result):
        pass

    def batch_size(self, state):
        return self.offers

    def key(self, arrival_s, slo_class, estimated_work_s, prompt_tokens):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Lacks:
    def plan(self, state):
        pass


class TakesNothing:
    def plan(self):
        pass

    def observe(self, result):
        pass


def function():
    pass
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "policies.py").write_text(MODULE)
    (tmp_path / "theirs" / "broken.py").write_text("import no_such_package_of_theirs")
    (tmp_path / "theirs" / "wrong.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)


def state(*, decoding: int = 0, reading: int = 0, waiting: int = 0) -> BatchState:
    running = batch_of(decoding=decoding, reading=reading, prompt_tokens=10, unread=10)
    return state_of(running=running, waiting=queue_of(waiting, 10), slots=8, max_batch_tokens=512)


def test_a_class_is_made_with_its_settings_and_asked_as_ours_are() -> None:
    policy = build_of(Family.BATCH, "theirs.policies:Fixed", {"size": 3})
    assert policy.plan(state(decoding=1, waiting=5)).starts == 2
    assert build_of(Family.BATCH, "theirs.policies:Fixed", {}).plan(state(waiting=9)).max_batch_size == 4


@pytest.mark.parametrize(
    ("path", "settings", "said"),
    [
        ("theirs:policies:Fixed", {}, "named package.module:Class"),
        ("theirs.policies:", {}, "named package.module:Class"),
        ("../theirs:Fixed", {}, "named package.module:Class"),
        ("nobodys.policies:Fixed", {}, "No module named 'nobodys'.*installed.*PYTHONPATH"),
        ("theirs.nothing:Fixed", {}, r"No module named 'theirs\.nothing'"),
        ("theirs.broken:Fixed", {}, "No module named 'no_such_package_of_theirs'"),
        ("theirs.wrong:Fixed", {}, "cannot be imported: ZeroDivisionError"),
        ("theirs.policies:Fast", {}, "cannot be imported: .*no attribute 'Fast'"),
        ("theirs.policies:function", {}, "is no class, but function"),
        ("theirs.policies:Lacks", {}, "no method observe, see policies.types"),
        ("theirs.policies:TakesNothing", {}, r"TakesNothing\.plan must take \(state\)"),
        ("theirs.policies:Fixed", {"speed": 3}, "with speed: TypeError.*'speed'"),
        ("theirs.policies:Fixed", {"size": 0}, "with size: ValueError: size must be 1 or more, got 0"),
        ("subprocess:Popen", {"args": ["false"]}, "no method plan"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_before_anything_starts(
    path: str, settings: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build_of(Family.BATCH, path, settings)


def test_an_order_is_not_a_batch_policy() -> None:
    with pytest.raises(ConfigError, match="no method key, see policies.router.order"):
        build_of(Family.ORDER, "theirs.policies:Fixed", {})


def test_a_name_of_the_registry_is_taken_from_its_own_family_alone() -> None:
    assert isinstance(build_of(Family.ORDER, "sjf", {}), SJF)
    for family, name in ((Family.BATCH, "fcfs"), (Family.ORDER, "auto")):
        with pytest.raises(ConfigError, match=f"{family.value} policy must be one of {kinds(family)[0]}.*got '{name}'"):
            build_of(family, name, {})
    with pytest.raises(ConfigError, match="memory_aware.*kind"):
        build_of(Family.BATCH, "memory_aware", {"kind": 1})


IDLE = state()
PLAN = capped_plan(state(waiting=1), 4, Limit.MEMORY)


@pytest.mark.parametrize(
    ("plan", "at", "said"),
    [
        (None, state(waiting=1), "must answer a StepPlan, got None"),
        ({"max_batch_size": 3}, state(waiting=1), "must answer a StepPlan"),
        (PLAN._replace(max_batch_size=0), state(waiting=1), "max_batch_size of 1 or more, got 0"),
        (PLAN._replace(max_batch_tokens=0), state(waiting=1), "max_batch_tokens"),
        (PLAN._replace(max_prefill_tokens=-1), state(waiting=1), "max_prefill_tokens"),
        (PLAN._replace(max_batch_size=float("nan")), state(waiting=1), "max_batch_size of 1 or more, got nan"),
        (PLAN._replace(steps=0), state(waiting=1), "steps of 1 or more"),
        (PLAN._replace(phase=Phase.DECODE), state(waiting=1), "answered DECODE"),
        (PLAN._replace(phase=Phase.DECODE), state(reading=1), "answered DECODE"),
        (PLAN._replace(phase=Phase.PREFILL), state(decoding=2), "answered PREFILL"),
        (PLAN._replace(phase=Phase.PREFILL, max_batch_size=2), state(decoding=2, waiting=1), "answered PREFILL"),
    ],
)
def test_a_plan_that_would_stop_the_engine_is_refused_by_name(plan: object, at: BatchState, said: str) -> None:
    policy = CheckedBatchPolicy("theirs.policies:Answers", {"answer": plan})
    with pytest.raises(PolicyError, match=rf"theirs\.policies:Answers\.plan .*{said}"):
        policy.plan(at)


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        (Phase.MIXED, IDLE),
        (Phase.DECODE, IDLE),
        (Phase.PREFILL, IDLE),
        (Phase.DECODE, state(decoding=1, reading=1, waiting=1)),
        (Phase.PREFILL, state(decoding=1, reading=1)),
        (Phase.PREFILL, state(decoding=1, waiting=1)),
        (Phase.MIXED, state(decoding=1)),
    ],
)
def test_a_plan_by_which_something_can_run_goes_through_as_it_is(phase: Phase, at: BatchState) -> None:
    plan: StepPlan = PLAN._replace(phase=phase)
    assert CheckedBatchPolicy("theirs.policies:Answers", {"answer": plan}).plan(at) is plan


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, "soon", ValueError("no idea")])
def test_a_key_that_cannot_be_queued_by_is_the_policy_s_fault_and_not_the_client_s(answer: Any) -> None:
    order = CheckedOrder("theirs.policies:Answers", {"answer": answer})
    with pytest.raises(PolicyError, match=r"theirs\.policies:Answers\.key"):
        order.key(1.0, None, 2.0, 3)


def test_a_key_is_handed_on_as_a_number() -> None:
    key = CheckedOrder("theirs.policies:Answers", {"answer": 7}).key(1.0, "chat", 2.0, 3)
    assert (key, type(key)) == (7.0, float)
