"""Files of OpenAI's API, each of one owner: `OWNER/files/ID/content` and, once that is whole, `OWNER/files/ID/file`."""

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from deployments.batches.ledger import Entry, Ledger
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from policies.errors import SluiceError

T = TypeVar("T")
logger = logging.getLogger(__name__)

NOBODY = "anyone"  # the owner of files and batches that come without a key
CLOCKS_APART_S = 3600.0  # an id of a host whose clock is ahead is one of ours
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class FileRecord(msgspec.Struct, frozen=True):
    """`created_at` and `expires_at` in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def as_openai(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "object": "file", "status": "processed"}


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From when on, and after how long, a file goes; OpenAI has these bounds."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600)]


class NotFoundError(SluiceError):
    """The owner has nothing by this id."""


class UnreadableError(NotFoundError):
    """What lies there by this id is damaged, or of a version that writes it otherwise. It keeps its place: nothing but
    its owner removes it, and it stands in the way of nothing else."""


def decoded(content: bytes, kind: type[T], what: str) -> T:
    """Raises UnreadableError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{what} is there, and cannot be read: {error}") from error


def owner_of(key: str | None) -> str:
    """The folder of an API key's name, which may hold any character."""
    return NOBODY if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]


def new_id(kind: str, now_s: float) -> str:
    """Ids sort by when they were made, by `Storage.now_s`."""
    return f"{kind}{int(now_s * 1000):012x}{secrets.token_hex(10)}"


def derived_id(kind: str, batch_id: str, part: str) -> str:
    """The id of a file of a batch: the same at every call, and sorted by when the batch was made."""
    return f"{kind}{batch_id[-32:-20]}{hashlib.sha256(f'{batch_id}{part}'.encode()).hexdigest()[:20]}"


def made_at_s(identity: str) -> float:
    """The time of an id, in Unix seconds."""
    return int(identity[-32:-20], 16) / 1e3


def check_id(identity: str, kind: str) -> str:
    """Raises NotFoundError for what none of ours looks like, as a path."""
    if not is_id(identity, kind):
        raise NotFoundError(f"no {kind[:-1]} {identity[:64]!r}")
    return identity


def is_id(identity: str, kind: str) -> bool:
    return _ID.fullmatch(identity) is not None and identity.startswith(kind)


class CursorError(SluiceError):
    """A page cannot come after what is no id."""


def page_of(
    ids: Iterable[str], after: str | None, kind: str, limit: int, get: Callable[[str], T], now_s: float
) -> tuple[list[T], bool]:
    """Newest first, and whether more follow. `after` may have been removed meanwhile. What cannot be read is left out.

    Args:
        get: reads one; raises NotFoundError for one that is not whole yet, or was removed meanwhile.

    Raises:
        CursorError: `after` never was an id.
    """
    if after is not None and not (is_id(after, kind) and made_at_s(after) <= now_s + CLOCKS_APART_S):
        raise CursorError(f"after must be the id of a {kind[:-1]} on the page before, got {after[:64]!r}")
    found: list[T] = []
    for identity in sorted((each for each in ids if after is None or each < after), reverse=True):
        if len(found) == limit:
            return found, True
        try:
            found.append(get(identity))
        except UnreadableError as error:
            logger.error("a list is without one: %s", error)
        except NotFoundError:
            pass
    return found, False


class Files:
    """All owners' files. Its calls block."""

    def __init__(self, storage: Storage, section: BatchesSection) -> None:
        self._storage, self._keep_s, self._ledger = storage, section.keep_s, Ledger(storage, section)

    def upload(
        self, owner: str, filename: str, chunks: Iterable[bytes], size: int, keep_s: float | None = None
    ) -> FileRecord:
        """Raises FullError: it does not fit."""
        self._storage.set_clock()
        now_s = self._storage.now_s()
        now = int(now_s)
        record = FileRecord(new_id("file-", now_s), size, now, now + int(keep_s or self._keep_s), filename, "batch")
        self._ledger.enter(owner, _entry(record))
        try:
            self._storage.write(f"{self._folder(owner, record.id)}/content", chunks)
            self._write_record(owner, record)
        except BaseException:
            self.remove(owner, record.id)
            raise
        return record

    def add(
        self,
        owner: str,
        filename: str,
        purpose: str,
        chunks: Iterable[bytes],
        file_id: str = "",
        keep_s: float | None = None,
    ) -> FileRecord:
        """A file for which there is room. One with the caller's id may exist already, with the same content."""
        identity = file_id or new_id("file-", self._storage.now_s())
        size = self._storage.write(f"{self._folder(owner, identity)}/content", chunks)
        now = int(self._storage.now_s())
        record = FileRecord(identity, size, now, now + int(keep_s or self._keep_s), filename, purpose)
        self._write_record(owner, record)
        self._ledger.put(owner, _entry(self._record(owner, identity)))
        return record

    def _write_record(self, owner: str, record: FileRecord) -> None:
        self._storage.create(f"{self._folder(owner, record.id)}/file", msgspec.json.encode(record))

    def get(self, owner: str, file_id: str) -> FileRecord:
        """Raises NotFoundError, also where it has expired."""
        try:
            record = self._record(owner, check_id(file_id, "file-"))
        except FileNotFoundError:
            raise NotFoundError(f"no file {file_id!r}") from None
        if record.expires_at <= self._storage.now_s():
            raise NotFoundError(f"{file_id!r} has expired")
        return record

    def _record(self, owner: str, file_id: str) -> FileRecord:
        """Raises FileNotFoundError, UnreadableError."""
        return decoded(self._storage.read(f"{self._folder(owner, file_id)}/file"), FileRecord, file_id)

    def page(self, owner: str, after: str | None, limit: int, purpose: str | None) -> tuple[list[FileRecord], bool]:
        """Newest first. Raises CursorError."""
        now_s = self._storage.now_s()
        entries = (each for each in self._ledger.entries(owner) if each.is_file and each.expires_at > now_s)
        ids = (each.id for each in entries if purpose in (None, each.kind))
        return page_of(ids, after, "file-", limit, partial(self.get, owner), now_s)

    def ids(self, owner: str) -> list[str]:
        return [name for name in self._storage.names(f"{owner}/files") if is_id(name, "file-")]

    def is_whole(self, owner: str, file_id: str) -> bool:
        return self._storage.exists(f"{self._folder(owner, file_id)}/file")

    def enter_anew(self, owner: str, file_id: str) -> None:
        """What has lost its entry, or never had one: an earlier version wrote none."""
        try:
            self._ledger.put(owner, _entry(self._record(owner, file_id)))
        except FileNotFoundError:
            pass
        except UnreadableError as error:
            logger.error("%s counts for nothing: %s", owner, error)

    def chunks(self, owner: str, file_id: str) -> Iterator[bytes]:
        return self._storage.chunks(f"{self._folder(owner, file_id)}/content")

    def lines(self, owner: str, file_id: str, max_bytes: int) -> Iterator[bytes]:
        """As `Storage.lines`."""
        return self._storage.lines(f"{self._folder(owner, file_id)}/content", max_bytes)

    def remove(self, owner: str, file_id: str) -> None:
        """The record goes first, so that nobody finds a file without content."""
        self._storage.remove(f"{self._folder(owner, file_id)}/file")
        self._storage.remove(self._folder(owner, file_id))
        self._ledger.strike(owner, file_id)

    @staticmethod
    def _folder(owner: str, file_id: str) -> str:
        return f"{owner}/files/{file_id}"


def _entry(record: FileRecord) -> Entry:
    return Entry(record.id, record.purpose, record.bytes, record.expires_at)
