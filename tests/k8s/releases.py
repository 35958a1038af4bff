"""Helm 4's library on a cluster, in a process of its own: one JSON command a line on standard input.

python -m tests.k8s.releases KUBECONFIG
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.k8s.engines import CHART, NAMESPACE, RELEASE, RefusedError, Values


class Releases:
    """install, upgrade, rollback, test, uninstall, history of one release."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def install(self, values: Values, chart: Path = CHART) -> None:
        self._call("install", values=values, chart=str(chart))

    def upgrade(self, values: Values, chart: Path = CHART) -> None:
        self._call("upgrade", values=values, chart=str(chart))

    def rollback(self, revision: int) -> None:
        self._call("rollback", revision=revision)

    def test(self) -> str:
        return str(self._call("test"))

    def uninstall(self) -> None:
        self._call("uninstall")

    def history(self) -> list[str]:
        """Each revision's status."""
        return list(self._call("history"))

    def _call(self, verb: str, **arguments: Any) -> Any:
        """Raises RefusedError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["result"]


@contextmanager
def releases(kubeconfig: Path) -> Iterator[Releases]:
    command = [sys.executable, "-m", "tests.k8s.releases", str(kubeconfig)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=CHART.parents[1],
    )
    try:
        yield Releases(process)
    finally:
        process.stdin and process.stdin.close()
        process.wait(30)


def _serve(kubeconfig: str) -> None:
    import helm_python

    # Releases are kept in memory: into the cluster Helm 4 writes them as protobuf, which the fake does not read.
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=NAMESPACE, storage_driver="memory") as helm:
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"result": _do(helm, json.loads(line))}
            except helm_python.HelmError as error:
                answer = {"refused": str(error)}
            print(json.dumps(answer), flush=True)


def _do(helm: Any, command: dict[str, Any]) -> Any:
    match command["verb"]:
        case "install":
            helm.install(command["chart"], RELEASE, command["values"])
        case "upgrade":
            helm.upgrade(command["chart"], RELEASE, command["values"])
        case "rollback":
            helm.rollback(RELEASE, version=command["revision"])
        case "uninstall":
            helm.uninstall(RELEASE)
        case "history":
            return [entry["status"] for entry in helm.history(RELEASE)]
        case "test":
            return str(helm.test(RELEASE, timeout=60, logs=True))
    return None


if __name__ == "__main__":
    _serve(sys.argv[1])
