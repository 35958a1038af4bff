"""What each owner stores, told by names alone: `OWNER/ledger/ID.KIND.BYTES.EXPIRES`, which are empty.

One listing gives the ids, bytes and ends of everything, and nothing of it is read. An entry is written before what it
stands for and removed after it, so that whatever is stored counts.
"""

import re
from typing import NamedTuple

from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from policies.errors import SluiceError

OPEN, ENDED = "open", "ended"  # kinds of batches; a file's kind is its purpose
_FILES_OF_A_BATCH = 2  # that it may write: output and errors
_NAME = re.compile(r"((?:file-|batch_)[0-9a-f]{32})\.([a-z_]+)\.(\d+)\.(\d+)", re.ASCII)


class FullError(SluiceError):
    """The owner may not store as much more."""


class Entry(NamedTuple):
    """A file or a batch.

    Attributes:
        bytes: that it takes, or may come to take.
        expires_at: in Unix seconds; 0 for an open batch.
    """

    id: str
    kind: str
    bytes: int
    expires_at: int

    @property
    def is_file(self) -> bool:
        return self.id.startswith("file-")

    @property
    def name(self) -> str:
        return ".".join(map(str, self))


class Ledger:
    """Those of all owners. Its calls block."""

    def __init__(self, storage: Storage, section: BatchesSection) -> None:
        self._storage, self._max_bytes, self._max_files = storage, section.max_stored_bytes, section.max_files

    def entries(self, owner: str) -> list[Entry]:
        """Sorted by id. Of two of one id, one of which replaces the other, the larger."""
        matches = (_NAME.fullmatch(name) for name in self._storage.names(_folder(owner)))
        found = sorted(Entry(each[1], each[2], int(each[3]), int(each[4])) for each in matches if each)
        return sorted({each.id: each for each in sorted(found, key=lambda each: each.bytes)}.values())

    def enter(self, owner: str, entry: Entry) -> None:
        """Raises FullError, and of several who enter at once each counts the others."""
        self._storage.create(f"{_folder(owner)}/{entry.name}", b"")
        try:
            self._check(self.entries(owner), entry)
        except FullError:
            self.strike(owner, entry.id)
            raise

    def _check(self, entries: list[Entry], entry: Entry) -> None:
        files = sum(each.is_file or _FILES_OF_A_BATCH * (each.kind == OPEN) for each in entries)
        if (entry.is_file or entry.kind == OPEN) and files > self._max_files:
            raise FullError(
                f"your files, and {_FILES_OF_A_BATCH} of each open batch, would be more than {self._max_files} "
                "(batches.max_files): delete some first"
            )
        if sum(each.bytes for each in entries) > self._max_bytes:
            what = "your files" if entry.is_file else f"your files, and the {entry.bytes} bytes that it may write,"
            raise FullError(
                f"{what} would exceed {self._max_bytes} bytes (batches.max_stored_bytes): delete some first"
            )

    def put(self, owner: str, entry: Entry) -> bool:
        """In the place of what has its id. Whether all fits."""
        self._storage.create(f"{_folder(owner)}/{entry.name}", b"")
        self._strike(owner, entry.id, but=entry.name)
        return sum(each.bytes for each in self.entries(owner)) <= self._max_bytes

    def strike(self, owner: str, identity: str) -> None:
        self._strike(owner, identity, but="")

    def _strike(self, owner: str, identity: str, but: str) -> None:
        for name in self._storage.names(_folder(owner)):
            if name.startswith(f"{identity}.") and name != but:
                self._storage.remove(f"{_folder(owner)}/{name}")


def _folder(owner: str) -> str:
    return f"{owner}/ledger"
