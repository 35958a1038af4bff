"""TLS between routers and engines, with the certificates that encrypt Ray: where RAY_USE_TLS is set, both are.

Each node has a certificate of one authority and shows it both ways (RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY,
RAY_TLS_CA_CERT). Whose address it is for does not matter here: that a replica is the one that was meant, and a router
one of the application, the handshake of `router.wire` proves.
"""

import os
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from policies.errors import ConfigError

USE_TLS_ENV = "RAY_USE_TLS"
CERTIFICATE_ENV, KEY_ENV, AUTHORITY_ENV = "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"


class WireTls(NamedTuple):
    """For the two ends of a connection."""

    replica: ssl.SSLContext
    router: ssl.SSLContext


def wire_tls(environment: Mapping[str, str] = os.environ) -> WireTls | None:
    """None where Ray is not encrypted.

    Raises:
        ConfigError: a file is not named, or cannot be read.
    """
    if environment.get(USE_TLS_ENV, "0").lower() not in ("1", "true"):  # as Ray reads it
        return None
    if missing := [name for name in (CERTIFICATE_ENV, KEY_ENV, AUTHORITY_ENV) if not environment.get(name)]:
        raise ConfigError(f"{USE_TLS_ENV} is set, and {', '.join(missing)} is not")
    return WireTls(_context(ssl.PROTOCOL_TLS_SERVER, environment), _context(ssl.PROTOCOL_TLS_CLIENT, environment))


def _context(side: int, environment: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(environment[CERTIFICATE_ENV], environment[KEY_ENV])
        context.load_verify_locations(environment[AUTHORITY_ENV])
    except OSError as error:  # and of ssl
        raise ConfigError(
            f"a file that {CERTIFICATE_ENV}, {KEY_ENV} or {AUTHORITY_ENV} names cannot be used: "
            f"{error.strerror or error}"
        ) from error
    return context
