"""python -m bench.one_client: what one request of one client does to the streams of the others.

A router with vLLM's front end, a Redis and a null engine run in processes of their own, and 24 streams of 20 ms a
token. In every round a window without the request and one with it, in turn: printed is by how much the longest gap of
any stream grew, in milliseconds, median [least, most], and what the request was answered.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from bench.chat_client import ChatClient
from bench.one_client.attacks import Attack, attacks
from bench.one_client.servers import route
from bench.rig.processes import child
from bench.session import turns
from bench.summary import Spread
from deployments.config.application import AppConfig
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.config.vllm_args import without
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis

INTERVAL_S = 0.02
STREAMS = 24
BEFORE_S = 0.6  # of a window, when the request is sent
TIMEOUT_S = 120.0
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SHOWN = 100  # characters of a refusal


def application(context_tokens: int) -> AppConfig:
    args = [*without(DEMO_ARGS, {"--max-model-len"}), *TOOLS, "--max-model-len", str(context_tokens)]
    return AppConfig(model=str(DEMO_MODEL), served_model_name="m", vllm_args=tuple(args))


async def until_ready(client: ChatClient, body: bytes) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            await client.ask(body)
            return
        except Exception:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.5)


async def send(port: int, attack: Attack, content: bytes) -> str:
    """Returns the answer in short, and after how long it came."""
    started_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = "".join(f"{name}: {value}\r\n" for name, value in attack.headers.items())
    writer.write(
        f"POST {attack.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {len(content)}\r\n\r\n".encode()
    )
    writer.write(content)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionError):  # it need not read all of what it refuses
                await writer.drain()
            answer = await _answer(reader)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        return f"{type(error).__name__} after {time.perf_counter() - started_s:.1f} s"
    finally:
        writer.close()
    status, took_s = answer[9:12].decode(), time.perf_counter() - started_s
    why = "" if status == "200" else answer.partition(b'"message":')[2][:SHOWN].decode()
    return f"{status} after {took_s:.2f} s {why}"


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return head + await reader.readexactly(int(length[1])) if length else head


class Window:
    """All streams for some seconds, and the longest gap of any."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        tokens = round(seconds / INTERVAL_S)
        self.body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        self._clients = [ChatClient(f"http://127.0.0.1:{port}", TIMEOUT_S) for _ in range(STREAMS)]

    async def longest_gap_ms(self, attack: Attack | None, content: bytes = b"") -> tuple[float, str]:
        streams = asyncio.gather(*(client.ask(self.body) for client in self._clients))
        await asyncio.sleep(BEFORE_S)
        answered = "" if attack is None else await send(self._port, attack, content)
        return max(max(answer.itl_s) for answer in await streams) * 1e3, answered


async def measure(port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    window = Window(port, options.seconds)
    await until_ready(ChatClient(f"http://127.0.0.1:{port}", 10.0), window.body)
    await window.longest_gap_ms(None)
    found = attacks(options.context)
    chosen = {name: attack for name, attack in found.items() if any(part in name for part in options.only)}
    rows = []
    for name, attack in tqdm(chosen.items(), disable=None):
        grown, answers, content = [], [], attack.content
        for number in range(options.repeats):
            gaps = {}
            for each in turns((None, attack), number):
                gaps[each is None], answered = await window.longest_gap_ms(each, content)
                answers += [answered] if each is not None else []
            grown.append(gaps[False] - gaps[True])
        rows.append({"request": name, "bytes": len(content), "longer_gap_ms": grown, "answers": answers})
        tqdm.write(f"{name:32} {Spread.of(grown):>8.0f} ms   {answers[-1]}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.one_client", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of windows for each request")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--context", type=int, default=32768, help="tokens of the model's context")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of requests to send; default: all")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--log", type=Path, default=Path("results/one_client.log"), help="of the router")
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    config, port = application(options.context), free_port()
    redis = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the demo model is made for less
    from bench.one_client.null_engine import serve
    from deployments.engines.vllm.version import ENGINE_VERSION

    namespace = config.namespace(ENGINE_VERSION)
    try:
        with (
            child(serve, redis.url, namespace, 4096, INTERVAL_S, options.context),
            child(route, config, redis.url, port, options.log),
        ):
            rows = uvloop.run(measure(port, options))
    finally:
        redis.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
