"""A model and policies of the user's own, on a machine with a core to spare, and the rest of the application."""

import os
import shutil
from collections.abc import Iterator

import msgspec
import pytest
import redis
import yaml

from deployments.config.model import DEMO_MODEL
from deployments.process.environment import cores_beside_engines
from router.packing import TICKET
from tests import tutorial
from tests.integration.application import Sluice
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KEY, ARRIVAL = TICKET.index("deadline_key"), TICKET.index("arrival_s")


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    """One engine with a model of the user's own, by its folder, and policies out of a package of theirs, those of
    docs/guides/write-a-policy.md."""
    folder = tmp_path_factory.mktemp("one")
    shutil.copytree(DEMO_MODEL, folder / "my-model")
    # Its share of the machine's memory, zeroed page by page, takes a slow core most of a minute.
    of_vllm = ["--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20)]
    policies = tutorial.write(folder)
    own = yaml.safe_load((folder / "keep-free.yaml").read_text())
    order = {"policy": tutorial.ORDER, "policy_args": {"s_per_1000_tokens": 1000}}
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(policies), os.environ.get("PYTHONPATH"))))}
    options, settings = (
        ("--model", "./my-model", "--engine-replicas", "1"),
        {**own, "order": order, "vllm_args": of_vllm},
    )
    with Sluice(folder, *options, settings=settings, env=env) as application:
        yield application


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


def engine_status(sluice: Sluice) -> dict[str, object]:
    (replica,) = sluice.status()["replicas"].values()
    engine: dict[str, object] = replica["engine"]
    return engine


def tickets(sluice: Sluice) -> list[list[float]]:
    with redis.Redis.from_url(sluice.redis_url()) as client:
        (table,) = client.keys("*:tickets") or ("none",)
        return [msgspec.msgpack.decode(packed) for packed in client.hvals(table)]


def test_a_policy_out_of_a_package_plans_the_steps_of_the_engine(one_engine: Sluice) -> None:
    """It lets in who is there and who fits, and no more: a lone request sees a cap of one."""
    assert one_engine.client().completions.create(model="./my-model", prompt="Rivers:", max_tokens=30).choices[0].text
    wait_until(lambda: engine_status(one_engine).get("max_batch_size") == 1, 60, "the status shows its last plan")
    status = engine_status(one_engine)
    assert (status["policy"], status["limited_by"]) == (tutorial.POLICY, "memory")


def test_an_order_out_of_a_package_makes_the_keys_of_the_queue(one_engine: Sluice) -> None:
    """A second later for each token of the prompt, as it is set here."""
    completions, prompt = one_engine.client().completions, "Once upon a time in a land of many rivers"
    usage = completions.create(model="./my-model", prompt=prompt, max_tokens=1).usage
    assert usage and usage.prompt_tokens > 5
    wait_until(lambda: not tickets(one_engine), 60, "the tickets of what has ended are gone")
    long = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with completions.create(model="./my-model", prompt=prompt, stream=True, **long) as answer:
        next(answer)
        (ticket,) = tickets(one_engine)
    assert ticket[KEY] - ticket[ARRIVAL] == pytest.approx(usage.prompt_tokens)
