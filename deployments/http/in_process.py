"""An application asked in its own process, without a connection."""

import asyncio
import logging
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope

logger = logging.getLogger(__name__)


@dataclass
class Reply:
    """The whole answer of an application."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


def after(first: Message, receive: Receive) -> Receive:
    """Receives that message once more, and then what follows it."""
    held = [first]

    async def next_message() -> Message:
        return held.pop() if held else await receive()

    return next_message


def replayed(body: bytes, receive: Receive) -> Receive:
    """Receives the whole body in one message, and then what follows it: that the client leaves."""
    return after({"type": "http.request", "body": body, "more_body": False}, receive)


async def ask(app: ASGIApp, scope: Scope, body: bytes = b"") -> Reply:
    """The answer of one application; 500 when it raises instead. To stop waiting, cancel this."""
    reply, parts = Reply(), list[bytes]()

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    async def nothing_more() -> Message:
        """The application may listen for a disconnect until its answer is there."""
        return await asyncio.Future()

    try:
        await app(dict(scope), replayed(body, nothing_more), keep)
    except Exception:  # of any kind: a caller that asks several applications gets the others' answers all the same
        logger.exception("%s failed", scope["path"])
        reply.status = HTTPStatus.INTERNAL_SERVER_ERROR
    reply.body = b"".join(parts)
    return reply
