"""The Batch API as the official client uses it, over two routers and real engines."""

from pathlib import Path

import openai
import pytest

from deployments.command import cli
from tests.integration import batches
from tests.integration.application import Sluice
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def client(sluice: Sluice) -> openai.OpenAI:
    return sluice.client()


def test_a_batch_is_answered_whole_by_engines(client: openai.OpenAI, tmp_path: Path) -> None:
    batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", 60))
    ended = batches.ended(client, batch, 120)
    assert (ended.status, ended.model) == ("completed", batches.MODEL)
    assert ended.request_counts is not None and ended.request_counts.completed == 60
    output = batches.lines(client, ended.output_file_id)
    assert {each["custom_id"] for each in output} == {str(number) for number in range(60)}
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in output)
    assert ended.usage is not None
    assert ended.usage.output_tokens == sum(each["response"]["body"]["usage"]["completion_tokens"] for each in output)


def test_a_batch_is_cancelled_in_the_middle(client: openai.OpenAI, tmp_path: Path) -> None:
    batch = batches.submitted(client, batches.write(tmp_path / "in.jsonl", 400, max_tokens=200))
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 60, "it has begun")
    assert client.batches.cancel(batch.id).status == "cancelling"
    ended = batches.ended(client, batch, 60)
    assert ended.status == "cancelled"
    assert set(batches.ids(client, ended).values()) == {1}
    assert batches.ids(client, ended).total() == 400


def test_the_command_runs_a_file(sluice: Sluice, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = batches.write(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    cli.main(["batch", "run", str(file), "-o", str(output), "--url", sluice.url])
    assert len(output.read_text().splitlines()) == 5
    cli.main(["batch", "list", "--url", sluice.url])
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["completed", "5/5"]
