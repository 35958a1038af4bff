"""The deployment's `user_config`, which Ray Serve hands to a router again whenever it has changed."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from deployments.config.live import with_live
from deployments.http.keys import RELOAD_S, KeyRing
from deployments.process.logs import log_by
from deployments.serving.candidates import Candidates
from deployments.serving.front_end import FrontEnd
from deployments.serving.live_settings import InForce
from policies.errors import ConfigError, StateStoreError
from policies.live import Live
from router.background import BackgroundTasks

logger = logging.getLogger(__name__)


class UserConfig:
    """Puts it in force in one router.

    Attributes:
        in_force: of all models.
        refused: why the last `user_config` is not in force; None where it is.
    """

    def __init__(
        self,
        in_force: Live[InForce],
        keys: KeyRing,
        front_ends: Sequence[FrontEnd],
        candidates: Candidates,
        background: BackgroundTasks,
    ) -> None:
        """Args:
        background: reads the keys again from time to time.
        """
        self.in_force, self._begun = in_force, in_force.now.config
        self._keys, self._front_ends, self._background = keys, front_ends, background
        self._candidates = candidates
        self.refused: str | None = None
        self._one_at_a_time = asyncio.Lock()

    async def change(self, user_config: object) -> None:
        """Put it in force, or tell in `refused` why not.

        A router that raises is replaced. So one that serves goes on by what is in force, and one that starts goes by
        what others of its kind have taken.

        Raises:
            ConfigError: at the start, where there are no others.
            StateStoreError: at the start, the shared state cannot be reached.
        """
        async with self._one_at_a_time:
            try:
                await self._go_by(user_config)
                self.refused = None
            except Exception as error:  # of any kind
                self.refused = str(error) or repr(error)
                logger.exception("serving goes by the user_config of before")
                if self._starts:
                    await self._go_by_last_taken(error)

    @property
    def _starts(self) -> bool:
        """Ray Serve has given none yet that could be used."""
        return self.in_force.now.user_config is None

    async def _go_by_last_taken(self, error: Exception) -> None:
        """Go by what routers took that began with the same settings. Raises the error where there were none, or it is
        no matter of settings."""
        is_setting = isinstance(error, ConfigError)
        found = await self._front_ends[0].announcer.told_user_config() if is_setting else None
        if found is None:
            raise error
        await self._go_by(found)

    async def _go_by(self, user_config: object) -> None:
        """Raises ConfigError, and StateStoreError at the start; all is as it was then."""
        config = with_live(self._begun, user_config)
        await self._use_keys(config.classes)
        self.in_force.replace(InForce(config, user_config))
        log_by(config.logs.settings())
        for front_end in self._front_ends:
            try:
                await front_end.announcer.tell()
            except StateStoreError as error:
                logger.warning("engines of %s are told when the shared state is back: %s", front_end.name, error)
        await self._candidates.exchange()

    async def _use_keys(self, classes: Collection[str]) -> None:
        """Raises ConfigError when keys name other classes; at the start also what keeps them from being read."""
        try:
            await self._keys.use_classes(classes)
        except StateStoreError as error:
            if self._starts:
                raise
            logger.warning("keys wait for the shared state: %s", error)
        if not self._starts:
            return
        if self._keys.required:
            self._background.repeat(self._keys.reload, RELOAD_S, "keys")
        else:
            logger.warning("no API keys are configured: everybody who reaches this address may use it")
