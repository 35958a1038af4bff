"""Pages of metrics, as Prometheus reads them.

Each router publishes its page to the shared state at its heartbeat, and the page of any router shows all of them, told
apart by the label `router`: one scrape behind a load balancer sees the whole service, whichever router answers it.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from router.clock import Clock
from router.state_store import ReplicaLoad, Snapshot

logger = logging.getLogger(__name__)

# They say when a counter was made, and of what is counted elsewhere that is when the page is.
disable_created_metrics()  # type: ignore[no-untyped-call]

# What the process counts besides (vLLM's front end, the process itself) is some 500 lines, which take milliseconds of
# the loop that sends tokens. Some of vLLM's labels hold what clients ask for: a page that has grown beyond measure is
# left out.
PROCESS_FRESH_S = 5.0
MAX_PROCESS_BYTES = 1_000_000
_Labels = TypeVar("_Labels", bound=tuple[object, ...])
_FAMILY = b"\n# HELP "  # a line of its own: labels and help have no line breaks


class _Labelled:
    """The families of a registry, with labels that all their samples get besides their own."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            labelled = Metric(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in family.samples]
            yield labelled


def page(registry: CollectorRegistry, labels: Mapping[str, str]) -> bytes:
    """What Prometheus reads, every sample with these labels where it has none of that name."""
    if not labels:
        return generate_latest(registry)
    labelled = CollectorRegistry()
    labelled.register(_Labelled(registry, labels))
    return generate_latest(labelled)


class ProcessPage:
    """What this process counts in the common registry: as it was PROCESS_FRESH_S ago at most."""

    def __init__(self, labels: Mapping[str, str], clock: Clock) -> None:
        self._labels, self._clock = labels, clock
        self._page, self._made_s = b"", -math.inf

    def __call__(self) -> bytes:
        if (now_s := self._clock.now()) - self._made_s >= PROCESS_FRESH_S:
            self._page, self._made_s = page(REGISTRY, self._labels), now_s
            if len(self._page) > MAX_PROCESS_BYTES:
                logger.warning("what vLLM counts is left out: %d bytes", len(self._page))
                self._page = b""
        return self._page


def shared_exposition(
    snapshot: Snapshot, labels: Mapping[str, str] | None = None, pool: str = "", *, may_be_none: bool = False
) -> bytes:
    """The state shared by all routers, as gauges; `pool` and `labels` as in RouterMetrics.

    Args:
        may_be_none: the last replica ends where no request comes.
    """
    registry = CollectorRegistry()
    namespace = f"sluice_{pool}" if pool else "sluice"

    def gauge(name: str, meaning: str, values: Mapping[_Labels, float], *names: str) -> None:
        family = Gauge(name, meaning, names, namespace=namespace, registry=registry)
        for key, value in values.items():
            (family.labels(*key) if names else family).set(value)

    def counter(name: str, meaning: str, counts: Mapping[_Labels, float], *names: str) -> None:
        family = Counter(name, meaning, names, namespace=namespace, registry=registry)
        for key, count in counts.items():
            family.labels(*key).inc(count)

    gauge("queue_length", "Requests waiting, by class and bin.", snapshot.lanes, "slo_class", "bin")
    gauge("queue_work_seconds", "Predicted work that waits.", {(): snapshot.waiting_s})
    overtaken = "How much later than a request another arrived that started before it, the longest so far."
    gauge("overtaken_max_seconds", overtaken, {(): snapshot.overtaken_s})
    late = "Requests moved behind those in time: their deadline had passed, or reading their prompt would pass it."
    counter("late_requests", late, snapshot.late, "slo_class", "reason")
    owed = "Starts of requests that had waited behind those in time for too long."
    counter("owed_starts", owed, {(name,): count for name, count in snapshot.owed.items()}, "slo_class")
    batches = "Batches of one bin that went: full, or as one of their requests had waited for as long as it may."
    counter(
        "batches", batches, {(str(index), why): count for (index, why), count in snapshot.batches.items()}, "bin", "why"
    )
    for name, meaning, value_of in _OF_REPLICAS:
        gauge(name, meaning, {(each,): value_of(load) for each, load in snapshot.replicas.items()}, "replica")
    gauge("routers", "Routers alive.", {(): snapshot.routers})
    missing = not snapshot.replicas and (snapshot.asked or not may_be_none)
    gauge("replica_missing", "1 where no replica is there and one is needed, else 0.", {(): missing})
    return page(registry, labels or {})


# Name, meaning and value of what each replica has in the shared state.
_OF_REPLICAS: tuple[tuple[str, str, Callable[[ReplicaLoad], float]], ...] = (
    ("replica_running", "Slots in use.", attrgetter("running")),
    ("replica_credit", "Slots on offer.", attrgetter("credit")),
    ("replica_work_seconds", "Predicted work.", attrgetter("outstanding_s")),
    ("replica_unread_tokens", "Prompt tokens that it was given and has not read.", attrgetter("unread_tokens")),
    ("replica_slowness", "Busy seconds for one predicted second.", attrgetter("slowness")),
)


def merge(pages: Iterable[bytes]) -> bytes:
    """One page out of several: each family once, with the samples of all."""
    families: dict[bytes, list[bytes]] = {}
    for family in (each for one in pages for each in (b"\n" + one).split(_FAMILY)[1:]):
        help_line, type_line, *samples = family.rstrip(b"\n").split(b"\n", 2)
        name = help_line.partition(b" ")[0]
        families.setdefault(name, [b"# HELP " + help_line, type_line]).extend(samples)
    return b"".join(line + b"\n" for lines in families.values() for line in lines)
