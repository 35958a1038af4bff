"""Bodies of requests as a router reads them."""

from deployments.http.bodies import RequestBodies
from deployments.http.limits import RequestLimits
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
    return RequestBodies(limits, max_buffered_bytes=max_buffered_bytes, timeout_s=timeout_s)
