"""One model's front end in a router: an OpenAI application over the routed engine client."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI

from deployments.config.application import AppConfig
from deployments.config.classes import ClassSection
from deployments.config.scaling import may_be_none
from deployments.http.limits import RequestLimits
from deployments.serving.engine_metrics import engine_exposition
from deployments.serving.in_words import now_in_words, without_replicas
from deployments.serving.live_settings import Announcer, InForce
from deployments.serving.parts import parts_of_engine, parts_of_router, steps_in_words
from policies.batches.in_flight import Load
from policies.errors import SluiceError, StateStoreError
from policies.live import Live
from policies.router.promise import TARGETS
from policies.router.sessions import Sessions
from router.admission import Tenant
from router.classifier import Classifier
from router.exposition import shared_exposition
from router.metrics import RouterMetrics
from router.prefill_decode import EngineClient
from router.recent import latest
from router.routed_client import RoutedClient
from router.state_store import ReplicaLoad, Snapshot, StateStore


class OutputReader(Protocol):
    """What hands outputs on to the tasks that answer requests: vLLM's front end, or that of servers of others."""

    @property
    def errored(self) -> bool:
        """It reads no more outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The routed clients of one model.

    Attributes:
        routed: takes all requests.
        answering: that of the replicas that answer: `routed`, or a part of it.
        classifier: of `answering`.
        reading_store: the shared state of the replicas that only read prompts; None without any.
    """

    routed: EngineClient[Any, Any]
    answering: RoutedClient[Any, Any]
    classifier: Classifier
    reading_store: StateStore | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """Everything of it serves; `front_end_start.opened_front_end` makes it.

    Attributes:
        in_force: the live settings of this model.
        store: the shared state of the replicas that answer.
        app: vLLM's application, or that of servers of others.
        announcer: tells engines and later routers what is in force.
        takes_media: whether the model takes images or sounds.
    """

    in_force: Live[InForce]
    router_id: str
    metrics: RouterMetrics
    store: StateStore
    clients: Clients
    reader: OutputReader
    app: FastAPI
    announcer: Announcer
    max_model_len: int
    takes_media: bool

    @property
    def config(self) -> AppConfig:
        """In force now."""
        return self.in_force.now.config

    @property
    def name(self) -> str:
        return self.config.public_name

    @property
    def names(self) -> tuple[str, ...]:
        """The model's and its adapters' names."""
        return tuple(self.config.served_names)

    async def charge(self, tenant: Tenant | None, tokens: float) -> None:
        """As `Entrance.charge`: a key's allowance is one for all models."""
        await self.clients.answering.entrance.charge(tenant, tokens)

    def check_health(self) -> None:
        """Raises SluiceError when no more outputs are read, as by vLLM's after one that it cannot process, or when it
        has requests and reaches no replica, though they live: HAProxy is to pass over it.

        It answers 500 from then on. What it says of engine replicas that are missing is no matter of this process.
        """
        if self.reader.errored:
            raise SluiceError(f"the front end of {self.name} reads no more outputs")
        if self.clients.answering.reaches_no_engine:
            raise SluiceError(f"no engine replica of {self.name} can be reached from here, though they live")

    async def load(self) -> Load:
        """Raises StateStoreError: the shared state cannot be reached."""
        snapshot, idle = await self.store.snapshot(), set(fills_idle(self.config))
        waiting_idle = sum(count for (name, _), count in snapshot.lanes.items() if name in idle)
        return Load(
            # Of a replica that starts when a request comes, one: a request has to come.
            slots=sum(replica.slots for replica in snapshot.replicas.values()) or int(may_be_none(self.config.engine)),
            waiting_idle=waiting_idle,
            waiting_promised=snapshot.waiting - waiting_idle,
            router_id=self.router_id,
            missed=self.metrics.missed(all_but=idle),
        )

    async def metrics_pages(self) -> list[bytes]:
        """The pages of all routers and of the shared state; only this router's while that is away.

        Every router's as it published it last, this one's too: a page of now would show more than the next one, if that
        comes from another router.
        """
        of_model, reading_store = {"model": self.name}, self.clients.reading_store
        try:
            of_routers = await self.store.published("metrics")
            pages = list(of_routers.values())
            if self.router_id not in of_routers:
                pages.append(self.metrics.exposition())
            none = may_be_none(self.config.engine)
            pages.append(shared_exposition(await self.store.snapshot(), of_model, may_be_none=none))
            pages.append(engine_exposition(await self.clients.routed.statuses(), of_model))
            if reading_store is not None:
                pages.append(shared_exposition(await reading_store.snapshot(), of_model, "prefill"))
                pages += (await reading_store.published("metrics")).values()
        except StateStoreError:
            return [self.metrics.exposition()]
        return pages

    async def status(self) -> dict[str, Any]:
        """Bins, replicas and what each engine says of itself.

        Raises:
            StateStoreError: the shared state cannot be reached.
        """
        clients, config = self.clients, self.config
        snapshot = await self.store.snapshot()
        engines = await clients.routed.statuses()
        reading = None if clients.reading_store is None else await clients.reading_store.snapshot()
        return {
            "model": self.name,
            "routers": snapshot.routers,
            **_pool(snapshot, engines),
            "without_replicas": without_replicas(snapshot, may_be_none=may_be_none(config.engine)),
            "overtaken_s": round(snapshot.overtaken_s, 3),
            "owed_starts": snapshot.owed,
            # Everybody with a key may read this page: how unlike the shares are, but not whose.
            "keys_served_s": sorted((round(each, 3) for each in snapshot.served_s.values()), reverse=True),
            "late": {f"{name}:{reason}": count for (name, reason), count in snapshot.late.items()},
            "batches": {f"{index}:{why}": count for (index, why), count in snapshot.batches.items()},
            "bin_edges_tokens": _as_json(clients.classifier.bin_edges),
            "bucket_edges_tokens": _as_json(clients.classifier.bucket_edges),
            # Other routers have memories of their own.
            "prefixes": {
                "entries": clients.classifier.prefixes.entries,
                "hit_tokens": self.metrics.hits,
                **({"loaded_tokens": loads} if (loads := self.metrics.loads) else {}),
            },
            "sessions": _of_sessions(clients.classifier.sessions),
            **({} if reading is None else {"prefill": _pool(reading, engines)}),
            "parts": parts_of_router(config),
            "classes": {name: _promised(section) for name, section in config.classes.items()},
            "default_class": config.default_class,
            "recent_requests": latest((await self.store.published("recent")).values()),
        }

    async def unkept(self) -> list[dict[str, Any]]:
        """The last requests whose promise was not kept, as routers published them last.

        Raises:
            StateStoreError: the shared state cannot be reached.
        """
        return latest((await self.store.published("unkept")).values(), None)


def fills_idle(config: AppConfig) -> dict[str, Any]:
    """The order of each class that fills idle capacity."""
    return {name: section.order for name, section in config.classes.items() if section.fills_idle}


def request_limits(config: AppConfig, max_model_len: int, *, takes_media: bool) -> RequestLimits:
    return RequestLimits.of_context(
        max_model_len,
        takes_media=takes_media,
        max_body_bytes=config.router.max_body_bytes,
        max_engine_requests=config.router.max_engine_requests,
    )


def _of_sessions(sessions: Sessions) -> dict[str, Any]:
    """Every router is told of all turns."""
    median_s = sessions.pauses.median_s
    return {
        "known": len(sessions),
        "turns": sessions.turns,
        "median_pause_s": None if median_s is None else round(median_s, 2),
        "growth_tokens": round(sessions.growth_tokens),
    }


def _promised(section: ClassSection) -> dict[str, float | None]:
    return {name: getattr(section, name) for name in TARGETS}


def _as_json(edges: Sequence[float]) -> list[float | None]:
    return [edge if math.isfinite(edge) else None for edge in edges]


def _pool(snapshot: Snapshot, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "waiting": {f"{name}:{index}": count for (name, index), count in snapshot.lanes.items()},
        "waiting_s": round(snapshot.waiting_s, 4),
        "replicas": {
            replica_id: _replica(load, engines.get(replica_id, {})) for replica_id, load in snapshot.replicas.items()
        },
    }


def _replica(load: ReplicaLoad, engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "takes_batches": load.gang,
        "slots": load.slots,
        "running": load.running,
        "credit": load.credit,
        "unread_tokens": load.unread_tokens,
        "max_unread_tokens": load.max_unread_tokens,
        "prompt_token_s": load.prompt_token_s,
        "outstanding_s": round(load.outstanding_s, 4),
        "slowness": round(load.slowness, 3),
        "engine": engine,
        "now": now_in_words(load, engine),
        "parts": parts_of_engine(engine),
        "steps_in_words": steps_in_words(engine),
    }
