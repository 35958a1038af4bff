"""What is Redis' own; what every store does stands in contracts/test_state_stores.py."""

import asyncio
import math
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import redis as redis_sync
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import ConfigError, StateStoreAccessError, StateStoreError
from policies.router.admission import Limits, Quota, Refusal, Settlement
from policies.router.order import Band, banded
from policies.router.tickets import Recall, Ticket
from predictor.learned import Scored
from router import redis_store
from router.redis_store import RedisStateStore, check_access, connect
from router.state_store import FinishedLength, Queued, ReplicaInfo
from tests.gate import Gate
from tests.waiting import PATIENCE_S

TICKET = Ticket(request_id="x", bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")
INFO = ReplicaInfo(replica_id="r", host="127.0.0.1", port=1, max_model_len=64)


@pytest.mark.parametrize("url", ["http://host", "host:6379", "redis://host:port/0"])
def test_what_is_no_url_of_a_redis_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        connect(url)


def test_certificates_without_encryption_are_refused() -> None:
    with pytest.raises(ConfigError, match="rediss://"):
        connect("redis://:hunter2@host/0", ca_certs="ca.pem")


@pytest.mark.parametrize("holds", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_said_so(tmp_path: Path, holds: str | None) -> None:
    file = tmp_path / "ca.pem"
    if holds is not None:
        file.write_text(holds)
    with pytest.raises(ConfigError, match=r"CA certificates for Redis, .*ca\.pem, cannot be read: .*[Nn]o "):
        connect("rediss://:hunter2@host/0", ca_certs=str(file))


def test_the_password_is_in_no_message() -> None:
    for url, ca_certs in (("redis://:hunter2@host:port/0", None), ("redis://:hunter2@host/0", "ca.pem")):
        with pytest.raises(ConfigError) as caught:
            connect(url, ca_certs)
        assert "hunter2" not in str(caught.value)


async def test_a_redis_that_is_not_there_is_said_so() -> None:
    store = RedisStateStore(connect(f"redis://:hunter2@127.0.0.1:{free_port()}/0"), "n")
    with pytest.raises(StateStoreError, match="Redis") as caught:
        await store.snapshot()
    assert "hunter2" not in str(caught.value)
    await store.close()


@pytest.fixture
def guarded_url() -> Iterator[str]:
    """With a password, and a user who may do next to nothing."""
    server = EmbeddedRedis(free_port(), "hunter2")
    with redis_sync.Redis.from_url(server.url) as admin:
        admin.acl_setuser("visitor", enabled=True, passwords=["+hunter3"], commands=["+hget"], keys=["*"])
    yield server.url.rpartition("@")[2]
    server.close()


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (":hunter4@", "invalid"),
        ("", "wants a password"),
        ("nobody:hunter4@", "invalid"),
        ("visitor:hunter3@", "no permissions"),
    ],
)
async def test_a_redis_that_refuses_us_is_told_from_one_that_is_away(guarded_url: str, user: str, said: str) -> None:
    url = f"redis://{user}{guarded_url}"
    client = connect(url)
    client.set_retry(Retry(NoBackoff(), 0))  # as the check of access: every try says the same
    store = RedisStateStore(client, "n")
    for call in (store.time_s, store.snapshot, lambda: anext(store.notices("a")), lambda: check_access(url)):
        with pytest.raises(
            StateStoreAccessError, match=rf"{said}.*check .*in redis_url, or in SLUICE_REDIS_URL"
        ) as caught:
            await call()
        shown = "".join(traceback.format_exception(caught.value))
        assert not any(secret in shown for secret in ("hunter", "visitor", "nobody"))
    await store.close()


async def test_the_right_password_is_let_in(guarded_url: str) -> None:
    await check_access(f"redis://:hunter2@{guarded_url}")


async def test_what_is_refused_is_not_tried_again(guarded_url: str) -> None:
    """Sixteen connections to a Redis far away take longer than a call may: it would count as away."""
    admin = connect(f"redis://:hunter2@{guarded_url}")
    before = (await admin.info("stats"))["total_connections_received"]
    for user in ("", ":wrong@"):
        with pytest.raises(StateStoreAccessError):
            await check_access(f"redis://{user}{guarded_url}")
    assert (await admin.info("stats"))["total_connections_received"] == before + 2
    await admin.aclose()


NOT_NOW = [
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "READONLY You can't write against a read only replica.",
    "CLUSTERDOWN The cluster is down",
    "ERR max number of clients reached",
]


@pytest.fixture
async def says(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """URL of a Redis that answers whatever it is asked with one error."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(f"-{request.param}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    server.close()


@pytest.mark.parametrize(
    "says",
    [
        f"{begin}User visitor has no permissions to run the 'ping' command"
        for begin in ("NOPERM ", "NOPERM ACL failure in script: ", "ERR ACL failure in script: ")
    ],
    indirect=True,
)
async def test_a_user_whom_redis_names_is_not_named_by_us(says: str) -> None:
    with pytest.raises(StateStoreAccessError, match="this user has no permissions to run the 'ping' command") as caught:
        await check_access(says)
    assert "visitor" not in str(caught.value)


@pytest.mark.parametrize("says", ["ERR The user executing the script can't run this command"], indirect=True)
async def test_a_script_that_a_user_may_not_run_is_refused(says: str) -> None:
    with pytest.raises(StateStoreAccessError, match="that user's ACL"):
        await check_access(says)


@pytest.mark.parametrize("url", ["redis://:hunter2/x@127.0.0.1:1/0"])
def test_what_is_no_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url is not a Redis URL") as caught:
        connect(url)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("says", NOT_NOW, indirect=True)
async def test_a_redis_that_cannot_serve_yet_is_waited_for(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "ExponentialBackoff", lambda **_: NoBackoff())
    store = RedisStateStore(connect(says), "n")
    with pytest.raises(StateStoreError) as caught:
        await store.time_s()
    assert type(caught.value) is StateStoreError
    await check_access(says)
    await store.close()


async def test_a_redis_that_is_not_there_may_come_yet() -> None:
    await check_access(f"redis://127.0.0.1:{free_port()}/0")


async def test_a_redis_that_says_nothing_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    store = RedisStateStore(connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"), "n")
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 0.1)  # for answers: connecting has its time
    for call in (store.snapshot, store.time_s, store.replica_infos):
        with pytest.raises(StateStoreError, match="TimeoutError"):
            await call()
    with pytest.raises(StateStoreError):
        await anext(store.notices("a"))
    await store.close()
    server.close()


async def test_a_write_to_a_connection_that_broke_a_moment_ago_counts_as_redis_away(redis_url: str) -> None:
    async def write() -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    store = RedisStateStore(connect(redis_url), "n")
    with pytest.raises(StateStoreError, match="Redis: unable to perform"):
        await store._guard(write)
    await store.close()


@pytest.fixture
async def silent(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """A way to Redis that can fall silent, before a store that does not wait for long."""
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(redis_store, "LISTEN_S", 0.4)
    gate = Gate(redis_url)
    await gate.open()
    yield gate
    gate.shut()


async def test_a_silent_connection_of_notices_is_left_for_one_that_goes_where_the_name_leads(silent: Gate) -> None:
    store = RedisStateStore(connect(silent.url), secrets.token_hex(4))
    notices = store.notices("a")
    assert await anext(notices) == []
    silent.fall_silent()
    with pytest.raises(StateStoreError, match="no answer on the connection of notices"):
        await asyncio.wait_for(anext(notices), PATIENCE_S)
    again = store.notices("a")
    assert await asyncio.wait_for(anext(again), PATIENCE_S) == []
    await again.aclose()
    await store.close()


async def test_notices_wait_for_as_long_as_redis_answers(silent: Gate) -> None:
    store = RedisStateStore(connect(silent.url), secrets.token_hex(4))
    notices = store.notices("a")
    assert await anext(notices) == []
    following = asyncio.ensure_future(anext(notices))
    await asyncio.wait([following], timeout=5.0)
    assert not following.done()
    await store._redis.publish(store._key("router:a"), msgspec.msgpack.encode([("x",)]))
    assert await asyncio.wait_for(following, PATIENCE_S) == [Recall("x")]
    await notices.aclose()
    await store.close()


async def test_a_burst_before_the_silence_costs_one_call_its_time(silent: Gate) -> None:
    store = RedisStateStore(connect(silent.url), "n")
    await asyncio.gather(*(store.time_s() for _ in range(20)))
    silent.fall_silent()
    with pytest.raises(StateStoreError, match="TimeoutError"):
        await store.time_s()
    await store.time_s()
    await store.close()


async def test_a_primary_that_became_a_replica_is_left_for_the_new_one() -> None:
    """It answers on, and refuses every write: nothing but its answer says that the name leads elsewhere now."""
    password, ports = "p", [free_port(), free_port()]
    old, new = (EmbeddedRedis(port, password) for port in ports)
    name = Gate(old.url)
    await name.open()
    store = RedisStateStore(connect(name.url), "n")
    notices = store.notices("a")
    assert await anext(notices) == []
    await store.beat_router("a", 60.0)  # over another connection, which stands from now on
    admin = connect(old.url)
    await admin.replicaof("127.0.0.1", str(ports[1]))
    name.lead_to(new.url)
    with pytest.raises(StateStoreError, match="(?i)read ?only replica"):
        await store.beat_router("a", 60.0)
    await store.beat_router("a", 60.0)
    assert (await store.snapshot()).routers == 1
    await notices.aclose()
    await admin.aclose()
    await store.close()
    name.shut()
    for redis in (old, new):
        redis.close()


async def test_so_is_one_whose_server_gives_the_code_apart_from_the_words(redis_url: str, namespace: str) -> None:
    """As Redis 7 and Valkey do for a script; the server of these tests may be older."""

    async def refused() -> None:
        raise ReadOnlyError("You can't write against a read only replica. script: 1, on @user_script:1.")

    client = connect(redis_url)
    store = RedisStateStore(client, namespace)
    before = await client.client_id()
    with pytest.raises(StateStoreError):
        await store._guard(refused)
    assert await client.client_id() != before, "the next call goes where the name leads"
    await store.close()


async def test_namespaces_do_not_mix(redis_url: str, namespace: str) -> None:
    stores = [RedisStateStore(connect(redis_url), f"{namespace}-{number}") for number in range(2)]
    await stores[0].enqueue(TICKET)
    assert [(await store.snapshot()).waiting for store in stores] == [1, 0]
    for store in stores:
        await store.close()


ONE_A_MINUTE = Limits(max_waiting=9, quotas=(Quota(name="k", cost=1.0, per_s=1 / 60, burst=1.0),))


async def test_models_of_one_application_share_a_quota_and_other_applications_do_not(
    redis_url: str, namespace: str
) -> None:
    first, second, other = (
        RedisStateStore(connect(redis_url), name)
        for name in (f"{namespace}:model", f"{namespace}:another:prefill", f"{namespace}-2:model")
    )
    assert await first.enqueue(TICKET, ONE_A_MINUTE) == Queued([])
    assert isinstance(await second.enqueue(TICKET, ONE_A_MINUTE), Refusal)
    assert await other.enqueue(TICKET, ONE_A_MINUTE) == Queued([])
    for store in (first, second, other):
        await store.close()


async def test_a_clock_of_redis_that_is_set_back_locks_nobody_out(redis_url: str, namespace: str) -> None:
    store, admin = RedisStateStore(connect(redis_url), namespace), connect(redis_url)
    assert await store.enqueue(TICKET, ONE_A_MINUTE) == Queued([])
    key = f"{{sluice:{namespace}}}:spent:k"
    for set_back_s, owed_s in ((0.0, 60.0), (3600.0, 60.0), (-40.0, 20.0)):  # the last lets time pass
        kept = await admin.get(key)
        assert isinstance(kept, bytes)
        owed, at_s = msgspec.msgpack.decode(kept)
        await admin.set(key, msgspec.msgpack.encode((owed, at_s + set_back_s)))
        refused = await store.enqueue(replace(TICKET, request_id="y"), ONE_A_MINUTE)
        assert isinstance(refused, Refusal)
        assert refused.retry_after_s == pytest.approx(owed_s, abs=10.0)
    await admin.aclose()
    await store.close()


async def test_a_cancellation_is_never_lost(new_store: Callable[[], RedisStateStore]) -> None:
    """Else a loop that is told to end goes on for ever, and a request whose client left runs to its end."""
    store = new_store()
    await store.snapshot()
    cut_off = 0
    for number in range(300):
        call = asyncio.create_task(store.locate(["x"]))
        await asyncio.sleep(number * 2e-6)
        if call.cancel():
            await asyncio.wait([call])
            assert call.cancelled()
            cut_off += 1
    assert cut_off
    assert await store.locate(["x"]) == [None]  # what was cut off left no answer behind


async def test_scripts_are_found_again_after_redis_forgot_them(
    redis_url: str, new_store: Callable[[], RedisStateStore]
) -> None:
    store, admin = new_store(), connect(redis_url)
    await store.enqueue(TICKET)
    await admin.script_flush()
    assert await store.locate(["x"]) == [""]
    await admin.aclose()


WEEK_S = 7 * 86_400


async def test_what_an_ended_application_leaves_goes_within_a_week(redis_url: str, namespace: str) -> None:
    client = connect(redis_url)
    store = RedisStateStore(client, namespace)

    async def left_s() -> dict[str, int]:
        keys = [key async for key in client.scan_iter(f"{store._prefix}:*")]
        return {key.decode().rpartition("}:")[2]: await client.ttl(key) for key in keys}

    limits = Limits(max_waiting=9, quotas=(Quota(name="k", cost=1.0, per_s=1.0, burst=9.0),))
    for life in range(2):
        of_key = replace(TICKET, request_id="first", arrival_s=2.0 * life, api_key="k")
        await store.enqueue(
            replace(of_key, deadline_key=banded(Band.LATE, 1.0), late_key=banded(Band.LATE, 1.0)), limits
        )
        await store.settle("a", life + 1, [Settlement(name="k", cost=1.0, per_s=1.0)])
        await store.enqueue(replace(TICKET, request_id="then", arrival_s=3.0 * life + 1.0, deadline_key=-1.0))
        await store.register_replica(INFO, 1)
        await store.release(INFO.replica_id, ["then"])
        await store.exchange_lengths(0, [FinishedLength("standard", 7)], 8)
        await store.swap_edges("2 bins", life, [0.0, 10.0 + life, math.inf])
        await store.change_settings("this way", {"mode": b"1"})
        await store.publish("a", {"metrics": b"page"}, 60.0)
        if life == 0:
            await store.beat_router("a", 60.0)
        await store.release(INFO.replica_id, ["first"])
        await store.drop_replica(INFO.replica_id)
    await store.remove_router("a")
    left = await left_s()
    assert {"lengths", "lengths_total", "edges", "settings:this way", "started", "overtaken", "served"} <= left.keys()
    assert all(0 < seconds <= WEEK_S for seconds in left.values()), left
    await client.expire(f"{store._prefix}:edges", 60)
    await store.beat_router("a", 60.0)
    assert (await left_s())["edges"] > WEEK_S - 60, "a router that lives renews them"
    await store.close()


def test_tables_are_apart_for_versions_that_write_other_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {redis_store.state_version.__wrapped__()}
    more = [
        ("ReplicaInfo", SimpleNamespace(__struct_fields__=(*ReplicaInfo.__struct_fields__, "new"))),
        ("FinishedLength", SimpleNamespace(_fields=(*FinishedLength._fields, "new"))),
        ("Scored", SimpleNamespace(_fields=(*Scored._fields, "new"))),
        ("PROTOCOL", redis_store.PROTOCOL + 1),
    ]
    for name, other in more:
        with monkeypatch.context() as changed:
            changed.setattr(redis_store, name, other)
            versions.add(redis_store.state_version.__wrapped__())
    assert len(versions) == 1 + len(more)
