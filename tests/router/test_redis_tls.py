"""The shared state over TLS: a real Redis behind a terminator with certificates made here."""

import asyncio
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deployments.command import cli
from deployments.http.keys import digest
from deployments.process.ports import free_port
from policies.errors import StateStoreAccessError, StateStoreError
from policies.router.tickets import Assignment, Ticket
from router.redis_store import RedisStateStore, check_access, connect
from router.state_store import ReplicaInfo

TICKET = Ticket(request_id="x", bin_index=0, deadline_key=0.0, work_s=1.0, router_id="a")

SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `certificate` is the file that clients trust."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name
    certificate: Path

    @classmethod
    def make(cls, folder: Path, common_name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        signed = (
            _certificate(name, name, key, signer=key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(SIGNS_CERTIFICATES, critical=True)
        )
        file = folder / f"{common_name}.crt"
        file.write_bytes(signed.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return cls(key, name, file)

    def issue(self, folder: Path, address: str) -> Path:
        """A certificate for an IP address and its key, in one file."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        signed = _certificate(subject, self.name, key, signer=self.key).add_extension(names, critical=False)
        file = folder / f"{address}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + signed.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        return file


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """With the identifiers of both keys, without which Python 3.13 trusts none."""
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(days=1),
        not_valid_after=now + timedelta(days=1),
    )
    ours = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    theirs = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return made.add_extension(ours, critical=False).add_extension(theirs, critical=False)


class Terminator:
    """Speaks TLS to clients and passes what they say to a Redis on this machine."""

    def __init__(self, redis_url: str, certificate: Path) -> None:
        self._redis = urlsplit(redis_url)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate)
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return f"rediss://:{self._redis.password}@127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_redis = await asyncio.open_connection(self._redis.hostname, self._redis.port)
        for source, sink in ((reader, to_redis), (upstream, writer)):
            pump = asyncio.create_task(_pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.fixture
async def tls_url(redis_url: str, authority: Authority, tmp_path: Path) -> AsyncIterator[str]:
    terminator = Terminator(redis_url, authority.issue(tmp_path, "127.0.0.1"))
    yield await terminator.start()
    await terminator.close()


async def test_tickets_and_notices_travel_over_tls(tls_url: str, authority: Authority, namespace: str) -> None:
    store = RedisStateStore(connect(tls_url, str(authority.certificate)), namespace)
    notices = store.notices("a")
    assert await anext(notices) == []
    assert await store.enqueue(TICKET) == []
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
    terminator = Terminator(redis_url, authority.issue(tmp_path, "127.0.0.2"))
    store = RedisStateStore(connect(await terminator.start(), str(authority.certificate)), namespace)
    with pytest.raises(StateStoreAccessError, match="IP address mismatch.*the host in redis_url"):
        await store.time_s()
    await store.close()
    await terminator.close()


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
    with pytest.raises(SystemExit, match="CERTIFICATE_VERIFY_FAILED"):
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
