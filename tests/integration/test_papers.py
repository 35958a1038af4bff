"""The papers' system: the BERT predictor, two engines that answer in rolling batches of one bin, and, beyond the
preset, one that reads long prompts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import deployments
from tests.integration.application import Sluice, chat

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PAPERS = Path(deployments.__file__).parent / "configs" / "papers.yaml"
PROMPTS, LONG_PROMPTS = 24, 3


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    (application,) = yaml.safe_load(PAPERS.read_text())["applications"]
    settings = application["args"]
    settings["engine"]["prefill"] = {"split": "always", "min_prompt_tokens": 256}
    settings["predictor"]["deadline_s"] = 5.0  # two cores run three engines, and are to answer all
    with Sluice(tmp_path_factory.mktemp("papers"), settings=settings) as papers:
        yield papers


def test_before_the_first_request_nothing_is_cut_and_the_status_says_what_acts(papers: Sluice) -> None:
    status = papers.status()
    assert status["parts"]["bins"]["acts"] and status["parts"]["prediction"]["acts"]
    for replica in status["replicas"].values():
        assert replica["engine"]["limited_by"] in (None, "slots")
        assert replica["parts"].keys() == {"phases", "batch_control"} and not replica["parts"]["batch_control"]["acts"]


async def test_all_parts_decide_together_and_every_request_is_answered(papers: Sluice) -> None:
    async with papers.async_client() as client:

        async def ask(number: int, times: int | None = None) -> int:
            times = times or 1 + number % 3
            text = f"Tell me {'a long story' if number % 2 else 'one word'} about river {number}. " * times
            headers = {"X-Sluice-Class": ("interactive", "standard", "offline")[number % 3]}
            asked = chat(text, max_tokens=200 if number % 2 else 10, extra_headers=headers)
            answer = await client.chat.completions.create(**asked)
            assert answer.usage is not None
            return answer.usage.completion_tokens

        tokens = await asyncio.gather(*map(ask, range(PROMPTS)))
        answered = papers.counted("sluice_predictor_questions_total", outcome="answered")
        tokens += await asyncio.gather(*(ask(number, times=60) for number in range(LONG_PROMPTS)))
    assert all(tokens)
    status = papers.status()
    assert len(status["bin_edges_tokens"]) == 5
    assert not any(replica["takes_batches"] for replica in status["replicas"].values())
    assert len(status["replicas"]) == 2 and len(status["prefill"]["replicas"]) == 1
    assert papers.counted("sluice_split_decisions_total", why="split") == LONG_PROMPTS
    assert papers.counted("sluice_kv_transfers_total") >= 1
    engines = [replica["engine"] for replica in status["replicas"].values()]
    assert all(engine["finished"] and engine["mode"] == "auto" for engine in engines)
    assert not any(status["batches"].values()), "those are whole ones"
    assert answered >= 0.9 * PROMPTS, "a request that waits for its batch waits for its prediction"
