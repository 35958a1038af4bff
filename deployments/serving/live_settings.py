"""The live settings of a router, and what engines and later routers are told of them through the shared state."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.config.application import AppConfig
from deployments.config.engine import Role
from deployments.config.live import EngineTerms, configured_as
from policies.live import Live
from router.state_store import StateStore

_USER_CONFIG, _TERMS = "user_config", "engines"


@dataclass(frozen=True, slots=True)
class InForce:
    """What a router goes by.

    Attributes:
        config: the configuration that it began with, with `user_config` over it; of one model, or of all.
        user_config: that of the deployment, of all models; None before Ray Serve has said what it is.
    """

    config: AppConfig
    user_config: Any = None


class LiveSettings:
    """What replicas of one group that began alike are told. Every method raises StateStoreError."""

    def __init__(self, store: StateStore, config: AppConfig) -> None:
        """Args:
        config: of one model, as its replicas began.
        """
        self._store, self._configured = store, configured_as(config)

    async def tell(self, user_config: Any, terms: EngineTerms) -> None:
        await self._store.change_settings(self._configured, _packed(user_config, terms))

    async def restore(self, user_config: Any, terms: EngineTerms) -> None:
        """Tell it where nothing of the kind is there."""
        await self._store.restore_settings(self._configured, _packed(user_config, terms))

    async def terms(self) -> EngineTerms | None:
        """None before any was told."""
        found = (await self._store.changed_settings(self._configured)).get(_TERMS)
        return None if found is None else msgspec.json.decode(found, type=EngineTerms)

    async def user_config(self) -> Any | None:
        """The one that was last taken; None before any was told."""
        found = (await self._store.changed_settings(self._configured)).get(_USER_CONFIG)
        return None if found is None else json.loads(found)


def _packed(user_config: Any, terms: EngineTerms) -> dict[str, bytes]:
    return {_USER_CONFIG: json.dumps(user_config).encode(), _TERMS: msgspec.json.encode(terms)}  # it may hold .inf


class Announcer:
    """Tells the engine replicas of one model, and routers that start later, what is in force in this router."""

    def __init__(self, in_force: Live[InForce], stores: Mapping[Role, StateStore]) -> None:
        """Args:
        in_force: of the model, as its replicas began.
        stores: the shared state of each group of its replicas.
        """
        self._in_force, self._begun = in_force, in_force.now.config
        self._groups = {role: LiveSettings(store, self._begun) for role, store in stores.items()}
        self._told: InForce | None = None
        self._one_at_a_time = asyncio.Lock()

    async def told_user_config(self) -> Any | None:
        """What routers of this configuration have last taken; None before the first. Raises StateStoreError."""
        return await self._groups["decode"].user_config()

    async def tell(self) -> None:
        """Tell what is in force; once that is told, only what the shared state has lost of it.

        Raises:
            StateStoreError: it cannot be reached, and is told at a later heartbeat.
        """
        async with self._one_at_a_time:
            now = self._in_force.now
            if now.user_config is None:
                return
            for role, settings in self._groups.items():
                terms = EngineTerms.of(self._begun, now.config, role)
                await (settings.restore if self._told is now else settings.tell)(now.user_config, terms)
            self._told = now
