"""The state of a batch, kept in files alone: it survives the loss of every process and of Redis.

    OWNER/batches/ID/batch        the request for it, written once
    OWNER/batches/ID/cancel       written once, when it is cancelled
    OWNER/batches/ID/log/00000007 segments, numbered from 0: progress in the first line, then lines of output and errors
    OWNER/batches/ID/end          its last progress, once its files are whole: then the log goes
    open/ID.OWNER                 there until the batch has ended

Object stores cannot append, so every few seconds a segment is written whole. A number can be written once. If two
runners run one batch by mistake, the second to write a number finds it taken, or the batch ended, and stops: so each
request has one line, even if it was computed twice.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from deployments.batches.files import (
    ExpiresAfter,
    NotFoundError,
    UnreadableError,
    check_id,
    decoded,
    is_id,
    made_at_s,
    new_id,
    page_of,
)
from deployments.batches.ledger import ENDED as ENDED_BATCH
from deployments.batches.ledger import OPEN, Entry, Ledger
from deployments.batches.lines import LineError
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from policies.errors import SluiceError

logger = logging.getLogger(__name__)

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
ENDED = ("completed", "failed", "expired", "cancelled")
_MAX_HEADER_BYTES = 64 << 20  # the numbers of all lines of a segment, in JSON
_OPEN = "open"
RECORD_BYTES = 4096  # of a batch, in its smallest files
# The line of an error of 190 bytes with its custom_id, for a line of at least 85 bytes with the same.
_ERROR_BYTES_PER_INPUT_BYTE = 2.5


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a batch."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchRecord(BatchRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The request as it is kept, by its owner. Times in Unix seconds.

    Attributes:
        key: the name of the API key; None without one.
        input_bytes: of its input file; 0 of batches of an earlier version.
    """

    id: str
    owner: str
    key: str | None
    created_at: int
    expires_at: int
    input_bytes: int = 0

    @property
    def output_keep_s(self) -> float | None:
        return None if self.output_expires_after is None else self.output_expires_after.seconds


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of finished requests, as their answers count them; `input` includes `cached`, `output` `reasoning`."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            self.input + other.input,
            self.cached + other.cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )

    def as_openai(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


class Progress(msgspec.Struct, frozen=True):
    """How far a batch is. Times in Unix seconds, None until then.

    Attributes:
        total: requests, once they are counted; `last` is the number of the last one's line.
        ending: its status once its files are written, known when nothing more is sent.
    """

    status: Status = "validating"
    model: str | None = None
    total: int = 0
    last: int = 0
    completed: int = 0
    failed: int = 0
    tokens: Tokens = Tokens()
    errors: tuple[LineError, ...] = ()
    ending: Status | None = None
    expected_end: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def remaining(self) -> int:
        return self.total - self.completed - self.failed


class Result(msgspec.Struct, frozen=True):
    """The line of output, or of errors, for the request in line `number` of the input."""

    number: int
    is_error: bool
    line: bytes


class _Header(msgspec.Struct):
    progress: Progress
    numbers: list[int]
    errors: list[int]  # the numbers of those that failed


class FencedError(SluiceError):
    """Another runner runs this batch."""


class Segment(NamedTuple):
    """The numbers of the requests whose results are in a segment, and of those that failed."""

    numbers: list[int]
    errors: list[int]


class Log:
    """The segments of one batch, and its end. Its calls block. A write that has failed may be made again.

    Raises, on every write:
        FencedError: another runner has written since.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, f"{folder}/log"
        self._end = f"{folder}/end"
        self._next = 0
        self._tried: bytes | None = None  # of a call that has failed, and may have written it nevertheless

    def read(self) -> tuple[Progress, Iterator[Segment]]:
        """The latest progress, and what is in each segment. Later appends come behind these."""
        names = self._names()
        self._next = int(names[-1]) + 1 if names else 0
        return self.progress(), (Segment(each.numbers, each.errors) for each in map(self._header, names))

    def progress(self) -> Progress:
        """One read once the batch has ended."""
        if (ended := self._ended()) is not None:
            return ended
        names = self._names()
        try:
            return self._header(names[-1]).progress if names else self._ended() or Progress()
        except FileNotFoundError:  # it has ended this moment
            return self._ended() or Progress()

    def _ended(self) -> Progress | None:
        try:
            return decoded(self._storage.read(self._end), Progress, self._end)
        except FileNotFoundError:
            return None

    def append(self, progress: Progress, results: list[Result]) -> int:
        """Returns the size of the segment in bytes."""
        header = _Header(progress, [each.number for each in results], [r.number for r in results if r.is_error])
        content = b"\n".join([msgspec.json.encode(header), *(each.line for each in results), b""])
        path = f"{self._folder}/{self._next:08d}"
        self._create(path, content)
        if self._storage.exists(self._end):  # the log was gone already, and anyone could write to it
            self._storage.remove(path)
            raise _fenced()
        self._next, self._tried = self._next + 1, None
        return len(content)

    def end(self, progress: Progress) -> None:
        """What the batch has become."""
        self._create(self._end, msgspec.json.encode(progress))

    def end_as_it_is(self) -> None:
        """Where an earlier version has told the end in the log alone."""
        self._storage.create(self._end, msgspec.json.encode(self.progress()))

    def remove(self) -> None:
        self._storage.remove(self._folder)

    def _create(self, path: str, content: bytes) -> None:
        was_tried, self._tried = content == self._tried, content
        if not self._storage.create(path, content) and not (was_tried and self._storage.read(path) == content):
            raise _fenced()

    def size_bytes(self) -> int:
        return self._storage.size_of_folder(self._folder)

    def lines(self, *, errors: bool) -> Iterator[bytes]:
        """The lines of output, or those of errors, with their line ends."""
        for name in self._names():
            lines = self._storage.lines(f"{self._folder}/{name}", _MAX_HEADER_BYTES)
            header = decoded(next(lines, b""), _Header, name)
            wrong = set(header.errors)
            yield from (line for number, line in zip(header.numbers, lines, strict=True) if (number in wrong) is errors)

    def _names(self) -> list[str]:
        return self._storage.names(self._folder)

    def _header(self, name: str) -> _Header:
        path = f"{self._folder}/{name}"
        return decoded(next(self._storage.lines(path, _MAX_HEADER_BYTES), b""), _Header, path)


def _fenced() -> FencedError:
    return FencedError("another runner has gone on with this batch")


class Batches:
    """All owners' batches. Its calls block."""

    def __init__(self, storage: Storage, section: BatchesSection) -> None:
        self._storage, self._section, self._ledger = storage, section, Ledger(storage, section)

    def create(
        self, owner: str, key: str | None, asked: BatchRequest, window_s: float, input_bytes: int = 0
    ) -> BatchRecord:
        """Raises FullError: what it may write does not fit."""
        self._storage.set_clock()
        now_s = self._storage.now_s()
        now = int(now_s)
        record = BatchRecord(
            id=new_id("batch_", now_s),
            owner=owner,
            key=key,
            created_at=now,
            expires_at=now + int(window_s),
            input_bytes=input_bytes,
            **{name: getattr(asked, name) for name in BatchRequest.__struct_fields__},
        )
        self._forget(owner)
        self._ledger.enter(owner, Entry(record.id, OPEN, bytes_to_write(record), 0))
        try:
            self._storage.create(_open(owner, record.id), b"")  # first: one that is not found would never run
            self._storage.create(f"{_folder(owner, record.id)}/batch", msgspec.json.encode(record))
        except BaseException:
            self._storage.remove(_open(owner, record.id))
            self.remove(owner, record.id)
            raise
        return record

    def _forget(self, owner: str) -> None:
        """The oldest of more ended batches than an owner may have."""
        ended = [each.id for each in self._ledger.entries(owner) if each.kind == ENDED_BATCH]
        for batch_id in ended[: -self._section.max_files]:
            self.remove(owner, batch_id)

    def reserve(self, record: BatchRecord, size: int | None = None) -> bool:
        """Count so many bytes for an open batch, by default what it needs at least. Whether they fit."""
        return self._ledger.put(record.owner, Entry(record.id, OPEN, size or bytes_to_write(record), 0))

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises NotFoundError, UnreadableError."""
        try:
            found = self._storage.read(f"{_folder(owner, check_id(batch_id, 'batch_'))}/batch")
        except FileNotFoundError:
            raise NotFoundError(f"no batch {batch_id!r}") from None
        return decoded(found, BatchRecord, batch_id)

    def page(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Newest first. Raises CursorError."""
        ids = (each.id for each in self._ledger.entries(owner) if not each.is_file)
        return page_of(ids, after, "batch_", limit, partial(self.get, owner), self._storage.now_s())

    def _is_whole(self, owner: str, batch_id: str) -> bool:
        return self._storage.exists(f"{_folder(owner, batch_id)}/batch")

    def ids(self, owner: str) -> list[str]:
        return [name for name in self._storage.names(f"{owner}/batches") if is_id(name, "batch_")]

    def cancel(self, record: BatchRecord) -> None:
        """Cancelled at the first call; others change nothing."""
        now = str(int(self._storage.now_s())).encode()
        self._storage.create(f"{_folder(record.owner, record.id)}/cancel", now)

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """In Unix seconds; None if it was not cancelled."""
        try:
            return decoded(self._storage.read(f"{_folder(record.owner, record.id)}/cancel"), int, record.id)
        except FileNotFoundError:
            return None

    def now_s(self) -> float:
        """As `Storage.now_s`: the clock by which windows are set and judged."""
        return self._storage.now_s()

    def log(self, record: BatchRecord) -> Log:
        return Log(self._storage, _folder(record.owner, record.id))

    def open_ids(self) -> list[tuple[str, str]]:
        """Owner and id of every batch that has not ended, oldest first."""
        found = (name.partition(".") for name in self._storage.names(_OPEN))
        return [(owner, batch_id) for batch_id, _, owner in found if is_id(batch_id, "batch_")]

    def opened(self) -> Iterator[BatchRecord]:
        """Batches that have not ended, oldest first."""
        self._storage.set_clock()
        for owner, batch_id in self.open_ids():
            if self._is_whole(owner, batch_id):
                try:
                    record = self.get(owner, batch_id)
                except UnreadableError as error:  # it keeps no other from running
                    logger.error("%s of %s cannot be read, so it does not run: %s", batch_id, owner, error)
                else:
                    yield record
            elif self._storage.now_s() - made_at_s(batch_id) > 3600:  # its creator has been lost before it was written
                self._storage.remove(_open(owner, batch_id))
                self.remove(owner, batch_id)

    def close(self, record: BatchRecord) -> None:
        """Once its progress tells how it ended, and its files are whole: the log goes."""
        self._end(record.owner, record.id)
        self._storage.remove(_open(record.owner, record.id))

    def settle(self, owner: str, batch_id: str) -> None:
        """One that is not among the open ones, though it has no entry of an ended one."""
        if not self._is_whole(owner, batch_id):
            self.remove(owner, batch_id)
            return
        try:
            status = Log(self._storage, _folder(owner, batch_id)).progress().status
        except UnreadableError as error:
            logger.error("%s of %s stays as it is: %s", batch_id, owner, error)
            return
        if status in ENDED:
            self._end(owner, batch_id)
        else:  # only its mark is lost
            self._storage.create(_open(owner, batch_id), b"")

    def _end(self, owner: str, batch_id: str) -> None:
        folder = _folder(owner, batch_id)
        log = Log(self._storage, folder)
        log.end_as_it_is()
        log.remove()
        size = self._storage.size_of_folder(folder) + RECORD_BYTES
        expires_at = int(self._storage.now_s() + self._section.keep_s)
        self._ledger.put(owner, Entry(batch_id, ENDED_BATCH, size, expires_at))

    def remove(self, owner: str, batch_id: str) -> None:
        self._storage.remove(_folder(owner, batch_id))
        self._ledger.strike(owner, batch_id)

    def owners(self) -> list[str]:
        """What else lies there is not ours, as `lost+found`."""
        return [name for name in self._storage.names("") if name.isalnum() and name != _OPEN]

    def as_openai(self, record: BatchRecord) -> dict[str, Any]:
        """OpenAI's `Batch`, as it is now."""
        progress, cancelled_at = self.log(record).progress(), self.cancelled_at(record)
        status: str = progress.status
        if cancelled_at is not None and status in ("validating", "in_progress"):
            status = "cancelling"
        ends_so = progress.ending == "cancelled" or status in ("cancelling", "cancelled")
        metadata = record.metadata
        if progress.expected_end is not None and status == "in_progress":
            metadata = {**(metadata or {}), "sluice_expected_end": _iso(progress.expected_end)}
        ended = {f"{each}_at": progress.ended_at if status == each else None for each in ENDED}
        errors = [msgspec.to_builtins(each) for each in progress.errors]
        return {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "model": progress.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": status,
            "output_file_id": progress.output_file_id,
            "error_file_id": progress.error_file_id,
            "created_at": record.created_at,
            "in_progress_at": progress.in_progress_at,
            "expires_at": record.expires_at,
            "finalizing_at": progress.finalizing_at,
            "cancelling_at": cancelled_at if ends_so else None,
            **ended,
            "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
            "usage": progress.tokens.as_openai() if progress.tokens != Tokens() else None,
            "metadata": metadata,
        }


def bytes_to_write(record: BatchRecord, remaining: float = 1.0, log_bytes: int = 0) -> int:
    """What a batch takes at its end, when its results stand in the log and in its files, and each request without an
    answer has an error.

    Args:
        remaining: the part of its requests that have no result yet.
        log_bytes: what its log has already.
    """
    return RECORD_BYTES + 2 * (log_bytes + int(remaining * _ERROR_BYTES_PER_INPUT_BYTE * record.input_bytes))


def _iso(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _folder(owner: str, batch_id: str) -> str:
    return f"{owner}/batches/{batch_id}"


def _open(owner: str, batch_id: str) -> str:
    return f"{_OPEN}/{batch_id}.{owner}"
