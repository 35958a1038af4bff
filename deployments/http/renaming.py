"""What a switch between versions of a model reads of a body, and writes into it."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from deployments.http.bodies import IN_A_THREAD_BYTES

T = TypeVar("T")


class _GoesOn(msgspec.Struct):
    previous_response_id: str | None = None


_goes_on = msgspec.json.Decoder(_GoesOn)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
# vLLM reads bodies as Python does, which allows NaN, half of a surrogate pair, and other encodings.
_LEFT_TO_PYTHON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


async def renamed(body: bytes, name: str) -> bytes:
    """The same JSON object with another `model`. All other values stay as they are, byte by byte, and are not made
    objects of.

    Args:
        body: of which a model's name was read already.
    """
    return await _by_size(body, partial(_renamed, name=name))


async def previous_response(body: bytes) -> str | None:
    """The id of the response from which it goes on; a body as for `renamed`."""
    return await _by_size(body, _previous)


async def _by_size(body: bytes, read: Callable[[bytes], T]) -> T:
    """In a thread where that takes longer than one takes to start."""
    return read(body) if len(body) < IN_A_THREAD_BYTES else await asyncio.to_thread(read, body)


def _renamed(body: bytes, name: str) -> bytes:
    try:
        return msgspec.json.encode({**_fields.decode(body), "model": name})
    except _LEFT_TO_PYTHON:
        return json.dumps({**json.loads(body), "model": name}).encode()


def _previous(body: bytes) -> str | None:
    try:
        return _goes_on.decode(body).previous_response_id
    except _LEFT_TO_PYTHON:
        previous = json.loads(body).get("previous_response_id")
        return previous if isinstance(previous, str) else None
