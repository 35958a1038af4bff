"""What a request loads from tiers beyond the GPU: as much as comes sooner than it would be read."""

from array import array
from functools import cached_property
from typing import Any

import msgspec
from vllm.v1.request import Request

from deployments.engines.vllm.cached_blocks import block_hashing
from deployments.engines.vllm.cached_tiers import TierTable, tier_table
from policies.router.tiers import cheapest_load
from router.cached_blocks import HASH_BYTES, BlockHashing, PromptBlocks, loadable

LIMIT_KEY = "max_load_tokens"  # vLLM's name (0.32, experimental) of what its offloading loads at most for a request


class Loads:
    """Limits what vLLM's offloading loads, which by itself is all that it has.

    As by the price of routers (`policies.router.tiers`), with the engine's own pace and what it loads at this moment.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._table: TierTable | None = tier_table(scheduler)

    @cached_property
    def _hashing(self) -> BlockHashing | None:
        """Asked for with the first request: vLLM knows the hash before the first block once schedulers are made."""
        algorithm = self._scheduler.vllm_config.cache_config.prefix_caching_hash_algo
        told = block_hashing(self._scheduler.kv_cache_manager.coordinator, algorithm)
        return msgspec.convert(told, BlockHashing) if told["groups"] else None

    def saved_tokens(self, request: Request, pace_s: float | None) -> int:
        """Tokens of its prompt that a request which comes now need not read because it loads them, less those that
        could be read meanwhile. If it had better read some, vLLM is told to load no more than the others.

        Args:
            pace_s: seconds in which a prompt token is read; None while that is not known.
        """
        if self._table is None or pace_s is None or not self._is_new(request) or self._hashing is None:
            return 0
        tiers = self._table.stored(self._table.tiers(self._scheduler))
        if not tiers:
            return 0
        cache, most = self._scheduler.kv_cache_manager, request.num_tokens
        hit_tokens = int(cache.coordinator.find_longest_cache_hit(request.block_hashes, most - 1)[1])
        hashes = array("Q", b"".join(each[-HASH_BYTES:] for each in request.block_hashes))
        parts = loadable(PromptBlocks(hashes, self._hashing.groups), most, self._hashing, hit_tokens, tiers)
        load = cheapest_load(parts, pace_s)
        if load.parts != tuple(parts):
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), LIMIT_KEY: load.tokens}
        return load.saved_tokens

    def _is_new(self, request: Request) -> bool:
        """Not one that goes on, or whose cache another replica sends."""
        is_sent = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        looks_up = self._scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request)
        return not request.num_computed_tokens and not is_sent and looks_up
