"""The state of a batch, kept in files alone: it survives the loss of every process and of Redis.

    OWNER/batches/ID/batch        the request for it, written once
    OWNER/batches/ID/cancel       written once, when it is cancelled
    OWNER/batches/ID/log/00000007 segments, numbered from 0: progress in the first line, then lines of output and errors
    open/ID.OWNER                 there until the batch has ended

Object stores cannot append, so every few seconds a segment is written whole. A number can be written once. If two
runners run one batch by mistake, the second to write a number finds it taken, and stops: so each request has one line,
even if it was computed twice.
"""

import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from deployments.batches.files import NotFoundError, check_id, made_at_s, new_id, page_of
from deployments.batches.lines import LineError
from deployments.batches.storage import Storage
from policies.errors import SluiceError

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
ENDED = ("completed", "failed", "expired", "cancelled")
_MAX_HEADER_BYTES = 64 << 20  # the numbers of all lines of a segment, in JSON
_OPEN = "open"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for a batch."""

    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None


class BatchRecord(BatchRequest, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The request as it is kept, by its owner. Times in Unix seconds.

    Attributes:
        key: the name of the API key; None without one.
    """

    id: str
    owner: str
    key: str | None
    created_at: int
    expires_at: int


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


_header = msgspec.json.Decoder(_Header)


class FencedError(SluiceError):
    """Another runner runs this batch."""


class Log:
    """The segments of one batch. Its calls block. An append that has failed may be made again.

    Raises, on every append:
        FencedError: another runner has written since.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._next = 0
        self._tried: bytes | None = None  # of a call that has failed, and may have written it nevertheless

    def read(self) -> tuple[Progress, Iterator[list[int]]]:
        """The latest progress, and the numbers of the requests in each segment. Later appends come behind these."""
        names = self._names()
        self._next = int(names[-1]) + 1 if names else 0
        return self._latest(names), (self._header(name).numbers for name in names)

    def progress(self) -> Progress:
        return self._latest(self._names())

    def _latest(self, names: list[str]) -> Progress:
        return self._header(names[-1]).progress if names else Progress()

    def append(self, progress: Progress, results: list[Result]) -> None:
        header = _Header(progress, [each.number for each in results], [r.number for r in results if r.is_error])
        content = b"\n".join([msgspec.json.encode(header), *(each.line for each in results), b""])
        path, was_tried = f"{self._folder}/{self._next:08d}", content == self._tried
        self._tried = content
        if not self._storage.create(path, content) and not (was_tried and self._storage.read(path) == content):
            raise FencedError("another runner has gone on with this batch")
        self._next, self._tried = self._next + 1, None

    def lines(self, *, errors: bool) -> Iterator[bytes]:
        """The lines of output, or those of errors, with their line ends."""
        for name in self._names():
            lines = self._storage.lines(f"{self._folder}/{name}", _MAX_HEADER_BYTES)
            header = _header.decode(next(lines))
            wrong = set(header.errors)
            yield from (line for number, line in zip(header.numbers, lines, strict=True) if (number in wrong) is errors)

    def _names(self) -> list[str]:
        return self._storage.names(self._folder)

    def _header(self, name: str) -> _Header:
        return _header.decode(next(self._storage.lines(f"{self._folder}/{name}", _MAX_HEADER_BYTES)))


class Batches:
    """All owners' batches. Its calls block."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def create(self, owner: str, key: str | None, asked: BatchRequest, window_s: float) -> BatchRecord:
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"), owner=owner, key=key, created_at=now, expires_at=now + int(window_s), **asdict(asked)
        )
        self._storage.create(_open(owner, record.id), b"")  # first: one that is not found would never run
        self._storage.create(f"{_folder(owner, record.id)}/batch", msgspec.json.encode(record))
        return record

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises NotFoundError."""
        try:
            found = self._storage.read(f"{_folder(owner, check_id(batch_id, 'batch_'))}/batch")
        except FileNotFoundError:
            raise NotFoundError(f"no batch {batch_id!r}") from None
        return msgspec.json.decode(found, type=BatchRecord)

    def page(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Newest first."""
        ids, more = page_of(self.ids(owner), after, limit)
        return [self.get(owner, identity) for identity in ids if self._is_whole(owner, identity)], more

    def _is_whole(self, owner: str, batch_id: str) -> bool:
        return self._storage.exists(f"{_folder(owner, batch_id)}/batch")

    def ids(self, owner: str) -> list[str]:
        return self._storage.names(f"{owner}/batches")

    def cancel(self, record: BatchRecord) -> None:
        """Cancelled at the first call; others change nothing."""
        now = str(int(time.time())).encode()
        self._storage.create(f"{_folder(record.owner, record.id)}/cancel", now)

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """In Unix seconds; None if it was not cancelled."""
        try:
            return int(self._storage.read(f"{_folder(record.owner, record.id)}/cancel"))
        except FileNotFoundError:
            return None

    def log(self, record: BatchRecord) -> Log:
        return Log(self._storage, f"{_folder(record.owner, record.id)}/log")

    def open_ids(self) -> list[tuple[str, str]]:
        """Owner and id of every batch that has not ended, oldest first."""
        found = (name.partition(".") for name in self._storage.names(_OPEN))
        return [(owner, batch_id) for batch_id, _, owner in found]

    def opened(self) -> Iterator[BatchRecord]:
        """Batches that have not ended, oldest first."""
        for owner, batch_id in self.open_ids():
            if self._is_whole(owner, batch_id):
                yield self.get(owner, batch_id)
            elif time.time() - made_at_s(batch_id) > 3600:  # its creator has been lost before it was written
                self._storage.remove(_open(owner, batch_id))

    def close(self, record: BatchRecord) -> None:
        """Once its log tells how it ended."""
        self._storage.remove(_open(record.owner, record.id))

    def remove(self, owner: str, batch_id: str) -> None:
        self._storage.remove(_folder(owner, batch_id))

    def owners(self) -> list[str]:
        return [name for name in self._storage.names("") if name != _OPEN]

    def as_openai(self, record: BatchRecord) -> dict[str, Any]:
        """OpenAI's `Batch`, as it is now."""
        progress, cancelled_at = self.log(record).progress(), self.cancelled_at(record)
        status: str = progress.status
        if cancelled_at is not None and status in ("validating", "in_progress"):
            status = "cancelling"
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
            "cancelling_at": cancelled_at if status in ("cancelling", "cancelled") else None,
            **ended,
            "request_counts": {"total": progress.total, "completed": progress.completed, "failed": progress.failed},
            "usage": progress.tokens.as_openai() if progress.tokens != Tokens() else None,
            "metadata": metadata,
        }


def _iso(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _folder(owner: str, batch_id: str) -> str:
    return f"{owner}/batches/{batch_id}"


def _open(owner: str, batch_id: str) -> str:
    return f"{_OPEN}/{batch_id}.{owner}"
