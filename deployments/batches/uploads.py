"""Uploads on their way: each is on this machine's disk until it is whole and stored.

No slow client keeps others from uploading: an upload takes a slot only once it is whole, must come at a least rate, and
where all together are too many or too large, one of the key with the most gives way, the slowest. So does one that is
whole and waits for its slot: where the folder is slow, one key's files would keep all others from coming.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.types import Message, Receive

from deployments.http.errors import HttpError

T = TypeVar("T")

MOST_AT_ONCE = 64  # on their way to one router: each has up to a megabyte in memory, and then a file on the disk
MOST_FILES = 4  # as large as one may be, whose bytes all that are not being stored may have together
STORED_AT_ONCE = 4  # each keeps a thread busy, and as much of the disk
LEAST_BYTES_PER_S = 16 << 10  # on average, after the first GRACE_S
GRACE_S = 30.0


@dataclass(slots=True, eq=False)
class Upload:
    """One that is not stored yet."""

    owner: str
    began_s: float = field(default_factory=time.monotonic)
    bytes: int = 0
    is_whole: bool = False
    is_being_stored: bool = False
    gave_way: bool = False
    deadline: asyncio.Timeout | None = None

    def rate(self, now_s: float) -> float:
        """Bytes per second; of one that has just begun no bytes are expected yet."""
        return self.bytes / (now_s - self.began_s) if now_s - self.began_s > 1.0 else float("inf")


class Uploads:
    """Those of one process."""

    def __init__(self, max_file_bytes: int, timeout_s: float) -> None:
        """Args:
        timeout_s: from the first byte of one until it is stored, the wait for others that are stored included.
        """
        self._max_file_bytes, self._timeout_s = max_file_bytes, timeout_s
        self._open: set[Upload] = set()
        self._slots = asyncio.Semaphore(STORED_AT_ONCE)

    @contextlib.asynccontextmanager
    async def receiving(self, owner: str) -> AsyncIterator[Upload]:
        """Raises HttpError: it is too slow, or gave way to others."""
        upload = Upload(owner)
        try:
            async with asyncio.timeout(min(GRACE_S, self._timeout_s)) as upload.deadline:
                self._open.add(upload)
                self._make_room()
                yield upload
        except TimeoutError as error:
            raise self._given_up(upload) from error
        finally:
            self._open.discard(upload)

    def bounded(self, upload: Upload, receive: Receive) -> Receive:
        """Receives its body, no more of it than one file may have. Raises HttpError."""
        most = self._max_file_bytes + (64 << 10)  # for the form's other fields and its separators

        async def next_part() -> Message:
            message = await receive()
            upload.bytes += len(message.get("body", b""))
            if upload.bytes > most:
                why = f"the file exceeds {self._max_file_bytes} bytes (batches.max_file_bytes)"
                raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
            self._extend(upload)
            self._make_room()
            return message

        return next_part

    async def stored(self, upload: Upload, storing: Coroutine[Any, Any, T]) -> T:
        """Store one that is whole, in its turn: from now on its client's pace is no matter."""
        with contextlib.closing(storing):  # it may be given up before its turn
            upload.is_whole = True
            self._extend(upload)
            async with self._slots:
                if upload.gave_way:  # a moment ago
                    raise TimeoutError
                upload.is_being_stored = True
                return await storing

    def _extend(self, upload: Upload) -> None:
        """Each byte brings time, until the time of the whole."""
        assert upload.deadline is not None, "it has one from its beginning"
        if upload.gave_way:
            return
        allowed_s = self._timeout_s
        if not upload.is_whole:
            allowed_s = min(allowed_s, GRACE_S + upload.bytes / LEAST_BYTES_PER_S)
        passed_s = time.monotonic() - upload.began_s
        upload.deadline.reschedule(asyncio.get_running_loop().time() + allowed_s - passed_s)

    def _make_room(self) -> None:
        coming = [each for each in self._open if not each.is_being_stored and not each.gave_way]
        are_too_large = sum(each.bytes for each in coming) > MOST_FILES * self._max_file_bytes
        if not are_too_large and len(coming) <= MOST_AT_ONCE:
            return
        most, now_s = Counter[str](), time.monotonic()
        for each in coming:
            most[each.owner] += each.bytes if are_too_large else 1
        slowest = min(coming, key=lambda each: (-most[each.owner], each.rate(now_s)))
        assert slowest.deadline is not None, "it has one from its beginning"
        if not slowest.deadline.expired():  # else its bytes come back in a moment
            slowest.gave_way = True
            slowest.deadline.reschedule(0)

    def _given_up(self, upload: Upload) -> HttpError:
        if upload.gave_way:
            why = "there are too many uploads, and this is the slowest: try again"
            return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": "5"})
        if upload.is_whole or time.monotonic() - upload.began_s >= self._timeout_s:
            why = f"the file was not stored within {self._timeout_s:g} s (batches.upload_timeout_s)"
        else:
            why = f"the file came at less than {LEAST_BYTES_PER_S} bytes a second"
        return HttpError(HTTPStatus.REQUEST_TIMEOUT, why, {"Connection": "close"})
