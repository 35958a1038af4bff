"""Gang batches over HTTP: real routers, Redis and Ray Serve, the predictor's bins, and the Transformers engine."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.config import DEMO_MODEL
from tests.integration.application import Sluice, free_port, wait_until

MODEL = "sluice-demo"
BRIEF = ["What is 7 times 8?", "What is 2 + 3?", "What is 12 - 5?"]
LONG = [
    "Write a long story about the moon.",
    "Write a detailed essay about the history of bread.",
    "Write a long story about a garden and explain every step.",
]
BATCH, MAX_WAIT_S = 3, 6.0
# An answer is predicted no longer than its request allows: so BRIEF stay below, and LONG are foreseen to go beyond.
EDGE_TOKENS, BRIEF_TOKENS, LONG_TOKENS = 18.0, 12, 24


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("gangs")
    settings = {
        "engine": {"replicas": 1, "gang": {"batch_size": BATCH, "max_wait_s": MAX_WAIT_S}},
        "bins": {"count": 2, "rule": "fixed", "edges": [0.0, EDGE_TOKENS, 100_000.0]},
        # A deadline that a busy machine keeps as well.
        "predictor": {"kind": "bert", "place": "router", "deadline_s": 5.0},
        "vllm_args": ["--dtype", "float32"],  # so that rounding moves no token from one batch to another
    }
    config = folder / "gangs.yaml"
    config.write_text(yaml.safe_dump(settings))
    application = Sluice(folder, free_port(), "--engine", "transformers", "--config", str(config))
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()


def alone(prompt: str, max_tokens: int) -> str:
    """The library's own greedy answer, one request at a time, without anything of ours."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    text: str = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def engine(sluice: Sluice) -> dict[str, Any]:
    (replica,) = sluice.status()["replicas"].values()
    return {**replica["engine"], "slots": replica["slots"], "taken": replica["running"]}


async def test_a_request_alone_goes_when_its_wait_is_over_and_a_bin_that_is_full_at_once(gangs: Sluice) -> None:
    client, before = gangs.async_client(), engine(gangs)

    async def answer(prompt: str, max_tokens: int) -> str:
        reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)
        return str(reply.choices[0].text)

    async def waits(expected: dict[str, int]) -> None:
        await asyncio.to_thread(wait_until, lambda: gangs.status()["waiting"] == expected, MAX_WAIT_S, str(expected))

    start_s = time.monotonic()
    assert await answer(BRIEF[0], BRIEF_TOKENS) == alone(BRIEF[0], BRIEF_TOKENS)
    assert time.monotonic() - start_s > MAX_WAIT_S
    long = [asyncio.create_task(answer(prompt, LONG_TOKENS)) for prompt in LONG[:2]]
    brief = [asyncio.create_task(answer(prompt, BRIEF_TOKENS)) for prompt in BRIEF[:2]]
    await waits({"standard:0": 2, "standard:1": 2})  # more than a batch, but not in one bin
    brief.append(asyncio.create_task(answer(BRIEF[2], BRIEF_TOKENS)))
    assert await asyncio.gather(*brief) == [alone(prompt, BRIEF_TOKENS) for prompt in BRIEF]
    long.append(asyncio.create_task(answer(LONG[2], LONG_TOKENS)))
    assert await asyncio.gather(*long) == [alone(prompt, LONG_TOKENS) for prompt in LONG]
    after = engine(gangs)
    assert after["batches"] - before["batches"] == 3
    assert (after["slots"], after["taken"]) == (BATCH, 0)


def test_the_engine_s_batches_are_on_the_metrics_page(gangs: Sluice) -> None:
    lines = [line for line in gangs.metrics() if line.startswith("sluice_engine_batches_total")]
    assert len(lines) == 1 and float(lines[0].rsplit(" ", 1)[1]) == engine(gangs)["batches"]


def test_a_stream_that_is_left_frees_its_replica(gangs: Sluice) -> None:
    client, before = gangs.client(), engine(gangs)["finished"]
    stream = client.completions.create(
        model=MODEL, prompt=BRIEF[0], max_tokens=1800, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine(gangs)["taken"] == 0, 20, "the replica is free")
    assert engine(gangs)["finished"] == before


async def test_logprobs_stop_strings_and_an_empty_message(gangs: Sluice) -> None:
    client = gangs.async_client()
    full = alone("A story:", 16)
    stop = full[4:7]
    reply, empty = await asyncio.gather(
        client.completions.create(
            model=MODEL, prompt="A story:", max_tokens=16, temperature=0, logprobs=2, stop=[stop]
        ),
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": ""}], max_tokens=3),
    )
    assert reply.choices[0].text == full[: full.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.top_logprobs is not None
    chosen = reply.choices[0].logprobs.token_logprobs
    assert chosen is not None and all(value is not None and value <= 0.0 for value in chosen)
    assert empty.usage is not None and empty.usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_does_not_do_is_refused_before_anything_is_sent(gangs: Sluice, stream: bool) -> None:
    schema = {"name": "any", "schema": {"type": "object"}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "JSON, please."}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "stream": stream,
    }
    reply = httpx.post(f"{gangs.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "structured_outputs" in json.dumps(reply.json())
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        gangs.client().completions.create(model=MODEL, prompt="A", max_tokens=1, extra_body={"prompt_logprobs": 1})
