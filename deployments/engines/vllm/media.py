"""Where routers fetch images, audio and video that requests name by URL: from public addresses and those allowed.

vLLM (0.32) would fetch from loopback, from the private network and from the metadata services of clouds, and follow
redirects there. The addresses are checked where connections are made: after the name was resolved, and after redirects.
"""

import functools
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

import aiohttp
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Fetches at once, in all and from one host: clients choose the servers, so a slow one must not hold those of others.
MOST_FETCHES, MOST_OF_A_HOST = 1024, 256
VLLMS_OWN = "http"  # the name of vLLM's connector, which VLLM_MEDIA_CONNECTOR may replace by an operator's
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_allowed(address: str, networks: Sequence[Network]) -> bool:
    """Public, or in one of the networks."""
    meant = _meant(ipaddress.ip_address(address))
    return (meant.is_global and not meant.is_multicast) or any(meant in network for network in networks)


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)


class _CheckedConnection(HTTPConnection):
    """vLLM's, with sockets for allowed addresses alone."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        self._networks = networks
        self._async_client: aiohttp.ClientSession | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._async_client is None:
            # Trying several addresses at once, aiohttp would take a refusal for one that cannot be reached.
            connector = aiohttp.TCPConnector(
                limit=MOST_FETCHES,
                limit_per_host=MOST_OF_A_HOST,
                happy_eyeballs_delay=None,
                socket_factory=self._socket,
            )
            self._async_client = aiohttp.ClientSession(connector=connector, trust_env=True)
        return self._async_client

    def get_sync_client(self) -> NoReturn:
        raise NotImplementedError("a router fetches media on its event loop")

    def _socket(self, target: Any) -> socket.socket:
        family, kind, protocol, _, address = target
        if not is_allowed(address[0], self._networks):
            why = "the URL leads to an address that is not public: router.media_networks says which others are allowed"
            raise VLLMValidationError(why)
        return socket.socket(family, kind, protocol)


def fetch_media_from_allowed_addresses(networks: Sequence[Network]) -> None:
    """In this process, from now on.

    Args:
        networks: allowed besides public addresses.
    """
    checked = functools.partial(MediaConnector, connection=_CheckedConnection(networks))
    MEDIA_CONNECTOR_REGISTRY.register(VLLMS_OWN)(checked)
