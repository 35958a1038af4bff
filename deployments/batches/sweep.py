"""Removes what has expired, and what a process that was lost left half written; makes the ledger true again."""

from deployments.batches.files import Files, derived_id, made_at_s
from deployments.batches.ledger import OPEN, Entry, Ledger
from deployments.batches.state import Batches, BatchRecord
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection

YOUNG_S = 3600.0  # what is younger may be written at this moment
LOOKED_AT_S = 90_000.0  # the age up to which each sweep looks whether a file is whole: a day of them finds it


def needed_by(record: BatchRecord) -> list[str]:
    """Ids of what an open batch reads and writes, besides its own."""
    return [record.input_file_id, *(derived_id("file-", record.id, kind) for kind in ("output", "error"))]


class Sweep:
    """Its call blocks. What fails for one owner keeps it from no other, and is raised at the end."""

    def __init__(self, storage: Storage, section: BatchesSection) -> None:
        self._files, self._batches = Files(storage, section), Batches(storage, section)
        self._ledger = Ledger(storage, section)

    def __call__(self) -> None:
        opened: dict[str, list[BatchRecord]] = {}
        for record in self._batches.opened():
            opened.setdefault(record.owner, []).append(record)
        failures: list[OSError] = []
        for owner in self._batches.owners():
            try:
                self._owner(owner, opened.get(owner, []))
            except OSError as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("a sweep could not look at all that is stored", failures)

    def _owner(self, owner: str, opened: list[BatchRecord]) -> None:
        entries = self._ledger.entries(owner)
        of_open = {record.id for record in opened}
        needed = of_open.union(*map(needed_by, opened))
        for entry in entries:
            if entry.id not in needed:
                self._look_at(owner, entry)
        known = {entry.id for entry in entries}
        for record in opened:
            if record.id not in known:
                self._batches.reserve(record)
        for file_id in set(self._files.ids(owner)) - known:
            self._find_file(owner, file_id, is_needed=file_id in needed)
        for batch_id in set(self._batches.ids(owner)) - known - of_open:
            if self._age_s(batch_id) > YOUNG_S:
                self._batches.settle(owner, batch_id)

    def _look_at(self, owner: str, entry: Entry) -> None:
        age_s = self._age_s(entry.id)
        if entry.kind == OPEN:  # it is not: its creator was lost, or who ended it
            if age_s > YOUNG_S:
                self._batches.settle(owner, entry.id)
        elif entry.expires_at <= self._batches.now_s():
            (self._files if entry.is_file else self._batches).remove(owner, entry.id)
        elif entry.is_file and YOUNG_S < age_s < LOOKED_AT_S and not self._files.is_whole(owner, entry.id):
            self._files.remove(owner, entry.id)

    def _find_file(self, owner: str, file_id: str, *, is_needed: bool) -> None:
        """One without an entry: of an earlier version, or of a process that was lost."""
        if self._files.is_whole(owner, file_id):
            self._files.enter_anew(owner, file_id)
        elif not is_needed and self._age_s(file_id) > LOOKED_AT_S:
            self._files.remove(owner, file_id)

    def _age_s(self, identity: str) -> float:
        return self._batches.now_s() - made_at_s(identity)
