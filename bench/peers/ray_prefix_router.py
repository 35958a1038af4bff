"""Ray Serve's own prefix-aware router before engines that run already: `python -m bench.peers.ray_prefix_router`.

`PrefixCacheAffinityRouter` is what Ray Serve LLM offers for prefixes. It keeps a tree of the texts that were sent to
each replica, and sends a request to the replica that has most of its text. Here a replica stands for one `vllm serve`
and passes its stream on, so that what is compared is the choice alone. It needs nothing but Ray.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Off, Ray listens on the loopback interface alone; it looks when it is imported.
os.environ.update({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"})

import httpx
import ray
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from bench.servers import HOST, RAY_READY

TIMEOUT_S = 300.0
MAX_ONGOING = 1000
OBJECT_STORE_BYTES = 150_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to /v1/completions. The router looks for the text under the name `prompt`."""

    prompt: str
    body: bytes

    @classmethod
    def of(cls, body: bytes, asked: Mapping[str, Any]) -> "Asked":
        """Token ids become one character each: equal beginnings are those of the tokens."""
        prompt = asked["prompt"]
        return cls(prompt=prompt if isinstance(prompt, str) else "".join(map(chr, prompt)), body=body)


class Engine:
    """Each replica passes requests on to one of the engines."""

    def __init__(self, urls: Sequence[str]) -> None:
        url = urls[serve.get_replica_context().rank.rank]
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)

    async def answer(self, asked: Asked) -> AsyncIterator[bytes]:
        """Raises httpx.HTTPError: the engine refuses, or breaks off."""
        headers = {"Content-Type": "application/json"}
        async with self._client.stream("POST", "/v1/completions", content=asked.body, headers=headers) as answer:
            answer.raise_for_status()
            async for piece in answer.aiter_bytes():
                yield piece


app = FastAPI()


@serve.ingress(app)
class Ingress:
    """Takes requests, and lets the router choose an engine for each."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(stream=True)

    @app.post("/v1/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        asked = Asked.of(await request.body(), await request.json())
        return StreamingResponse(self._engines.answer.remote(asked), media_type="text/event-stream")


def application(urls: Sequence[str]) -> Application:
    """Ray Serve's defaults, but that no request waits in front of an engine."""
    router = RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter)
    engines = serve.deployment(
        Engine, num_replicas=len(urls), max_ongoing_requests=MAX_ONGOING, request_router_config=router
    )
    return serve.deployment(Ingress, max_ongoing_requests=MAX_ONGOING).bind(engines.bind(urls))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.ray_prefix_router",
        description="Serves /v1/completions of several engines until Ctrl-C.",
    )
    parser.add_argument("urls", nargs="+", metavar="URL", help="of an engine's OpenAI server")
    parser.add_argument("--port", type=int, default=8000, help="on the loopback interface (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            address="local",
            num_cpus=1 + len(options.urls),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": HOST, "port": options.port})
            serve.run(application(options.urls), name="prefixes", route_prefix="/")
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # not before: Ray has set its own
            print(f"{RAY_READY}http://{HOST}:{options.port}", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
