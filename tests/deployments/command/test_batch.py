"""`sluice batch` against a server that answers as OpenAI's does."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.command import batch as module
from deployments.command import cli
from tests.http_server import Asked, BrokenOff, answering

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


class Application:
    """Says of its batch what `states` has, one after the other, and the last for ever."""

    def __init__(self) -> None:
        self.states = [batch("validating")]
        self.asked: list[Asked] = []
        self.is_cut_off = False

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        self.asked.append(asked)
        if asked.path.endswith("/content"):
            return 200, BrokenOff(asked.path.encode()) if self.is_cut_off else asked.path.encode()
        return 200, json.dumps(self._told(asked.method, asked.path)).encode()

    def _told(self, method: str, path: str) -> dict[str, Any]:
        if path == "/v1/files":
            file = {"id": "file-in", "object": "file", "bytes": 1, "created_at": 1, "filename": "a"}
            return {**file, "purpose": "batch", "status": "processed"}
        if method == "GET" and path.partition("?")[0] == "/v1/batches":
            return {"object": "list", "data": self.states, "has_more": False}
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@pytest.fixture
def server() -> Application:
    return Application()


@pytest.fixture
def run(server: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINE)
    with answering(server.answer) as url:
        yield lambda *argv: cli.main(["batch", *argv, "--url", url])


def test_a_file_is_submitted_followed_and_its_answers_fetched(server: Application, run: Callable[..., None]) -> None:
    ended = batch("completed", output_file_id="file-out", error_file_id="file-err")
    server.states = [batch("validating"), batch("in_progress"), ended]
    run("run", "in.jsonl", "-o", "out.jsonl", "--window", "2h")
    (asked,) = [json.loads(each.body) for each in server.asked if each[:2] == ("POST", "/v1/batches")]
    assert asked == {"input_file_id": "file-in", "endpoint": "/v1/completions", "completion_window": "2h"}
    assert any(LINE.encode() in each.body for each in server.asked if each.path == "/v1/files")
    assert Path("out.jsonl").read_text() == "/v1/files/file-out/content"
    assert Path("out.jsonl.errors").read_text() == "/v1/files/file-err/content"


def test_a_batch_that_failed_ends_with_its_errors(server: Application, run: Callable[..., None]) -> None:
    errors = [{"code": "invalid", "line": number, "message": "no url"} for number in range(1, 13)]
    server.states = [batch("failed", errors={"object": "list", "data": errors})]
    with pytest.raises(SystemExit, match="(?s)batch_1 failed.*line 1: no url.*and 2 more"):
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert not Path("out.jsonl").exists()


def test_an_interrupted_run_says_how_it_is_followed(
    server: Application, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_answers_that_come_in_part_stand_nowhere_and_are_fetched_again(
    server: Application, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.states, server.is_cut_off = [batch("completed", output_file_id="file-out")], True
    with pytest.raises(SystemExit, match="file-out did not come whole"):
        run("run", "in.jsonl", "-o", "the answers.jsonl")
    assert sorted(each.name for each in Path().iterdir()) == ["in.jsonl"]
    assert "batch_1 has ended: sluice batch follow batch_1 -o 'the answers.jsonl'" in capsys.readouterr().err


def test_a_run_whose_application_goes_away_says_how_it_is_followed(
    server: Application, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = server._told

    def told(method: str, path: str) -> dict[str, Any]:
        if method == "GET":
            raise ConnectionResetError
        return answer(method, path)

    monkeypatch.setattr(server, "_told", told)
    with pytest.raises(SystemExit, match="does not answer"):
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert "batch_1 goes on: sluice batch follow batch_1 -o out.jsonl" in capsys.readouterr().err


def test_answers_go_through_a_device_that_stays_what_it_is(server: Application, run: Callable[..., None]) -> None:
    Path("out").symlink_to("/dev/null")
    server.states = [batch("completed", output_file_id="file-out")]
    run("run", "in.jsonl", "-o", "out")
    assert (Path("out").readlink(), Path("out.part").exists()) == (Path("/dev/null"), False)


@pytest.mark.parametrize("output", ["nowhere/out.jsonl", "folder", "in.jsonl/out"])
@pytest.mark.parametrize("action", [("run", "in.jsonl"), ("follow", "batch_1")])
def test_a_place_for_answers_that_cannot_be_written_is_told_before_anything_runs(
    server: Application, run: Callable[..., None], action: tuple[str, str], output: str
) -> None:
    Path("folder").mkdir()
    with pytest.raises(SystemExit, match=f"cannot write {output}: "):
        run(*action, "-o", output)
    assert not server.asked


def test_batches_are_listed_and_cancelled(
    server: Application, run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    server.states = [batch("cancelling")]
    run("list")
    run("cancel", "batch_1")
    listed, cancelled = capsys.readouterr().out.splitlines()
    assert listed.split()[-2:] == ["cancelling", "2/2"]
    assert cancelled == "batch_1 cancelling"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"custom_id": "a"}', "[" * 100_000])
def test_a_file_of_no_requests_is_refused_before_it_is_sent(
    server: Application, run: Callable[..., None], content: str
) -> None:
    Path("in.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=r"in\.jsonl"):
        run("run", "in.jsonl", "-o", "out.jsonl")
    assert not server.asked
