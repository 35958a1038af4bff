"""The runner of batches over a real folder, with small routers in the place of an application's."""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.batches import input as input_module
from deployments.batches import retried
from deployments.batches import runner as module
from deployments.batches.files import Files, derived_id, new_id
from deployments.batches.ledger import Ledger
from deployments.batches.results import Reply
from deployments.batches.runner import Runner
from deployments.batches.state import ENDED, Batches, BatchRecord, Progress, Result
from deployments.batches.storage import Storage
from deployments.batches.sweep import Sweep
from deployments.config.services import BatchesSection
from deployments.process.spans import Tracing
from policies.batches.in_flight import Load
from router.trail import TraceHeaders
from tests.deployments.batches.routers import COMPLETIONS, Routers, answer, asking, line, lines
from tests.otlp_receiver import receiving
from tests.waiting import until

SECTION = BatchesSection(segment_s=0.02)


class Folder:
    """A folder of files and batches, and what a client would do to it."""

    def __init__(self, storage: Storage, section: BatchesSection = SECTION) -> None:
        self.storage = storage
        self.files, self.batches = Files(storage, section), Batches(storage, section)

    def batch(self, content: bytes, *, owner: str = "me", key: str | None = None, window_s: float = 60) -> BatchRecord:
        file = self.files.add(owner, "in.jsonl", "batch", [content])
        return self.batches.create(owner, key, asking(file.id), window_s, file.bytes)

    def shown(self, record: BatchRecord) -> dict[str, Any]:
        return self.batches.as_openai(record)

    def output(self, record: BatchRecord, kind: str = "output") -> list[dict[str, Any]]:
        file_id = self.shown(record)[f"{kind}_file_id"]
        content = b"" if file_id is None else b"".join(self.files.chunks(record.owner, file_id))
        return [json.loads(each) for each in content.splitlines()]

    async def ends(self, record: BatchRecord) -> dict[str, Any]:
        await until(lambda: record.id not in {batch_id for _, batch_id in self.batches.open_ids()})
        shown = self.shown(record)
        assert shown["status"] in ENDED
        return shown


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(Storage(str(tmp_path)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOAD_S", "LOOK_S", "PATIENCE_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr(retried, "FIRST_PAUSE_S", 0.01)


@asynccontextmanager
async def running(
    folder: Folder, routers: Routers, section: BatchesSection = SECTION, tracing: Tracing | None = None
) -> AsyncIterator[Runner]:
    runner = Runner(section, folder.storage, routers, tracing)
    runner.start()
    try:
        yield runner
    finally:
        await runner.close()


def ids(results: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(each["custom_id"] for each in results)


IDS = [f"{number:03}" for number in range(100)]


async def test_a_batch_is_answered_line_by_line(folder: Folder) -> None:
    record = folder.batch(lines(IDS))
    async with running(folder, Routers()):
        shown = await folder.ends(record)
    assert (shown["status"], shown["model"]) == ("completed", "m")
    assert shown["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert shown["usage"]["input_tokens"], shown["usage"]["input_tokens_details"] == (200, {"cached_tokens": 100})
    assert shown["error_file_id"] is None
    output = folder.output(record)
    assert ids(output) == IDS
    assert {each["response"]["body"]["text"] for each in output} == {each[::-1] for each in IDS}


async def test_each_line_is_a_span_under_which_routers_go_on(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(prompt: str) -> Reply:
        return Reply(400, b"{}") if prompt == "001" else answer(prompt)

    record, routers = folder.batch(lines(IDS[:3])), Routers(answers)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.target)
        tracing = Tracing.by_otlp("batches", "grpc")
        async with running(folder, routers, tracing=tracing):
            await folder.ends(record)
        await tracing.close()
        found = sorted(receiver.named("batch line"), key=lambda span: span.attributes["sluice.batch_line"])
    assert [span.attributes for span in found] == [
        {
            "sluice.batch": record.id,
            "sluice.batch_line": number,
            "gen_ai.request.model": "m",
            "http.response.status_code": status,
            **({} if status == 200 else {"error.type": "400"}),
        }
        for number, status in ((1, 200), (2, 400), (3, 200))
    ]
    told = {trace["traceparent"].split("-")[1] for trace in routers.traces if trace is not None}
    assert told == {span.trace_id for span in found} and len(told) == 3


async def test_open_batches_are_shown_to_their_owner_alone_as_far_as_they_are(folder: Folder) -> None:
    of_mine, held = Counter[str](), asyncio.Event()

    class Holds(Routers):
        async def answer(self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None) -> Reply:
            of_mine[json.loads(body)["prompt"]] += 1
            if of_mine.total() > 30:
                await held.wait()
            return await super().answer(key, endpoint, body, trace)

    record = folder.batch(lines(IDS))
    async with running(folder, Holds()) as runner:
        await until(lambda: of_mine.total() > 40)
        mine = runner.open_batches("me")
        assert mine.count == 1 and runner.open_batches("other").count == 0
        (shown,) = mine.oldest
        assert (shown["id"], shown["model"], shown["endpoint"]) == (record.id, "m", COMPLETIONS)
        assert (shown["status"], shown["total"], shown["failed"]) == ("in_progress", 100, 0)
        assert shown["completed"] == 30
        assert (shown["completion_window"], shown["expires_at"]) == ("1m", record.expires_at)
        held.set()
        await folder.ends(record)
        await until(lambda: runner.open_batches("me").count == 0)


async def test_of_many_open_batches_the_oldest_are_shown(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SHOWN", 2)
    records = [folder.batch(lines(IDS[:1])) for _ in range(3)]
    routers = Routers(pause_s=3600)
    async with running(folder, routers) as runner:
        await until(lambda: runner.open_batches("me").count == 3)
        assert [each["id"] for each in runner.open_batches("me").oldest] == sorted(each.id for each in records)[:2]


async def test_what_a_model_refuses_stands_in_the_errors_with_its_status(folder: Folder) -> None:
    refusals = {"000": Reply(400, b'{"error": {"message": "no"}}'), "001": Reply(404, b"Not\nFound")}
    record = folder.batch(lines(IDS))
    async with running(folder, Routers(lambda prompt: refusals.get(prompt) or answer(prompt))):
        shown = await folder.ends(record)
    assert shown["request_counts"] == {"total": 100, "completed": 98, "failed": 2}
    errors = {each["custom_id"]: each["response"] for each in folder.output(record, "error")}
    assert {name: (each["status_code"], each["body"]) for name, each in errors.items()} == {
        "000": (400, {"error": {"message": "no"}}),
        "001": (404, "Not\nFound"),  # no JSON: as text
    }


USAGES = {
    "a negative count": {"prompt_tokens": -1},
    "a part of a token": {"prompt_tokens": 1.5, "completion_tokens": 3},
    "more than a counter holds": {"completion_tokens": 1 << 70},
    "of another form": {"prompt_tokens": 2, "prompt_tokens_details": []},
}


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
async def test_whatever_a_server_counts_each_line_has_its_answer_as_it_is(folder: Folder, usage: Any) -> None:
    routers = Routers(lambda prompt: Reply(200, json.dumps({"text": prompt[::-1], "usage": usage}).encode()))
    record = folder.batch(lines(IDS))
    async with running(folder, routers) as runner:
        shown = await folder.ends(record)
    assert (shown["status"], shown["usage"]) == ("completed", None)
    assert {each["response"]["body"]["text"] for each in folder.output(record)} == {each[::-1] for each in IDS}
    assert set(routers.asked.values()) == {1}
    assert runner.metrics.failures.labels("batch")._value.get() == 0


BODIES = {"nests too deeply": b"[" * 10_000, "is no UTF-8": b'{"text":"\xff"}', "is no JSON": b"<html>"}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_an_answer_that_cannot_be_read_is_kept_as_text(folder: Folder, body: bytes) -> None:
    record = folder.batch(lines(["a"]))
    async with running(folder, Routers(lambda _: Reply(200, body))):
        await folder.ends(record)
    (output,) = folder.output(record)
    assert output["response"]["body"] == body.decode(errors="replace")


async def test_a_wrong_input_fails_with_the_numbers_of_its_lines(folder: Folder) -> None:
    record = folder.batch(line("a") + b"{\n" + line("a"))
    routers = Routers()
    async with running(folder, routers):
        shown = await folder.ends(record)
    assert shown["status"] == "failed"
    assert [(each["code"], each["line"]) for each in shown["errors"]["data"]] == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 3),
    ]
    assert not routers.asked


async def test_a_request_whose_key_has_spent_its_quota_is_sent_again_and_in_its_name(folder: Folder) -> None:
    refusals = Counter[str]()

    def at_first_not(prompt: str) -> Reply:
        refusals[prompt] += 1
        return Reply(429, b"{}", retry_after_s=0.01) if refusals[prompt] < 3 else answer(prompt)

    record, routers = folder.batch(lines(["a"]), key="team"), Routers(at_first_not)
    async with running(folder, routers):
        shown = await folder.ends(record)
    assert shown["request_counts"]["completed"] == 1
    assert routers.keys == ["team"] * 3


@pytest.mark.parametrize(("status", "times"), [(503, 10), (502, 10), (500, 2), (501, 1), (400, 1)])
async def test_a_request_is_sent_again_as_often_as_waiting_may_help(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, status: int, times: int
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    record, routers = folder.batch(lines(["a"])), Routers(lambda _: Reply(status, b"{}"))
    async with running(folder, routers):
        shown = await folder.ends(record)
    assert shown["request_counts"]["failed"] == 1
    assert routers.asked["a"] == times


async def test_a_batch_waits_while_no_router_is_there(folder: Folder) -> None:
    record, routers = folder.batch(lines(IDS)), Routers()
    routers.are_away = True
    async with running(folder, routers):
        await asyncio.sleep(0.1)
        routers.are_away = False
        assert (await folder.ends(record))["request_counts"]["completed"] == 100


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
async def test_a_batch_ends_though_no_router_is_there(folder: Folder, ending: str) -> None:
    record, routers = folder.batch(lines(IDS), window_s=60 if ending == "cancelled" else 1), Routers()
    routers.are_away = True
    if ending == "cancelled":
        folder.batches.cancel(record)
    async with running(folder, routers):
        shown = await folder.ends(record)
    assert (shown["status"], shown[f"{ending}_at"] is not None) == (ending, True)
    assert [each["code"] for each in shown["errors"]["data"]] == ["not_begun"]


async def test_a_cancelled_batch_has_what_was_answered_and_an_error_for_each_other(folder: Folder) -> None:
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.02, load=Load(slots=8))
    async with running(folder, routers) as runner:
        await until(lambda: folder.shown(record)["request_counts"]["completed"] >= 5)
        folder.batches.cancel(record)
        runner.look()
        shown = await folder.ends(record)
        assert routers.in_flight == 0
    assert (shown["status"], shown["cancelled_at"] is not None) == ("cancelled", True)
    output, errors = folder.output(record), folder.output(record, "error")
    assert sorted(ids(output) + ids(errors)) == IDS
    assert len(output) >= 5
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}


async def test_a_batch_whose_window_ends_is_expired(folder: Folder) -> None:
    record = folder.batch(lines(IDS), window_s=1)
    async with running(folder, Routers(pause_s=60.0)):
        shown = await folder.ends(record)
    assert (shown["status"], shown["expired_at"] is not None) == ("expired", True)
    assert {each["error"]["code"] for each in folder.output(record, "error")} == {"batch_expired"}


async def test_no_more_is_in_flight_than_engines_leave(folder: Folder) -> None:
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.005, load=Load(slots=64, waiting_promised=3))
    async with running(folder, routers):
        await folder.ends(record)
    assert routers.most_in_flight == 1


async def test_keys_share_alike_however_many_batches_each_has(folder: Folder) -> None:
    records = [folder.batch(lines(IDS), owner="many", key="many") for _ in range(5)]
    records.append(folder.batch(lines(IDS), owner="one", key="one"))
    routers = Routers(pause_s=0.005, load=Load(slots=16))
    async with running(folder, routers, SECTION.model_copy(update={"max_in_flight": 8})):
        for record in records:
            assert (await folder.ends(record))["request_counts"]["completed"] == 100
    first, last = routers.keys.index("one"), len(routers.keys) - routers.keys[::-1].index("one")
    shared = Counter(routers.keys[first:last])
    assert abs(shared["many"] - shared["one"]) < 20


async def test_a_key_whose_quota_is_spent_keeps_no_place_from_others(folder: Folder) -> None:
    def answers(prompt: str) -> Reply:
        return Reply(429, b"{}", retry_after_s=3600.0) if prompt.startswith("spent") else answer(prompt)

    spent = folder.batch(lines(f"spent {each}" for each in IDS), owner="spent", key="spent")
    routers = Routers(answers, load=Load(slots=4))
    async with running(folder, routers) as runner:
        await until(lambda: routers.asked.total() > 0)
        other = folder.batch(lines(IDS), owner="other", key="other")
        runner.look()
        assert (await folder.ends(other))["request_counts"]["completed"] == 100
        assert len([each for each in routers.asked if each.startswith("spent")]) <= 4  # the others are not read yet
        folder.batches.cancel(spent)
        runner.look()
        await folder.ends(spent)
        await until(lambda: b'sluice_batches_requests_in_flight{model="m"} 0.0' in runner.metrics.exposition())


async def test_requests_that_pause_all_go_on(folder: Folder) -> None:
    refusals = Counter[str]()

    def answers(prompt: str) -> Reply:
        refusals[prompt] += 1
        return Reply(429, b"{}", retry_after_s=0.02) if refusals[prompt] < 3 else answer(prompt)

    records = [folder.batch(lines(IDS), owner=key, key=key) for key in ("one", "two")]
    routers = Routers(answers, load=Load(slots=4))
    async with running(folder, routers):
        for record in records:
            assert (await folder.ends(record))["request_counts"]["completed"] == 100
    assert routers.most_in_flight <= 4


async def test_prompts_that_begin_alike_go_together(folder: Folder) -> None:
    mixed = [f"{number % 4} of {number:02}" for number in range(40)]
    record, routers = folder.batch(lines(mixed)), Routers()
    async with running(folder, routers, SECTION.model_copy(update={"max_in_flight": 1})):
        await folder.ends(record)
    assert list(routers.asked) == sorted(mixed)


async def test_a_runner_that_is_told_to_end_writes_what_was_answered(folder: Folder) -> None:
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.01, load=Load(slots=8))
    async with running(folder, routers, SECTION.model_copy(update={"segment_s": 600.0})) as first:
        await until(lambda: (mine := first.open_batches("me").oldest) and mine[0]["completed"] >= 20)
        answered = first.open_batches("me").oldest[0]["completed"]
    assert folder.shown(record)["request_counts"]["completed"] >= answered
    async with running(folder, routers):
        await folder.ends(record)
    assert ids(folder.output(record)) == IDS
    assert sum(routers.asked.values()) <= len(IDS) + 8  # of those in flight


async def test_a_runner_that_is_told_to_end_while_it_writes_loses_no_answer(tmp_path: Path) -> None:
    class Slow(Storage):
        pause_s = 0.0

        def create(self, path: str, content: bytes) -> bool:
            time.sleep(self.pause_s)
            return super().create(path, content)

    storage = Slow(str(tmp_path))
    folder, routers = Folder(storage), Routers(pause_s=0.01, load=Load(slots=8))
    record = folder.batch(lines(IDS))
    async with running(folder, routers) as runner:
        await until(lambda: folder.shown(record)["request_counts"]["completed"] >= 10)
        storage.pause_s = 0.5
        await asyncio.sleep(0.1)  # the next segment is on its way, and more is answered meanwhile
        answered = runner.open_batches("me").oldest[0]["completed"]
    assert folder.shown(record)["request_counts"]["completed"] >= answered


async def test_the_end_is_foreseen(folder: Folder) -> None:
    record = folder.batch(lines(IDS))
    async with running(folder, Routers(pause_s=0.05, load=Load(slots=4, waiting_idle=1))):
        await until(lambda: folder.shown(record)["metadata"] is not None)
        assert folder.shown(record)["metadata"]["sluice_expected_end"].startswith("20")


async def test_two_runners_of_one_batch_write_no_line_twice(folder: Folder) -> None:
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.002, load=Load(slots=8))
    async with running(folder, routers), running(folder, routers):
        await folder.ends(record)
    assert ids(folder.output(record)) == IDS


async def test_what_is_older_than_it_is_kept_is_removed_but_for_what_runs(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, runs = folder.batch(lines(["a"])), folder.batch(lines(["b"]))
    folder.batches.close(ended)
    later_s = module.time.time() + SECTION.keep_s + 1
    monkeypatch.setattr(module.time, "time", lambda: later_s)
    Sweep(folder.storage, SECTION)()
    assert folder.batches.ids("me") == [runs.id]
    assert folder.files.ids("me") == [runs.input_file_id]


async def test_a_batch_whose_answers_exceed_what_its_key_may_store_ends_and_says_so(tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"max_stored_bytes": 400_000, "max_in_flight": 4})
    folder = Folder(Storage(str(tmp_path)), section)
    long = {"text": "x" * 20_000}

    def answers(_: str) -> Reply:
        return Reply(200, json.dumps(long).encode())

    record, routers = folder.batch(lines(IDS)), Routers(answers, pause_s=0.02)
    async with running(folder, routers, section):
        shown = await folder.ends(record)
    assert (shown["status"], [each["code"] for each in shown["errors"]["data"]]) == ("failed", ["no_room"])
    assert 0 < shown["request_counts"]["completed"] < 20
    errors = folder.output(record, "error")
    assert sorted(ids(folder.output(record)) + ids(errors)) == IDS
    assert {each["error"]["code"] for each in errors} == {"batch_failed"}


def test_what_an_earlier_version_or_a_lost_process_has_left_is_put_in_order(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, runs = folder.batch(lines(["a"])), folder.batch(lines(["b"]))
    folder.batches.log(ended).append(Progress(status="completed"), [])
    folder.storage.remove("me/ledger")
    folder.storage.remove(f"open/{ended.id}.me")
    half = new_id("file-", time.time())
    folder.storage.create(f"me/files/{half}/content", b"xxxx")
    later_s = module.time.time() + 2 * 86_400
    monkeypatch.setattr(module.time, "time", lambda: later_s)
    Sweep(folder.storage, SECTION)()
    assert {each.id: each.kind for each in Ledger(folder.storage, SECTION).entries("me")} == {
        ended.input_file_id: "batch",
        runs.input_file_id: "batch",
        ended.id: "ended",
        runs.id: "open",
    }
    assert folder.shown(ended)["status"] == "completed"
    assert folder.storage.names(f"me/batches/{ended.id}/log") == []
    assert half not in folder.files.ids("me")


def test_what_is_not_ours_in_the_folder_keeps_nothing_from_being_swept(folder: Folder, tmp_path: Path) -> None:
    file = folder.files.add("me", "in", "batch", [b"x"], keep_s=-1.0)
    folder.batch(lines(["a"]))
    for stray in ("README", "a.txt", "lost+found/x/y", "open/.nfs01", "me/files/.nfs01", "me/batches/.nfs01"):
        (tmp_path / stray).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / stray).touch()
    Sweep(folder.storage, SECTION)()
    assert file.id not in folder.files.ids("me")
    assert len(folder.batches.ids("me")) == 1


def test_the_output_of_an_open_batch_is_not_swept_while_it_is_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = folder.batch(lines(["a"]))
    later_s = module.time.time() + 100_000.0  # the id of its output is as old as the batch
    monkeypatch.setattr(module.time, "time", lambda: later_s)

    def written() -> Iterator[bytes]:
        yield b"a"
        Sweep(folder.storage, SECTION)()
        yield b"b"

    output = derived_id("file-", record.id, "output")
    folder.files.add("me", "out", "batch_output", written(), output)
    assert b"".join(folder.files.chunks("me", output)) == b"ab"


def test_an_open_batch_whose_mark_is_lost_is_open_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    record = folder.batch(lines(["a"]))
    folder.storage.remove(f"open/{record.id}.me")
    later_s = module.time.time() + 7200
    monkeypatch.setattr(module.time, "time", lambda: later_s)
    Sweep(folder.storage, SECTION)()
    assert folder.batches.open_ids() == [("me", record.id)]


async def test_a_batch_that_cannot_be_read_keeps_no_other_from_running(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = folder.batch(lines(IDS[:1])), folder.batch(lines(IDS[:1]))
    folder.storage.write(f"me/batches/{broken.id}/batch", [b"{}"])
    async with running(folder, Routers()):
        assert (await folder.ends(whole))["status"] == "completed"
    assert f"{broken.id} of me cannot be read" in caplog.text


class FailingOwner(Storage):
    """The folder of one owner."""

    def names(self, folder: str) -> list[str]:
        if folder == "a/ledger":
            raise OSError("of one owner")
        return super().names(folder)


def test_what_fails_for_one_owner_keeps_a_sweep_from_no_other(tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"keep_s": 0.001})
    folder = Folder(Storage(str(tmp_path)), section)
    files = [folder.files.add(owner, "in.jsonl", "batch", [b"x"]) for owner in ("a", "b")]
    time.sleep(1.1)
    with pytest.raises(ExceptionGroup, match="could not look at all"):
        Sweep(FailingOwner(str(tmp_path)), section)()
    assert [folder.storage.exists(f"{o}/files/{f.id}/file") for o, f in zip("ab", files, strict=True)] == [True, False]


class Away(Storage):
    """A folder that cannot be used while it is away."""

    is_away, looks = True, 0

    def names(self, folder: str) -> list[str]:
        self.looks += folder == "open"
        if self.is_away:
            raise OSError("stale file handle")
        return super().names(folder)


async def test_a_folder_that_is_away_is_looked_at_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    away = Away(str(tmp_path))
    record = Folder(Storage(str(tmp_path))).batch(lines(["a"]))
    async with running(Folder(away), Routers()):
        await asyncio.sleep(0.5)
        looks, away.is_away = away.looks, False
        shown = await Folder(Storage(str(tmp_path))).ends(record)
    assert looks <= 4  # a sweep's among them
    assert shown["status"] == "completed"


async def test_results_that_the_log_has_lost_are_computed_again(folder: Folder) -> None:
    record = folder.batch(lines(["a", "b", "c"]))
    log = folder.batches.log(record)
    for number, name in ((1, "a"), (2, "b")):
        done = Progress(status="in_progress", model="m", total=3, last=3, completed=number)
        log.append(done, [Result(number, False, json.dumps({"custom_id": name}).encode())])
    folder.storage.remove(f"me/batches/{record.id}/log/00000000")
    async with running(folder, Routers()):
        shown = await folder.ends(record)
    assert shown["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert ids(folder.output(record)) == ["a", "b", "c"]


class Mortal(Storage):
    """Dies at one of its writes, before or after it: from then on nothing is read or written."""

    def __init__(self, url: str, dies_at: int, *, after: bool) -> None:
        super().__init__(url)
        self._left, self._after, self.died = dies_at, after, asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _do(self, write: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left > 0:
            return write()
        if self._left == 0 and self._after:
            write()
        self._loop.call_soon_threadsafe(self.died.set)
        raise OSError("the process is no more")

    def create(self, path: str, content: bytes) -> bool:
        return bool(self._do(lambda: Storage.create(self, path, content)))

    def write(self, path: str, chunks: Iterable[bytes]) -> int:
        return int(self._do(lambda: Storage.write(self, path, chunks)))

    def remove(self, path: str) -> None:
        self._do(lambda: Storage.remove(self, path))


class Failing(Storage):
    """Fails at its writes, or at all calls, while it is told to."""

    fails, fails_to_read = False, False

    def create(self, path: str, content: bytes) -> bool:
        self._check(self.fails)
        return super().create(path, content)

    def write(self, path: str, chunks: Iterable[bytes]) -> int:
        self._check(self.fails)
        return super().write(path, chunks)

    def lines(self, path: str, max_bytes: int) -> Iterator[bytes]:
        for each in super().lines(path, max_bytes):
            self._check(self.fails_to_read)
            yield each

    def _check(self, fails: bool) -> None:
        if fails:
            raise OSError("no space left")


async def test_while_its_folder_fails_a_batch_keeps_its_answers_and_sends_nothing_more(tmp_path: Path) -> None:
    storage = Failing(str(tmp_path))
    folder = Folder(storage)
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.01, load=Load(slots=8))
    async with running(folder, routers, SECTION.model_copy(update={"max_in_flight": 8})) as runner:
        await until(lambda: folder.shown(record)["request_counts"]["completed"] >= 20)
        storage.fails = True
        await until(lambda: runner.troubles("me"))
        await until(lambda: routers.in_flight == 0)
        asked = routers.asked.total()
        assert asked < len(IDS)
        await asyncio.sleep(0.2)
        assert routers.asked.total() == asked
        storage.fails = False
        shown = await folder.ends(record)
    assert shown["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
    assert set(routers.asked.values()) == {1}
    assert ids(folder.output(record)) == IDS


async def test_an_input_that_cannot_be_read_for_a_time_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "WINDOW_LINES", 10)
    storage = Failing(str(tmp_path))
    folder = Folder(storage)
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.01)
    async with running(folder, routers, SECTION.model_copy(update={"max_in_flight": 4})) as runner:
        await until(lambda: folder.shown(record)["request_counts"]["completed"] >= 20)
        storage.fails_to_read = True
        await until(lambda: runner.troubles("me"))
        storage.fails_to_read = False
        shown = await folder.ends(record)
    assert shown["request_counts"]["completed"] == 100
    assert set(routers.asked.values()) == {1}


async def test_a_segment_that_was_written_though_its_write_failed_is_taken_for_this_runners_own(
    tmp_path: Path,
) -> None:
    class Loses(Storage):
        """Answers of an object store, one of three."""

        calls = 0

        def create(self, path: str, content: bytes) -> bool:
            created = super().create(path, content)
            if "/log/" in path:
                self.calls += 1
                if self.calls % 3 == 0:
                    raise OSError("timed out")
            return created

    folder = Folder(Loses(str(tmp_path)))
    record, routers = folder.batch(lines(IDS)), Routers(pause_s=0.01, load=Load(slots=8))
    async with running(folder, routers):
        await folder.ends(record)
    assert set(routers.asked.values()) == {1}
    assert ids(folder.output(record)) == IDS


async def test_a_batch_whose_input_is_lost_ends_with_what_was_answered(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_module, "WINDOW_LINES", 10)
    held = asyncio.Event()

    class Holds(Routers):
        async def answer(self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None) -> Reply:
            if self.asked.total() >= 60:
                await held.wait()
            return await super().answer(key, endpoint, body, trace)

    record, routers = folder.batch(lines(IDS)), Holds()
    async with running(folder, routers, SECTION.model_copy(update={"max_in_flight": 10})):
        await until(lambda: folder.shown(record)["request_counts"]["completed"] >= 60)
        folder.storage.remove(f"me/files/{record.input_file_id}")
    async with running(folder, routers):  # one that has no longer opened it
        held.set()
        shown = await folder.ends(record)
    done = shown["request_counts"]["completed"]
    assert ids(folder.output(record)) == sorted(routers.asked) and done == len(routers.asked)
    assert (shown["status"], shown["failed_at"] is not None) == ("failed", True)
    (error,) = shown["errors"]["data"]
    assert (error["code"], f"{100 - done} requests" in error["message"]) == ("lines_lost", True)


async def test_a_batch_whose_lines_are_all_answered_needs_its_input_no_more(folder: Folder) -> None:
    record = folder.batch(lines(IDS))
    log = folder.batches.log(record)
    begun = Progress(status="in_progress", model="m", total=1, last=1, completed=1)
    log.append(begun, [Result(1, False, b'{"custom_id":"a"}')])
    folder.storage.remove(f"me/files/{record.input_file_id}")
    async with running(folder, Routers()):
        shown = await folder.ends(record)
    assert (shown["status"], ids(folder.output(record))) == ("completed", ["a"])


@settings(max_examples=30, deadline=None)
@given(deaths=st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=6), refused=st.sets(st.sampled_from(IDS)))
def test_whatever_dies_when_each_request_has_one_line(deaths: list[tuple[int, bool]], refused: set[str]) -> None:
    def answers(prompt: str) -> Reply:
        return Reply(400, b"{}") if prompt in refused else answer(prompt)

    async def live(url: str) -> None:
        folder = Folder(Storage(url))
        record = folder.batch(lines(IDS))
        for dies_at, after in deaths:
            mortal = Mortal(url, dies_at, after=after)
            async with running(Folder(mortal), Routers(answers, pause_s=0.001)):
                died, ended = asyncio.create_task(mortal.died.wait()), asyncio.create_task(folder.ends(record))
                await asyncio.wait([died, ended], return_when=asyncio.FIRST_COMPLETED)
                died.cancel()
                ended.cancel()
        async with running(folder, Routers(answers)):
            shown = await folder.ends(record)
        assert shown["status"] == "completed"
        assert ids(folder.output(record)) == sorted(set(IDS) - refused)
        assert ids(folder.output(record, "error")) == sorted(refused)
        assert shown["request_counts"]["failed"] == len(refused)

    with tempfile.TemporaryDirectory() as url, pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "LAST_WRITE_S", 0.05)  # the dead write nothing
        asyncio.run(live(url))
