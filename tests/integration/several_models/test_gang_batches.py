"""Gang batches over HTTP: real routers, Redis and Ray Serve, the predictor's bins, and the Transformers engine."""

import asyncio
import json
import time
from functools import cache
from typing import Any

import httpx
import openai
import pytest

from deployments.config.model import DEMO_MODEL
from tests.integration.application import Sluice
from tests.integration.several_models.models import EDGE_TOKENS, GANG_SIZE, GANG_WAIT_S, GANGS, KEY
from tests.waiting import wait_until

pytestmark = pytest.mark.long

BRIEF = ["What is 7 times 8?", "What is 2 + 3?", "What is 12 - 5?"]
LONG = [
    "Write a long story about the moon.",
    "Write a detailed essay about the history of bread.",
    "Write a long story about a garden and explain every step.",
]
# An answer is predicted no longer than its request allows: so BRIEF stay below, and LONG are foreseen to go beyond.
BRIEF_TOKENS, LONG_TOKENS = 12, 24
assert BRIEF_TOKENS < EDGE_TOKENS < LONG_TOKENS


@cache
def library() -> tuple[Any, Any]:
    """Tokenizer and model, imported here: at the top seconds would pass before the first test of all starts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(DEMO_MODEL), model


@cache
def alone(prompt: str, max_tokens: int) -> str:
    """The library's own greedy answer, one request at a time, without anything of ours."""
    tokenizer, model = library()
    inputs = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    text: str = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def engine(sluice: Sluice) -> dict[str, Any]:
    (replica,) = sluice.status(GANGS)["replicas"].values()
    return {**replica["engine"], "slots": replica["slots"], "taken": replica["running"]}


async def test_a_request_alone_goes_when_its_wait_is_over_and_a_bin_that_is_full_at_once(models: Sluice) -> None:
    client, before = models.async_client(), engine(models)

    async def answer(prompt: str, max_tokens: int) -> str:
        reply = await client.completions.create(model=GANGS, prompt=prompt, max_tokens=max_tokens, temperature=0)
        return str(reply.choices[0].text)

    async def waits(expected: dict[str, int]) -> None:
        await asyncio.to_thread(
            wait_until, lambda: models.status(GANGS)["waiting"] == expected, GANG_WAIT_S, str(expected)
        )

    def reckon() -> None:
        for prompts, max_tokens in ((BRIEF, BRIEF_TOKENS), (LONG, LONG_TOKENS)):
            for prompt in prompts:
                alone(prompt, max_tokens)

    async def timed() -> tuple[str, float]:
        start_s = time.monotonic()
        return await answer(BRIEF[0], BRIEF_TOKENS), time.monotonic() - start_s

    library()  # an import holds up this process, and the clock would run
    lonely = asyncio.create_task(timed())
    await asyncio.to_thread(reckon)  # while it waits
    text, took_s = await lonely
    assert text == alone(BRIEF[0], BRIEF_TOKENS)
    assert took_s > GANG_WAIT_S
    long = [asyncio.create_task(answer(prompt, LONG_TOKENS)) for prompt in LONG[:2]]
    brief = [asyncio.create_task(answer(prompt, BRIEF_TOKENS)) for prompt in BRIEF[:2]]
    await waits({"standard:0": 2, "standard:1": 2})  # more than a batch, but not in one bin
    brief.append(asyncio.create_task(answer(BRIEF[2], BRIEF_TOKENS)))
    assert await asyncio.gather(*brief) == [alone(prompt, BRIEF_TOKENS) for prompt in BRIEF]
    long.append(asyncio.create_task(answer(LONG[2], LONG_TOKENS)))
    assert await asyncio.gather(*long) == [alone(prompt, LONG_TOKENS) for prompt in LONG]
    # A relay tells the shared state of a slot apart from the answer.
    await asyncio.to_thread(wait_until, lambda: engine(models)["taken"] == 0, 60, "the replica is free")
    after = engine(models)
    # One more where the machine is so busy that a wait was over before its batch was full.
    assert 3 <= after["batches"] - before["batches"] <= 4
    assert after["slots"] == GANG_SIZE


def test_the_engine_s_batches_are_on_the_metrics_page(models: Sluice) -> None:
    assert models.series("sluice_engine_batches_total") == [engine(models)["batches"]]


async def test_streams_that_are_left_free_their_replica(models: Sluice) -> None:
    client, before = models.async_client(), engine(models)["finished"]

    async def leave(prompt: str) -> None:
        stream = await client.completions.create(
            model=GANGS, prompt=prompt, max_tokens=1800, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()

    await asyncio.gather(*(leave(prompt) for prompt in LONG))  # a whole batch, which need not wait
    await asyncio.to_thread(wait_until, lambda: engine(models)["taken"] == 0, 60, "the replica is free")
    assert engine(models)["finished"] == before


async def test_logprobs_stop_strings_and_an_empty_message(models: Sluice) -> None:
    client = models.async_client()
    full = alone("A story:", 16)
    stop = full[4:7]
    reply, empty, plain = await asyncio.gather(
        client.completions.create(
            model=GANGS, prompt="A story:", max_tokens=16, temperature=0, logprobs=2, stop=[stop]
        ),
        client.chat.completions.create(model=GANGS, messages=[{"role": "user", "content": ""}], max_tokens=3),
        # With it the batch is full, and need not wait.
        client.completions.create(model=GANGS, prompt=BRIEF[0], max_tokens=BRIEF_TOKENS, temperature=0),
    )
    assert plain.choices[0].text == alone(BRIEF[0], BRIEF_TOKENS)
    assert reply.choices[0].text == full[: full.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.top_logprobs is not None
    chosen = reply.choices[0].logprobs.token_logprobs
    assert chosen is not None and all(value is not None and value <= 0.0 for value in chosen)
    assert empty.usage is not None and empty.usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_does_not_do_is_refused_before_anything_is_sent(models: Sluice, stream: bool) -> None:
    schema = {"name": "any", "schema": {"type": "object"}}
    body = {
        "model": GANGS,
        "messages": [{"role": "user", "content": "JSON, please."}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "stream": stream,
    }
    reply = httpx.post(
        f"{models.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert reply.status_code == 400
    assert "structured_outputs" in json.dumps(reply.json())
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        models.client().completions.create(model=GANGS, prompt="A", max_tokens=1, extra_body={"prompt_logprobs": 1})
