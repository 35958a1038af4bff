"""The candidates of an application: routers add what each has counted, and obey one verdict.

Each router publishes its own counts of a candidate at every heartbeat, in the shared state of that candidate, and with
them those of routers that are gone, as far as any has seen them. The first that sees enough in all of them writes the
verdict down, where nothing is written yet, and every router obeys what stands there. While the shared state is away all
go on by what they knew last, and what it has lost of a verdict is written again.

Counts and verdicts go by the name of a run: of the candidate as it was configured when the application began, and of
its section as it is now. Any change of these begins anew, and a change of anything else does not.
"""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from deployments.config.application import AppConfig
from deployments.config.candidate import CandidateSection, idle_class
from deployments.config.model import ModelSection
from deployments.config.scaling import may_be_none
from deployments.http.copies import Copies, CopyTerms
from deployments.http.trials import Run, Tally, Trial
from deployments.http.versions import MadeBy, Versions
from deployments.serving.front_end import FrontEnd
from deployments.serving.live_settings import InForce
from policies.errors import StateStoreError
from policies.live import Live
from policies.router.candidate import Verdict, verdict
from router.background import BackgroundTasks
from router.candidate_metrics import CandidateMetrics
from router.routed_client import RoutedClient
from router.state_store import StateStore

logger = logging.getLogger(__name__)

_FORM = (
    "candidate:1"  # of what is told: another form gets another number, so that no router reads what it does not know
)
_SINCE, _DECIDED = "since", "decided"
MOST_GONE = 100  # routers that are gone and still counted, those with most requests: some kilobytes of each page


class _Told(msgspec.Struct):
    """What a router publishes: what it has counted, and what those had that are gone."""

    run: Run
    gone: dict[str, Run]


class _Decided(msgspec.Struct, frozen=True):
    """What was decided, and on what."""

    verdict: Verdict
    counts: Run


class Jury:
    """What routers say together of one candidate.

    Attributes:
        counts: of all routers as of the last exchange; once it is decided, those on which it was.
        said: what these say, whether it is obeyed or not.
        since_s: when the run began, on the clock of the shared state; None before the first exchange.
    """

    def __init__(self, trial: Trial, model: ModelSection, store: StateStore, router_id: str, silence_s: float) -> None:
        """Args:
        model: the candidate, as it is in the application's arguments.
        store: the shared state of the candidate's replicas.
        silence_s: after which a router is taken for dead.
        """
        self.trial, self.counts, self.said = trial, Run(), Verdict.WAIT
        self.since_s: float | None = None
        self._model = model.model_dump_json(include=set(ModelSection.model_fields))
        self._store, self._router_id, self._silence_s = store, router_id, silence_s
        self._decided: _Decided | None = None
        self._living, self._gone = dict[str, Run](), dict[str, Run]()
        self._one_at_a_time = asyncio.Lock()

    async def exchange(self) -> None:
        """Tell what this router has counted, and obey what stands of all.

        Raises:
            StateStoreError: the shared state cannot be reached; the verdict that was known is still obeyed.
        """
        async with self._one_at_a_time:
            await self._exchange(self._run_id())

    async def _exchange(self, run_id: str) -> None:
        if self.trial.run.run_id != run_id:
            self.trial.begin(run_id)
            self.counts, self.said, self.since_s, self._decided = Run(run_id=run_id), Verdict.WAIT, None, None
            self._living, self._gone = {}, {}
        await self._add_up(run_id)
        kept = await self._kept(run_id)
        if kept is None and (due := self._due()) is not Verdict.WAIT:
            kept = await self._kept(run_id, _Decided(due, self.counts))
        if kept is not None:
            self._obey(kept)

    def _run_id(self) -> str:
        what = f"{self._model}\n{self.trial.section.now!r}"
        return f"{_FORM}:{hashlib.sha256(what.encode()).hexdigest()[:12]}"

    async def _add_up(self, run_id: str) -> None:
        page = msgspec.json.encode(_Told(self.trial.run, self._gone))
        await self._store.publish(self._router_id, {_FORM: page}, self._silence_s)
        pages = {
            router_id: msgspec.json.decode(told, type=_Told)
            for router_id, told in (await self._store.published(_FORM)).items()
        }
        known = [self._living, self._gone, *(told.gone for told in pages.values())]
        self._gone = _gone(run_id, pages.keys(), known)
        self._living = {router_id: told.run for router_id, told in pages.items() if told.run.run_id == run_id}
        counts = Run(run_id=run_id)
        for run in (*self._living.values(), *self._gone.values()):
            counts.add(run)
        if self._decided is None:
            self.counts = counts
            self.said = verdict(counts.incumbent.counts, counts.candidate.counts)

    async def _kept(self, run_id: str, decided: _Decided | None = None) -> _Decided | None:
        """What stands in the shared state, once what this router knows is written where nothing stands."""
        since_s = await self._store.time_s() if self.since_s is None else self.since_s
        known = {_SINCE: since_s, _DECIDED: decided or self._decided}
        told = {name: msgspec.json.encode(value) for name, value in known.items() if value is not None}
        await self._store.restore_settings(run_id, told)
        kept = await self._store.changed_settings(run_id)
        self.since_s = msgspec.json.decode(kept.get(_SINCE, told[_SINCE]), type=float)
        return msgspec.json.decode(kept[_DECIDED], type=_Decided) if _DECIDED in kept else None

    def _due(self) -> Verdict:
        """What is to be done by what is said."""
        decide = self.trial.section.now.decide
        does = {"never": (), "roll_back": (Verdict.ROLL_BACK,), "promote": (Verdict.ROLL_BACK, Verdict.PROMOTE)}[decide]
        return self.said if self.said in does else Verdict.WAIT

    def _obey(self, decided: _Decided) -> None:
        if self._decided is not None:
            return
        self._decided, self.counts, self.said = decided, decided.counts, decided.verdict
        self.trial.go_by(decided.verdict)
        logger.warning(
            "candidate %s of %s: %s, %s",
            self.trial.name,
            self.trial.of,
            _DONE[decided.verdict],
            _in_words(decided.counts),
            extra={"candidate": self.trial.name, "of": self.trial.of, "verdict": decided.verdict},
        )

    def status(self) -> dict[str, Any]:
        trial, section = self.trial, self.trial.section.now
        return {
            "model": trial.name,
            "of": trial.of,
            "share": section.share,
            "mirror": section.mirror,
            "decide": section.decide,
            "in_force": trial.in_force,
            "answers_share": trial.answered_share,
            "verdict": self.said,
            "since": None if self.since_s is None else round(self.since_s, 3),
            "incumbent": _as_json(self.counts.incumbent),
            "candidate": _as_json(self.counts.candidate),
            "copies_left_out": self.counts.copies_left_out,
        }


def _gone(run_id: str, living: Collection[str], known: Iterable[Mapping[str, Run]]) -> dict[str, Run]:
    """What those had counted of a run that live no more: the latest of what is known, for counts only grow."""
    found: dict[str, Run] = {}
    for router_id, run in (each for runs in known for each in runs.items()):
        is_new = router_id not in found or run.requests > found[router_id].requests
        if router_id not in living and run.run_id == run_id and is_new:
            found[router_id] = run
    return dict(sorted(found.items(), key=lambda each: -each[1].requests)[:MOST_GONE])


_DONE = {Verdict.ROLL_BACK: "rolled back", Verdict.PROMOTE: "promoted"}


def _as_json(tally: Tally) -> dict[str, Any]:
    answered = tally.answered
    return {
        "requests": tally.counts.requests,
        "kept": tally.kept,
        "missed": tally.missed,
        "failed": tally.failed,
        "mean_output_tokens": round(tally.output_tokens / answered, 2) if answered else None,
        "mean_whole_s": round(tally.whole_s / answered, 4) if answered else None,
    }


def _in_words(counts: Run) -> str:
    return "; ".join(
        f"{name}: {tally.counts.requests} requests, {tally.kept} kept, {tally.missed} missed, {tally.failed} failed"
        for name, tally in (("candidate", counts.candidate), ("incumbent", counts.incumbent))
    )


class Candidates:
    """All candidates in one router."""

    def __init__(self, juries: Sequence[Jury]) -> None:
        self._juries = juries

    async def exchange(self) -> None:
        """Before requests come: what stands is obeyed from the first one on, if the shared state can be reached."""
        for jury in self._juries:
            try:
                await jury.exchange()
            except StateStoreError as error:
                logger.warning("candidate %s waits for the shared state: %s", jury.trial.name, error)

    def status(self) -> list[dict[str, Any]]:
        return [jury.status() for jury in self._juries]

    @property
    def promoted(self) -> dict[str, str]:
        """The names of candidates, by those of the models whose requests they answer now."""
        found = [jury.trial for jury in reversed(self._juries) if jury.trial.in_force is Verdict.PROMOTE]
        return {trial.of: trial.name for trial in found}

    def versions(self, front_ends: Sequence[FrontEnd], made_by: MadeBy, copies: Copies) -> Mapping[str, Versions]:
        """By the name of each incumbent."""
        apps = {front_end.name: front_end.app for front_end in front_ends}
        trials = [jury.trial for jury in self._juries]
        return {
            of: Versions(of, apps[of], [trial for trial in trials if trial.of == of], made_by, copies)
            for of in dict.fromkeys(trial.of for trial in trials)
        }


def candidates(in_force: Live[InForce], front_ends: Sequence[FrontEnd]) -> Candidates:
    """Those of an application, whose routers exchange at every heartbeat from now on.

    Args:
        in_force: of all models.
        front_ends: one of each model, in their order.
    """
    begun, juries = in_force.now.config, []
    for number, (model, front_end) in enumerate(zip(begun.more_models, front_ends[1:], strict=True)):
        if model.candidate is None:
            continue
        section = in_force.view(partial(_section, number))
        metrics = CandidateMetrics(front_end.metrics.registry)
        answering = front_end.clients.answering
        has_engines = partial(_has_engines, answering, none_needed=may_be_none(model.engine))
        trial = Trial(front_end.name, model.candidate.of, front_end.app, section, metrics, has_engines)
        jury = Jury(trial, model, front_end.store, front_end.router_id, begun.router.silence_s)
        answering.repeat(jury.exchange, "candidate")
        juries.append(jury)
    return Candidates(juries)


def _has_engines(client: RoutedClient[Any, Any], *, none_needed: bool) -> bool:
    """Or one starts when a request comes."""
    return none_needed or bool(client.snapshot.replicas)


def _section(number: int, in_force: InForce) -> CandidateSection:
    section = in_force.config.more_models[number].candidate
    assert section is not None, "a live change takes none away"
    return section


def copies_of(in_force: Live[InForce], background: BackgroundTasks) -> Copies:
    return Copies(background, in_force.view(lambda now: _copy_terms(now.config)))


def _copy_terms(config: AppConfig) -> CopyTerms | None:
    """None where no class fills idle capacity."""
    if (name := idle_class(config.classes)) is None:
        return None
    return CopyTerms(name, config.router.max_wait_s)
