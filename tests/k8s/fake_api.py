"""A Kubernetes API server as far as Helm needs one, in memory: discovery, objects, label selectors, and admission.

Admission refuses what the schemas of tests/k8s refuse. Server-side apply merges, pods and jobs succeed at once, watches
report what is there and end.
"""

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.k8s.engines import Manifest
from tests.k8s.schemas import HIGHEST, errors

# group/version -> plural -> kind
RESOURCES = {
    "v1": {
        "configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "pods": "Pod",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"statefulsets": "StatefulSet"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "ray.io/v1": {"rayservices": "RayService"},
}  # fmt: skip
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_DONE: dict[str, Manifest] = {
    "Pod": {"phase": "Succeeded"},
    "Job": {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]},
}
_FAILED: Manifest = {
    "failed": 1,
    "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "it failed"}],
}
Key = tuple[str, str, str]  # group/version, plural, name


@dataclass
class Cluster:
    """What the server holds: one namespace. Jobs of the names in `failing` fail."""

    objects: dict[Key, Manifest] = field(default_factory=dict)
    revision: int = 0
    failing: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def kinds(self) -> list[str]:
        return sorted(RESOURCES[version][plural] for version, plural, _ in self.objects)

    def one(self, kind: str) -> Manifest:
        return next(o for o in self.objects.values() if o["kind"] == kind)

    def store(self, key: Key, manifest: Manifest) -> Manifest:
        self.revision += 1
        metadata = manifest.setdefault("metadata", {})
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata |= {"resourceVersion": str(self.revision), "creationTimestamp": "2026-01-01T00:00:00Z"}
        if manifest["kind"] in _DONE:
            manifest["status"] = _FAILED if metadata["name"] in self.failing else _DONE[manifest["kind"]]
        self.objects[key] = manifest
        return manifest


def merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    both = {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    return {key: value for key, value in both.items() if value is not None}


def selected(manifest: Manifest, selector: str) -> bool:
    labels = manifest["metadata"].get("labels", {})
    wanted = [term.split("=", 1) for term in selector.split(",") if "=" in term]
    return all(labels.get(name) == value.lstrip("=") for name, value in wanted)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.data: Manifest = yaml.safe_load(body) if body else {}
        with self.cluster.lock:
            status, answer = self._answer(url.path.strip("/").split("/"))
        self._send(status, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _send(self, status: int, answer: Manifest | str) -> None:
        payload = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _answer(self, path: list[str]) -> tuple[int, Manifest | str]:
        known = _DISCOVERY.get("/".join(path))
        if known is not None:
            return 200, known
        version, rest = (path[1], path[2:]) if path[0] == "api" else ("/".join(path[1:3]), path[3:])
        rest = rest[2:] if rest[:1] == ["namespaces"] and len(rest) > 2 else rest
        if version not in RESOURCES or not rest or rest[0] not in RESOURCES[version]:
            return _status(404, "NotFound", f"no {self.path}")
        if rest[2:] == ["log"]:
            return 200, "a token came\n"
        return self._object(version, rest[0], rest[1] if len(rest) > 1 else None)

    def _object(self, version: str, plural: str, name: str | None) -> tuple[int, Manifest | str]:
        if self.command == "GET" and name is None:
            return self._list(version, plural)
        if self.command == "POST":
            name = self.data["metadata"]["name"]
        assert name is not None
        key, kind = (version, plural, name), RESOURCES[version][plural]
        old = self.cluster.objects.get(key)
        if self.command == "POST" and old is not None:
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        creates = self.command == "POST" or "apply-patch" in self.headers.get("Content-Type", "")
        if old is None and not creates:
            return _status(404, "NotFound", f'{plural} "{name}" not found')
        if self.command == "GET":
            return 200, old or {}
        if self.command == "DELETE":
            del self.cluster.objects[key]
            return _status(200, "", "deleted", "Success")
        return self._write(key, kind, merged(old, self.data) if self.command == "PATCH" and old else self.data)

    def _write(self, key: Key, kind: str, manifest: Manifest) -> tuple[int, Manifest | str]:
        manifest = {**manifest, "apiVersion": key[0], "kind": kind}
        manifest["metadata"] = {**manifest["metadata"], "namespace": "prod"}
        written = {k: v for k, v in manifest.items() if k != "status"}
        wrong = errors(written, HIGHEST)
        if wrong:
            return _status(422, "Invalid", f'{kind} "{key[2]}" is invalid: {"; ".join(wrong)}')
        return 200, self.cluster.store(key, manifest)

    def _list(self, version: str, plural: str) -> tuple[int, Manifest | str]:
        kind, selector = RESOURCES[version][plural], self.query.get("labelSelector", "")
        named = self.query.get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            o
            for k, o in self.cluster.objects.items()
            if k[:2] == (version, plural) and selected(o, selector) and named in ("", k[2])
        ]
        if "watch" in self.query:
            return 200, "".join(json.dumps({"type": "ADDED", "object": o}) + "\n" for o in items)
        metadata = {"resourceVersion": str(self.cluster.revision)}
        return 200, {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items}


def _status(code: int, reason: str, message: str, status: str = "Failure") -> tuple[int, Manifest]:
    return code, {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": status,
        "message": message, "reason": reason, "code": code,
    }  # fmt: skip


def _discovery() -> dict[str, Manifest]:
    pages: dict[str, Manifest] = {
        "version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(v) for v in RESOURCES if "/" in v]},
        "openapi/v3": {"paths": {_base(v): {"serverRelativeURL": f"/openapi/v3/{_base(v)}"} for v in RESOURCES}},
    }
    for version, plurals in RESOURCES.items():
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": VERBS}
            for plural, kind in plurals.items()
        ]
        pages[_base(version)] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        paths = {f"/{_base(version)}/namespaces/{{ns}}/{p}/{{name}}": _patch(version, k) for p, k in plurals.items()}
        pages[f"openapi/v3/{_base(version)}"] = {"openapi": "3.0.0", "info": {"title": "fake"}, "paths": paths}
    return pages


def _base(version: str) -> str:
    return "api/v1" if version == "v1" else f"apis/{version}"


def _group(version: str) -> Manifest:
    name, number = version.split("/")
    entry = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def _patch(version: str, kind: str) -> Manifest:
    """Says that the server itself validates fields, so that Helm leaves it to do so."""
    group, _, number = version.rpartition("/")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")]
    gvk = {"group": group, "version": number, "kind": kind}
    return {"patch": {"x-kubernetes-group-version-kind": gvk, "parameters": parameters, "responses": {}}}


_DISCOVERY = _discovery()


@contextmanager
def serve() -> Iterator[tuple[Cluster, str]]:
    """The cluster and a kubeconfig for it."""
    cluster = Cluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cluster, _kubeconfig(f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _kubeconfig(url: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {"token": "none"}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "prod"}}],
    }
    return yaml.safe_dump(config)
