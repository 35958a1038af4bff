"""A whole application before servers that it does not run: plain vLLM, of the pinned release and of the one before."""

import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.process.ports import free_port
from deployments.process.vllm_env import cpu_env
from tests import another_release
from tests.integration.application import EXACT, START_TIMEOUT_S, Sluice, kill_all
from tests.integration.traffic import undisturbed
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROMPTS = ["Name three rivers.", "Tell me of the sea.", "Count to ten."]


class PlainServer:
    """`vllm serve` with the demo model; it can be killed and started anew at the same address."""

    def __init__(self, folder: Path, packages: Path | None) -> None:
        """Args:
        packages: go before those of this environment.
        """
        self.port = free_port()
        self.url, self._log = f"http://127.0.0.1:{self.port}", folder / f"vllm-{self.port}.log"
        self._env = {**os.environ, **cpu_env(eager=True), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if packages is not None:
            self._env["PYTHONPATH"] = str(packages)
        self.start()

    def start(self) -> None:
        options = ("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "theirs", *DEMO_ARGS, *EXACT)
        serve = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL), *options]
        with self._log.open("ab") as output:
            self._process = psutil.Popen(serve, stdout=output, stderr=output, env=self._env, start_new_session=True)

    def wait(self) -> None:
        wait_until(self._answers, START_TIMEOUT_S, f"{self.url} answers: {self._log}")

    def _answers(self) -> bool:
        assert self._process.is_running() and self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def version(self) -> str:
        with urllib.request.urlopen(f"{self.url}/version", timeout=60) as response:
            return str(response.read())

    def kill(self) -> None:
        if self._process.is_running():
            kill_all([self._process, *self._process.children(recursive=True)])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PlainServer]]:
    folder = tmp_path_factory.mktemp("servers")
    made = [PlainServer(folder, None), PlainServer(folder, another_release.installed())]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


@pytest.fixture(scope="module")
def sluice(servers: list[PlainServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    urls = [option for server in servers for option in ("--engine-url", server.url)]
    options = ("theirs", "--served-model-name", "sluice-demo", *urls, "--router-replicas", "2")
    with Sluice(tmp_path_factory.mktemp("sluice"), *options, settings=SETTINGS) as application:
        yield application


SETTINGS: Mapping[str, Any] = {"engine": {"openai": {"slots": 16}}}


def chat(client: openai.OpenAI, prompt: str, model: str = "sluice-demo", **more: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=40,
        **more,
    )


def test_answers_are_the_servers_own(sluice: Sluice, servers: list[PlainServer]) -> None:
    assert "0.31" in servers[1].version() and "0.31" not in servers[0].version()
    plain = openai.OpenAI(base_url=f"{servers[0].url}/v1", api_key="none", timeout=180)
    for prompt in PROMPTS:
        theirs, ours = chat(plain, prompt, "theirs"), chat(sluice.client(), prompt)
        assert ours.choices[0].message.content == theirs.choices[0].message.content
        assert (ours.usage, ours.model) == (theirs.usage, "sluice-demo")
        chunks = list(chat(sluice.client(), prompt, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == theirs.choices[0].message.content
        assert chunks[-1].usage == theirs.usage
        assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_requests_of_all_classes_reach_both_servers_and_their_lengths_are_learned(sluice: Sluice) -> None:
    with undisturbed(sluice) as traffic:
        traffic.wait_for_whole_streams(24)
    wait_until(lambda: sluice.counted("sluice_requests_total", outcome="length") > 24, 60, "they are counted")
    assert sluice.counted("sluice_output_tokens_total") >= 24 * 300
    status = sluice.status()
    assert len(status["replicas"]) == 2
    assert all(set(each["engine"]["off"]["phases"]) == {"openai"} for each in status["replicas"].values())
    assert all(each["slots"] == 16 for each in status["replicas"].values())


def test_what_a_server_refuses_and_what_no_server_is_asked(sluice: Sluice) -> None:
    client = sluice.client()
    with pytest.raises(openai.BadRequestError, match="maximum context length|max_tokens"):
        client.chat.completions.create(
            model="sluice-demo", messages=[{"role": "user", "content": "x"}], max_tokens=100_000
        )
    with pytest.raises(openai.NotFoundError, match="nobody"):
        chat(client, "x", model="nobody")
    with pytest.raises(openai.BadRequestError, match="messages must be"):
        client.post("/chat/completions", body={"model": "sluice-demo"}, cast_to=object)
    assert [model.id for model in client.models.list()] == ["sluice-demo"]


def test_a_killed_server_costs_no_request_and_is_used_again_once_it_is_back(
    sluice: Sluice, servers: list[PlainServer]
) -> None:
    with undisturbed(sluice) as traffic:
        servers[1].kill()
        traffic.wait_for_whole_streams(12)
        wait_until(lambda: len(sluice.status()["replicas"]) == 1, START_TIMEOUT_S, "one server is left")
        servers[1].start()
        servers[1].wait()
        wait_until(lambda: len(sluice.status()["replicas"]) == 2, START_TIMEOUT_S, "both serve")
        traffic.wait_for_whole_streams(12)
    assert sluice.counted("sluice_requests_recovered_total") > 0
