"""Two Helm engines that know nothing of each other: the Helm 3 command, and Helm 4's library.

Helm 4 runs in a process of its own (this file as a script), for its Go runtime does not belong in pytest's.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from tests.k8s.helm3 import helm3

CHART = Path(__file__).parents[2] / "k8s/sluice"
NAMESPACE, RELEASE, KUBERNETES = "prod", "my", "1.33.0"
LIBRARY_SHA256 = "9108c3a68d6ed3a394d02543bb4afeeb9f9e2bbcf9fbc228f48ac5576e3bdf83"
Values = dict[str, Any]
Manifest = dict[str, Any]


class _GoLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # which of them is known at run time
    """Reads `2e+09`, as Go writes whole numbers out of values, as the number that it is to Go."""


_GoLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^-?\d(\.\d+)?e[+-]\d+$"), list("-0123456789"))
LOADER = _GoLoader


class RefusedError(Exception):
    """The chart refuses these values; the text is Helm's."""


class Engine(Protocol):
    def render(self, values: Values, chart: Path = CHART) -> str: ...

    def lint(self, values: Values) -> list[str]: ...


class Helm3:
    """The command, once for every call."""

    def render(self, values: Values, chart: Path = CHART) -> str:
        """Raises RefusedError."""
        result = self._run(
            "template", RELEASE, str(chart), "--namespace", NAMESPACE, "--kube-version", KUBERNETES, values=values
        )
        if result.returncode != 0:
            raise RefusedError(result.stderr)
        return result.stdout

    def lint(self, values: Values) -> list[str]:
        result = self._run("lint", str(CHART), "--strict", values=values)
        return [] if result.returncode == 0 else [result.stdout]

    def notes(self, values: Values, kubeconfig: Path) -> str:
        """What a user of this cluster reads after install."""
        command = ["install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig)]
        command += ["--dry-run", "--disable-openapi-validation"]
        return self._run(*command, values=values).stdout.partition("NOTES:\n")[2]

    def _run(self, *arguments: str, values: Values) -> "subprocess.CompletedProcess[str]":
        command = [str(helm3()), *arguments, "--values", "-"]
        return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60)


class Helm4:
    """The library, in one process for all calls."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def render(self, values: Values, chart: Path = CHART) -> str:
        """Raises RefusedError."""
        return str(self._call("render", values, chart))

    def lint(self, values: Values) -> list[str]:
        return [str(finding) for finding in self._call("lint", values, CHART)]

    def _call(self, verb: str, values: Values, chart: Path) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, "values": values, "chart": str(chart)}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["result"]


@contextmanager
def start_helm4() -> Iterator[Helm4]:
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=CHART.parents[1]
        )
        try:
            yield Helm4(process)
        finally:
            process.stdin and process.stdin.close()
            process.wait(30)


def documents(text: str) -> list[Manifest]:
    """Parsed, in a fixed order: the engines agree on objects, not on the order of files."""
    parsed = [document for document in yaml.load_all(text, LOADER) if document]
    return sorted(parsed, key=lambda document: (document["kind"], document["metadata"]["name"]))


def ray_service(text: str) -> Manifest:
    return next(document for document in documents(text) if document["kind"] == "RayService")


def application(text: str) -> Manifest:
    """The application out of serveConfigV2."""
    found: Manifest = yaml.load(ray_service(text)["spec"]["serveConfigV2"], LOADER)["applications"][0]
    return found


def settings_of(text: str) -> Manifest:
    """What the application goes by: `args`, and the user_config of its routers over them."""
    found = application(text)
    (user_config,) = (each["user_config"] for each in found.get("deployments", [{"user_config": {}}]))
    settings: Manifest = _over(found["args"], user_config)
    return settings


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{name: _over(below.get(name), value) for name, value in above.items()}}
    if isinstance(above, list) and above and all(isinstance(each, dict) for each in above):
        return [_over(*pair) for pair in zip(below, above, strict=True)]
    return above


def start_params(service: Manifest) -> dict[str, dict[str, str]]:
    """What `ray start` is told, by group."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["rayStartParams"] for group in cluster.get("workerGroupSpecs", [])}
    return {"head": cluster["headGroupSpec"]["rayStartParams"], **groups}


def _serve_helm4() -> None:
    """Answers requests on standard input, one JSON object a line."""
    import helm_python
    from helm_python import _native

    with open(helm_python.library_path, "rb") as library:
        if hashlib.file_digest(library, "sha256").hexdigest() != LIBRARY_SHA256:
            sys.exit(f"{helm_python.library_path} is not the pinned Helm 4 library")
    options = {"name": RELEASE, "namespace": NAMESPACE, "kube_version": KUBERNETES}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["verb"] == "lint":
                report = helm_python.lint(request["chart"], request["values"], strict=True, kube_version=KUBERNETES)
                answer: dict[str, Any] = {"result": [m for m in report["messages"] if m["severity"] > 1]}
            else:
                chart = helm_python.Chart.load(request["chart"])
                values, settings = json.dumps(request["values"]), json.dumps(options)
                files = json.loads(_native.call_string("helm_render", chart._raw(), values, settings))
                answer = {"result": "\n---\n".join(text for path, text in files.items() if path.endswith(".yaml"))}
        except helm_python.HelmError as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve_helm4()
