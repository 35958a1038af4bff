"""Everything is killed at once in the middle of a batch, routers, engines, Redis, Ray and what runs the batch, and
started again over its folder."""

import random
from pathlib import Path

import pytest

from tests.integration import batches
from tests.integration.application import Sluice
from tests.waiting import wait_until

pytestmark = pytest.mark.soak
REQUESTS = 2000
OPTIONS = ("--engine-replicas", "1", "--batch-folder", "batches")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_request_has_one_line_after_everything_was_killed(seed: int, tmp_path: Path) -> None:
    die_after = random.Random(seed).randrange(1, REQUESTS)
    file = batches.write(tmp_path / "in.jsonl", REQUESTS)
    with Sluice(tmp_path, *OPTIONS) as application:
        client = application.client()
        batch = batches.submitted(client, file)

        def answered() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed >= die_after

        wait_until(answered, 600, f"{die_after} are answered")
        application.kill()
    with Sluice(tmp_path, *OPTIONS) as application:
        client = application.client()
        ended = batches.ended(client, batch, 600)
        assert ended.status == "completed"
        found = batches.ids(client, ended)
    assert found == {str(number): 1 for number in range(REQUESTS)}
