"""What takes minutes: `make soak`. As root: one test fills a disk of its own, which is mounted for it."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice, alive, command_of
from tests.integration.one_model.test_deaths import check_redis_that_stands_still
from tests.integration.traffic import undisturbed
from tests.waiting import wait_until

pytestmark = pytest.mark.soak
OPTIONS = ("--router-replicas", "2", "--", "--max-num-seqs", "16", *EXACT)
HANG_TIMEOUT_S = 20.0
OF_THE_NODE_S = 30.0  # for which Ray's own processes may be away
WARM_UP_S, LOAD_S, LOOK_EVERY_S = 120.0, 600.0, 60.0
MAX_GROWTH_BYTES = 32 << 20  # in LOAD_S
# The heap of vLLM's CPU build has not settled after two minutes of answers of all lengths, and grows ever more slowly.
MAX_CORE_GROWTH_BYTES = 256 << 20


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A small one, where temporary files go."""
    folder = Path("/tmp/soak")  # short: paths of Unix sockets begin with it
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder)], check=True)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(folder))
        yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


@pytest.fixture(scope="module")
def sluice(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("soak")
    with Sluice(folder, *OPTIONS, settings={"engine": {"hang_timeout_s": HANG_TIMEOUT_S}}) as application:
        yield application


def test_a_full_disk_costs_nobody_anything(sluice: Sluice, disk: Path) -> None:
    (controller,) = sluice.named("ServeController")
    fill = disk / "fill"
    with undisturbed(sluice) as traffic, fill.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):  # it is full then
            while file.write(bytes(1 << 20)):
                pass
        assert psutil.disk_usage(str(disk)).free == 0
        traffic.wait_for_whole_streams(12)
        fill.unlink()
        file.truncate(0)
        traffic.wait_for_whole_streams(12)
    assert controller.is_running()


def test_a_redis_that_stands_still_for_long_costs_new_requests_no_more_than_a_moment(sluice: Sluice) -> None:
    check_redis_that_stands_still(sluice, lambda _: time.sleep(40))


def test_what_an_engine_core_holds_that_stands_still_goes_on_elsewhere(sluice: Sluice) -> None:
    core, _ = sluice.engine_cores()
    with undisturbed(sluice) as traffic:
        core.suspend()
        wait_until(lambda: not alive([core]), START_TIMEOUT_S, "it is ended")
        wait_until(lambda: len(sluice.engine_cores()) == 2, START_TIMEOUT_S, "another one has come")
        traffic.wait_for_whole_streams(12)
    assert max(stream.longest_gap_s for stream in traffic.streams) < 3 * HANG_TIMEOUT_S


def memory(sluice: Sluice) -> dict[str, int]:
    """Bytes of each process, by what it is."""
    found = {}
    for process in sluice.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            name = " ".join(command_of(process)[:1]).rpartition("/")[2][:40]
            found[f"{name} {process.pid}"] = process.memory_info().rss
    return found


def most_growth_bytes(name: str) -> int:
    return MAX_CORE_GROWTH_BYTES if name.startswith("VLLM::EngineCore") else MAX_GROWTH_BYTES


async def asks_of_every_kind(client: httpx.AsyncClient, number: int) -> None:
    """What is not a plain stream: some of it is refused, some leaves."""
    chat = {"model": "sluice-demo", "messages": [{"role": "user", "content": f"What is {number}?"}], "max_tokens": 30}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "n": 3, "logprobs": True, "top_logprobs": 3}),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {**chat, "model": "nobody"}),
        ("/v1/completions", {"model": "sluice-demo", "prompt": "word " * (50 + number % 900), "max_tokens": 5}),
        ("/v1/completions", {"model": "sluice-demo", "prompt": "a", "temperature": -1}),
        ("/tokenize", {"model": "sluice-demo", "prompt": f"number {number}"}),
    ):
        await client.post(path, json=body)
    for path in ("/metrics", "/sluice/status", "/v1/models"):
        await client.get(path)
    leaves = {**chat, "stream": True, "max_tokens": 500, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=leaves) as response:
        async for _ in response.aiter_lines():
            break


@contextlib.asynccontextmanager
async def mixed_load(sluice: Sluice) -> AsyncIterator[None]:
    async def client(first: int) -> None:
        async with httpx.AsyncClient(base_url=sluice.url, timeout=180, trust_env=False) as client:
            for number in range(first, 10**6, 4):
                await asks_of_every_kind(client, number)

    clients = [asyncio.create_task(client(first)) for first in range(4)]
    yield
    for task in clients:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def test_nothing_grows_in_ten_minutes_of_mixed_load(sluice: Sluice) -> None:
    with undisturbed(sluice) as traffic:
        async with mixed_load(sluice):
            await asyncio.sleep(WARM_UP_S)
            before = memory(sluice)
            await asyncio.sleep(LOAD_S)
            after = memory(sluice)
    for name, size in sorted(after.items(), key=lambda item: -item[1]):
        print(f"{name:52} {before.get(name, 0) >> 20:6} MiB {size >> 20:6} MiB")
    print(f"{len(traffic.streams)} streams, {len(traffic.probes)} new requests beside the mixed ones")
    assert before.keys() == after.keys(), "somebody has died"
    assert [name for name, size in after.items() if size - before[name] > most_growth_bytes(name)] == []


def test_without_the_cluster_s_table_all_goes_on_for_a_while_and_then_all_ends(sluice: Sluice) -> None:
    (gcs,) = sluice.named("gcs_server")
    everything = sluice.processes()
    with undisturbed(sluice):
        gcs.kill()
        time.sleep(OF_THE_NODE_S)
    wait_until(lambda: not alive(everything), START_TIMEOUT_S, "all has ended")
    assert "GCS" in sluice.output()


def test_without_the_raylet_all_goes_on(disk: Path, tmp_path: Path) -> None:
    with Sluice(tmp_path, *OPTIONS) as application:
        (raylet,) = application.named("raylet/raylet")
        everything = application.processes()
        with undisturbed(application):
            raylet.kill()
            time.sleep(OF_THE_NODE_S)
        application.interrupt()
        wait_until(lambda: not alive(everything), START_TIMEOUT_S, "all has ended")
