"""The jobs that run before pods are made: where they stand, and what they do."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.k8s.cases import named, with_password
from tests.k8s.engines import CHART, Helm4, Manifest, Values, documents, settings_of

FETCHING: Values = {
    "modelFetch": {"enabled": True},
    "modelCache": {"enabled": True, "existingClaim": "models", "mountPath": "/m"},
    "huggingface": {"existingSecret": "hub"},
}


def _job(helm: Helm4, values: Values, name: str) -> Manifest:
    jobs = {m["metadata"]["name"]: m for m in documents(helm.render(with_password(values))) if m["kind"] == "Job"}
    return jobs[f"my-sluice-{name}"]


def _pod(job: Manifest) -> Manifest:
    pod: Manifest = job["spec"]["template"]["spec"]
    return pod


def _env(job: Manifest) -> dict[str, str]:
    """As a container has it: Kubernetes takes `$$(` for `$(`."""
    entries = _pod(job)["containers"][0]["env"]
    return {entry["name"]: entry["value"].replace("$$(", "$(") for entry in entries if "value" in entry}


@pytest.mark.parametrize("file", ["one-gpu", "everything", "prefill-decode"])
def test_the_check_gets_what_the_application_will_get(helm4: Helm4, file: str) -> None:
    values = named(file)
    job = next(m for m in documents(helm4.render(values)) if m["metadata"]["name"].endswith("-config-check"))
    assert json.loads(_env(job)["SLUICE_APP"]) == settings_of(helm4.render(values))


def test_what_looks_like_a_variable_in_the_configuration_stays_as_it_is(helm4: Helm4) -> None:
    app = {"engine": {"env": {"A": "$(HOME)"}}}
    entry = _pod(_job(helm4, {"app": app}, "config-check"))["containers"][0]["env"][0]
    assert "$$(HOME)" in entry["value"] and json.loads(entry["value"].replace("$$(", "$("))["engine"]["env"] == {
        "A": "$(HOME)"
    }


def test_jobs_run_before_everything_else_the_check_first(helm4: Helm4) -> None:
    weights = {}
    for name in ("config-check", "model-fetch"):
        annotations = _job(helm4, FETCHING, name)["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert "hook-failed" not in annotations["helm.sh/hook-delete-policy"], "its log says why it failed"
        weights[name] = int(annotations["helm.sh/hook-weight"])
    assert weights["config-check"] < weights["model-fetch"]


def test_jobs_need_nothing_that_the_release_itself_makes(helm4: Helm4) -> None:
    """It is not there yet at the first install."""
    everything = helm4.render(with_password(FETCHING))
    made = {m["metadata"]["name"] for m in documents(everything) if m["kind"] != "Job"}
    for name in ("config-check", "model-fetch"):
        job = _job(helm4, FETCHING, name)
        assert not {word for word in made if f"'{word}'" in str(job["spec"])}


def test_jobs_take_no_gpu_and_end(helm4: Helm4) -> None:
    for name in ("config-check", "model-fetch"):
        job = _job(helm4, {**named("one-gpu"), **FETCHING}, name)
        assert "nvidia.com/gpu" not in str(_pod(job)["containers"][0]["resources"])
        assert job["spec"]["activeDeadlineSeconds"] > 0 and job["spec"]["backoffLimit"] == 0


def test_without_the_switches_there_is_no_job(helm4: Helm4) -> None:
    assert "kind: Job" not in helm4.render({"configCheck": {"enabled": False}})


class Hub(NamedTuple):
    address: str
    asked: list[str]


FILES = {
    "org/safe": ["config.json", "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth"],
    "org/old": ["config.json", "pytorch_model.bin"],
}
COMMIT = "0" * 39 + "1"


@contextmanager
def _hub() -> Iterator[Hub]:
    """A hub of two models, as far as a download asks it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            owner, _, rest = path.removeprefix("/api/models/").lstrip("/").partition("/")
            name, verb, *more = rest.split("/")
            files = FILES[f"{owner}/{name}"]
            match verb:
                case "revision":
                    self._json({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
                case "tree":
                    self._json([{"type": "file", "path": f, "size": 2, "oid": "a"} for f in files])
                case _:
                    self._send(b"{}", {"ETag": '"a"', "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET

        def _json(self, answer: Any) -> None:
            self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def _send(self, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_address[1]}", asked)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_fetch_brings_what_vllm_reads_of_every_model_and_no_other_weights(helm4: Helm4, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    app = {
        "model": "org/safe",
        "vllm_args": ["--revision=v1"],
        "more_models": [{"model": "org/old"}, {"model": str(folder)}, {"model": "demo"}],
    }
    groups = [{"name": "e", "replicas": 4, "resources": {}}]
    job = _job(helm4, {**FETCHING, "app": app, "engineGroups": groups}, "model-fetch")
    python, *arguments = _pod(job)["containers"][0]["command"]
    assert python == "python"
    with _hub() as hub:
        local = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "m"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], env={**os.environ, **_env(job), **local}, capture_output=True, timeout=120
        )
    assert done.returncode == 0, done.stderr.decode()
    there = {path.name for path in (tmp_path / "m/hub").glob("models--*/snapshots/*/**/*") if path.is_file()}
    assert there == {"config.json", "model.safetensors", "pytorch_model.bin"}
    assert not any("org/safe" in path and "pytorch_model.bin" in path for path in hub.asked)
    assert "/api/models/org/safe/revision/v1" in hub.asked and "/api/models/org/old/revision/main" in hub.asked
    assert done.stdout.decode().count("nothing to download") == 2


def test_the_fetch_mounts_the_claim_where_pods_look_for_models(helm4: Helm4) -> None:
    job = _job(helm4, FETCHING, "model-fetch")
    assert {"name": "models", "mountPath": "/m"} in _pod(job)["containers"][0]["volumeMounts"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in _pod(job)["volumes"]
    assert _env(job)["HF_HOME"] == "/m"
    secrets = [e["valueFrom"]["secretKeyRef"]["name"] for e in _pod(job)["containers"][0]["env"] if "valueFrom" in e]
    assert secrets == ["hub"]


def test_scripts_of_jobs_are_rendered_as_they_are(helm4: Helm4) -> None:
    command = _pod(_job(helm4, FETCHING, "model-fetch"))["containers"][0]["command"]
    assert command[-1].strip() == (CHART / "files/fetch.py").read_text().strip()


def _check(job: Manifest, folder: Path) -> "subprocess.CompletedProcess[str]":
    """As its container does; /tmp is the pod's own there."""
    command = [part.replace("/tmp/", f"{folder}/") for part in _pod(job)["containers"][0]["command"]]
    env = {**os.environ, **_env(job), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.slow
def test_the_check_takes_what_the_application_takes(helm4: Helm4, tmp_path: Path) -> None:
    done = _check(_job(helm4, named("cpu-demo"), "config-check"), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_the_check_refuses_an_argument_that_vllm_does_not_know(helm4: Helm4, tmp_path: Path) -> None:
    """Helm's schema takes it, for it is a text like another."""
    done = _check(_job(helm4, {"app": {"vllm_args": ["--max-modle-len", "8192"]}}, "config-check"), tmp_path)
    assert done.returncode != 0 and "--max-modle-len" in done.stderr
