"""vLLM's own HTTP application over the routed client, in the environment of routers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments import app
from deployments.config import DEMO_ARGS, DEMO_MODEL
from deployments.http_layer import SluiceMiddleware, log_causes
from deployments.keys import KeyRing
from policies.errors import AdmissionError, StateStoreError
from router.timing import RequestTiming

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

OF_THE_NODE = {"VLLM_API_KEY": "k", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
# One that makes vLLM's front end tell its engine of transfers, and counts of cached tokens.
OF_THE_OPERATOR = ["--kv-offloading-size", "1", "--enable-prompt-tokens-details"]
ROOM = {"standard": 4096, "narrow": 50}


class Routed:
    """What it is told to raise, it raises for every request; else it answers with two tokens."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.checks_until_cut_off: int | None = None
        self.asked: list[Any] = []
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def check_room(self, slo_class: str, requests: int, timing: RequestTiming) -> None:
        if self.checks_until_cut_off == 0:
            timing.outcome = "error"
            raise StateStoreError("Redis is away")
        if self.checks_until_cut_off is not None:
            self.checks_until_cut_off -= 1
        if requests > ROOM[slo_class]:
            timing.outcome = "refused"
            raise AdmissionError("no room", retry_after_s=6.5)

    async def submit(self, request: Any, **_: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.metrics.stats import PrefillStats

        if self.raises is not None:
            raise self.raises
        self.asked.append(request)
        stats = PrefillStats(num_prompt_tokens=1)
        done = EngineCoreOutput(request.request_id, [300, 301], finish_reason=FinishReason.STOP, prefill_stats=stats)
        await self._outputs.put(EngineCoreOutputs(outputs=[done]))

    async def cancel(self, request_ids: list[str], outcome: str) -> None:
        """Nothing of it is left."""

    async def next_outputs(self) -> Any:
        return await self._outputs.get()


@pytest.fixture
def routed() -> Routed:
    return Routed()


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch, routed: Routed) -> AsyncIterator[httpx.AsyncClient]:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from deployments.vllm_adapter import RoutedAsyncLLM, parse_vllm_args

    for name, value in OF_THE_NODE.items():
        monkeypatch.setenv(name, value)
    for name, value in app.router_env().items():
        monkeypatch.setenv(name, value)
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats", *OF_THE_OPERATOR])
    llm = RoutedAsyncLLM(args, routed)  # type: ignore[arg-type]
    served = build_app(args, ("generate",), llm.model_config)
    log_causes(served)
    await init_app_state(llm, served.state, args, ("generate",))
    served.state.server = SimpleNamespace()
    keys = KeyRing(file=None, environment=None, client=None, application="app", classes=ROOM)
    wrapped = SluiceMiddleware(served, max_body_bytes=1 << 20, classes=ROOM, default_class="standard", keys=keys)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(wrapped), base_url="http://sluice") as made:
        yield made
    llm.shutdown()


async def test_a_request_for_more_answers_than_there_is_room_for_is_refused_before_any_is_made(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="deployments.http_layer")
    most = {"prompt": ["a"] * 128, "n": 128, "max_tokens": 4}
    beyond = [{**most, "n": 129}, {**most, "prompt": ["a"] * 129}]
    for stream in (False, True):
        for body in beyond:
            refused = await client.post("/v1/completions", json={**body, "stream": stream})
            assert refused.status_code == 400
            assert "128" in refused.json()["error"]["message"]
        full = await client.post(
            "/v1/completions", json={**most, "stream": stream}, headers={"X-Sluice-Class": "narrow"}
        )
        assert (full.status_code, full.headers["retry-after"]) == (429, "7")
        assert full.json()["error"]["message"] == "no room"
        assert vars(caplog.records[-1])["outcomes"] == ["refused"]


@pytest.mark.parametrize("error", [UnicodeEncodeError("utf-8", "a", 0, 1, "no such letter"), TypeError("no such type")])
async def test_what_is_answered_with_500_leaves_its_cause(
    client: httpx.AsyncClient, routed: Routed, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    routed.raises = error
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 500
    (line,) = [record for record in caplog.records if record.message == "/v1/completions failed"]
    assert line.levelname == "ERROR" and line.exc_text is not None
    assert f"{type(error).__name__}: {error}" in line.exc_text


BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"model": str(DEMO_MODEL), "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_may_not_queue_gets_its_status_streamed_or_not(
    client: httpx.AsyncClient, routed: Routed, path: str, stream: bool
) -> None:
    for error, status in ((AdmissionError("the rate is spent", 7.0), 429), (StateStoreError("Redis is away"), 503)):
        routed.raises = error
        response = await client.post(path, json={**BODIES[path], "stream": stream})
        assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("checks", [0, 1])
async def test_a_shared_state_that_is_lost_between_two_checks_is_answered_as_if_before(
    client: httpx.AsyncClient, routed: Routed, path: str, stream: bool, checks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks for a place before it begins a stream, and again for each engine request."""
    caplog.set_level("INFO", logger="deployments.http_layer")
    routed.checks_until_cut_off = checks
    response = await client.post(path, json={**BODIES[path], "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "Redis is away")
    assert vars(caplog.records[-1])["outcomes"] == ["error"]
    assert not routed.asked


@pytest.mark.parametrize("path", BODIES)
async def test_streams_that_may_queue_come_whole(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={**BODIES[path], "stream": True})
    assert response.status_code == 200
    assert "00" in response.text
    if path == "/v1/responses":
        assert "response.created" in response.text
        assert "response.completed" in response.text


async def test_what_a_client_says_of_transfers_reaches_no_engine_and_no_count(
    client: httpx.AsyncClient, routed: Routed
) -> None:
    forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 999}}
    for answers in (1, 2):
        done = await client.post("/v1/completions", json={**BODIES["/v1/completions"], **forged, "n": answers})
        assert "999" not in str(done.json()["usage"])
    assert [request.sampling_params.extra_args for request in routed.asked] == [None] * 3


async def test_for_a_request_that_vllm_refuses_no_other_takes_a_slot(client: httpx.AsyncClient, routed: Routed) -> None:
    """To tell a KV connector of it vLLM sends one that the engine would end without a word."""
    refused = {"model": "nobody", "kv_transfer_params": {"do_remote_prefill": True}}
    assert (await client.post("/v1/completions", json={**BODIES["/v1/completions"], **refused})).status_code == 404
    assert not routed.asked


async def test_vllm_asks_for_no_key_opens_no_route_of_developers_and_stores_no_response(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.post("/reset_prefix_cache")).status_code == 404
    stored = await client.post("/v1/responses", json={"input": "a", "background": True})
    assert (stored.status_code, "RESPONSES_API_STORE" in stored.text) == (400, True)


def test_an_environment_that_names_other_limits_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "7")
    assert app.router_env()["VLLM_MAX_N_SEQUENCES"] == "7"
    assert app.router_env()["VLLM_MAX_COMPLETION_PROMPTS"] == "128"


OF_THE_BUILD_FOR_GPUS = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else version(name)
from vllm.platforms import current_platform
print(repr(current_platform.device_type))
"""


@pytest.mark.parametrize(("env", "found"), [({}, "''"), (app.router_env(), "'cpu'")], ids=["as it is", "in a router"])
def test_the_build_for_gpus_makes_front_ends_where_there_is_no_gpu(env: dict[str, str], found: str) -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | env
    command = [sys.executable, "-c", OF_THE_BUILD_FOR_GPUS]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == found
