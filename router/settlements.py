"""What requests took of their keys' tokens, beyond what they were charged when they were queued.

A prediction is charged, and only the end of an answer tells what it was good for. The differences are summed up by
allowance, so that what waits for the shared state is as long as there are keys, however long that is away.
"""

import logging
from dataclasses import dataclass, replace
from itertools import islice

from policies.errors import StateStoreError
from policies.router.admission import Quota, Refusal, Settlement
from router.admission import Tenant
from router.state_store import StateStore

logger = logging.getLogger(__name__)

MAX_IN_A_CALL = 1000  # some milliseconds of Redis; the others go with the next call


@dataclass(slots=True)
class Bill:
    """What one request has been charged so far.

    Attributes:
        quota: of tokens, and what is charged when the request is queued.
        prompt_tokens: of the client's own prompt, as they are priced; that of a request that was moved holds a part of
            its answer too.
        charged_tokens: None before the request was taken, and where that is unknown: then nothing follows.
    """

    quota: Quota
    prompt_tokens: int
    charged_tokens: float | None = None

    @classmethod
    def of(cls, tenant: Tenant | None, prompt_tokens: int, tokens: float) -> "Bill | None":
        """For these tokens, answer included; None where they are not counted."""
        quota = tenant.token_quota(tokens) if tenant else None
        return None if quota is None else cls(quota, prompt_tokens)


class Settlements:
    """Those of one router, until the shared state has them."""

    def __init__(self, router_id: str, store: StateStore) -> None:
        self._router_id, self._store = router_id, store
        self._due: dict[str, Settlement] = {}  # by allowance
        self._sent: list[Settlement] = []  # in a call without a reply so far: it comes again as it was
        self._number = 0

    async def charge(self, quota: Quota) -> Refusal | None:
        """Take a quota now; where the shared state does not answer, when that is back."""
        try:
            return await self._store.charge([quota])
        except StateStoreError as error:
            logger.warning("%s is charged when the shared state is back: %s", quota.name, error)
            self.add(quota, quota.cost)
            return None

    def add(self, quota: Quota, tokens: float) -> None:
        """Take these tokens out of an allowance, with the next call; below 0 they come back."""
        due = self._due.get(quota.name) or Settlement(name=quota.name, cost=0.0, per_s=quota.per_s)
        self._due[quota.name] = replace(due, cost=due.cost + tokens)

    def settle(self, bill: Bill, output_tokens: int, *, is_over: bool = True) -> None:
        """While its answer goes on, only what it takes beyond its charge counts."""
        taken, charged = bill.prompt_tokens + output_tokens, bill.charged_tokens
        if charged is not None and (is_over or taken > charged):
            self.add(bill.quota, taken - charged)
            bill.charged_tokens = taken

    async def send(self) -> None:
        """Raises StateStoreError when the shared state does not answer; nothing is lost by that, or counted twice."""
        if self._sent:
            await self._send()
        if self._due:
            self._sent = [self._due.pop(name) for name in list(islice(self._due, MAX_IN_A_CALL))]
            self._number += 1
            await self._send()

    async def _send(self) -> None:
        await self._store.settle(self._router_id, self._number, self._sent)
        self._sent = []

    async def close(self) -> None:
        try:
            while self._sent or self._due:
                await self.send()
        except StateStoreError as error:
            left = len({each.name for each in self._sent} | self._due.keys())
            logger.warning("what %d keys took beyond what they were charged is lost: %s", left, error)
