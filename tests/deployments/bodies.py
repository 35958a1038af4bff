"""The middleware around an application of a test, and clients of that."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio as redis
from starlette.types import ASGIApp

from deployments.http.bodies import BodyLimits, RequestBodies
from deployments.http.keys import KeyRing
from deployments.http.limits import RequestLimits
from deployments.http.middleware import SluiceMiddleware
from deployments.http.promises import Promises
from policies.live import Live
from policies.router.promise import NO_PROMISE
from router.admission import Tenant


async def free(tenant: Tenant | None, tokens: float) -> None:
    """In place of a charge."""


def request_bodies(
    max_body_bytes: int | None = None,
    *,
    context_tokens: int = 2048,
    max_buffered_bytes: int = 64 << 20,
    timeout_s: float = 30.0,
) -> RequestBodies:
    limits = RequestLimits.of_context(
        context_tokens, takes_media=False, max_body_bytes=max_body_bytes, max_engine_requests=256
    )
    return RequestBodies(Live(BodyLimits(request=limits, max_buffered_bytes=max_buffered_bytes, timeout_s=timeout_s)))


def key_ring(
    classes: Collection[str] = ("standard",),
    *,
    file: Path | None = None,
    entries: Iterable[Mapping[str, Any]] | None = None,
    client: "redis.Redis | None" = None,
    application: str = "app",
) -> KeyRing:
    """entries: of the environment; without any source no key is needed."""
    environment = None if entries is None else json.dumps(list(entries))
    return KeyRing(file=file, environment=environment, client=client, application=application, classes=classes)


def behind_middleware(app: ASGIApp, classes: Iterable[str] = ("standard",), **parts: Any) -> SluiceMiddleware:
    """parts: those that differ, by their names in SluiceMiddleware."""
    promises = parts.pop("promises", Promises(dict.fromkeys(classes, NO_PROMISE), "standard"))
    others = {"bodies": request_bodies(), "promises": Live(promises), "keys": key_ring(tuple(classes)), "charge": free}
    return SluiceMiddleware(app, **{**others, **parts})


def asking(app: ASGIApp, *, prefix: str = "", raises: bool = True) -> httpx.AsyncClient:
    """A client of an application in this process.

    prefix: as Ray Serve's `route_prefix`, which stands in the path and in the root path.
    """
    transport = httpx.ASGITransport(app, raise_app_exceptions=raises, root_path=prefix)
    return httpx.AsyncClient(transport=transport, base_url="http://sluice")
