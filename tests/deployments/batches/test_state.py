"""What a batch has come to, in files."""

import time
from pathlib import Path

import pytest

from deployments.batches.files import Files, NotFoundError, new_id
from deployments.batches.lines import LineError
from deployments.batches.run import BatchRun
from deployments.batches.state import Batches, BatchRecord, FencedError, Progress, Result, Tokens
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from tests.deployments.batches.routers import asking


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(Storage(str(tmp_path)), BatchesSection())


def made(batches: Batches, owner: str = "me") -> BatchRecord:
    input_file_id = new_id("file-", time.time())
    return batches.create(owner, None, asking(input_file_id, metadata={"for": "tests"}), window_s=86_400.0)


def test_a_log_is_read_as_it_was_written(batches: Batches) -> None:
    record = made(batches)
    log = batches.log(record)
    begun = Progress(status="in_progress", total=3, last=3, completed=1, failed=1, tokens=Tokens(input=5))
    log.append(Progress(status="in_progress", total=3, last=3), [])
    log.append(begun, [Result(1, False, b'{"a":1}'), Result(3, True, b'{"b":2}')])
    again = batches.log(record)
    progress, numbers = again.read()
    assert progress == begun
    assert list(numbers) == [([], []), ([1, 3], [3])]
    assert list(again.lines(errors=False)) == [b'{"a":1}\n']
    assert list(again.lines(errors=True)) == [b'{"b":2}\n']


def test_of_two_who_run_a_batch_the_second_to_write_stops(batches: Batches) -> None:
    record = made(batches)
    first, second = batches.log(record), batches.log(record)
    first.read()
    second.read()
    first.append(Progress(), [Result(1, False, b"{}")])
    with pytest.raises(FencedError):
        second.append(Progress(), [Result(1, False, b"{}")])
    assert list(batches.log(record).lines(errors=False)) == [b"{}\n"]


def test_who_creates_a_batch_finds_it_open_until_it_is_closed(batches: Batches) -> None:
    record = made(batches)
    assert list(batches.opened()) == [record]
    batches.close(record)
    assert list(batches.opened()) == []
    assert batches.get("me", record.id) == record


def test_a_batch_that_could_not_be_created_reserves_nothing(
    batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Storage.create

    def full(storage: Storage, path: str, content: bytes) -> bool:
        if content:  # as on a full disk, which takes empty files
            raise OSError("no space left")
        return create(storage, path, content)

    monkeypatch.setattr(Storage, "create", full)
    with pytest.raises(OSError, match="no space"):
        made(batches)
    assert batches.open_ids() == []
    assert list(tmp_path.glob("*/ledger/*")) == []


def test_a_batch_of_another_owner_and_a_path_are_not_found(batches: Batches) -> None:
    record = made(batches)
    for owner, batch_id in (("you", record.id), ("me", "batch_../../x"), ("me", record.input_file_id)):
        with pytest.raises(NotFoundError):
            batches.get(owner, batch_id)


def test_pages_come_newest_first_and_follow_each_other(batches: Batches) -> None:
    ids = sorted((made(batches).id for _ in range(5)), reverse=True)
    first, has_more = batches.page("me", None, 2)
    rest, has_no_more = batches.page("me", first[-1].id, 3)
    assert [record.id for record in (*first, *rest)] == ids
    assert (has_more, has_no_more) == (True, False)


def test_a_runner_that_was_late_for_the_end_writes_nothing_where_the_log_has_gone(batches: Batches) -> None:
    record = made(batches)
    first, late = batches.log(record), batches.log(record)
    for log in (first, late):
        log.read()
    first.append(Progress(status="in_progress", total=1, last=1), [Result(1, False, b"{}")])
    ended = Progress(status="completed", total=1, completed=1)
    first.end(ended)
    batches.close(record)
    with pytest.raises(FencedError):
        late.append(Progress(), [Result(1, False, b"{}")])
    with pytest.raises(FencedError):
        late.end(Progress(status="expired"))
    assert batches.log(record).progress() == ended
    assert batches.log(record).size_bytes() == 0


def test_a_batch_that_was_cancelled_says_when_and_once(batches: Batches) -> None:
    record = made(batches)
    batches.log(record).append(Progress(status="in_progress"), [])
    batches.cancel(record)
    batches.cancel(record)
    shown = batches.as_openai(record)
    assert shown["status"] == "cancelling"
    assert shown["cancelling_at"] == batches.cancelled_at(record)
    log = batches.log(record)
    log.read()
    log.append(Progress(status="finalizing", ending="cancelled"), [])
    shown = batches.as_openai(record)
    assert (shown["status"], shown["cancelling_at"]) == ("finalizing", batches.cancelled_at(record))


def test_a_batch_that_failed_tells_its_errors(batches: Batches) -> None:
    record = made(batches)
    error = {"code": "invalid_method", "message": "method must be POST", "line": 3, "param": "method"}
    batches.log(record).append(Progress(status="failed", errors=(LineError(**error),), ended_at=7), [])
    shown = batches.as_openai(record)
    assert (shown["failed_at"], shown["errors"]["data"]) == (7, [error])


def test_a_window_is_set_and_judged_by_the_folders_clock_whatever_hosts_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, section = time.time, BatchesSection()
    monkeypatch.setattr(time, "time", lambda: real() + 3600)  # the host of the router
    asked = Batches(Storage(str(tmp_path)), section)
    record = asked.create("me", None, asking(new_id("file-", real())), window_s=600.0)
    assert record.expires_at == pytest.approx(real() + 600, abs=60)
    monkeypatch.setattr(time, "time", lambda: real() - 3600)  # that of the runner
    storage = Storage(str(tmp_path))
    batches = Batches(storage, section)
    assert list(batches.opened()) == [record]
    run = BatchRun(record, batches, Files(storage, section))
    assert 540 < run.left_s <= 601
    assert not run.is_expected_late
    assert storage.names("") == ["me", "open"]
