"""Everything is killed at once in the middle of a batch, routers, engines, Redis, Ray and what runs the batch, and
started again over its folder."""

import random
from pathlib import Path

import pytest

from deployments.batches.state import Batches
from deployments.config.services import BatchesSection
from deployments.serving.batch_runner import storage_of
from tests.integration import batches
from tests.integration.application import Sluice
from tests.waiting import wait_until

pytestmark = pytest.mark.soak
REQUESTS = 2000
OPTIONS = ("--engine-replicas", "1", "--batch-folder", "batches")
SETTINGS = {"batches": {"segment_s": 1.0}}  # a batch that is over by the next look cannot be killed in its middle


def lines_in_segments(folder: Path) -> int:
    """Of the one batch that is open: they have an answer, and need none anew."""
    section = BatchesSection(folder=str(folder))
    storage = Batches(storage_of(section), section)
    (record,) = storage.opened()
    _, segments = storage.log(record).read()
    return sum(len(segment.numbers) for segment in segments)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_request_has_one_line_after_everything_was_killed_and_none_is_computed_anew_that_had_it(
    seed: int, tmp_path: Path
) -> None:
    die_after = random.Random(seed).randrange(1, REQUESTS // 2)
    file = batches.write(tmp_path / "in.jsonl", REQUESTS)
    with Sluice(tmp_path, *OPTIONS, settings=SETTINGS) as application:
        client = application.client()
        batch = batches.submitted(client, file)
        wait_until(lambda: batches.completed(client, batch) >= die_after, 600, f"{die_after} are answered")
        application.kill()
    kept = lines_in_segments(tmp_path / "batches")
    assert kept >= die_after
    with Sluice(tmp_path, *OPTIONS, settings=SETTINGS) as application:
        ended = batches.ended(application.client(), batch, 600)
        assert ended.status == "completed"
        found = batches.ids(application.client(), ended)
        wait_until(lambda: computed(application) >= REQUESTS - kept, 60, "its router has told of all")
        assert computed(application) == REQUESTS - kept
    assert found == {str(number): 1 for number in range(REQUESTS)}


def computed(application: Sluice) -> float:
    """Requests that engines have answered since it started."""
    return sum(application.counted("sluice_requests_total", outcome=outcome) for outcome in ("stop", "length"))
