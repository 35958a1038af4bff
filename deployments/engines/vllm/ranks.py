"""Data parallelism inside a replica: several engines of one model, each with a queue, a cache and promises of its own.

vLLM calls them ranks. For routers each is a replica, so that they place requests by the rank. Those of a model without
experts are independent. With experts they step together: a rank that has a request waits in its first step until all
others have joined, which they do once they are told. vLLM has a coordinator for that; here the relays' process tells
them, for it sees every request and hears from every rank when all of them rest.
"""

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from deployments.engines.vllm.core_link import CoreLink, Rank
from deployments.engines.vllm.engine import VllmEngine
from deployments.process.ports import free_port

PORTS = 6  # that ranks of a model with experts need to find each other; vLLM takes as many for itself


class RankGroup:
    """All ranks of one replica. When one has died, all have."""

    def __init__(self, links: Sequence[CoreLink]) -> None:
        self._links, self._steps_together = links, any(link.told.steps_together for link in links)
        self._wave = 0  # as vLLM numbers the times between two rests of all
        self._runs = self._came = False
        for link in links:
            link.group = self

    def added(self, link: CoreLink) -> None:
        """A request was sent to that rank."""
        if not self._steps_together:
            return
        if self._runs:
            self._came = True
            return
        self._runs = True
        self._start(other for other in self._links if other is not link)

    def rest(self, wave: int) -> None:
        """One of them says that all rest since that wave's end.

        A request that was on its way to one of them then has woken that one alone, so all are woken again. Where there
        was none after all, they rest after one step.
        """
        if wave < self._wave:
            return  # another has said so
        self._wave = wave + 1
        self._runs, self._came = self._came, False
        if self._runs:
            self._start(self._links)

    def _start(self, links: Iterable[CoreLink]) -> None:
        for link in links:
            link.start_wave(self._wave)

    def died(self) -> None:
        for link in self._links:
            link.died()


def started_ranks(argv: Sequence[str], batch_size: int | None, ranks: int) -> list[VllmEngine]:
    """One engine, or the ranks of a data-parallel one; run it in a thread, it blocks until they are ready.

    Raises:
        ConfigError, RuntimeError: as `VllmEngine`; no rank is left then.
    """
    if ranks == 1:
        return [VllmEngine(argv, batch_size)]
    ports = tuple(free_port() for _ in range(PORTS))
    with ThreadPoolExecutor(ranks, "ranks") as threads:
        starting = [threads.submit(VllmEngine, argv, batch_size, Rank(index, ports)) for index in range(ranks)]
        failed = [each for each in wait(starting, return_when=FIRST_EXCEPTION).done if each.exception()]
        for process in multiprocessing.active_children() if failed else ():  # the others wait for it
            process.kill()
    engines = [each.result() for each in (*failed, *starting)]
    RankGroup([engine.core for engine in engines])
    return engines
