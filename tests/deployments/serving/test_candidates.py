"""What routers say together of a candidate: one verdict, in every kind of store."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deployments.config.application import AppConfig
from deployments.config.candidate import CandidateSection
from deployments.http.trials import Ended, Outcome, Trial, Version
from deployments.serving import candidates as under_test
from deployments.serving.candidates import Candidates, Jury
from policies.errors import StateStoreError
from policies.live import Live
from policies.router.candidate import LEAST_REQUESTS, Verdict
from router.candidate_metrics import CandidateMetrics
from router.memory_store import MemoryStateStore
from router.redis_store import RedisStateStore
from router.state_store import StateStore

SILENCE_S = 60.0
GOOD, BAD = Ended(Outcome.KEPT, 10, 1.0), Ended(Outcome.MISSED, 10, 5.0)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, new_store: Callable[[], RedisStateStore]) -> AsyncIterator[StateStore]:
    yield MemoryStateStore(time.monotonic) if request.param == "memory" else new_store()


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    """In place of a front end."""


class Router:
    """What one router has of a candidate."""

    def __init__(self, store: StateStore, router_id: str, model: dict[str, Any] | None = None, **section: Any) -> None:
        self.store, self.router_id = store, router_id
        more = {"model": "n", **(model or {}), "candidate": {"of": "m", **section}}
        (found,) = AppConfig.model_validate({"model": "m", "more_models": [more]}).more_models
        assert found.candidate is not None
        self.section = Live(found.candidate)
        self.registry = CollectorRegistry()
        self.trial = Trial("n", "m", nobody, self.section, CandidateMetrics(self.registry), lambda: True)
        self.jury = Jury(self.trial, found, store, router_id, SILENCE_S)

    def count(self, version: Version, ended: Ended, times: int) -> None:
        for _ in range(times):
            self.trial.note(self.trial.run, version, ended)

    async def beat(self) -> Verdict:
        await self.store.beat_router(self.router_id, SILENCE_S)
        await self.jury.exchange()
        return self.trial.in_force

    @property
    def status(self) -> dict[str, Any]:
        return self.jury.status()


async def rolled_back(store: StateStore, router_id: str = "a", **section: Any) -> Router:
    router = Router(store, router_id, **section)
    await router.beat()
    router.count(Version.INCUMBENT, GOOD, 500)
    router.count(Version.CANDIDATE, BAD, 50)
    await router.beat()
    return router


async def test_counts_of_all_routers_are_added_and_all_obey_one_verdict(store: StateStore) -> None:
    routers = [Router(store, name) for name in "abc"]
    for router in routers:
        assert await router.beat() is Verdict.WAIT
        router.count(Version.INCUMBENT, GOOD, 14)
        router.count(Version.CANDIDATE, BAD, LEAST_REQUESTS // 3 + 1)
    told = [await router.beat() for router in routers]
    assert told == [Verdict.WAIT, Verdict.WAIT, Verdict.ROLL_BACK], "two together have too few"
    assert [await router.beat() for router in routers] == [Verdict.ROLL_BACK] * 3
    statuses = [router.status for router in routers]
    assert all(each == statuses[0] for each in statuses)
    assert (statuses[0]["candidate"]["missed"], statuses[0]["incumbent"]["kept"]) == (3 * (LEAST_REQUESTS // 3 + 1), 42)
    assert (statuses[0]["share"], statuses[0]["answers_share"]) == (0.05, 0.0)
    assert routers[0].registry.get_sample_value("sluice_candidate_verdict", {"of": "m"}) == -1


async def test_what_was_decided_first_stands_whatever_another_router_would_say(store: StateStore) -> None:
    first = await rolled_back(store)
    other = Router(store, "b")
    assert await other.beat() is Verdict.ROLL_BACK, "from its first look on"
    other.count(Version.INCUMBENT, BAD, 5000)
    other.count(Version.CANDIDATE, GOOD, 5000)
    assert await other.beat() is await first.beat() is Verdict.ROLL_BACK


async def test_a_router_that_starts_later_obeys_though_all_others_are_gone(store: StateStore) -> None:
    await rolled_back(store)
    await store.remove_router("a")
    later = Router(store, "b")
    assert await later.beat() is Verdict.ROLL_BACK
    assert later.status["candidate"]["missed"] == 50, "on what it was decided"


async def test_what_a_router_counted_that_is_gone_stays_as_long_as_one_has_seen_it(store: StateStore) -> None:
    first, second, third = (Router(store, name) for name in "abc")
    for router in (first, second):
        await router.beat()
        router.count(Version.CANDIDATE, GOOD, 5)
        await router.beat()
    await store.remove_router("a")
    for _ in range(2):
        await second.beat()
    await third.beat()
    await store.remove_router("b")
    await third.beat()
    assert third.status["candidate"]["requests"] == 10
    await first.beat()  # it was silent, and not gone
    await third.beat()
    assert third.status["candidate"]["requests"] == 10


async def test_of_routers_that_are_gone_only_so_many_are_kept(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "MOST_GONE", 2)
    watcher = Router(store, "watcher")
    await watcher.beat()
    for number in range(1, 5):
        router = Router(store, f"router {number}")
        await router.beat()
        router.count(Version.CANDIDATE, GOOD, number)
        await router.beat()
        await watcher.beat()
        await store.remove_router(router.router_id)
        await watcher.beat()
    assert watcher.status["candidate"]["requests"] == 3 + 4


@pytest.mark.parametrize("changed", [{"share": 0.2}, {"mirror": True}, {"decide": "promote"}])
async def test_a_changed_section_begins_anew(store: StateStore, changed: dict[str, Any]) -> None:
    router = await rolled_back(store)
    router.section.replace(CandidateSection.model_validate({"of": "m", **changed}))
    assert await router.beat() is Verdict.WAIT
    assert router.status["candidate"]["requests"] == 0
    router.section.replace(CandidateSection(of="m"))
    assert await router.beat() is Verdict.ROLL_BACK, "what was tried already is known"


async def test_another_model_in_its_place_begins_anew_and_live_settings_of_its_engines_do_not(
    store: StateStore,
) -> None:
    await rolled_back(store)
    assert await Router(store, "b", model={"vllm_args": ["--max-num-seqs", "8"]}).beat() is Verdict.WAIT
    assert await Router(store, "c").beat() is Verdict.ROLL_BACK


@pytest.mark.parametrize(
    ("decide", "obeyed"),
    [
        ("never", {Verdict.ROLL_BACK: Verdict.WAIT, Verdict.PROMOTE: Verdict.WAIT}),
        ("roll_back", {Verdict.ROLL_BACK: Verdict.ROLL_BACK, Verdict.PROMOTE: Verdict.WAIT}),
        ("promote", {Verdict.ROLL_BACK: Verdict.ROLL_BACK, Verdict.PROMOTE: Verdict.PROMOTE}),
    ],
)
async def test_it_is_done_what_is_configured_and_said_in_any_case(
    store: StateStore, decide: str, obeyed: dict[Verdict, Verdict]
) -> None:
    for said, in_force in obeyed.items():
        router = Router(store, "a", model={"served_model_name": said}, decide=decide)
        await router.beat()
        router.count(Version.INCUMBENT, GOOD, 5000)
        router.count(Version.CANDIDATE, BAD if said is Verdict.ROLL_BACK else GOOD, 5000)
        assert await router.beat() is in_force
        assert (router.status["verdict"], router.status["in_force"]) == (said, in_force)


class Away(MemoryStateStore):
    """Can be out of reach."""

    is_away = False

    async def publish(self, *args: Any) -> None:
        if self.is_away:
            raise StateStoreError("away")
        await super().publish(*args)


async def test_while_the_shared_state_is_away_what_was_known_is_obeyed_and_written_again_afterwards() -> None:
    store = Away(time.monotonic)
    router = await rolled_back(store)
    store.is_away = True
    with pytest.raises(StateStoreError):
        await router.beat()
    await Candidates([router.jury]).exchange()  # as at a change of settings, which it must not fail
    assert router.trial.in_force is Verdict.ROLL_BACK
    router.store = router.jury._store = MemoryStateStore(time.monotonic)  # which has lost all
    assert await router.beat() is Verdict.ROLL_BACK
    assert await Router(router.store, "b").beat() is Verdict.ROLL_BACK


async def test_a_candidate_began_once_for_all_routers(store: StateStore) -> None:
    first, second = Router(store, "a"), Router(store, "b")
    await first.beat()
    await second.beat()
    assert first.status["since"] == second.status["since"] is not None


async def test_each_verdict_is_logged_once_with_its_figures(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    router = await rolled_back(store)
    await router.beat()
    (line,) = [record.getMessage() for record in caplog.records if "candidate n of m" in record.getMessage()]
    assert "rolled back" in line and "50 missed" in line and "500 kept" in line


async def test_means_are_of_answers(store: StateStore) -> None:
    router = Router(store, "a")
    await router.beat()
    for ended in (GOOD, BAD, Ended(Outcome.FAILED)):
        router.count(Version.CANDIDATE, ended, 1)
    await router.beat()
    told = router.status["candidate"]
    assert (told["requests"], told["mean_output_tokens"], told["mean_whole_s"]) == (3, 10.0, 3.0)


async def test_batches_go_by_the_load_of_who_answers_them(store: StateStore) -> None:
    router = Router(store, "a")
    assert Candidates([router.jury]).promoted == {}
    router.trial.go_by(Verdict.PROMOTE)
    assert Candidates([router.jury]).promoted == {"m": "n"}
