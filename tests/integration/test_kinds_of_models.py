"""Whole applications with models of the kinds that people serve, tiny and random: images, sliding windows, experts."""

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import Asked, answering
from tests.integration.application import EXACT, Sluice
from tests.integration.test_scheduler_equality import picture
from tests.integration.traffic import undisturbed
from tests.random_models import write_experts, write_images, write_windows
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


WITH_EXPERTS = ("--worker-extension-cls", "tests.experts_on_cpus.ExpertsOnCpus")


@contextmanager
def serving(folder: Path, name: str = "tiny", more: Sequence[str] = (), **settings: Any) -> Iterator[Sluice]:
    """The model in `folder`, by one replica."""
    vllm_args = [*EXACT, "--max-model-len=1024", "--enforce-eager", "--enable-prompt-tokens-details", *more]
    one = {
        "model": str(folder),
        "served_model_name": name,
        "engine": {"replicas": 1},
        "vllm_args": vllm_args,
        **settings,
    }
    with Sluice(folder, settings=one) as application:
        yield application


def switched_off(sluice: Sluice) -> dict[str, Any]:
    (replica,) = sluice.status()["replicas"].values()
    return dict(replica["engine"]["off"])


def png(number: int) -> bytes:
    content = io.BytesIO()
    picture(number).save(content, format="png")
    return content.getvalue()


def asked_about(sluice: Sluice, url: str, text: str = "What is this?") -> str:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    answer = sluice.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item, misc]
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return str(answer.choices[0].message.content)


def test_images_are_seen_by_value_and_by_url_from_networks_that_are_allowed(tmp_path: Path) -> None:
    write_images(tmp_path)

    def image(asked: Asked) -> tuple[int, bytes]:
        return 200, png(int(asked.path.strip("/")))

    with answering(image) as images, serving(tmp_path, router={"media_networks": ["127.0.0.0/8"]}) as sluice:
        data = [f"data:image/png;base64,{base64.b64encode(png(number)).decode()}" for number in range(2)]
        seen = [asked_about(sluice, each) for each in data]
        assert seen[0] != seen[1]
        assert [asked_about(sluice, f"{images}/{number}") for number in range(2)] == seen
        assert asked_about(sluice, data[0], "What is this? " * 60) != seen[0]
        assert switched_off(sluice) == {}


def test_prefix_hits_of_a_model_with_sliding_windows_are_known_before(tmp_path: Path) -> None:
    write_windows(tmp_path, window=48)
    with serving(tmp_path) as sluice:
        assert switched_off(sluice) == {}
        prompt, hits = [number % 4000 + 10 for number in range(300)], []
        for turn in range(4):
            answer = sluice.client().completions.create(
                model="tiny", prompt=[*prompt, *([turn + 5] * 80 * turn)], max_tokens=4, temperature=0
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            hits.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert hits[0] == 0 and min(hits[1:]) > 200
        wait_until(lambda: sluice.counted("sluice_hit_tokens_total") == sum(hits), 60, "hits are counted")
        assert sluice.counted("sluice_wrong_hit_tokens_total") == 0


def test_a_model_with_experts_is_served_by_ranks_that_step_together(tmp_path: Path) -> None:
    write_experts(tmp_path)
    with serving(tmp_path, "sluice-demo", ("--data-parallel-size", "2", *WITH_EXPERTS)) as sluice:
        with undisturbed(sluice, streams=4, tokens=60) as traffic:
            traffic.wait_for_whole_streams(24)
        replicas = sluice.status()["replicas"]
        assert [name.rpartition("-")[2] for name in sorted(replicas)] == ["rank0", "rank1"]
        assert all(set(each["engine"]["off"]) == {"phases"} for each in replicas.values())
        served = {name: sluice.counted("sluice_engine_busy_seconds_total", replica=name) for name in replicas}
        assert min(served.values()) > 0
        (before,) = sluice.engine_replicas()
        sluice.engine_cores()[1].kill()
        wait_until(lambda: [each.pid for each in sluice.engine_replicas()] not in ([], [before.pid]), 300, "a new one")
        assert sluice.client().completions.create(model="sluice-demo", prompt="x", max_tokens=4).choices[0].text
