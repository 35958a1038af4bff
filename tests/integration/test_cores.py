"""A model of the user's own, by its folder, on a machine with a core to spare, and the rest of its application."""

import os
from collections.abc import Iterator

import pytest

from deployments.process.environment import cores_beside_engines
from tests.integration.application import Sluice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def one_engine(one_engine_begun: Sluice) -> Iterator[Sluice]:
    with one_engine_begun:
        yield one_engine_begun.wait_until_ready()


def test_a_model_of_the_user_s_own_answers(one_engine: Sluice) -> None:
    client = one_engine.client()
    assert [each.id for each in client.models.list()] == ["./my-model"]
    assert client.completions.create(model="./my-model", prompt="Rivers:", max_tokens=3).choices[0].text


def test_an_engine_may_run_where_the_others_may_not(one_engine: Sluice) -> None:
    everywhere = os.sched_getaffinity(0)
    beside = cores_beside_engines(everywhere, 1)
    (engine,) = one_engine.engine_cores()
    assert os.sched_getaffinity(engine.pid) == everywhere
    replicas, parents = (*one_engine.routers(), *one_engine.engine_replicas()), one_engine.parents_of_new_replicas()
    for other in (one_engine.process, one_engine.redis(), *replicas, *parents):
        assert os.sched_getaffinity(other.pid) == beside, other
