"""The deployment that speaks HTTP, as Ray Serve sees it."""

import asyncio
import logging
import uuid

from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Scope

from deployments.batches.results import Reply as BatchReply
from deployments.config.application import AppConfig
from deployments.http.in_process import ask
from deployments.http.middleware import REQUEST_ID_HEADER, TENANT
from deployments.http.promises import CLASS_HEADER
from deployments.process.logs import log_by
from deployments.process.loopback import keep_to_loopback
from deployments.serving.autoscaling import LoopUse, Stats
from deployments.serving.batch_runner import RemoteRunner
from deployments.serving.lifetime import Lifetime
from deployments.serving.service import Service, opened_service
from policies.batches.in_flight import Load
from router.admission import Tenant
from router.trail import TraceHeaders

logger = logging.getLogger(__name__)


class Router:
    """Any number of them share the bins through the state store.

    Requests go over the relay's wire, not to `engines`, which are all groups of every model, those for all classes
    first: that they are bound here makes Ray Serve deploy them.
    `redis_url` is None where the application has an embedded Redis.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: AppConfig,
        redis_url: str | None,
        engines: list[list[DeploymentHandle]],
        api_keys: str | None,
        predictor: DeploymentHandle | None = None,
        batches: DeploymentHandle | None = None,
    ) -> None:
        self._lifetime, self._loop_use = Lifetime(), LoopUse()
        log_by(config.logs.settings())
        keep_to_loopback()
        runner = None if batches is None else RemoteRunner(batches)
        opening = opened_service(
            config,
            redis_url,
            engines=[groups[0] for groups in engines],
            api_keys=api_keys,
            predictor=predictor,
            batches=runner,
        )
        self._class_of_batches = config.batches.slo_class
        self._service: Service = await self._lifetime.start(self._lifetime.resources.enter_async_context(opening))

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this in the replica, once, after __init__."""
        return self._service.app

    async def reconfigure(self, user_config: object, rank: object) -> None:
        """Ray Serve calls this once the application is built, before a request comes, and whenever the deployment's
        `user_config` has changed. With `rank` it does so also where there is none.

        Raises:
            ConfigError, StateStoreError: as `UserConfig.change`, at the start; all is closed then.
        """
        try:
            await self._service.user_config.change({} if user_config is None else user_config)
        except Exception:  # Ray Serve replaces this router
            await self._lifetime.end()
            raise

    async def answer_of_batch(
        self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None = None
    ) -> BatchReply:
        """To one request of a batch, in the name of the API key that made it; for the runner."""
        tenant = None if key is None else self._service.keys.named(key)
        scope = _scope(endpoint, tenant, self._class_of_batches, trace)
        reply = await ask(self._service.middleware, scope, body)
        retry_after = Headers(raw=reply.headers).get("retry-after")
        return BatchReply(reply.status, reply.body, None if retry_after is None else float(retry_after))

    async def loads(self) -> dict[str, Load]:
        """The load of every model, by each of its names; for the runner of batches.

        Raises:
            StateStoreError: the shared state is away.
        """
        front_ends = self._service.front_ends
        loads = await asyncio.gather(*(front_end.load() for front_end in front_ends))
        pairs = zip(front_ends, loads, strict=True)
        found = {name: load for front_end, load in pairs for name in front_end.names}
        return {**found, **{of: found[name] for of, name in self._service.candidates.promoted.items()}}

    def check_health(self) -> None:
        """Ray Serve replaces the router for which it raises: one that fails at once would draw all requests to it."""
        for front_end in self._service.front_ends:
            front_end.check_health()

    async def record_autoscaling_stats(self) -> Stats:
        """Ray Serve asks for it where routers are scaled."""
        return self._loop_use.report(*self._service.front_ends[0].metrics.loop_lag)

    async def __del__(self) -> None:
        await self._lifetime.end()


def _scope(path: str, tenant: Tenant | None, slo_class: str, trace: TraceHeaders | None) -> Scope:
    """The scope of a request for JSON that this process makes itself."""
    own = {"content-type": "application/json", CLASS_HEADER: slo_class, REQUEST_ID_HEADER: uuid.uuid4().hex}
    headers = {**own, **(trace or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": Headers(headers).raw,
        "client": None,
        "server": None,
        TENANT: tenant,
    }
