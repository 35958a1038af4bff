"""A pairing of two real servers in child processes; they answer as vLLM does, without a model."""

import json
from pathlib import Path

import pytest

from bench.load import ServerUnusable
from bench.pairing import WARM_UP_TOKENS, Pairing, Plan, measure_pairing
from bench.servers import Server, ServerFailed, ServerSpec
from tests.bench.toy_server import PROGRAM, toy_spec


def asked(server: Server, max_tokens: int) -> list[str]:
    """The prompts of the measured runs; a warm-up asks for another length."""
    lines = server.log_path.read_text().splitlines()
    requests = [json.loads(line.removeprefix("asked ")) for line in lines if line.startswith("asked ")]
    return [prompt for length, prompt in requests if length == max_tokens]


def pair(
    baseline: ServerSpec, contender: ServerSpec, plan: Plan, logs: Path, counted: list[None]
) -> tuple[Pairing, list[list[str]]]:
    with Server(baseline, logs) as first, Server(contender, logs) as second:
        for server in (first, second):
            server.wait_until_ready(30.0)
        pairing = measure_pairing(first, second, plan, lambda stage: None, lambda: counted.append(None))
        return pairing, [asked(server, plan.max_tokens) for server in (first, second)]


@pytest.mark.slow
def test_systems_take_turns_with_the_same_prompts_and_every_run_is_kept(tmp_path: Path) -> None:
    plan = Plan(concurrency=(1, 3), repeats=2, requests_per_client=4, least_requests=5, max_tokens=7, idle_s=0.1)
    counted: list[None] = []
    pairing, (to_plain, to_ours) = pair(toy_spec("plain"), toy_spec("ours"), plan, tmp_path, counted)

    assert [(run.repeat, run.concurrency, run.system) for run in pairing.runs] == [
        (0, 1, "plain"),
        (0, 1, "ours"),
        (0, 3, "plain"),
        (0, 3, "ours"),
        (1, 1, "ours"),
        (1, 1, "plain"),
        (1, 3, "ours"),
        (1, 3, "plain"),
    ]
    assert [run.load.answered for run in pairing.runs_of("ours", 3)] == [12, 12]
    assert all(run.load.output_tokens == 7 * run.load.answered for run in pairing.runs)
    assert len(counted) == plan.requests_per_pairing == 2 * 2 * (5 + 12)
    assert set(to_plain) == set(to_ours)
    assert len(set(to_plain)) == len(to_plain) == 34
    assert set(pairing.idle_cpu_cores) == {"plain", "ours"}


@pytest.mark.slow
def test_pairings_that_share_a_server_send_it_no_prompt_twice(tmp_path: Path) -> None:
    plan = Plan(concurrency=(1, 3), repeats=2, requests_per_client=4, least_requests=5, max_tokens=7, idle_s=0.1)
    with Server(toy_spec("plain"), tmp_path) as shared:
        for number, name in enumerate(("one", "other")):
            with Server(toy_spec(name), tmp_path) as contender:
                for server in (shared, contender):
                    server.wait_until_ready(30.0)
                measure_pairing(shared, contender, plan, lambda stage: None, lambda: None, number)
        prompts = [*asked(shared, plan.max_tokens), *asked(shared, WARM_UP_TOKENS)]
    assert len(set(prompts)) == len(prompts) == 2 * (34 + 12)


def test_a_system_that_refuses_everything_is_not_compared(tmp_path: Path) -> None:
    plan = Plan(concurrency=(1,), repeats=1, least_requests=2, requests_per_client=2)
    with pytest.raises(ServerFailed, match=r"ours answered none of 2 requests\nerror ×2: HTTP 503: .*closed today"):
        pair(toy_spec("plain"), toy_spec("ours", behaviour="refuse"), plan, tmp_path, [])


def test_a_server_without_models_is_named(tmp_path: Path) -> None:
    healthy = PROGRAM.replace('web.get("/v1/models", models), ', "")
    with pytest.raises(ServerUnusable, match="/v1/models gave no model"):
        pair(toy_spec("plain"), toy_spec("ours", program=healthy), Plan(), tmp_path, [])


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"concurrency": ()}, {"concurrency": (4, 0)}, {"idle_s": 0.0}])
def test_an_empty_plan_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Plan(**changes)  # type: ignore[arg-type]
