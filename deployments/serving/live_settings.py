"""What routers tell, through the shared state, of the settings that changed while engines serve: the engine replicas of
their model what follows for them, and routers that start later the `user_config` that was last taken."""

import json
from typing import Any

import msgspec

from deployments.config.application import AppConfig
from deployments.config.live import EngineTerms, configured_as
from router.state_store import StateStore

_USER_CONFIG, _TERMS = "user_config", "engines"


class LiveSettings:
    """Of one group of replicas that began with the same configuration. Every method raises StateStoreError."""

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
