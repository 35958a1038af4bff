"""A Redis that is not the application's own: behind TLS and a password, and a line that is long, bad or not to be
trusted."""

import asyncio
import contextlib
import ssl
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.authority import Authority, shown_by_server
from tests.gate import Gate
from tests.integration import batches
from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice
from tests.integration.traffic import undisturbed
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
OPTIONS = ("--router-replicas", "2", "--batch-folder", "batches", "--", "--max-num-seqs", "16", *EXACT)
HERE = "127.0.0.1"


class Line:
    """What stands between the application and Redis, in a thread of its own."""

    def __init__(self, redis_url: str, tls: ssl.SSLContext) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.tls, self.gate = tls, Gate(redis_url, tls)

    def __enter__(self) -> "Line":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.gate.open(), self._loop).result(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.gate.shut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)

    @contextlib.contextmanager
    def long(self, delay_s: float) -> Iterator[None]:
        self.gate.delay_s = delay_s
        yield
        self.gate.delay_s = 0.0

    @contextlib.contextmanager
    def bad(self, share: float) -> Iterator[None]:
        losing = asyncio.run_coroutine_threadsafe(self.gate.lose_packets(share), self._loop)
        yield
        losing.cancel()

    @contextlib.contextmanager
    def showing(self, certificate: Path, instead_of: Path) -> Iterator[None]:
        """To new connections; there are no old ones."""
        self.tls.load_cert_chain(certificate)
        self._loop.call_soon_threadsafe(self.gate.cut)
        yield
        self.tls.load_cert_chain(instead_of)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), "trusted")


@pytest.fixture(scope="module")
def certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.issue(tmp_path_factory.mktemp("certificate"), HERE)


@pytest.fixture(scope="module")
def line(redis_url: str, certificate: Path) -> Iterator[Line]:
    with Line(redis_url, shown_by_server(certificate)) as opened:
        yield opened


@pytest.fixture(scope="module")
def sluice(line: Line, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    settings, env = {"redis_ca_certs": str(authority.certificate)}, {"SLUICE_REDIS_URL": line.gate.url}
    with Sluice(tmp_path_factory.mktemp("far"), *OPTIONS, settings=settings, env=env) as application:
        yield application


def no_slot_is_taken(sluice: Sluice) -> bool:
    """By the shared state."""
    status = sluice.status()
    return not status["waiting"] and not any(replica["running"] for replica in status["replicas"].values())


def no_status(sluice: Sluice) -> bytes:
    """What is said in its place; on a busy machine at times that Redis was too slow."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        sluice.status()
    return refused.value.read()


def test_batches_and_stored_responses_come_through_tls(sluice: Sluice, tmp_path: Path) -> None:
    client = sluice.client()
    batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", 8))
    kept = client.responses.create(model="sluice-demo", input="Rivers?", max_output_tokens=8)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    assert batches.ended(client, batch, START_TIMEOUT_S).status == "completed"


def test_a_redis_that_is_far_away_slows_no_stream_down(sluice: Sluice, line: Line) -> None:
    """A call for each step would make each of them several times as long."""

    def took_s() -> float:
        with undisturbed(sluice) as traffic:
            began_s = time.monotonic()
            traffic.wait_for_whole_streams(18)
            return time.monotonic() - began_s

    near_s = took_s()
    with line.long(0.05):
        far_s = took_s()
    assert far_s < 3 * near_s


def test_a_line_that_loses_packets_loses_no_request_and_no_slot(sluice: Sluice, line: Line) -> None:
    with undisturbed(sluice) as traffic, line.bad(0.1):
        traffic.wait_for_whole_streams(60)
    wait_until(lambda: no_slot_is_taken(sluice), PATIENCE_S, "all slots are free")


def test_a_redis_that_shows_a_wrong_certificate_is_away_until_it_shows_the_right_one(
    sluice: Sluice, line: Line, certificate: Path, tmp_path: Path
) -> None:
    strange = Authority.make(tmp_path, "stranger").issue(tmp_path, HERE)
    with undisturbed(sluice) as traffic:
        with line.showing(strange, instead_of=certificate):
            traffic.wait_for_whole_streams(12)
            wait_until(lambda: b"Redis is not trusted" in no_status(sluice), PATIENCE_S, "it says why")
        traffic.wait_for_whole_streams(12)
    wait_until(lambda: no_slot_is_taken(sluice), PATIENCE_S, "all slots are free")
