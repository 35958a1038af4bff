"""Models and adapters behind one address, for holders of keys, with the learned predictor."""

import json
import time

import httpx
import openai
import pytest

from tests.integration.application import Sluice, is_loopback
from tests.integration.several_models.models import GANGS, KEY, NIGHT_KEY, SCALED, TIGHT
from tests.waiting import wait_until


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
    answered = [
        line for line in sluice.metrics() if "sluice_predictor_questions_total" in line and 'outcome="answered"' in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in answered if f'model="{model}"' in line)


def test_the_learned_predictor_is_asked_and_answers(models: Sluice) -> None:
    """About plain prompts and about chats."""
    holder, hint = client(models, KEY), {"X-Sluice-Expected-Tokens": "12"}
    time.sleep(PUBLISHED_S)
    before = answered_questions(models, SCALED)
    holder.completions.create(model=SCALED, prompt="How many rivers?", max_tokens=3, extra_headers=hint)
    wait_until(lambda: answered_questions(models, SCALED) == before + 1, 60, "the prompt is counted")
    holder.chat.completions.create(model=SCALED, messages=[{"role": "user", "content": "Which?"}], max_tokens=3)
    wait_until(lambda: answered_questions(models, SCALED) == before + 2, 60, "the chat is counted")


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
