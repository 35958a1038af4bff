"""`StateStore` in Redis: each move is one Lua script, so one round trip and atomic for all routers and replicas."""

import asyncio
import contextlib
import hashlib
import json
import re
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec
import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError, RedisError

from policies.errors import ConfigError, StateStoreAccessError, StateStoreError
from policies.router.admission import NO_LIMITS, Foreseen, Limits, Quota, Refusal, Settlement
from policies.router.tickets import Assignment, Notice, Reading, Recall, Ticket, unknown_ticket
from predictor.learned import Scored
from router.one_call import OneCall
from router.packing import LUA_NAMES, packed_limits, packed_quotas, packed_reading, packed_settlements, packed_ticket
from router.state_store import FinishedLength, LaneEdges, Queued, ReplicaInfo, ReplicaLoad, Snapshot
from router.wire import PROTOCOL

CALL_TIMEOUT_S = 5.0
LISTEN_S = CALL_TIMEOUT_S / 2  # for notices, before Redis is asked whether it is there
# What a call raises when Redis is away. RuntimeError is uvloop's, of a write to a connection that has just broken.
AWAY = (RedisError, OSError, RuntimeError)
CREDENTIALS = "the user and the password in redis_url, or in SLUICE_REDIS_URL in the environment"
SETTINGS_S = 7 * 86400  # for which those of a configuration are kept that no deployment has told again
MOST_TICKETS = 32  # of one call, for which Redis does nothing else
MAX_CONNECTIONS = 64  # a burst of requests shares them: Redis runs one command at a time anyway
# What Redis 7, and 6, say of commands inside a script. An error of no kind of its own.
_NOT_IN_SCRIPTS = "ACL failure in script|user executing the script can't"
_LUA = Path(__file__).with_name("lua")
_info_decoder = msgspec.msgpack.Decoder(ReplicaInfo)
_length_decoder = msgspec.msgpack.Decoder(FinishedLength)
_OF_NOBODY = packed_ticket(unknown_ticket(""))
_notice_decoder = msgspec.msgpack.Decoder(list[tuple[str, ...]])


@cache
def state_version() -> str:
    """The version of the tables and of what is read from them: it changes with the scripts, with the fields that those
    keep unread, and with the relay's protocol.

    In a rolling update of Sluice itself old and new routers are up at once; they must not read each other's tables.
    """
    scripts = LUA_NAMES.encode() + b"".join(path.read_bytes() for path in sorted(_LUA.glob("*.lua")))
    kept = (ReplicaInfo.__struct_fields__, FinishedLength._fields, Scored._fields)
    return hashlib.sha256(scripts + repr((PROTOCOL, *kept)).encode()).hexdigest()[:12]


def tls_options(url: str, ca_certs: str | None) -> dict[str, Any]:
    """What a client of redis-py takes besides its URL.

    Raises:
        ConfigError: there are certificates, but no TLS, or they cannot be read.
    """
    if not ca_certs:
        return {}
    if not url.startswith("rediss://"):
        raise ConfigError(
            "CA certificates are given, but the URL of Redis does not begin with rediss://: nothing would be encrypted"
        )
    try:
        ssl.create_default_context(cafile=ca_certs)
    except OSError as error:  # at every connection, as if Redis were not there
        raise ConfigError(
            f"the CA certificates for Redis, {ca_certs}, cannot be read: {error.strerror or error}"
        ) from error
    return {"ssl_ca_certs": ca_certs}


def not_a_url(setting: str) -> ConfigError:
    """An error without the parser's words, which may hold a part of the password."""
    return ConfigError(
        f"{setting} is not a Redis URL: it begins with redis://, rediss:// or unix://, and special characters of the "
        "password are percent-encoded"
    )


def why_refused(error: BaseException) -> str | None:
    """Why no waiting helps, without user and password; None where it may.

    Redis that loads, is busy, follows another one or cannot be reached says something else.
    """
    if isinstance(error, AuthenticationError):
        none_given = re.search("already authenticated|Authentication required", str(error))  # by the protocol's version
        wants = "it wants a password, and was given none" if none_given else error
        return f"Redis does not let us in ({wants}): check {CREDENTIALS}"
    if isinstance(error, NoPermissionError) or re.search(_NOT_IN_SCRIPTS, str(error)):
        words = re.sub(r"\bUser \S+", "this user", str(error))
        return f"Redis does not obey us ({words}): check {CREDENTIALS}, and that user's ACL"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else f"Redis is not trusted ({cause}): check redis_ca_certs, and the host in redis_url"


async def check_access(url: str, ca_certs: str | None = None) -> None:
    """Before what takes long. A Redis that does not answer may do so later: then nothing is said.

    Raises:
        ConfigError: as `connect`.
        StateStoreAccessError: it refuses us, and will do so later too.
    """
    client = connect(url, ca_certs)
    # Once: redis-py tries again without the password, until that cannot be told from silence.
    client.set_retry(Retry(NoBackoff(), 0))
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await client.ping()
    except AWAY as error:
        if why := why_refused(error):
            raise StateStoreAccessError(why) from None
    finally:
        await client.aclose()


def connect(url: str, ca_certs: str | None = None) -> "redis.Redis":
    """A client for redis://, rediss:// (TLS) or unix://.

    It sets no socket_timeout: with one, redis-py sends by `asyncio.wait_for`, which in Python 3.11 loses a cancellation
    that arrives as the bytes leave. The store puts its own limit around each call.

    Raises:
        ConfigError: the URL cannot be parsed, or as `tls_options`.
    """
    tls = tls_options(url, ca_certs)
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=None,
            socket_timeout=None,
            socket_connect_timeout=CALL_TIMEOUT_S,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            **tls,
        )
    except ValueError:
        raise not_a_url("redis_url") from None
    return redis.Redis.from_pool(pool)


def _strings(values: Iterable[bytes]) -> list[str]:
    return [value.decode() for value in values]


def _class_and_reason(field: str) -> tuple[str, str]:
    slo_class, _, reason = field.rpartition(":")
    return slo_class, reason


def _bin_and_why(field: str) -> tuple[int, str]:
    bin_index, _, why = field.partition(":")
    return int(bin_index), why


def _by_bin(lanes: Mapping[str, int]) -> dict[tuple[str, int], int]:
    waiting: Counter[tuple[str, int]] = Counter()
    for name, count in lanes.items():
        slo_class, bin_index, _bucket = name.rsplit(":", 2)
        waiting[slo_class, int(bin_index)] += count
    return dict(waiting)


def _notice(request_id: str, replica_id: str | None = None) -> Notice:
    return Recall(request_id) if replica_id is None else Assignment(request_id, replica_id)


def _asked(ticket: Ticket, limits: Limits) -> tuple[str | bytes, ...]:
    return ticket.request_id, packed_ticket(ticket), packed_limits(limits), packed_quotas(limits.quotas)


def _refusal(reason: bytes, retry_after_s: bytes, *foreseen: bytes) -> Refusal:
    return Refusal(reason.decode(), float(retry_after_s), _foreseen(*foreseen) if foreseen else None)


def _foreseen(wait_s: bytes, reading_s: bytes, elsewhere_s: bytes = b"") -> Foreseen:
    return Foreseen(float(wait_s), float(reading_s), float(elsewhere_s) if elsewhere_s else None)


async def guarded(client: "redis.Redis", call: Callable[[], Awaitable[Any]], timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """What a call of this client brings.

    Raises:
        StateStoreError: Redis is away, or does not answer in time.
        StateStoreAccessError: it refuses us.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call()
    except AWAY as error:
        # Up to Redis 6.2 the code stands in the words, where a script met it; later ones give it as their own.
        if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
            await _look_for_the_primary(client)
        if isinstance(error, TimeoutError):
            await _leave_idle_connections(client)
        if why := why_refused(error):
            raise StateStoreAccessError(why) from None  # its words may name the user
        raise StateStoreError(f"Redis: {str(error) or type(error).__name__}") from error


async def _look_for_the_primary(client: "redis.Redis") -> None:
    """The old one may live on as a replica, with all its connections: new ones go where the name leads."""
    with contextlib.suppress(*AWAY):  # of ends that are broken; the next call tells
        await client.connection_pool.disconnect()


async def _leave_idle_connections(client: "redis.Redis") -> None:
    """Its host may have gone without a word: each of them would cost a call its time until it is found out."""
    with contextlib.suppress(*AWAY):  # of ends that are broken
        await client.connection_pool.disconnect(inuse_connections=False)


def scripts_in(client: "redis.Redis", folder: Path, names: str = "") -> dict[str, AsyncScript]:
    """The Lua scripts of a folder by their names, each behind its prelude, and that behind ``names``."""
    prelude = names + (folder / "prelude.lua").read_text()
    paths = [path for path in folder.glob("*.lua") if path.stem != "prelude"]
    return {path.stem: client.register_script(prelude + path.read_text()) for path in paths}


class RedisStateStore:
    """Takes the client, does not build it; `namespace` keeps several applications apart in one database.

    What stands before its first colon names the application, for which quotas are counted.
    """

    def __init__(self, client: "redis.Redis", namespace: str) -> None:
        self._redis = client
        application, *model = namespace.split(":", 1)
        self._application = f"{{sluice:{application}}}"  # the braces keep all of its keys in one slot of a cluster
        self._prefix = ":".join((self._application, *model))
        self._scripts = scripts_in(client, _LUA, LUA_NAMES)
        self._enqueues = OneCall(self._enqueue_all, MOST_TICKETS)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _run(self, script: str, *args: str | bytes | int | float) -> Any:
        return await self._guard(lambda: self._scripts[script](keys=[self._prefix, self._application], args=list(args)))

    async def _guard(self, call: Callable[[], Awaitable[Any]]) -> Any:
        return await guarded(self._redis, call)

    async def enqueue(self, ticket: Ticket, limits: Limits = NO_LIMITS) -> Queued | Refusal:
        taken, *reply = await self._enqueues.ask(_asked(ticket, limits))
        if not taken:
            return _refusal(*reply)
        assignments, *foreseen = reply
        return Queued([Assignment(*_strings(pair)) for pair in assignments], _foreseen(*foreseen))

    async def _enqueue_all(self, asked: Sequence[tuple[str | bytes, ...]]) -> Sequence[Any]:
        replies: Sequence[Any] = await self._run("enqueue", "", *chain.from_iterable(asked))
        return replies

    async def admit(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        ((taken, *reply),) = await self._run("enqueue", "admit", *_asked(ticket, limits))
        return None if taken else _refusal(*reply)

    async def charge(self, quotas: Sequence[Quota]) -> Refusal | None:
        taken, *reply = await self._run("charge", packed_quotas(quotas))
        return None if taken else _refusal(*reply)

    async def settle(self, router_id: str, number: int, settlements: Sequence[Settlement]) -> None:
        await self._run("settle", router_id, number, packed_settlements(settlements))

    async def release(
        self,
        replica_id: str,
        request_ids: Sequence[str],
        lease_s: float | None = None,
        reading: Reading | None = None,
    ) -> None:
        lease_ms = "" if lease_s is None else int(lease_s * 1000)
        await self._run("release", replica_id, lease_ms, packed_reading(reading), *request_ids)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        await self._enqueues.answered()  # a request whose client has left may be on its way yet
        await self._run("cancel", *request_ids)

    async def dispatch(self, router_id: str = "") -> list[Assignment]:
        return [Assignment(*_strings(pair)) for pair in await self._run("dispatch", router_id)]

    async def locate(self, request_ids: Sequence[str]) -> list[str | None]:
        places = await self._run("locate", *request_ids)
        return [None if place is None else place.decode() for place in places]

    async def register_replica(
        self, info: ReplicaInfo, slots: int, running: Sequence[str] = (), slowness: float = 1.0
    ) -> None:
        classes = f",{','.join(info.classes)}," if info.classes else ""
        gang = "" if info.gang_max_wait_s is None else repr(info.gang_max_wait_s)
        packed, silence_ms = msgspec.msgpack.encode(info), int(info.silence_s * 1000)
        batches = (gang, repr(info.gang_patience_s), info.rolling_size)
        fields = (packed, slots, classes, repr(slowness), *batches, silence_ms, repr(info.start_s), _OF_NOBODY)
        await self._run("register_replica", info.replica_id, *fields, *running)

    async def beat_replica(
        self,
        replica_id: str,
        slots: int,
        lease_s: float,
        slowness: float = 1.0,
        gang_sizes: Sequence[int] = (),
        reading: Reading | None = None,
    ) -> list[str] | None:
        fields = (slots, repr(slowness), int(lease_s * 1000), ",".join(map(str, gang_sizes)), packed_reading(reading))
        reply = await self._run("beat_replica", replica_id, *fields)
        return None if reply is None else _strings(reply)

    async def swap_edges(
        self, shape: str, version: int, bins: Sequence[float] = (), buckets: Sequence[float] = ()
    ) -> LaneEdges | None:
        reply = await self._run("swap_edges", shape, version, len(bins), *map(repr, bins), *map(repr, buckets))
        return None if reply is None else LaneEdges(int(reply[0]), *(tuple(map(float, edges)) for edges in reply[1:]))

    async def drop_replica(self, replica_id: str) -> None:
        await self._run("drop_replica", replica_id)

    async def replica_info(self, replica_id: str) -> ReplicaInfo | None:
        raw = await self._guard(lambda: cast(Awaitable[Any], self._redis.hget(self._key("replicas"), replica_id)))
        return None if raw is None else _info_decoder.decode(raw)

    async def replica_infos(self) -> list[ReplicaInfo]:
        raws = await self._guard(lambda: cast(Awaitable[Any], self._redis.hvals(self._key("replicas"))))
        return [_info_decoder.decode(raw) for raw in raws]

    async def beat_router(self, router_id: str, silence_s: float) -> tuple[list[str], list[str]]:
        replicas, routers = await self._run("beat_router", router_id, int(silence_s * 1000))
        return _strings(replicas), _strings(routers)

    async def time_s(self) -> float:
        seconds, microseconds = await self._guard(self._redis.time)
        return float(seconds + microseconds * 1e-6)

    async def remove_router(self, router_id: str) -> None:
        await self._run("remove_router", router_id)

    async def exchange_lengths(
        self, seen: int, new: Iterable[FinishedLength], keep: int
    ) -> tuple[int, list[FinishedLength]]:
        packed = [msgspec.msgpack.encode(length) for length in new]
        total, unseen = await self._run("exchange_lengths", seen, keep, *packed)
        return total, [_length_decoder.decode(raw) for raw in unseen]

    async def change_settings(self, configured: str, changes: Mapping[str, bytes]) -> None:
        key, fields = self._key(f"settings:{configured}"), cast(dict[Any, Any], changes)
        async with self._redis.pipeline() as pipeline:
            pipeline.hset(key, mapping=fields)
            pipeline.expire(key, SETTINGS_S)
            await self._guard(pipeline.execute)

    async def restore_settings(self, configured: str, settings: Mapping[str, bytes]) -> None:
        key = self._key(f"settings:{configured}")
        async with self._redis.pipeline() as pipeline:
            for name, value in settings.items():
                pipeline.hsetnx(key, name, value)
            pipeline.expire(key, SETTINGS_S)
            await self._guard(pipeline.execute)

    async def changed_settings(self, configured: str) -> dict[str, bytes]:
        key = self._key(f"settings:{configured}")
        found = await self._guard(lambda: cast(Awaitable[Any], self._redis.hgetall(key)))
        return {name.decode(): value for name, value in found.items()}

    async def publish(self, router_id: str, pages: Mapping[str, bytes], ttl_s: float) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for what, page in pages.items():
                pipeline.set(self._key(f"{what}:{router_id}"), page, px=int(ttl_s * 1000))
            await self._guard(pipeline.execute)

    async def published(self, what: str) -> dict[str, bytes]:
        ids = _strings(await self._guard(lambda: self._redis.zrange(self._key("routers"), 0, -1)))
        if not ids:
            return {}
        raws = await self._guard(lambda: self._redis.mget([self._key(f"{what}:{router_id}") for router_id in ids]))
        return {router_id: raw for router_id, raw in zip(ids, raws, strict=True) if raw is not None}

    async def snapshot(self) -> Snapshot:
        tables = json.loads(await self._run("snapshot"))
        return Snapshot(
            lanes=_by_bin(tables["lanes"]),
            replicas={replica_id: ReplicaLoad(**load) for replica_id, load in tables["replicas"].items()},
            routers=tables["routers"],
            waiting_s=tables["waiting_s"],
            recalled=frozenset(tables["recalled"]),
            overtaken_s=tables["overtaken_s"],
            late={_class_and_reason(field): count for field, count in tables["late"]},
            owed={slo_class: count for slo_class, count in tables["owed"]},
            batches={_bin_and_why(field): count for field, count in tables["batches"]},
            served_s={api_key: seconds for api_key, seconds in tables["served"]},
            starts=tables["starts"],
            start_s=tables["start_s"],
            asked=tables["asked"],
        )

    async def notices(self, router_id: str) -> AsyncGenerator[list[Notice], None]:
        channel = self._key(f"router:{router_id}")
        pubsub = self._redis.pubsub()
        try:
            await self._guard(lambda: pubsub.subscribe(channel))
            silent = 0
            while True:
                message = await self._guard(lambda: pubsub.get_message(timeout=LISTEN_S))
                silent = silent + 1 if message is None else 0
                if message is None:
                    await self._look_for_life(pubsub, silent)
                elif message["type"] == "subscribe":
                    yield []
                elif message["type"] == "message":
                    yield [_notice(*told) for told in _notice_decoder.decode(message["data"])]
        finally:
            # The connection is broken when we come here after an error; there is nothing more to lose by closing it.
            with contextlib.suppress(*AWAY):
                await cast(Awaitable[None], pubsub.aclose())  # type: ignore[no-untyped-call]

    async def _look_for_life(self, pubsub: "redis.client.PubSub", silent: int) -> None:
        """redis-py asks too, and never looks for the answer: to a host that has gone the kernel sends for minutes.

        Args:
            silent: for how many LISTEN_S nothing has come.

        Raises:
            StateStoreError: nothing has come since it was asked CALL_TIMEOUT_S ago.
        """
        if silent * LISTEN_S > CALL_TIMEOUT_S:
            await _leave_idle_connections(self._redis)
            raise StateStoreError("Redis: no answer on the connection of notices")
        if silent == 1:
            await self._guard(pubsub.ping)

    async def close(self) -> None:
        await self._redis.aclose()
