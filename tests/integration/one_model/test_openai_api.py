"""The OpenAI API as clients use it: the official client, and requests that no client should send."""

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.integration.application import Sluice
from tests.waiting import wait_until

MODEL = "sluice-demo"
USER = [{"role": "user", "content": "Name three facts about rivers."}]


Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def client(sluice: Sluice) -> openai.OpenAI:
    return sluice.client()


@pytest.fixture(scope="module")
def ask(client: openai.OpenAI) -> Ask:
    """For a chat with these options."""
    return lambda **options: client.chat.completions.create(model=MODEL, messages=USER, **options)


def post(sluice: Sluice, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    """Status, headers and decoded body."""
    request = urllib.request.Request(
        sluice.url + path, data=body, headers={"Content-Type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def test_a_stream_of_chat_adds_up_to_the_answer_in_one_piece(ask: Ask) -> None:
    whole = ask(max_tokens=32, temperature=0)
    stream = ask(max_tokens=32, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Rivers are", max_tokens=12, temperature=0)
    stream = client.completions.create(model=MODEL, prompt="Rivers are", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_an_answer_says_under_which_service_tier_it_was_served(ask: Ask) -> None:
    whole = ask(max_tokens=4, service_tier="priority")
    assert whole.service_tier == "priority"
    stream = ask(max_tokens=4, service_tier="flex", stream=True, extra_headers={"x-slo-ttft-ms": "900"})
    assert {chunk.service_tier for chunk in stream} == {"flex"}
    assert ask(max_tokens=4).service_tier is None


def test_two_choices_are_two_answers(ask: Ask) -> None:
    # Each is given a seed of its own, made from this one.
    answer = ask(max_tokens=24, n=2, temperature=1.0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_logprobs_come_for_every_token(ask: Ask) -> None:
    answer = ask(max_tokens=5, logprobs=True, top_logprobs=3)
    assert answer.usage is not None and answer.choices[0].logprobs is not None
    logprobs = answer.choices[0].logprobs.content
    assert logprobs is not None
    assert len(logprobs) == answer.usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in logprobs)


def test_a_json_schema_is_kept(ask: Ask) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
            "legs": {"type": "integer", "enum": [2, 4, 6]},
        },
        "required": ["name", "legs"],
        "additionalProperties": False,
    }
    answer = ask(
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}},
    )
    animal = json.loads(answer.choices[0].message.content or "")
    assert set(animal) == {"name", "legs"}
    assert animal["legs"] in (2, 4, 6)


def test_stop_strings_end_the_answer(ask: Ask) -> None:
    whole = ask(max_tokens=40, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[10:13]
    cut = ask(max_tokens=40, temperature=0, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_tokenize_and_detokenize_are_inverse(sluice: Sluice) -> None:
    _, _, tokens = post(sluice, "/tokenize", json.dumps({"model": MODEL, "prompt": "seven rivers"}).encode())
    _, _, text = post(sluice, "/detokenize", json.dumps({"model": MODEL, "tokens": tokens["tokens"]}).encode())
    assert text["prompt"] == "seven rivers"


def test_the_request_id_is_echoed_and_time_is_split(sluice: Sluice) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, "max_tokens": 8}).encode()
    status, headers, _ = post(sluice, "/v1/chat/completions", body, {"X-Request-Id": "abc-123"})
    assert status == 200
    assert headers.get_all("X-Request-Id") == ["abc-123"]
    parts = dict(part.strip().split(";dur=") for part in headers["Server-Timing"].split(","))
    assert set(parts) == {"queue", "engine", "framework"}
    assert float(parts["engine"]) > 0


def test_every_router_knows_what_the_engines_have_cached(sluice: Sluice, client: openai.OpenAI) -> None:
    """Also the one that has sent nothing."""
    text = "Name three facts about rivers, and three about lakes. " * 30  # some blocks of 128 tokens
    client.completions.create(model=MODEL, prompt=text, max_tokens=4)

    def known() -> list[float]:
        return sluice.series("sluice_cached_blocks")

    wait_until(lambda: len(known()) == 2 and min(known()) == max(known()) >= 2, 60, "both routers know the same blocks")


def test_a_whole_answer_by_a_time_is_met_or_missed(sluice: Sluice, ask: Ask) -> None:
    def of(e2e: str) -> float:
        return sluice.counted("sluice_slo_requests_total", slo_class="standard", e2e=e2e)

    met, missed = of("met"), of("missed")
    ask(max_tokens=30, extra_headers={"x-slo-e2e-ms": "1"})
    wait_until(lambda: of("missed") > missed, 60, "no answer is whole after a millisecond")
    ask(max_tokens=3, extra_headers={"x-slo-e2e-ms": "60000"})
    wait_until(lambda: of("met") > met, 60, "a minute is enough")


def test_metrics_count_requests_of_both_routers(sluice: Sluice, ask: Ask) -> None:
    """In a class that hardly another test uses: the page shows each other router as of that one's last heartbeat."""

    def requests() -> float:
        return sluice.counted("sluice_requests_total", slo_class="interactive")

    before = requests()
    for _ in range(4):
        ask(max_tokens=2, extra_headers={"X-Sluice-Class": "interactive"})
    wait_until(lambda: requests() == before + 4, 60, "four requests are counted")

    def names() -> set[str]:
        return {line.split("{")[0].split(" ")[0] for line in sluice.metrics() if not line.startswith("#")}

    expected = {
        "sluice_slo_requests_total", "sluice_replica_unread_tokens",
        "sluice_queue_wait_seconds_count", "sluice_ttft_seconds_bucket", "sluice_itl_seconds_sum",
        "sluice_e2e_seconds_count", "sluice_replica_credit", "sluice_replica_running", "sluice_routers",
        "sluice_predictor_fallbacks_total", "sluice_engine_running", "sluice_engine_mode", "sluice_engine_batch_size",
        "sluice_prompt_tokens_total", "sluice_build_info", "sluice_engine_kv_cache_usage_ratio",
        "sluice_engine_prefix_cache_query_tokens_total", "sluice_engine_prefix_cache_hit_tokens_total",
    }  # fmt: skip
    # An engine that finds no time to answer is missing on the page.
    wait_until(lambda: expected <= names(), 60, f"these are on the page: {expected}")
    none = [name for name in names() if name.startswith("sluice_key_") or name.endswith("_created")]
    assert none == [], "there are no keys, and a page does not say when a counter was made"


def test_whichever_router_answers_its_page_shows_what_both_processes_count(sluice: Sluice) -> None:
    def routers(name: str, path: str = "/metrics") -> set[str]:
        with urllib.request.urlopen(sluice.url + path, timeout=60) as response:
            lines = response.read().decode().splitlines()
        return {line.partition('router="')[2].partition('"')[0] for line in lines if line.startswith(name)}

    wait_until(lambda: len(routers("process_cpu_seconds_total")) == 2, 60, "both have published their page")
    both = routers("process_cpu_seconds_total")
    for _ in range(8):
        for name in ("process_cpu_seconds_total", "python_info", "sluice_replicas_lost_total"):
            assert routers(name) == routers(name, "/metrics/") == both


CHAT = "/v1/chat/completions"
LONG_PROMPT = "word " * 3000


@pytest.mark.parametrize(
    ("path", "body", "expected", "says"),
    [
        (CHAT, {"model": "nobody", "messages": USER}, 404, "nobody"),
        (CHAT, {"model": MODEL}, 400, "messages"),
        (CHAT, {"model": MODEL, "messages": USER, "max_tokens": 99_999}, 400, "max_tokens"),
        (CHAT, {"model": MODEL, "messages": USER, "temperature": -1}, 400, "temperature"),
        (CHAT, {"model": MODEL, "messages": "x" * 5_000_000}, 413, "bytes"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": LONG_PROMPT}]}, 400, "2048"),
        ("/v1/completions", {"model": MODEL, "prompt": LONG_PROMPT}, 400, "2048"),
        ("/v1/nothing", {}, 404, "not found"),
    ],
    ids=itertools.count(),
)
def test_bad_input_gets_the_right_status_and_a_message(
    sluice: Sluice, path: str, body: dict[str, Any], expected: int, says: str
) -> None:
    status, _, answer = post(sluice, path, json.dumps(body).encode())
    assert status == expected, answer
    assert says.lower() in json.dumps(answer).lower()


READ_BY_RAY = (
    "X-Request-Id", "X-Request-Timeout-Seconds", "X-Request-Disconnect-Disabled", "X-Session-Id", "Tracestate",
    "Serve-Multiplexed-Model-Id",
)  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_RAY)
def test_headers_that_ray_cannot_read_are_refused_in_openais_form(sluice: Sluice, name: str) -> None:
    status, _, answer = post(sluice, CHAT, b"{}", {name: "caf\xe9"})
    assert (status, name.lower() in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/v1/models/nobody", "/v1/files/none/nothing", "/v1/nothing"])
def test_paths_that_are_not_there_are_told_in_openais_form(sluice: Sluice, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{sluice.url}{path}", timeout=60)
    assert json.load(error.value)["error"]["code"] == error.value.code == 404


def test_at_anthropics_route_errors_have_anthropics_form(sluice: Sluice) -> None:
    for body in (b"{}", b"no JSON"):
        status, _, answer = post(sluice, "/v1/messages", body)
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")


def test_a_request_whose_time_is_over_is_told_in_openais_form(sluice: Sluice) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2000, "ignore_eos": True}
    status, _, answer = post(sluice, CHAT, json.dumps(body).encode(), {"X-Request-Timeout-Seconds": "0.2"})
    assert (status, "X-Request-Timeout-Seconds" in answer["error"]["message"]) == (408, True)


def test_headers_of_more_than_16_kb_are_refused_in_openais_form(sluice: Sluice) -> None:
    status, _, answer = post(sluice, CHAT, b"{}", {"Cookie": "x" * 20_000})
    assert (status, answer["error"]["type"]) == (400, "BadRequest")


def test_what_is_no_json_and_a_wrong_method_are_no_server_errors(sluice: Sluice) -> None:
    status, _, answer = post(sluice, CHAT, b"this is not JSON")
    assert (status, "json" in json.dumps(answer).lower()) == (400, True)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{sluice.url}{CHAT}", timeout=60)
    assert error.value.code == 405
