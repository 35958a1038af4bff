"""vLLM's own media connector against real servers on loopback addresses, as a router sets it up."""

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

import pytest
from aiohttp import web
from PIL import Image
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

from deployments.config.application import AppConfig
from deployments.engines.vllm import media
from deployments.engines.vllm.media import VLLMS_OWN, fetch_media_from_allowed_addresses, is_allowed
from tests.waiting import until

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

ALLOWED, ALLOWED_TOO, REFUSED = "127.0.0.2", "127.0.0.3", "127.0.0.1"


class Servers:
    """One port on several addresses: a picture, and a redirect to wherever it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0

    async def picture(self, request: web.Request) -> web.Response:
        self.asked.append(request.host)
        buffer = io.BytesIO()
        Image.new("RGB", (3, 2)).save(buffer, "PNG")
        return web.Response(body=buffer.getvalue(), content_type="image/png")

    async def elsewhere(self, request: web.Request) -> web.Response:
        self.asked.append(request.host)
        raise web.HTTPFound(self.url(request.query["host"]))

    async def slow(self, request: web.Request) -> web.Response:
        self.asked.append(request.host)
        await asyncio.Event().wait()
        raise AssertionError

    def url(self, host: str, path: str = "picture.png") -> str:
        return f"http://{host}:{self.port}/{path}"


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made, app = Servers(), web.Application()
    paths = {"/picture.png": made.picture, "/elsewhere": made.elsewhere, "/slow": made.slow}
    app.add_routes([web.get(path, answer) for path, answer in paths.items()])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("0.0.0.0", 0))
    made.port = listener.getsockname()[1]
    await web.SockSite(runner, listener).start()
    yield made
    await runner.cleanup()


@pytest.fixture
async def connector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", dict(MEDIA_CONNECTOR_REGISTRY.name2class))
    config = AppConfig.model_validate({"model": "m", "router": {"media_networks": [f"{ALLOWED}/31"]}})
    fetch_media_from_allowed_addresses(config.router.media_networks)
    made = MEDIA_CONNECTOR_REGISTRY.load(VLLMS_OWN)
    yield made
    await (await made.connection.get_async_client()).close()


async def test_a_picture_from_an_allowed_network_is_fetched(servers: Servers, connector: Any) -> None:
    assert (await connector.fetch_image_async(servers.url(ALLOWED))).size == (3, 2)
    assert (await connector.fetch_image_async(servers.url(ALLOWED, f"elsewhere?host={ALLOWED}"))).size == (3, 2)


async def test_a_slow_server_keeps_no_picture_of_another_waiting(
    servers: Servers, connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MOST_OF_A_HOST", 2)
    slow = [asyncio.create_task(connector.fetch_image_async(servers.url(ALLOWED, "slow"))) for _ in range(3)]
    await until(lambda: len(servers.asked) == 2)
    async with asyncio.timeout(4):  # vLLM gives a fetch 5 s
        assert (await connector.fetch_image_async(servers.url(ALLOWED_TOO))).size == (3, 2)
    assert len(servers.asked) == 3 and not any(each.done() for each in slow)
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize("host", [REFUSED, "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "169.254.169.254"])
async def test_no_other_private_address_is_asked_and_none_is_tried_again(
    servers: Servers, connector: Any, host: str
) -> None:
    for url in (servers.url(host), servers.url(ALLOWED, f"elsewhere?host={host}")):
        with pytest.raises(VLLMValidationError, match=r"router\.media_networks") as refused:
            await connector.fetch_image_async(url)
        assert create_error_response(refused.value).error.code == HTTPStatus.BAD_REQUEST
    assert servers.asked == [f"{ALLOWED}:{servers.port}"], "vLLM tries again what may be for the moment only"


async def test_what_can_read_only_by_blocking_the_loop_is_not_fetched(servers: Servers, connector: Any) -> None:
    with pytest.raises(NotImplementedError):
        connector.fetch_image(servers.url(ALLOWED))
    assert not servers.asked


PUBLIC = ["8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8", "2002:808:808::1"]
NOT_PUBLIC = [
    "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "224.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "fd00:ec2::254", "fe80::1%eth0",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1", "2001:0:808:808::80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(address, [])


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_others_are_not_however_they_are_written(address: str) -> None:
    assert not is_allowed(address, [])


def test_a_network_that_is_named_is_allowed_however_its_addresses_are_written() -> None:
    networks = [ip_network("10.1.0.0/16"), ip_network("fd00::/8")]
    assert all(is_allowed(address, networks) for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1"))
    assert not is_allowed("10.2.0.1", networks)
