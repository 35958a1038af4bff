"""The relay's link to an engine process, with a process that plays vLLM's engine core."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import zmq

from deployments.engines.vllm import core_process
from deployments.engines.vllm.core_link import CoreLink, Rank
from deployments.engines.vllm.core_process import Told
from policies.errors import ConfigError, EngineCallError, ReplicaLostError
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

READY = {"max_model_len": 100, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32"}


def play(argv: list[str], handshake: str, telling: Connection, place: object, rank: int) -> None:
    """In the engine process; `argv` says what happens."""
    if "is refused" in argv:
        telling.send_bytes(msgspec.msgpack.encode(Told(refused="vllm_args: no such model")))
        return
    if "ends at once" in argv:
        return
    telling.send_bytes(msgspec.msgpack.encode(Told(engine_version="vllm-1", kv_layout="model=m")))
    if "ends while it loads" in argv:
        return
    context = zmq.Context()
    greets = context.socket(zmq.DEALER)
    greets.identity = rank.to_bytes(2, "little")
    greets.connect(handshake)
    greets.send(msgspec.msgpack.encode({"status": "HELLO"}))
    told = msgspec.msgpack.decode(greets.recv())
    addresses = told["addresses"]
    comes, goes = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    comes.identity = greets.identity
    comes.connect(addresses["inputs"][0])
    goes.connect(addresses["outputs"][0])
    comes.send(msgspec.msgpack.encode(READY))
    greets.send(msgspec.msgpack.encode({"status": "READY"}))
    while True:
        kind, *parts = comes.recv_multipart()
        given = msgspec.msgpack.decode(parts[0])
        if kind == b"\x02":  # in which it rests at once
            goes.send(msgspec.msgpack.encode([rank, [["seen", given]], None, 1.0, None, None, given[0]]))
            continue
        if kind != b"\x03":
            goes.send(msgspec.msgpack.encode([0, [["seen", [kind[0]]]]]))
            continue
        _, number, method, arguments = given
        if method == "end":
            os._exit(1)
        elif method == "fail":
            goes.send(b"ENGINE_CORE_DEAD")
        elif method == "babble":
            goes.send(b"no message")
        elif method == "refuse":
            goes.send(msgspec.msgpack.encode([0, [], None, 1.0, [number, "no such setting", None]]))
        elif method == "parallel":
            goes.send(msgspec.msgpack.encode([0, [], None, 1.0, [number, None, [None, told["parallel_config"]]]]))
        elif method == "echo":
            goes.send(msgspec.msgpack.encode([0, [], None, 1.0, [number, None, [None, arguments]]]))


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "run", play)


@pytest.fixture
async def link() -> AsyncIterator[CoreLink]:
    made = await asyncio.to_thread(CoreLink, ["serves"])
    yield made
    await asyncio.to_thread(made.shutdown)


async def test_an_engine_process_says_what_it_is_and_answers_calls(link: CoreLink) -> None:
    assert (link.told.engine_version, link.told.kv_layout) == ("vllm-1", "model=m")
    assert msgspec.to_builtins(link.ready).items() <= READY.items()
    assert await asyncio.gather(*(link.call("echo", at, {"a": [at]}) for at in range(5))) == [
        [at, {"a": [at]}] for at in range(5)
    ]
    with pytest.raises(EngineCallError, match="^no such setting$"):
        await link.call("refuse")
    link.add([msgspec.msgpack.encode(["a"])])
    link.abort(["a"])
    batches = [await link.next_batch() for _ in range(2)]
    assert [batch.outputs[0].new_token_ids for batch in batches] == [[0], [1]]


class Group:
    """Of one rank; notes what it hears."""

    def __init__(self, link: CoreLink) -> None:
        self.heard: list[object] = []
        link.group = self

    def added(self, link: CoreLink) -> None:
        self.heard.append("added")

    def rest(self, wave: int) -> None:
        self.heard.append(wave)

    def died(self) -> None:
        self.heard.append("died")


async def test_a_rank_has_a_name_of_its_own_and_its_group_hears_of_it() -> None:
    link = await asyncio.to_thread(CoreLink, ["serves"], Rank(3, (7001, 7002, 7003)))
    group = Group(link)
    assert await link.call("parallel") == {
        "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": 7001,
        "_data_parallel_master_port_list": [7002, 7003],
    }
    link.add([msgspec.msgpack.encode(["a"])])
    link.start_wave(5)
    batches = [await link.next_batch() for _ in range(2)]
    assert [batch.outputs[0].new_token_ids for batch in batches] == [[0], [5, -1]]
    await until(lambda: group.heard == ["added", 5])
    with pytest.raises(ReplicaLostError):
        await link.call("end")
    assert group.heard == ["added", 5, "died"]
    await asyncio.to_thread(link.shutdown)


async def test_an_engine_alone_is_told_of_no_others(link: CoreLink) -> None:
    assert await link.call("parallel") == {}


@pytest.mark.parametrize("how", ["end", "fail"])
async def test_nobody_waits_for_an_engine_that_has_died(link: CoreLink, how: str) -> None:
    """It ends without a word, or says that it does."""
    waiting = [asyncio.create_task(each) for each in (link.call("says nothing"), link.next_batch(), link.call(how))]
    done, _ = await asyncio.wait(waiting, timeout=30.0)
    assert link.dead and [type(task.exception()) for task in done] == [ReplicaLostError] * 3
    for call in (link.call("echo"), link.next_batch()):
        with pytest.raises(ReplicaLostError):
            await call
    with pytest.raises(ReplicaLostError):
        link.add([b""])
    link.abort(["a"])  # nobody is left to be told


async def test_an_engine_that_says_what_cannot_be_read_is_given_up(
    link: CoreLink, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ReplicaLostError):
        await link.call("babble")
    assert link.dead and "reading what the engine core sent failed" in caplog.text


async def test_a_call_that_is_given_up_leaves_nothing(link: CoreLink) -> None:
    asked = asyncio.create_task(link.call("says nothing"))
    await until(lambda: bool(link._calls))
    asked.cancel()
    assert await link.call("echo") == []
    assert not link._calls


async def test_a_process_whose_arguments_are_refused_says_why() -> None:
    with pytest.raises(ConfigError, match="^vllm_args: no such model$"):
        await asyncio.to_thread(CoreLink, ["is refused"])


@pytest.mark.parametrize("when", ["ends at once", "ends while it loads"])
async def test_a_process_that_ends_while_it_starts_is_not_waited_for(when: str) -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        await asyncio.to_thread(CoreLink, [when])


async def test_an_end_takes_the_process_and_its_sockets_along(link: CoreLink) -> None:
    folder = link._folder.name
    began = time.monotonic()
    await asyncio.to_thread(link.shutdown)
    await until(lambda: not os.path.exists(folder))
    assert not link._process.is_alive() and time.monotonic() - began < 30.0
    told: Any = link.next_batch()
    with pytest.raises(ReplicaLostError):
        await told
