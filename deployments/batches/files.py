"""Files of OpenAI's API, each of one owner: `OWNER/files/ID/content` and, once that is whole, `OWNER/files/ID/file`."""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from deployments.batches.storage import Storage
from policies.errors import SluiceError

NOBODY = "anyone"  # the owner of files and batches that come without a key
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


class NotFoundError(SluiceError):
    """The owner has nothing by this id."""


def owner_of(key: str | None) -> str:
    """The folder of an API key's name, which may hold any character."""
    return NOBODY if key is None else hashlib.sha256(key.encode()).hexdigest()[:32]


def new_id(kind: str) -> str:
    """Ids sort by when they were made."""
    return f"{kind}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def derived_id(kind: str, batch_id: str, part: str) -> str:
    """The id of a file of a batch: the same at every call, and sorted by when the batch was made."""
    return f"{kind}{batch_id[-32:-20]}{hashlib.sha256(f'{batch_id}{part}'.encode()).hexdigest()[:20]}"


def made_at_s(identity: str) -> float:
    """The time of an id, in Unix seconds."""
    return int(identity[-32:-20], 16) / 1e3


def check_id(identity: str, kind: str) -> str:
    """Raises NotFoundError for what none of ours looks like, as a path."""
    if not _ID.fullmatch(identity) or not identity.startswith(kind):
        raise NotFoundError(f"no {kind[:-1]} {identity[:64]!r}")
    return identity


def page_of(ids: list[str], after: str | None, limit: int) -> tuple[list[str], bool]:
    """Newest first; the ids of one page, and whether more follow. `after` may have been removed meanwhile."""
    left = sorted((each for each in ids if after is None or each < after), reverse=True)
    return left[:limit], len(left) > limit


class Files:
    """All owners' files. Its calls block."""

    def __init__(self, storage: Storage, keep_s: float) -> None:
        self._storage, self._keep_s = storage, keep_s

    def add(self, owner: str, filename: str, purpose: str, chunks: Iterable[bytes], file_id: str = "") -> FileRecord:
        """A file with the caller's id may exist already, with the same content."""
        identity = file_id or new_id("file-")
        size = self._storage.write(f"{self._folder(owner, identity)}/content", chunks)
        now = int(time.time())
        record = FileRecord(identity, size, now, now + int(self._keep_s), filename, purpose)
        self._storage.create(f"{self._folder(owner, identity)}/file", msgspec.json.encode(record))
        return record

    def get(self, owner: str, file_id: str) -> FileRecord:
        """Raises NotFoundError."""
        try:
            found = self._storage.read(f"{self._folder(owner, check_id(file_id, 'file-'))}/file")
        except FileNotFoundError:
            raise NotFoundError(f"no file {file_id!r}") from None
        return msgspec.json.decode(found, type=FileRecord)

    def page(self, owner: str, after: str | None, limit: int, purpose: str | None) -> tuple[list[FileRecord], bool]:
        """Newest first."""
        found: list[FileRecord] = []
        ids, more = page_of(self.ids(owner), after, limit=1 << 30)
        for identity in ids:
            try:
                record = self.get(owner, identity)
            except NotFoundError:  # not whole yet, or removed meanwhile
                continue
            if purpose in (None, record.purpose):
                if len(found) == limit:
                    return found, True
                found.append(record)
        return found, more

    def ids(self, owner: str) -> list[str]:
        return self._storage.names(f"{owner}/files")

    def chunks(self, owner: str, file_id: str) -> Iterator[bytes]:
        return self._storage.chunks(f"{self._folder(owner, file_id)}/content")

    def lines(self, owner: str, file_id: str, max_bytes: int) -> Iterator[bytes]:
        """As `Storage.lines`."""
        return self._storage.lines(f"{self._folder(owner, file_id)}/content", max_bytes)

    def stored_bytes(self, owner: str) -> int:
        return self._storage.size_of_folder(f"{owner}/files")

    def remove(self, owner: str, file_id: str) -> None:
        """The record goes first, so that nobody finds a file without content."""
        self._storage.remove(f"{self._folder(owner, file_id)}/file")
        self._storage.remove(self._folder(owner, file_id))

    @staticmethod
    def _folder(owner: str, file_id: str) -> str:
        return f"{owner}/files/{file_id}"
