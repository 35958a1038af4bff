"""`sluice status`: its errors, and how numbers look.

What it shows of an application that runs is tested with a real one (tests/integration/one_model/).
"""

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from deployments.command import cli, status_tables
from deployments.command import status as module
from deployments.command.status_tables import (
    Looked,
    batch_rows,
    bin_rows,
    candidate_rows,
    class_rows,
    number,
    off_rows,
    part_rows,
    percent,
    plain,
    predictor_rows,
    promise_rows,
    seconds,
    short,
)
from tests.http_server import Asked, answering

UNKNOWN = {"error": {"message": "this address needs an API key", "type": "Unauthorized", "param": None, "code": 401}}


class Application:
    """Answers everything alike."""

    def __init__(self) -> None:
        self.url, self.status, self.content, self.keys = "", 200, "", list[str | None]()

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        self.keys.append(asked.headers.get("Authorization"))
        return self.status, self.content.encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made = Application()
    with answering(made.answer) as made.url:
        yield made


def run(server: Application, *argv: str) -> None:
    cli.main(["status", "--url", f"{server.url}/v1", *argv])


@pytest.mark.parametrize(
    ("status", "content"), [(404, "{}"), (200, "<html>"), (200, "[]"), (200, '{"model": "m"}'), (200, "")]
)
def test_what_is_not_sluice_is_told_as_that(server: Application, status: int, content: str) -> None:
    server.status, server.content = status, content
    with pytest.raises(SystemExit, match=r"is not Sluice: it has no /sluice/status\. Is --url right"):
        run(server)


def test_a_missing_key_is_told_with_where_it_belongs(server: Application) -> None:
    server.status, server.content = 401, json.dumps(UNKNOWN)
    with pytest.raises(SystemExit, match=r"(?s)needs an API key.*OPENAI_API_KEY"):
        run(server)


def test_a_key_comes_from_the_environment_and_an_option_goes_before_it(
    server: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    for options in ((), ("--key", "another")):
        with pytest.raises(SystemExit):
            run(server, *options)
    assert server.keys == ["Bearer mine", "Bearer another"]


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999999", "127.0.0.1:8000", "http://a..b", "", "http://"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(SystemExit, match="--url must be an address such as"):
        cli.main(["status", "--url", url])


@pytest.mark.parametrize("key", ["schlüssel", "a\nb"])
def test_a_key_that_can_be_none_is_told_without_it(server: Application, key: str) -> None:
    with pytest.raises(SystemExit, match="OPENAI_API_KEY") as told:
        run(server, "--key", key)
    assert key not in str(told.value)


@pytest.mark.parametrize("command", [("status",), ("batch", "list")])
def test_where_nothing_answers_that_is_said_with_the_way_out(command: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:1 does not answer: .*Is --url right"):
        cli.main([*command, "--url", "http://127.0.0.1:1"])


def test_an_application_that_is_away_for_a_while_is_asked_again(
    server: Application, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once it has answered: then comes an error of it, then another answer, then Ctrl-C."""
    server.content = '{"model": "m", "replicas": {}, "classes": {}}'
    turns = iter([(404, "{}"), (200, server.content)])

    def between(_: float) -> None:
        if (turn := next(turns, None)) is None:
            raise KeyboardInterrupt
        server.status, server.content = turn

    monkeypatch.setattr(module.time, "sleep", between)
    run(server, "--json", "--watch")
    said = capsys.readouterr()
    assert [json.loads(line)["model"] for line in said.out.splitlines()] == ["m", "m"]
    assert "is not Sluice" in said.err and "Trying again" in said.err


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "often"])
def test_a_time_between_two_looks_is_a_number_of_seconds(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", "--watch", wrong])
    assert "must be a number of seconds, at least 0.1" in capsys.readouterr().err


def test_a_class_has_its_share_in_time_and_its_lanes_together() -> None:
    nothing = {"ttft_s": None, "tpot_s": None, "e2e_s": None}
    status: dict[str, Any] = {
        "classes": {"a:b": {"ttft_s": 0.5, "tpot_s": None, "e2e_s": 8.0}, "idle": nothing},
        "waiting": {"a:b:0": 2, "a:b:3": 1, "idle:0": 7},
    }
    slo = "sluice_slo_requests_total"
    metrics = [
        (slo, {"slo_class": "a:b", "ttft": "met", "tpot": "met", "e2e": "met", "router": "1"}, 2.0),
        (slo, {"slo_class": "a:b", "ttft": "met", "tpot": "met", "e2e": "met", "router": "2"}, 1.0),
        (slo, {"slo_class": "a:b", "ttft": "met", "tpot": "met", "e2e": "missed"}, 2.0),
        (slo, {"slo_class": "a:b", "ttft": "met", "tpot": "missed", "e2e": "met"}, 1.0),
        ("sluice_late_requests_total", {"slo_class": "a:b", "reason": "passed"}, 5.0),
        ("sluice_refused_requests_total", {"slo_class": "idle", "reason": "quota"}, 6.0),
    ]
    rows = list(class_rows(Looked(status=status, metrics=metrics)))
    assert rows == [
        ("a:b", "500 ms", "none", "8.00 s", "3", "6", "50.0 %", "5", "0"),
        ("idle", "none", "none", "none", "7", "0", "–", "0", "6"),
    ]


def test_a_class_has_its_missed_targets_and_its_mean_times_per_token() -> None:
    slo, gaps = "sluice_slo_requests_total", "sluice_engine_promise_gap_seconds_total"
    metrics = [
        (slo, {"slo_class": "chat", "ttft": "met", "tpot": "missed", "e2e": "met"}, 1.0),
        (slo, {"slo_class": "chat", "ttft": "met", "tpot": "met", "e2e": "met"}, 3.0),
        (slo, {"slo_class": "free", "ttft": "met", "tpot": "met", "e2e": "missed"}, 2.0),
        ("sluice_engine_promised_requests_total", {"slo_class": "chat", "tpot": "met", "replica": "a"}, 2.0),
        ("sluice_engine_promised_requests_total", {"slo_class": "chat", "tpot": "missed", "replica": "b"}, 2.0),
        *((gaps, {"slo_class": "chat", "of": of, "replica": "a"}, 0.2) for of in ("promised", "came")),
        *((gaps, {"slo_class": "chat", "of": of, "replica": "b"}, 0.1) for of in ("believed", "in_steps", "came")),
        ("sluice_ttft_error_seconds_total", {"slo_class": "chat", "router": "a"}, 0.3),
        ("sluice_ttft_error_seconds_total", {"slo_class": "chat", "router": "b"}, 0.1),
        ("sluice_foreseen_ttft_seconds_total", {"slo_class": "chat", "router": "a"}, 2.0),
        ("sluice_promise_gap_seconds_sum", {"slo_class": "chat"}, 0.4),
        ("sluice_promise_gap_seconds_count", {"slo_class": "chat"}, 4.0),
    ]
    rows = list(promise_rows(Looked(status={"classes": {"free": {}, "idle": {}, "chat": {}}}, metrics=metrics)))
    assert rows == [
        ("chat", "0.0 %", "20.0 %", "25.0 %", "0.0 %", "50 ms", "25 ms", "25 ms", "75 ms", "100 ms"),
        ("free", "0.0 %", "–", "0.0 %", "100.0 %", "–", "–", "–", "–", "–"),
    ]


def test_candidates_are_shown_beside_their_incumbents() -> None:
    counts = {"requests": 40, "kept": 30, "missed": 10, "failed": 2, "mean_output_tokens": 60.25, "mean_whole_s": 1.5}
    nothing = dict.fromkeys(counts, 0) | {"mean_output_tokens": None, "mean_whole_s": None}
    told = {"model": "n", "of": "m", "share": 0.05, "in_force": "wait", "verdict": "roll_back", "copies_left_out": 3}
    candidates = [{**told, "mirror": mirror, "candidate": counts, "incumbent": nothing} for mirror in (False, True)]
    first, incumbent, copied, _ = candidate_rows({"candidates": candidates})
    shown = ("candidate", "40", "25.0 %", "2", "60.2", "1.50 s", "3")
    assert first == ("n", "m", "5.0 %", "wait", "roll back", *shown)
    assert incumbent == ("", "", "", "", "", "incumbent", "0", "–", "0", "–", "–", "")
    assert copied[2] == "5.0 % in copies"
    assert list(candidate_rows({})) == [], "of an application of an earlier version"


def test_what_is_off_is_said_once_with_its_replicas() -> None:
    lora = {"phases": {"adapters": "LoRA", "connector": "a KV connector"}, "exact_hits": {"media": "images"}}
    replicas = {name: {"engine": {"off": lora}} for name in ("a", "b")} | {"c": {"engine": {"error": "gone"}}}
    status = {
        "model": "m",
        "replicas": replicas,
        "more_models": [{"model": "n", "replicas": {"d": {"engine": {"off": {}}}}}],
    }
    assert list(off_rows(status)) == [
        ("phases", "LoRA, a KV connector", "a, b"),
        ("exact hits", "images", "a, b"),
    ]


def test_parts_are_said_once_with_their_replicas_and_steps_by_each() -> None:
    phases = {"phases": {"acts": True, "why": "turns"}, "batch_control": {"acts": False, "why": "slots"}}
    replicas = {
        "a": {"engine": {}, "parts": phases, "steps_in_words": "1 % mixed"},
        "b": {"engine": {}, "parts": phases, "steps_in_words": None},
    }
    bins = {"bins": {"acts": False, "why": "one by one"}}
    assert list(part_rows({"model": "m", "parts": bins, "replicas": replicas})) == [
        ("bins", "no", "one by one", "m"),
        ("phases", "yes", "turns", "a, b"),
        ("batch control", "no", "slots", "a, b"),
        ("steps", "–", "1 % mixed", "a"),
    ]


def test_bins_that_act_say_what_they_hold_and_how_often_that_was_right() -> None:
    ended = [(0, 10, "stop"), (0, 60, "stop"), (1, 50, "stop"), (1, 49, "length"), (2, 5000, "stop")]
    status: dict[str, Any] = {
        "model": "m",
        "parts": {"bins": {"acts": True, "why": "rolling"}},
        "bin_edges_tokens": [1.0, 50.0, 200.0, None],
        "waiting": {"chat:0": 2, "free:0": 1, "chat:10": 4},
        "recent_requests": [{"bin": bin, "output_tokens": tokens, "outcome": how} for bin, tokens, how in ended],
    }
    assert list(bin_rows(status)) == [
        ("m", "0", "below 50", "3", "2", "50.0 %"),
        ("m", "1", "from 50 below 200", "0", "1", "100.0 %"),
        ("m", "2", "from 200", "0", "1", "100.0 %"),
    ]
    status["parts"]["bins"]["acts"] = False
    assert not list(bin_rows(status))


def test_a_predictor_is_used_where_it_has_proved_better() -> None:
    def of(slo_class: str, **values: float) -> list[tuple[str, dict[str, str], float]]:
        labels = {"model": "m", "slo_class": slo_class}
        return [(f"sluice_predictor_{name}", labels, value) for name, value in values.items()]

    metrics = of("chat", believed=1.0, advantage=0.254, hit_ratio=0.6, reference_hit_ratio=0.25)
    metrics += of("new", believed=0.0, advantage=math.nan, hit_ratio=math.nan)
    assert list(predictor_rows(Looked(status={}, metrics=metrics))) == [
        ("chat", "m", "yes", "0.25", "60.0 %", "25.0 %"),
        ("new", "m", "no, it has not proved better", "–", "–", "–"),
    ]


def test_a_batch_in_progress_has_its_share_done_and_its_ends() -> None:
    at = datetime(2026, 11, 27, 12, 30)
    batch: dict[str, Any] = {"id": "batch_1", "model": "", "endpoint": "/v1/completions", "status": "in_progress"}
    batch |= {"total": 2000, "completed": 1500, "failed": 1}
    batch |= {"expected_end": None, "completion_window": "24h", "expires_at": at.timestamp()}
    rows = list(batch_rows({"count": 12, "oldest": [batch] * 11}))
    ends = ("–", "2026-11-27 12:30 (24h)")
    assert rows[0] == ("batch_1", "–", "/v1/completions", "in progress", "1,501 of 2,000", "1", *ends)
    assert len(rows) == 11 and rows[-1] == ("and 2 more",)
    assert list(batch_rows(None)) == []


def test_sessions_are_named_where_there_are_any() -> None:
    none, one = {"known": 0, "median_pause_s": None}, {"known": 1, "median_pause_s": None}
    assert status_tables._sessions([{}, {"sessions": none}]) == ""
    assert status_tables._sessions([{"sessions": one}]) == " · 1 session"
    many = {"known": 20, "median_pause_s": 8.7}
    told = " · 21 sessions, which pause 8.70 s in the median"
    assert status_tables._sessions([{"sessions": one}, {"sessions": many}]) == told


def test_numbers_are_as_on_the_page() -> None:
    assert [number(None), number(1234.4), number(1.005, 2)] == ["–", "1,234", "1.00"]
    assert [seconds(each) for each in (None, 0.0042, 0.5, 61.0)] == ["–", "4.2 ms", "500 ms", "61.00 s"]
    assert [percent(None), percent(0.125)] == ["–", "12.5 %"]
    assert [short("a" * 24), short("a" * 20 + "b" * 7)] == ["a" * 24, f"{'a' * 16}…{'b' * 7}"]


def test_what_a_client_has_named_cannot_steer_the_terminal() -> None:
    assert plain("q\x1b[2J\n7\x9b1m") == "q?[2J?7?1m"


def test_heads_are_those_of_the_page() -> None:
    page = (Path(module.__file__).parents[1] / "http/page/index.html").read_text()
    for heads in (
        status_tables.CLASSES,
        status_tables.PROMISES,
        status_tables.REPLICAS,
        status_tables.PARTS,
        status_tables.BINS,
        status_tables.OFF,
        status_tables.RECENT,
    ):
        assert json.dumps(heads, ensure_ascii=False) in page
