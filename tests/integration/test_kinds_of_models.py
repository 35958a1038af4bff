"""A whole application with models of the kinds that people serve, tiny and random: images, sliding windows, experts."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http_server import Asked, answering
from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice
from tests.integration.test_scheduler_equality import picture
from tests.integration.traffic import undisturbed
from tests.random_models import write_experts, write_images, write_windows
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


ARGS = (*EXACT, "--max-model-len=1024", "--enforce-eager", "--enable-prompt-tokens-details")
RANKS = ("--data-parallel-size", "2", "--worker-extension-cls", "tests.experts_on_cpus.ExpertsOnCpus")
IMAGES, WINDOWS, EXPERTS = "images", "windows", "sluice-demo"  # the name under which traffic asks


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    """All of them behind one address."""
    folder = tmp_path_factory.mktemp("kinds")
    write_images(folder / IMAGES)
    write_windows(folder / WINDOWS, window=48)
    write_experts(folder / EXPERTS)

    def model(name: str, *more: str) -> dict[str, Any]:
        named = {"model": str(folder / name), "served_model_name": name}
        return {**named, "engine": {"replicas": 1}, "vllm_args": [*ARGS, *more]}

    router = {"media_networks": ["127.0.0.0/8"]}
    settings = {**model(IMAGES), "more_models": [model(WINDOWS), model(EXPERTS, *RANKS)], "router": router}
    with Sluice(folder, settings=settings) as application:
        yield application


def switched_off(sluice: Sluice, model: str) -> list[set[str]]:
    """By replica."""
    return [set(replica["engine"]["off"]) for replica in sluice.status(model)["replicas"].values()]


def png(number: int) -> bytes:
    content = io.BytesIO()
    picture(number).save(content, format="png")
    return content.getvalue()


def asked_about(sluice: Sluice, url: str, text: str = "What is this?") -> str:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    answer = sluice.client().chat.completions.create(
        model=IMAGES,
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return str(answer.choices[0].message.content)


def test_images_are_seen_by_value_and_by_url_from_networks_that_are_allowed(sluice: Sluice) -> None:
    def image(asked: Asked) -> tuple[int, bytes]:
        return 200, png(int(asked.path.strip("/")))

    with answering(image) as images:
        data = [f"data:image/png;base64,{base64.b64encode(png(number)).decode()}" for number in range(2)]
        seen = [asked_about(sluice, each) for each in data]
        assert seen[0] != seen[1]
        assert [asked_about(sluice, f"{images}/{number}") for number in range(2)] == seen
        assert asked_about(sluice, data[0], "What is this? " * 60) != seen[0]
        assert switched_off(sluice, IMAGES) == [set()]


def test_prefix_hits_of_a_model_with_sliding_windows_are_known_before(sluice: Sluice) -> None:
    assert switched_off(sluice, WINDOWS) == [set()]
    prompt, hits = [number % 4000 + 10 for number in range(300)], []
    for turn in range(4):
        answer = sluice.client().completions.create(
            model=WINDOWS, prompt=[*prompt, *([turn + 5] * 80 * turn)], max_tokens=4, temperature=0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        hits.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert hits[0] == 0 and min(hits[1:]) > 200
    known = {"model": WINDOWS}
    wait_until(lambda: sluice.counted("sluice_hit_tokens_total", **known) == sum(hits), 60, "hits are counted")
    assert sluice.counted("sluice_wrong_hit_tokens_total", **known) == 0


def test_a_model_with_experts_is_served_by_ranks_that_step_together(sluice: Sluice) -> None:
    with undisturbed(sluice, streams=4, tokens=60) as traffic:
        traffic.wait_for_whole_streams(24)
    replicas = sluice.status(EXPERTS)["replicas"]
    assert [name.rpartition("-")[2] for name in sorted(replicas)] == ["rank0", "rank1"]
    assert switched_off(sluice, EXPERTS) == [{"phases"}] * 2
    assert min(sluice.counted("sluice_engine_busy_seconds_total", replica=name) for name in replicas) > 0
    (rank,) = sluice.named("EngineCore_DP1")
    rank.kill()

    def are_others() -> bool:
        found = sluice.status(EXPERTS)["replicas"]
        return len(found) == 2 and not found.keys() & replicas.keys()

    wait_until(are_others, START_TIMEOUT_S, "other ranks serve")
    assert sluice.client().completions.create(model=EXPERTS, prompt="x", max_tokens=4).choices[0].text
