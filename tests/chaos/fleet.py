"""Routers, replicas and their Redis, each a process of its own."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import redis

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from router.redis_store import RedisStateStore, connect
from router.state_store import Snapshot
from tests.island import Island

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 300
ENDLESS = "--endless"


class Process:
    """One of ours, with what it printed so far."""

    def __init__(self, log: Path, *arguments: str, under: Sequence[str] = ()) -> None:
        self.log, self._endless = log, ENDLESS in arguments
        with log.open("wb") as output:
            command = [*under, sys.executable, "-m", "tests.chaos.processes", *arguments]
            env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            self.popen = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=env)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def result(self) -> dict[str, Any]:
        if self._endless:
            self.popen.terminate()  # asks no more
        assert self.popen.wait(PATIENCE_S) == 0, self.log.read_text()[-3000:]
        found: dict[str, Any] = json.loads(self.log.read_text().splitlines()[-1])
        return found

    @property
    def asked(self) -> int:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith('{"so_far"')]
        return json.loads(lines[-1])["so_far"] if lines else 0


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder, self.namespace = folder, secrets.token_hex(4)
        self.redis_port, self.password = free_port(), secrets.token_urlsafe(16)
        self.redis = EmbeddedRedis(self.redis_port, self.password)
        self.processes: list[Process] = []

    def _start(self, role: str, *arguments: str, under: Sequence[str] = ()) -> Process:
        log = self.folder / f"{role}{len(self.processes)}.log"
        made = Process(log, role, "--namespace", self.namespace, "--url", self.redis.url, *arguments, under=under)
        self.processes.append(made)
        return made

    def replica(self, *arguments: str) -> Process:
        return self._start("replica", "--id", f"r{len(self.processes)}", *arguments)

    def replica_on(self, island: Island, *arguments: str) -> Process:
        """It reaches Redis through the island's cable."""
        place = ("--id", f"r{len(self.processes)}", "--url", self.url_from(island), "--host", island.address)
        return self._start("replica", *place, *arguments, under=island.command)

    def router_on(self, island: Island, *arguments: str) -> Process:
        """It reaches Redis through the island's cable."""
        return self._start("router", "--url", self.url_from(island), *arguments, under=island.command)

    def url_from(self, island: Island) -> str:
        """Of its Redis, which listens there too from now on."""
        with redis.Redis.from_url(self.redis.url) as admin:
            admin.config_set("bind", f"127.0.0.1 {island.ashore}")
        return self.redis.url.replace("127.0.0.1", island.ashore)

    def router(self, *arguments: str) -> Process:
        return self._start("router", "--seed", str(len(self.processes)), *arguments)

    def snapshot(self) -> Snapshot:
        async def ask() -> Snapshot:
            store = RedisStateStore(connect(self.redis.url), self.namespace)
            try:
                return await store.snapshot()
            finally:
                await store.close()

        return asyncio.run(ask())

    def close(self) -> None:
        for process in self.processes:
            if process.popen.is_running():
                process.kill()
        self.redis.close()
