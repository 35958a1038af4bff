"""Two models and two adapters behind one address, for holders of keys, with the learned predictor."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
import yaml

from deployments.cli import DEMO_ARGS
from deployments.config import DEMO_MODEL
from deployments.keys import digest, new_key
from tests.adapters import write_adapter
from tests.integration.application import Sluice, free_port

KEY, NIGHT_KEY = new_key(), new_key()


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("models")
    keys = folder / "keys.yaml"
    night = {"name": "night", "sha256": digest(NIGHT_KEY), "classes": ["offline"], "requests_per_minute": 1}
    keys.write_text(yaml.safe_dump([{"name": "all", "sha256": digest(KEY)}, night]))
    second = {"model": "demo", "served_model_name": "second", "vllm_args": list(DEMO_ARGS)}
    adapters = {
        name: str(write_adapter(folder / name, DEMO_MODEL, strength=strength))
        for name, strength in (("changed", 1.0), ("unchanged", 0.0))
    }
    engine = {"replicas": 1, "num_cpus": 0, "drain_timeout_s": 5, "lora": {"adapters": adapters, "max_rank": 8}}
    settings = {
        "keys": {"file": str(keys)},
        "engine": {"replicas": 1},
        # A deadline that a busy machine keeps as well.
        "predictor": {"kind": "bert", "deadline_s": 5.0, "num_cpus": 0},
        "more_models": [{**second, "engine": engine}],
    }
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump(settings))
    application = Sluice(folder, free_port(), "--config", str(config))
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()


def client(sluice: Sluice, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{sluice.url}/v1", api_key=key, timeout=120, max_retries=0)


def test_all_models_are_listed_and_each_answers(two_models: Sluice) -> None:
    holder = client(two_models, KEY)
    assert [model.id for model in holder.models.list()] == ["sluice-demo", "second", "changed", "unchanged"]
    for name in ("sluice-demo", "second"):
        stream = holder.completions.create(model=name, prompt="A story:", max_tokens=5, temperature=0, stream=True)
        assert {chunk.model for chunk in stream} == {name}


def test_adapters_answer_by_name(two_models: Sluice) -> None:
    holder = client(two_models, KEY)

    def ask(name: str) -> str:
        stream = holder.completions.create(
            model=name, prompt="A story:", max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    plain, changed, unchanged = ask("second"), ask("changed"), ask("unchanged")
    assert plain == unchanged == ask("second")
    assert changed == ask("changed") != plain


def answered_questions(sluice: Sluice, model: str) -> float:
    lines = httpx.get(f"{sluice.url}/metrics", timeout=30).text.splitlines()
    answered = [line for line in lines if "sluice_predictor_questions_total" in line and 'outcome="answered"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in answered if f'model="{model}"' in line)


def test_the_learned_predictor_is_asked_and_answers(two_models: Sluice) -> None:
    """About plain prompts and about chats."""
    holder, hint = client(two_models, KEY), {"X-Sluice-Expected-Tokens": "12"}
    before = answered_questions(two_models, "second")
    holder.completions.create(model="second", prompt="How many rivers?", max_tokens=3, extra_headers=hint)
    assert answered_questions(two_models, "second") == before + 1
    holder.chat.completions.create(model="second", messages=[{"role": "user", "content": "Which?"}], max_tokens=3)
    assert answered_questions(two_models, "second") == before + 2


def test_an_unknown_model_is_not_found(two_models: Sluice) -> None:
    with pytest.raises(openai.NotFoundError, match="third"):
        client(two_models, KEY).completions.create(model="third", prompt="A story:")


def test_models_do_not_share_replicas(two_models: Sluice) -> None:
    response = httpx.get(f"{two_models.url}/sluice/status", headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    status = response.json()
    replicas = [set(each["replicas"]) for each in (status, *status["more_models"])]
    assert [len(each) for each in replicas] == [1, 1]
    assert not replicas[0] & replicas[1]


def test_who_has_no_key_gets_nothing(two_models: Sluice) -> None:
    with pytest.raises(openai.AuthenticationError):
        client(two_models, "sk-sluice-wrong").models.list()
    assert httpx.get(f"{two_models.url}/health", timeout=30).status_code == 200


def test_a_key_is_kept_to_its_classes_and_its_rate_before_anything_is_streamed(two_models: Sluice) -> None:
    holder = client(two_models, NIGHT_KEY)
    ask = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    headers = {"Authorization": f"Bearer {NIGHT_KEY}", "X-Sluice-Class": "offline"}
    with pytest.raises(openai.PermissionDeniedError):
        holder.models.list(extra_headers={"X-Sluice-Class": "interactive"})
    url = f"{two_models.url}/v1/chat/completions"
    first = httpx.post(url, json=ask, headers=headers, timeout=120)
    assert (first.status_code, "data:" in first.text) == (200, True)
    second = httpx.post(url, json=ask, headers=headers, timeout=120)
    assert second.status_code == 429
    assert 0 < int(second.headers["retry-after"]) <= 60
    assert "requests_per_minute of night" in json.loads(second.text)["error"]["message"]
