"""`sluice usage`: sums of what keys used, out of logs."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from deployments.command import cli


def line(at: str, tenant: str | None, **fields: Any) -> str:
    told = {
        "asctime": f"2026-11-29 {at},123",
        "name": "deployments.http.exchange",
        "message": "request",
        "tenant": tenant,
        "model": "m",
        "slo_class": "standard",
        "prompt_tokens": 10,
        "output_tokens": 5,
        "replicas": ["r"],
        **fields,
    }
    return json.dumps(told)


LINES = (
    ":actor_name:ServeReplica:sluice:Router",
    line("13:59:59", "team-a"),
    line("14:00:00", "team-a"),
    f"(worker pid=7) {line('14:10:00', 'team-a', output_tokens=7)}",  # a pod's log may say whose it is
    line("14:20:00", None),
    line("14:30:00", "team-b", slo_class="offline", replicas=[], output_tokens=0),  # no engine took it
    line("14:40:00", "team-b", name="another"),
    line("14:50:00", "team-a", model="n"),
    line("14:59:00", "team-a")[:40],
    line("15:00:00", "team-a"),
)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> list[list[Any]]:
    cli.main(["usage", *argv])
    return [list(json.loads(each).values()) for each in capsys.readouterr().out.splitlines()]


def test_each_hour_key_model_and_class_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worker-1.err").write_text("\n".join(LINES[:4]))
    (tmp_path / "worker-1.err.1").write_text("\n".join(LINES[4:]))
    (tmp_path / "gcs_server.out").write_text(LINES[1])
    assert told(capsys, str(tmp_path)) == [
        ["2026-11-29T13", "team-a", "m", "standard", 1, 10, 5],
        ["2026-11-29T14", None, "m", "standard", 1, 10, 5],
        ["2026-11-29T14", "team-a", "m", "standard", 2, 20, 12],
        ["2026-11-29T14", "team-a", "n", "standard", 1, 10, 5],
        ["2026-11-29T15", "team-a", "m", "standard", 1, 10, 5],
    ]


def test_hours_outside_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(LINES)))
    hours = ("--since", "2026-11-29T13", "--until", "2026-11-29 14")
    assert [each[0] for each in told(capsys, *hours)] == ["2026-11-29T13"]


@pytest.mark.parametrize("hour", ["today", "2026-11-29", "2026-11-29T14:00"])
def test_a_time_that_is_no_hour_is_refused(hour: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["usage", "--since", hour])
    assert "must be an hour such as 2026-11-29T14" in capsys.readouterr().err


def test_logs_that_are_not_there_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no files worker-"):
        cli.main(["usage", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"missing\.err cannot be read: No such file"):
        cli.main(["usage", str(tmp_path / "missing.err")])
