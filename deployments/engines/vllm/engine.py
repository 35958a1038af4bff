"""On an engine replica: vLLM's engine core behind the relay, which imports nothing of vLLM itself."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from deployments.engines.vllm.core_link import ALONE, CoreLink, Rank
from deployments.engines.vllm.frames import RelayedBatch, RelayedRequest
from deployments.engines.vllm.measurement import loads, measure
from policies.router.credit import late_uncounted
from router.cached_blocks import BlockChanges

logger = logging.getLogger(__name__)


class VllmEngine:
    """vLLM's engine core in a process of its own, for the relay.

    Attributes:
        core: what speaks with it.
    """

    def __init__(self, argv: Sequence[str], batch_size: int | None = None, rank: Rank = ALONE) -> None:
        """Starts the engine and blocks until it is ready: run it in a thread.

        Args:
            argv: the arguments of `vllm serve`.
            batch_size: of whole batches that it is given when it is idle; None is given single requests.
            rank: of a data-parallel engine; each is an engine of its own.

        Raises:
            ConfigError: the arguments are wrong, or the model does not generate text.
            RuntimeError: it did not start; the log of this process says why.
        """
        self.core = CoreLink(argv, rank)
        self.codec = self.core.codec
        self.engine_version = self.core.told.engine_version
        self._batch_size = batch_size
        self._admits: int | None = None
        self._late = 0
        self._tells_blocks = True

    @property
    def gang_sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def slots(self) -> int:
        """Requests that it may be given: its slots, and those that wait there and are late, by its last status: they
        delay no other. Of a batch those that do not fit into its cache wait in the engine: a size that followed
        what memory has let run would only shrink, for no more is ever given."""
        slots = self.core.ready.max_num_seqs
        if self._batch_size is not None:
            return min(slots, self._batch_size)
        return min(slots, self._admits or slots) + late_uncounted(self._late, slots)

    @property
    def max_model_len(self) -> int:
        return self.core.ready.max_model_len

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one step."""
        return self.core.ready.max_num_batched_tokens

    @property
    def kv_layout(self) -> str:
        """What two replicas must have in common to read each other's KV cache; "" without a connector."""
        layout = self.core.told.kv_layout
        return f"{layout} block_size={self.core.ready.block_size}" if layout else ""

    async def add(self, request: RelayedRequest) -> None:
        """Raises ReplicaLostError when the engine core has died, as all that follow."""
        self.core.add(self.codec.encode_request(request))

    async def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    async def next_outputs(self) -> RelayedBatch:
        return await self.core.next_batch()

    async def status(self) -> dict[str, Any]:
        """The engine core's own counts (running, waiting, free_blocks, total_blocks), and what the plug-in says."""
        status = dict(await self.core.call("sluice_status"))
        status["free_tokens"] = status["free_blocks"] * self.core.ready.block_size
        self._admits, self._late = status.get("batch_size"), status.get("late_requests", 0)
        return status

    async def cached_blocks(self, since: int | None) -> BlockChanges | None:
        """As `deployments.engines.base.Engine`, by the engine core's utility `sluice_blocks`."""
        if not self._tells_blocks:
            return None
        told = await self.core.call("sluice_blocks", since)
        if isinstance(told, str):
            logger.info("routers guess what the prefix cache holds: %s", told)
            self._tells_blocks = False
            return None
        return msgspec.convert(told, BlockChanges)

    async def measure(self, seconds: float) -> None:
        """Let the scheduler plug-in see what steps cost, for so long at most. The engine serves no request yet."""
        status = await self.status()
        given = loads(
            slots=self.slots,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            cache_tokens=status["total_blocks"] * self.core.ready.block_size,
            draft_tokens=status.get("drafts", {}).get("most", 0),
        )
        settings = await self.control({})
        # A search would cut the batches that are to be measured, and begin with what was no traffic.
        await self.control({"papers": {}})
        took_s = await measure(self, given, seconds)
        await self.control({"papers": settings["papers"]})
        logger.info("measured what steps cost in %.1f s", took_s)

    async def load_adapters(self) -> None:
        """Those that its arguments name. Raises an exception with vLLM's words when one cannot be loaded."""
        await self.core.call("sluice_load_adapters")

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change the scheduler's settings. Raises an exception with the plug-in's words when one is wrong."""
        return dict(await self.core.call("sluice_control", changes))

    @property
    def dead(self) -> bool:
        return self.core.dead

    def shutdown(self) -> None:
        self.core.shutdown()
