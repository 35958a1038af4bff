"""Models and adapters behind one address, for holders of keys, with the learned predictor."""

import json
import time
from importlib.metadata import version

import httpx
import openai
import pytest
from playwright.sync_api import expect

from tests.integration.application import Sluice, is_loopback
from tests.integration.browser import opened
from tests.integration.several_models.models import GANGS, KEY, NIGHT_KEY, SCALED, TIGHT
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def client(sluice: Sluice, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{sluice.url}/v1", api_key=key, timeout=120, max_retries=0)


def test_all_models_are_listed_and_each_answers(models: Sluice) -> None:
    holder = client(models, KEY)
    assert [model.id for model in holder.models.list()] == [TIGHT, SCALED, "changed", "unchanged", GANGS]
    for name in (TIGHT, SCALED):
        stream = holder.completions.create(model=name, prompt="A story:", max_tokens=5, temperature=0, stream=True)
        assert {chunk.model for chunk in stream} == {name}


def test_adapters_answer_by_name(models: Sluice) -> None:
    holder = client(models, KEY)

    def ask(name: str) -> str:
        stream = holder.completions.create(
            model=name, prompt="A story:", max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    plain, changed, unchanged = ask(SCALED), ask("changed"), ask("unchanged")
    assert plain == unchanged == ask(SCALED)
    assert changed == ask("changed") != plain


# A page shows what each router counted at its last heartbeat, and is itself a second old at most.
PUBLISHED_S = 3.0


def answered_questions(sluice: Sluice, model: str) -> float:
    return sluice.counted("sluice_predictor_questions_total", outcome="answered", model=model)


def test_the_learned_predictor_is_asked_and_answers(models: Sluice) -> None:
    """About plain prompts and about chats."""
    holder, hint = client(models, KEY), {"X-Sluice-Expected-Tokens": "12"}
    time.sleep(PUBLISHED_S)
    before = answered_questions(models, SCALED)
    holder.completions.create(model=SCALED, prompt="How many rivers?", max_tokens=3, extra_headers=hint)
    wait_until(lambda: answered_questions(models, SCALED) == before + 1, 60, "the prompt is counted")
    holder.chat.completions.create(model=SCALED, messages=[{"role": "user", "content": "Which?"}], max_tokens=3)
    wait_until(lambda: answered_questions(models, SCALED) == before + 2, 60, "the chat is counted")


def token_counts(sluice: Sluice, model: str) -> tuple[float, ...]:
    """Prompt and output tokens of a model, in all and of the first key."""
    kinds = ("prompt", "output")
    in_all = [sluice.counted(f"sluice_{kind}_tokens_total", model=model) for kind in kinds]
    return *in_all, *(sluice.counted(f"sluice_key_{kind}_tokens_total", model=model, key="all") for kind in kinds)


@pytest.mark.parametrize("model", [TIGHT, SCALED, GANGS])
def test_tokens_on_the_metrics_page_are_those_that_answers_say(models: Sluice, model: str) -> None:
    """In all and by key."""
    holder, chat = client(models, KEY), [{"role": "user", "content": "Name a river."}]
    time.sleep(PUBLISHED_S)
    before = token_counts(models, model)
    requests = models.counted("sluice_key_requests_total", model=model, key="all")
    *_, last = holder.completions.create(
        model=model, prompt="Rivers are", max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    whole = [
        holder.completions.create(model=model, prompt="A story of three bears:", max_tokens=12),
        holder.chat.completions.create(model=model, messages=chat, max_tokens=7),
    ]
    usages = [last.usage, *(answer.usage for answer in whole)]
    took = (sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages))
    assert min(took) > len(usages)
    expected = tuple(old + new for old, new in zip(before, took * 2, strict=True))
    wait_until(lambda: token_counts(models, model) == expected, 60, f"the tokens are counted: {before} and {took}")
    assert models.counted("sluice_key_requests_total", model=model, key="all") == requests + len(usages)


def test_a_repeated_prompt_is_found_in_the_prefix_cache_and_counted_there(models: Sluice) -> None:
    holder, block_tokens = client(models, KEY), 32
    prompt = "The prefix cache of an engine knows a prompt that it has read before. " * 6

    def counts() -> tuple[float, float]:
        names = (f"sluice_engine_prefix_cache_{kind}_tokens_total" for kind in ("query", "hit"))
        queries, hits = (models.counted(name, model=TIGHT) for name in names)
        return queries, hits

    time.sleep(PUBLISHED_S)
    queries, hits = counts()
    answers = [holder.completions.create(model=TIGHT, prompt=prompt, max_tokens=1) for _ in range(2)]
    (tokens,) = {answer.usage.prompt_tokens for answer in answers if answer.usage}
    assert tokens > 2 * block_tokens
    held = (tokens - 1) // block_tokens * block_tokens
    wait_until(lambda: counts() == (queries + 2 * tokens, hits + held), 60, f"{held} tokens of {tokens} are hits")


def test_the_metrics_page_says_what_runs_and_how_full_it_is(models: Sluice) -> None:
    for model in (TIGHT, SCALED, GANGS):
        assert (
            models.counted("sluice_build_info", model=model, version=version("sluice-serve"), ray=version("ray")) == 1
        )
    assert 0 <= models.counted("sluice_engine_kv_cache_usage_ratio", model=TIGHT) <= 1
    busy_s, planning_s = (
        models.counted(f"sluice_engine_{what}_seconds_total", model=TIGHT) for what in ("busy", "planning")
    )
    assert busy_s > planning_s > 0


def test_with_a_predictor_too_nothing_listens_beyond_loopback(models: Sluice) -> None:
    listening = models.listening()
    assert any("PredictorReplica" in part for _, command in listening for part in command)
    assert [each for each in listening if not is_loopback(each[0])] == []


def test_an_unknown_model_is_not_found(models: Sluice) -> None:
    with pytest.raises(openai.NotFoundError, match="third"):
        client(models, KEY).completions.create(model="third", prompt="A story:")


def test_models_do_not_share_replicas(models: Sluice) -> None:
    replicas = [replica for name in (TIGHT, SCALED, GANGS) for replica in models.status(name)["replicas"]]
    assert len(set(replicas)) == len(replicas) >= 3


def test_who_has_no_key_gets_nothing(models: Sluice) -> None:
    with pytest.raises(openai.AuthenticationError):
        client(models, "sk-sluice-wrong").models.list()
    assert httpx.get(f"{models.url}/health", timeout=30).status_code == 200


def test_a_key_is_kept_to_its_classes_and_its_rate_before_anything_is_streamed(models: Sluice) -> None:
    holder = client(models, NIGHT_KEY)
    ask = {"model": SCALED, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    headers = {"Authorization": f"Bearer {NIGHT_KEY}", "X-Sluice-Class": "offline"}
    with pytest.raises(openai.PermissionDeniedError):
        holder.models.list(extra_headers={"X-Sluice-Class": "interactive"})
    url = f"{models.url}/v1/chat/completions"
    first = httpx.post(url, json=ask, headers=headers, timeout=120)
    assert (first.status_code, "data:" in first.text) == (200, True)
    second = httpx.post(url, json=ask, headers=headers, timeout=120)
    assert second.status_code == 429
    assert 0 < int(second.headers["retry-after"]) <= 60
    assert "requests_per_minute of night" in json.loads(second.text)["error"]["message"]


def test_the_page_asks_for_a_key_before_it_shows_anything(models: Sluice) -> None:
    with opened(models.url) as page:
        for key, shown in (("wrong", "The key is not known here."), (KEY, "")):
            page.locator("#keyinput").fill(key)
            page.locator("#keyinput").press("Enter")
            expect(page.locator("#trouble")).to_have_text(shown)
        expect(page.locator("#what")).to_contain_text(TIGHT)
        expect(page.locator("#curl")).to_contain_text("Authorization: Bearer $KEY")
        assert KEY not in page.content()
