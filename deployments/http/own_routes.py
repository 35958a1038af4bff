"""Routes of Sluice's own, in front of vLLM's application."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.middleware import route_path


def in_front_of(app: ASGIApp, ours: re.Pattern[str], own: ASGIApp) -> ASGIApp:
    """`own` answers requests that `ours` matches, which are written as "GET /v1/files", and `app` all others."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and ours.fullmatch(f"{scope['method']} {route_path(scope)}")
        await (own if is_ours else app)(scope, receive, send)

    return answer
