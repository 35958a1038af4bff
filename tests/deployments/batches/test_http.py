"""Files and batches as the official client uses them, through the middleware, with a runner beside it."""

import asyncio
import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from deployments.batches import uploads
from deployments.batches.files import owner_of
from deployments.batches.http import BatchApi, no_batch_api
from deployments.batches.runner import Runner, Troubles
from deployments.batches.state import Batches
from deployments.batches.storage import Storage
from deployments.batches.sweep import Sweep
from deployments.config.services import BatchesSection
from deployments.http.keys import digest
from tests.deployments.batches.routers import COMPLETIONS, Routers, lines
from tests.deployments.bodies import asking, behind_middleware, key_ring, request_bodies
from tests.waiting import until

KEYS = ("mine", "yours", "hurried")
ENTRIES = [
    {"name": name, "sha256": digest(name), **({"classes": ["standard"]} if name == "hurried" else {})} for name in KEYS
]
URL = "http://sluice/v1"
CLASSES = ("standard", "offline")
IDS = ["a", "b", "c"]
SECTION = BatchesSection(segment_s=0.02, max_file_bytes=100_000, max_stored_bytes=300_000, max_open=3)


async def vllm(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind: it has no such routes."""
    await FastAPI()(scope, receive, send)


class Service:
    """An application with its folder, and clients of it."""

    def __init__(self, folder: Path, section: BatchesSection = SECTION) -> None:
        self.storage = Storage(str(folder))
        self.routers = Routers()
        self.runner = Runner(section, self.storage, self.routers)
        self.api = BatchApi(vllm, section, self.storage, {COMPLETIONS, "/v1/models"}, self.runner.look, self._troubles)

    async def _troubles(self, owner: str) -> Troubles:
        return self.runner.troubles(owner)

    async def start(self) -> None:
        keys = key_ring(CLASSES, entries=ENTRIES)
        await keys.reload()
        self.http = asking(behind_middleware(self.api, CLASSES, bodies=request_bodies(2000), keys=keys))

    def client(self, key: str = "mine") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url=URL, http_client=self.http, max_retries=0, _strict_response_validation=True
        )


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(tmp_path)
    await made.start()
    yield made
    await made.runner.close()
    await made.http.aclose()


async def uploaded(client: openai.AsyncOpenAI, content: bytes | None = None) -> str:
    file = await client.files.create(file=("in.jsonl", lines(IDS) if content is None else content), purpose="batch")
    return file.id


async def begun(client: openai.AsyncOpenAI, **changes: Any) -> Any:
    asked = {"endpoint": COMPLETIONS, "completion_window": "24h", **changes}
    if "input_file_id" not in asked:
        asked["input_file_id"] = await uploaded(client)
    return await client.batches.create(**asked)


@asynccontextmanager
async def refused(status: int, words: str) -> AsyncIterator[None]:
    with pytest.raises(openai.APIStatusError) as raised:
        yield
    assert raised.value.status_code == status, raised.value.message
    assert words in raised.value.message


async def test_a_batch_lives_from_its_upload_to_its_output(service: Service) -> None:
    client = service.client()
    batch = await begun(client, metadata={"for": "tests"})
    assert (batch.status, batch.metadata) == ("validating", {"for": "tests"})
    assert batch.expires_at == batch.created_at + 86_400
    service.runner.start()
    await until(lambda: service.runner.metrics.requests.labels("m", "completed")._value.get() == len(IDS))
    while (batch := await client.batches.retrieve(batch.id)).status != "completed":
        pass
    assert (batch.request_counts.total, batch.request_counts.completed) == (3, 3)
    assert batch.usage.total_tokens == 15
    content = await client.files.content(batch.output_file_id)
    assert sorted(json.loads(each)["custom_id"] for each in content.text.splitlines()) == IDS
    output = await client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == ("batch_output", len(content.content))
    assert service.routers.keys == ["mine"] * 3


async def test_a_batch_that_is_cancelled_says_so(service: Service) -> None:
    client = service.client()
    batch = await begun(client)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    service.runner.start()
    while (batch := await client.batches.retrieve(batch.id)).status != "cancelled":
        pass
    async with refused(409, "cancelled"):
        await client.batches.cancel(batch.id)


async def test_lists_have_pages(service: Service) -> None:
    client = service.client()
    ids = [(await begun(client)).id for _ in range(3)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == ids[::-1]
    files = [file.id async for file in client.files.list(limit=2)]
    assert len(files) == 3
    assert files == sorted(files, reverse=True)
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []


async def test_a_client_with_another_key_finds_nothing(service: Service) -> None:
    mine, yours = service.client(), service.client("yours")
    batch = await begun(mine)
    for call in (
        yours.batches.retrieve(batch.id),
        yours.batches.cancel(batch.id),
        yours.files.retrieve(batch.input_file_id),
        yours.files.content(batch.input_file_id),
        yours.files.delete(batch.input_file_id),
        begun(yours, input_file_id=batch.input_file_id),
    ):
        async with refused(404, "no "):
            await call
    assert [each.id async for each in yours.batches.list()] == []
    assert [each.id async for each in yours.files.list()] == []
    async with refused(401, "API key"):
        await service.client("guessed").files.list()


async def test_a_file_is_deleted_unless_a_batch_reads_it(service: Service) -> None:
    client = service.client()
    file_id = await uploaded(client)
    assert (await client.files.delete(file_id)).deleted
    async with refused(404, file_id):
        await client.files.retrieve(file_id)
    batch = await begun(client)
    async with refused(409, batch.id):
        await client.files.delete(batch.input_file_id)


async def test_content_that_is_lost_is_404_and_no_broken_answer(service: Service) -> None:
    client = service.client()
    file_id = await uploaded(client)
    service.storage.remove(f"{owner_of('mine')}/files/{file_id}/content")
    async with refused(404, "lost"):
        await client.files.content(file_id)
    assert (await client.files.content(await uploaded(client, b""))).content == b""


async def test_an_upload_may_be_larger_than_other_bodies_and_has_its_own_bound(service: Service) -> None:
    client = service.client()
    content = b"x" * 90_000
    assert await (await client.files.content(await uploaded(client, content))).aread() == content
    async with refused(413, "batches.max_file_bytes"):
        await uploaded(client, b"x" * 300_000)


async def test_a_key_has_a_bound_on_what_it_stores(service: Service) -> None:
    client = service.client()
    for _ in range(3):
        await uploaded(client, b"x" * 90_000)
    async with refused(413, "batches.max_stored_bytes"):
        await uploaded(client, b"x" * 90_000)
    await uploaded(service.client("yours"), b"x" * 90_000)


async def test_whatever_batches_write_counts_and_goes_when_it_is_not_needed(service: Service) -> None:
    client = service.client()
    file_id = await uploaded(client, lines(map(str, range(200))))
    service.runner.start()
    for _ in range(4):
        batch = await begun(client, input_file_id=file_id)
        with suppress(openai.ConflictError):
            await client.batches.cancel(batch.id)
        while (batch := await client.batches.retrieve(batch.id)).status not in ("cancelled", "completed"):
            pass
        for made in (batch.output_file_id, batch.error_file_id):
            if made is not None:
                await client.files.delete(made)
        await until(lambda: not Batches(service.storage, SECTION).open_ids())
    assert service.storage.names(f"{owner_of('mine')}/batches/{batch.id}/log") == []
    assert service.storage.size_of_folder(owner_of("mine")) < 40_000  # the input, and four small records


async def test_a_batch_that_cannot_fit_is_refused_when_it_is_made(service: Service) -> None:
    client = service.client()
    file_id = await uploaded(client, b"x" * 70_000)
    async with refused(413, "batches.max_stored_bytes"):
        await begun(client, input_file_id=file_id)
    assert [each.id async for each in client.batches.list()] == []
    await client.batches.create(
        endpoint=COMPLETIONS, completion_window="24h", input_file_id=await uploaded(client, b"x" * 20_000)
    )


async def test_a_key_has_a_bound_on_its_files_and_of_its_ended_batches_the_oldest_go(tmp_path: Path) -> None:
    service = Service(tmp_path, SECTION.model_copy(update={"max_files": 3}))
    await service.start()
    client = service.client()
    file_ids = [await uploaded(client, b"x") for _ in range(3)]
    async with refused(413, "batches.max_files"):
        await uploaded(client)
    for file_id in file_ids[1:]:
        await client.files.delete(file_id)
    service.runner.start()
    made = []
    for _ in range(5):
        made.append(await begun(client, input_file_id=file_ids[0]))
        await until(lambda: not Batches(service.storage, SECTION).open_ids())
    assert [each.id async for each in client.batches.list()] == [each.id for each in made[:0:-1]]
    await service.runner.close()


async def test_files_that_batches_write_count_too(tmp_path: Path) -> None:
    service = Service(tmp_path, SECTION.model_copy(update={"max_files": 4}))
    await service.start()
    service.runner.start()
    client = service.client()
    file_id = await uploaded(client)
    for _ in range(2):  # each has an output, and could have had errors
        await begun(client, input_file_id=file_id)
        await until(lambda: not Batches(service.storage, SECTION).open_ids())
    async with refused(413, "batches.max_files"):
        await begun(client, input_file_id=file_id)
    assert len([each async for each in client.files.list()]) == 3
    assert not Batches(service.storage, SECTION).open_ids()
    await service.runner.close()


async def test_a_page_reads_what_it_shows(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client, reads = service.client(), Counter[str]()
    for _ in range(5):
        await uploaded(client, b"x")
    read = Storage.read

    def counted(storage: Storage, path: str) -> bytes:
        reads[path] += 1
        return read(storage, path)

    monkeypatch.setattr(Storage, "read", counted)
    assert len((await client.files.list(limit=2)).data) == 2
    assert reads.total() == 2
    assert (await client.files.list(purpose="batch_output")).data == []
    assert reads.total() == 2


async def test_a_folder_that_is_slow_takes_no_threads_of_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, client = threading.Event(), service.client()
    monkeypatch.setattr(Storage, "names", lambda *_: held.wait(10) and [])
    lists = [asyncio.ensure_future(client.files.list()) for _ in range(40)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await asyncio.to_thread(lambda: None)
    held.set()
    assert [page.data for page in await asyncio.gather(*lists)] == [[]] * 40


async def test_downloads_from_a_folder_that_is_slow_take_no_threads_of_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, client = threading.Event(), service.client()
    file_id = await uploaded(client)

    def chunks(*_: object) -> Iterator[bytes]:
        yield lines(IDS)[:10]
        held.wait(10)
        yield lines(IDS)[10:]

    monkeypatch.setattr(Storage, "chunks", chunks)
    downloads = [asyncio.ensure_future(client.files.content(file_id)) for _ in range(50)]
    await asyncio.sleep(1.0)
    try:
        async with asyncio.timeout(5):
            await run_in_threadpool(lambda: None)  # as form parsers do, of uploads
    finally:
        held.set()
    assert {each.content for each in await asyncio.gather(*downloads)} == {lines(IDS)}


@pytest.mark.parametrize("after", ["nonsense", f"batch_{'0' * 32}", f"file-{'f' * 32}"])
async def test_a_cursor_that_never_was_an_id_is_refused(service: Service, after: str) -> None:
    client = service.client()
    await uploaded(client)
    async with refused(400, "after"):
        await client.files.list(after=after)
    async with refused(400, "after"):
        await client.batches.list(after=after.replace("batch_", "file-"))


async def test_files_may_be_deleted_from_page_to_page(service: Service) -> None:
    client = service.client()
    ids = {await uploaded(client, b"x") for _ in range(5)}
    assert {(await client.files.delete(file.id)).id async for file in client.files.list(limit=2)} == ids


async def test_files_expire_when_their_client_has_asked_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client()
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(file=("in.jsonl", lines(IDS)), purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 3600
    async with refused(400, "batches.keep_s"):
        await begun(client, input_file_id=file.id, output_expires_after={**after, "seconds": 40 * 86_400})
    batch = await begun(client, input_file_id=file.id, output_expires_after=after)
    service.runner.start()
    while (batch := await client.batches.retrieve(batch.id)).status != "completed":
        pass
    output = await client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600
    await until(lambda: not Batches(service.storage, SECTION).open_ids())
    later_s = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later_s)
    for expired in (file, output):
        async with refused(404, "expired"):
            await client.files.content(expired.id)
    assert (await client.files.list()).data == []
    Sweep(service.storage, SECTION)()
    assert service.storage.names(f"{owner_of('mine')}/files") == []
    assert (await client.batches.retrieve(batch.id)).status == "completed"


async def test_a_key_has_a_bound_on_open_batches(service: Service) -> None:
    client = service.client()
    for _ in range(3):
        await begun(client)
    async with refused(429, "batches.max_open"):
        await begun(client)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "/v1/chat/completions"}, COMPLETIONS),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "8d"}, "batches.max_window_s"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 600}}, "512"),
        ({"metadata": {"sluice_expected_end": "now"}}, "sluice_expected_end"),
        ({"extra_body": {"what": 1}}, "what"),
    ],
)
async def test_a_wrong_request_for_a_batch_is_refused(service: Service, changes: dict[str, Any], words: str) -> None:
    async with refused(400, words):
        await begun(service.client(), **changes)


async def test_a_key_that_may_not_use_the_class_of_batches_has_none(service: Service) -> None:
    async with refused(403, "batches.slo_class"):
        await begun(service.client("hurried"))


async def test_a_wrong_upload_is_refused(service: Service) -> None:
    client = service.client()
    async with refused(400, "purpose"):
        await client.files.create(file=("a", b"x"), purpose="vision")
    for wrong in ({"anchor": "now", "seconds": 3600}, {"anchor": "created_at", "seconds": 60}):
        async with refused(400, "expires_after"):
            await client.files.create(file=("a", b"x"), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
    async with refused(400, "batches.keep_s"):
        await client.files.create(
            file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 40 * 86_400}
        )
    headers = {"Authorization": "Bearer mine"}
    no_form = await service.http.post(
        "/v1/files", content=b"{}", headers={**headers, "Content-Type": "application/json"}
    )
    assert no_form.status_code == 400
    no_file = await service.http.post("/v1/files", data={"purpose": "batch"}, headers=headers)
    assert no_file.status_code == 400
    broken = {**headers, "Content-Type": "multipart/form-data; boundary=x"}
    assert (await service.http.post("/v1/files", content=b"--y\r\n", headers=broken)).status_code == 400
    odd = {**headers, "Content-Type": "multipart/form-data; boundary=x; charset=undefined"}
    named = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\r\n--x--\r\n'
    assert (await service.http.post("/v1/files", content=named, headers=odd)).status_code == 400


async def test_an_upload_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    service = Service(tmp_path, SECTION.model_copy(update={"upload_timeout_s": 0.05}))
    await service.start()

    async def never_ends() -> AsyncIterator[bytes]:
        yield b"--x\r\n"
        await until(lambda: False)

    headers = {"Authorization": "Bearer mine", "Content-Type": "multipart/form-data; boundary=x"}
    answer = await service.http.post("/v1/files", content=never_ends(), headers=headers)
    assert answer.status_code == 408


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


@pytest.fixture
async def slowly(service: Service) -> AsyncIterator[Callable[..., asyncio.Task[httpx.Response]]]:
    """Uploads that have begun, and whose rest never comes."""
    tasks = []

    def begin(key: str = "mine", size: int = 1) -> asyncio.Task[httpx.Response]:
        async def parts() -> AsyncIterator[bytes]:
            yield FORM + b"x" * size
            await asyncio.Event().wait()

        headers = {"Authorization": f"Bearer {key}", "Content-Type": "multipart/form-data; boundary=x"}
        tasks.append(asyncio.create_task(service.http.post("/v1/files", content=parts(), headers=headers)))
        return tasks[-1]

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_no_slow_upload_keeps_another_waiting(service: Service, slowly: Any) -> None:
    slow = [slowly() for _ in range(16)]
    async with asyncio.timeout(10):
        for key in ("yours", "mine"):
            await uploaded(service.client(key))
    assert not any(each.done() for each in slow)


async def test_an_upload_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch, slowly: Any) -> None:
    monkeypatch.setattr(uploads, "GRACE_S", 0.1)
    answer = await asyncio.wait_for(slowly(), 10)
    assert (answer.status_code, "bytes a second" in answer.json()["error"]["message"]) == (408, True)


@pytest.mark.parametrize("bound", ["MOST_AT_ONCE", "MOST_FILES"])
async def test_beyond_what_all_may_have_the_slowest_of_the_key_with_the_most_gives_way(
    monkeypatch: pytest.MonkeyPatch, service: Service, slowly: Any, bound: str
) -> None:
    monkeypatch.setattr(uploads, bound, {"MOST_AT_ONCE": 4, "MOST_FILES": 2}[bound])
    slowest = slowly(size=20_000)
    others = [slowly(size=60_000), slowly(size=60_000), slowly("yours", size=10)]
    await asyncio.sleep(1.1)
    assert not slowest.done()
    others.append(slowly("yours", size=80_000))
    answer = await asyncio.wait_for(slowest, 10)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert not any(each.done() for each in others)


async def test_files_of_one_key_that_wait_for_a_slow_folder_keep_no_other_key_from_uploading(
    service: Service, slowly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    write = Storage.write

    def slow(storage: Storage, path: str, chunks: Iterable[bytes]) -> int:
        may_go_on.wait(10)
        return write(storage, path, chunks)

    monkeypatch.setattr(Storage, "write", slow)
    monkeypatch.setattr(uploads, "MOST_FILES", 1)
    whole = [asyncio.create_task(uploaded(service.client(), b"x" * 9_000)) for _ in range(uploads.STORED_AT_ONCE)]
    await asyncio.sleep(0.2)
    others = [slowly("yours"), slowly("yours")]
    await asyncio.sleep(0.2)
    assert not any(each.done() for each in (*whole, *others))
    waiting = [asyncio.create_task(uploaded(service.client(), b"x" * 60_000)) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert {getattr(each.exception(), "status_code", None) for each in done} == {503}
    assert not any(each.done() for each in (*whole, *others))
    may_go_on.set()
    await asyncio.gather(*whole, *waiting, return_exceptions=True)


async def test_a_folder_that_cannot_be_used_is_503(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[str]:
        raise PermissionError("not yours")

    monkeypatch.setattr(Storage, "names", fails)
    async with refused(503, "folder"):
        await service.client().batches.list()


DAMAGED = {
    "the batch": "{owner}/batches/{batch}/batch",
    "its end": "{owner}/batches/{batch}/end",
    "its cancellation": "{owner}/batches/{batch}/cancel",
    "the file": "{owner}/files/{file}/file",
}


@pytest.mark.parametrize("path", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("content", [b"", b'{"status":"of a later version"}'])
async def test_what_cannot_be_read_is_told_and_stands_in_no_ones_way(
    service: Service, path: str, content: bytes
) -> None:
    client = service.client()
    whole = await begun(client)
    broken = await begun(client)
    names = {"owner": owner_of("mine"), "batch": broken.id, "file": broken.input_file_id}
    service.storage.write(path.format_map(names), [content])
    is_file = "{file}" in path
    if is_file:
        assert [each.id async for each in client.files.list()] == [whole.input_file_id]
    else:
        assert [each.id async for each in client.batches.list()] == [whole.id]
    async with refused(404, "is there, and cannot be read"):
        await (client.files.retrieve(broken.input_file_id) if is_file else client.batches.retrieve(broken.id))
    unused = await uploaded(client)
    await client.files.delete(unused)
    for name in service.storage.names(f"{names['owner']}/ledger"):
        service.storage.remove(f"{names['owner']}/ledger/{name}")
    Sweep(service.storage, SECTION)()
    assert service.storage.exists(path.format_map(names))


async def test_a_batch_says_that_its_folder_fails_and_not_where_it_is(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, create = service.client(), Storage.create
    batch = await begun(client)

    def full(storage: Storage, path: str, content: bytes) -> bool:
        if "/log/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/srv/{path}")
        return create(storage, path, content)

    monkeypatch.setattr(Storage, "create", full)
    service.runner.start()
    await until(lambda: service.runner.troubles(owner_of("mine")))
    shown = (await client.batches.retrieve(batch.id)).metadata
    assert shown == {"sluice_trouble": "the folder of batches fails: No space left on device"}
    assert [each.metadata async for each in client.batches.list()] == [shown]
    service.runner.metrics.show(service.runner._runs.values(), {})
    assert b"sluice_batches_troubled 1.0" in service.runner.metrics.exposition()


async def test_without_a_folder_the_way_out_is_named() -> None:
    client = asking(no_batch_api(vllm))
    for path in ("/v1/files", "/v1/batches/batch_1"):
        answer = await client.get(path)
        assert answer.status_code == 501
        assert "batches.folder" in answer.json()["error"]["message"]
    assert (await client.get("/v1/models")).status_code == 404
