"""How many requests of batches may be in flight to one model, and which batch sends the next one."""

import asyncio
from collections import Counter

from policies.batches.in_flight import InFlight
from policies.batches.turns import Waiting, choose


class Places:
    """Places for the requests of batches to one model.

    Attributes:
        in_flight: requests that have a place.

    A key has no more requests that are in flight or pause than are allowed in flight, so few lines are in memory.
    """

    def __init__(self, policy: InFlight) -> None:
        self.policy = policy
        self._of_keys: Counter[str] = Counter()
        self._pausing: Counter[str] = Counter()  # those that wait for a place again among them
        self._waiting: dict[Waiting, asyncio.Future[None]] = {}
        self._going_on: dict[asyncio.Future[None], Waiting] = {}
        self._is_filling = False

    @property
    def in_flight(self) -> int:
        return self._of_keys.total()

    async def take(self, batch: Waiting) -> None:
        """Returns when it is the batch's turn, which then has one more place; a batch waits for one at a time."""
        self._waiting[batch] = turn = asyncio.get_running_loop().create_future()
        try:
            self.fill()
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given one in the same moment
                self.give_back(batch)
            raise
        finally:
            self._waiting.pop(batch, None)

    async def pause(self, batch: Waiting, pause_s: float) -> None:
        """Others may have the place meanwhile: what waits for the quota of its key would keep it from them for hours.
        The request has one again afterwards, also when this raises."""
        turn = asyncio.get_running_loop().create_future()
        self._pausing[batch.key] += 1
        self.give_back(batch)
        try:
            await asyncio.sleep(pause_s)
            self._going_on[turn] = batch
            self.fill()
            await turn
        finally:
            self._going_on.pop(turn, None)
            if not turn.done() or turn.cancelled():
                self._give(batch.key, was_pausing=True)

    def _give(self, key: str, *, was_pausing: bool) -> None:
        self._of_keys[key] += 1
        self._pausing[key] -= was_pausing

    def give_back(self, batch: Waiting) -> None:
        self._of_keys[batch.key] -= 1
        self.fill()

    def fill(self) -> None:
        """Give away the free places soon; to be called when the limit has grown."""
        if not self._is_filling:
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        """Give each key one place at a time: a batch asks for its next only after it was given one, and would find them
        all taken by a key with many batches."""
        self._is_filling = False
        served = set[str]()
        while self.in_flight < self.policy.limit and (asking := self._asking(served)):
            chosen = choose(list(asking), self._of_keys)
            turn, was_pausing = asking[chosen]
            if was_pausing:
                del self._going_on[turn]
            else:
                del self._waiting[chosen]
            served.add(chosen.key)
            self._give(chosen.key, was_pausing=was_pausing)
            turn.set_result(None)
        if served and (self._waiting or self._going_on):
            self.fill()

    def _asking(self, served: set[str]) -> dict[Waiting, tuple[asyncio.Future[None], bool]]:
        """Of each batch of the other keys what may have a place next, and whether it has paused: that goes first."""
        most, asking = self.policy.limit, dict[Waiting, tuple[asyncio.Future[None], bool]]()
        for batch, turn in self._waiting.items():
            if not turn.done() and self._of_keys[batch.key] + self._pausing[batch.key] < most:
                asking[batch] = turn, False
        for turn, batch in reversed(self._going_on.items()):
            if not turn.done():
                asking[batch] = turn, True
        return {batch: each for batch, each in asking.items() if batch.key not in served}
