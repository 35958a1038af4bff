"""A server in a child process that answers as vLLM does, without a model."""

import sys

from bench.servers import ServerSpec
from deployments.process.ports import free_port

PROGRAM = """
import asyncio, json, sys
from aiohttp import web
port, refuse = int(sys.argv[1]), sys.argv[2] == "refuse"
async def answer(request):
    asked = await request.json()
    prompt = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
    print("asked", json.dumps([asked["max_tokens"], prompt]), flush=True)
    if refuse:
        return web.json_response({"error": "closed today"}, status=503)
    word = b'{"delta": {"content": "a"}}' if "messages" in asked else b'{"index": 0, "text": "a"}'
    usage = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\\n\\n' % asked["max_tokens"]
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(asked["max_tokens"]):
        await response.write(b'data: {"choices": [' + word + b"]}\\n\\n")
        await asyncio.sleep(0.001)
    await response.write(usage + b"data: [DONE]\\n\\n")
    return response
async def models(request):
    return web.json_response({"data": [{"id": "toy"}]})
async def nothing(request):
    return web.Response()
app = web.Application()
app.add_routes([web.post("/v1/chat/completions", answer), web.post("/v1/completions", answer)])
app.add_routes([web.get("/v1/models", models), web.get("/health", nothing), web.get("/metrics", nothing)])
web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)
"""


def toy_spec(name: str, behaviour: str = "answer", program: str = PROGRAM, port: int | None = None) -> ServerSpec:
    """behaviour: "answer" or "refuse"."""
    port = free_port() if port is None else port
    return ServerSpec(name=name, command=(sys.executable, "-c", program, str(port), behaviour), port=port)
