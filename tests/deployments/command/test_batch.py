"""`sluice batch` against a server that answers as OpenAI's does."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deployments.command import batch as module
from deployments.command import cli

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}\n'


def batch(status: str, **more: Any) -> dict[str, Any]:
    return {
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/completions",
        "input_file_id": "file-in",
        "completion_window": "24h",
        "created_at": 1,
        "status": status,
        "request_counts": {"total": 2, "completed": 1, "failed": 1},
        **more,
    }


class Server(ThreadingHTTPServer):
    """Says of its batch what `states` has, one after the other, and the last for ever."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.states = [batch("validating")]
        self.asked: list[tuple[str, str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str) -> dict[str, Any] | bytes:
        if path.endswith("/content"):
            return path.encode()
        if method == "POST" and path == "/v1/files":
            file = {"id": "file-in", "object": "file", "bytes": 1, "created_at": 1, "filename": "a"}
            return {**file, "purpose": "batch", "status": "processed"}
        if path.startswith("/v1/batches?") or (method, path) == ("GET", "/v1/batches"):
            return {"object": "list", "data": self.states, "has_more": False}
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.command, self.path, body))
        answer = self.server.answer(self.command, self.path)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not among the output of tests."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINE)
    return lambda *argv: cli.main(["batch", *argv, "--url", server.url])


def test_a_file_is_submitted_followed_and_its_answers_fetched(server: Server, run: Callable[..., None]) -> None:
    ended = batch("completed", output_file_id="file-out", error_file_id="file-err")
    server.states = [batch("validating"), batch("in_progress"), ended]
    run("run", "in.jsonl", "-o", "out.jsonl", "--window", "2h")
    (asked,) = [json.loads(body) for method, path, body in server.asked if (method, path) == ("POST", "/v1/batches")]
    assert asked == {"input_file_id": "file-in", "endpoint": "/v1/completions", "completion_window": "2h"}
    assert any(LINE.encode() in body for _, path, body in server.asked if path == "/v1/files")
    assert Path("out.jsonl").read_text() == "/v1/files/file-out/content"
    assert Path("out.jsonl.errors").read_text() == "/v1/files/file-err/content"


def test_a_batch_that_failed_ends_with_its_errors(server: Server, run: Callable[..., None]) -> None:
    errors = [{"code": "invalid", "line": number, "message": "no url"} for number in range(1, 13)]
    server.states = [batch("failed", errors={"object": "list", "data": errors})]
    with pytest.raises(SystemExit, match="(?s)batch_1 failed.*line 1: no url.*and 2 more"):
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert not Path("out.jsonl").exists()


def test_an_interrupted_run_says_how_it_is_followed(
    server: Server, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="130"):
        patched.setattr(module.time, "sleep", interrupt)
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert "sluice batch follow batch_1 -o out.jsonl" in capsys.readouterr().err
    server.states = [batch("completed", output_file_id="file-out")]
    run("follow", "batch_1", "-o", "out.jsonl")
    assert Path("out.jsonl").exists()


def test_batches_are_listed_and_cancelled(
    server: Server, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.states = [batch("cancelling")]
    run("list")
    run("cancel", "batch_1")
    listed, cancelled = capsys.readouterr().out.splitlines()
    assert listed.split()[-2:] == ["cancelling", "2/2"]
    assert cancelled == "batch_1 cancelling"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"custom_id": "a"}'])
def test_a_file_of_no_requests_is_refused_before_it_is_sent(
    server: Server, run: Callable[..., None], content: str
) -> None:
    Path("in.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=r"in\.jsonl"):
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert not server.asked


def test_an_application_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="--url"):
        cli.main(["batch", "list", "--url", "http://127.0.0.1:1"])
