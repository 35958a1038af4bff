"""An application asked in its own process, without a connection."""

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope

logger = logging.getLogger(__name__)


@dataclass
class Reply:
    """One application's answer, whole."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


def after(first: Message, receive: Receive) -> Receive:
    """That message once more, and then what follows."""
    held = [first]

    async def next_message() -> Message:
        return held.pop() if held else await receive()

    return next_message


def replayed(body: bytes, receive: Receive) -> Receive:
    return after({"type": "http.request", "body": body, "more_body": False}, receive)


async def ask(app: ASGIApp, scope: Scope, body: bytes = b"") -> Reply:
    """One application's answer; 500 when it raises instead. Whoever no longer waits for it cancels this."""
    reply, parts = Reply(), list[bytes]()

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    async def nothing_more() -> Message:
        """Until the answer is there, and whoever listens for a disconnect is stopped."""
        return await asyncio.Future()

    try:
        await app(dict(scope), replayed(body, nothing_more), keep)
    except Exception:  # of whatever kind: who asked several applications has the others' answers all the same
        logger.exception("%s failed", scope["path"])
        reply.status = HTTPStatus.INTERNAL_SERVER_ERROR
    reply.body = b"".join(parts)
    return reply
