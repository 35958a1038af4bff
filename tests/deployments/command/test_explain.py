"""`sluice explain`: what it says of requests whose promise was not kept."""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from deployments.command import cli
from deployments.command.explain import WORDS
from policies.router.admission import Foreseen
from policies.router.explanation import Cause, Served
from policies.router.promise import Promise
from tests.http_server import Asked, answering

CLASSES = {
    "interactive": {"ttft_s": 1.0, "tpot_s": 0.1, "e2e_s": None},
    "standard": {"ttft_s": 2.0, "tpot_s": 0.1, "e2e_s": None},
}
LATE = Served(
    promise=Promise(ttft_s=1.0, tpot_s=0.1),
    preparing_s=0.01,
    wait_s=1.2,
    reading_s=0.2,
    gap_s=0.05,
    whole_s=3.0,
    is_whole=True,
    predicted_tokens=40.0,
    output_tokens=33,
    foreseen=Foreseen(wait_s=0.4, reading_s=0.2, replicas=2),
)
REFUSED = Served(promise=LATE.promise, refused=Cause.LATE, foreseen=Foreseen(wait_s=3.0, reading_s=0.2, replicas=1))


class Application:
    def __init__(self) -> None:
        self.url, self.unkept, self.recent = "", list[dict[str, Any]](), list[dict[str, Any]]()

    def ended(self, request_id: str, cause: Cause, served: Served, ago_s: float = 10.0) -> None:
        each = {"at": time.time() - ago_s, "request_id": request_id, "slo_class": "interactive", "cause": cause}
        self.unkept.append(msgspec.to_builtins({**each, "served": served, "replica": "r1"}))

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        if asked.path == "/sluice/unkept":
            return 200, json.dumps({"unkept": {"m": self.unkept}}).encode()
        status = {"model": "m", "replicas": {}, "classes": CLASSES, "recent_requests": self.recent}
        return 200, json.dumps(status).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Application()
    with answering(made.answer) as made.url:
        yield made


@pytest.fixture
def explain(server: Application, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: str) -> str:
        cli.main(["explain", "--url", server.url, *argv])
        return capsys.readouterr().out

    return run


def test_one_request_is_told_with_what_would_have_kept_it(server: Application, explain: Any) -> None:
    server.ended("chatcmpl-1", Cause.QUEUE, LATE)
    server.ended("chatcmpl-2", Cause.LATE, REFUSED)
    late, refused = explain("chatcmpl-1"), explain("chatcmpl-2")
    assert WORDS[Cause.QUEUE] in late and "chatcmpl-2" not in late
    assert "one more replica, beside 2, would not have kept its first token" in late  # 1.01 s
    assert "the promise of class standard would have been kept" in late
    (turn,) = [line.split() for line in late.splitlines() if "its turn" in line]
    assert turn == ["its", "turn", "–", "400", "ms", "1.20", "s"]
    assert WORDS[Cause.LATE] in refused and "one more replica, beside 1, would not" in refused
    assert "class standard" not in refused


def test_all_of_a_time_are_counted_by_cause(server: Application, explain: Any) -> None:
    server.ended("a", Cause.QUEUE, LATE)
    server.ended("b", Cause.LATE, REFUSED)
    server.ended("c", Cause.LATE, REFUSED)
    server.ended("old", Cause.PACE, LATE, ago_s=7200.0)
    told = [line.split() for line in explain().splitlines()]
    assert [line[1:3] for line in told if line[:1] == ["interactive"]] == [["late", "2"], ["queue", "1"]]
    assert not any("old" in line for line in told)
    assert any("old" in line for line in map(str.split, explain("--last", "3h").splitlines()))
    assert "all were kept" in explain("--last", "1s")
    assert [each["cause"] for each in json.loads(explain("--json"))] == ["queue", "late", "late"]


def test_a_request_that_is_not_among_them_is_said_so(server: Application, explain: Any) -> None:
    server.recent = [{"request_id": "chatcmpl-kept"}]
    with pytest.raises(SystemExit, match="was served as promised"):
        explain("kept")
    with pytest.raises(SystemExit, match="unkept_because"):
        explain("unknown")


@pytest.mark.parametrize("told", [{"at": 1}, {"cause": "of a later version"}, "text"])
def test_what_another_version_tells_is_told_as_that(server: Application, explain: Any, told: Any) -> None:
    server.ended("chatcmpl-1", Cause.QUEUE, LATE)
    server.unkept = [{**server.unkept[0], **told} if "cause" in told else told]
    with pytest.raises(SystemExit, match="is of another version of Sluice"):
        explain()


@pytest.mark.parametrize("span", ["0", "x", "-1h", "1w", "h"])
def test_a_time_that_is_none_is_refused(explain: Any, span: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain(f"--last={span}")
    assert "must be a time such as 90s, 15m or 2h" in capsys.readouterr().err
