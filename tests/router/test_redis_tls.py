"""The shared state over TLS: a real Redis behind a terminator with certificates made here."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.command import cli
from deployments.http.keys import digest
from deployments.process.ports import free_port
from policies.errors import StateStoreAccessError, StateStoreError
from policies.router.tickets import Assignment, Ticket
from router.redis_store import RedisStateStore, check_access, connect
from router.state_store import Queued, ReplicaInfo
from tests.authority import Authority, shown_by_server
from tests.gate import Gate

TICKET = Ticket(request_id="x", bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.fixture
async def tls_url(redis_url: str, authority: Authority, tmp_path: Path) -> AsyncIterator[str]:
    gate = Gate(redis_url, shown_by_server(authority.issue(tmp_path, "127.0.0.1")))
    await gate.open()
    yield gate.url
    gate.shut()


async def test_tickets_and_notices_travel_over_tls(tls_url: str, authority: Authority, namespace: str) -> None:
    store = RedisStateStore(connect(tls_url, str(authority.certificate)), namespace)
    notices = store.notices("a")
    assert await anext(notices) == []
    assert await store.enqueue(TICKET) == Queued([])
    info = ReplicaInfo(replica_id="r", host="127.0.0.1", port=1, secret=b"s", max_model_len=8)
    await store.register_replica(info, 1, [])
    async with asyncio.timeout(30):
        assert await anext(notices) == [Assignment("x", "r")]
    await notices.aclose()
    await store.close()


async def test_a_redis_of_another_authority_is_refused(tls_url: str, namespace: str, tmp_path: Path) -> None:
    stranger = Authority.make(tmp_path, "stranger")
    store = RedisStateStore(connect(tls_url, str(stranger.certificate)), namespace)
    for call in (store.time_s, lambda: check_access(tls_url, str(stranger.certificate))):
        with pytest.raises(StateStoreAccessError, match="CERTIFICATE_VERIFY_FAILED.*check redis_ca_certs"):
            await call()
    await store.close()


async def test_a_redis_over_tls_that_is_not_there_may_come_yet(authority: Authority) -> None:
    await check_access(f"rediss://127.0.0.1:{free_port()}/0", str(authority.certificate))


async def test_a_certificate_for_another_host_is_refused(
    redis_url: str, authority: Authority, namespace: str, tmp_path: Path
) -> None:
    gate = Gate(redis_url, shown_by_server(authority.issue(tmp_path, "127.0.0.2")))
    await gate.open()
    store = RedisStateStore(connect(gate.url, str(authority.certificate)), namespace)
    with pytest.raises(StateStoreAccessError, match="IP address mismatch.*the host in redis_url"):
        await store.time_s()
    await store.close()
    gate.shut()


async def test_a_redis_that_asks_for_a_certificate_gets_the_one_that_the_url_names(
    redis_url: str, authority: Authority, namespace: str, tmp_path: Path
) -> None:
    ours = authority.issue(tmp_path, "127.0.0.1")
    tls = shown_by_server(ours)
    tls.load_verify_locations(authority.certificate)
    tls.verify_mode = ssl.CERT_REQUIRED
    gate = Gate(redis_url, tls)
    await gate.open()
    named, without = (
        RedisStateStore(connect(gate.url + query, str(authority.certificate)), namespace)
        for query in (f"?ssl_certfile={ours}&ssl_keyfile={ours}", "")
    )
    assert await named.time_s() > 0
    with pytest.raises(StateStoreError):
        await without.time_s()
    await named.close()
    await without.close()
    gate.shut()


async def test_the_command_for_keys_trusts_the_authority_that_it_is_told(
    tls_url: str,
    authority: Authority,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLUICE_REDIS_URL", tls_url)
    trusting = ["--application", namespace, "--redis-ca-certs", str(authority.certificate)]
    await asyncio.to_thread(cli.main, ["keys", "new", "--name", "a", "--store", *trusting])
    key = capsys.readouterr().out.strip()
    await asyncio.to_thread(cli.main, ["keys", "list", *trusting])
    assert json.loads(capsys.readouterr().out) == {"name": "a", "sha256": digest(key)}
    with pytest.raises(SystemExit, match="CERTIFICATE_VERIFY_FAILED.*check redis_ca_certs"):
        await asyncio.to_thread(cli.main, ["keys", "list", "--application", namespace])
    await asyncio.to_thread(cli.main, ["keys", "remove", "a", *trusting])
    monkeypatch.setenv("SLUICE_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(SystemExit, match="does not begin with rediss"):
        cli.main(["keys", "list", *trusting])


async def test_without_tls_a_tls_port_answers_nothing(tls_url: str, namespace: str) -> None:
    store = RedisStateStore(connect(tls_url.replace("rediss://", "redis://")), namespace)
    with pytest.raises(StateStoreError):
        await store.time_s()
    await store.close()
