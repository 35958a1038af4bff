"""Whether this process makes traces, by OpenTelemetry's own environment variables. Without, nothing is imported."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from policies.errors import ConfigError

if TYPE_CHECKING:
    from deployments.process.spans import Tracing

DISABLED_ENV = "OTEL_SDK_DISABLED"
EXPORTER_ENV = "OTEL_TRACES_EXPORTER"
ENDPOINT_ENVS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_ENVS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOLS = ("grpc", "http/protobuf")


def started_tracing(part: str) -> "Tracing | None":
    """None if no traces are asked for.

    Args:
        part: the part of the application that this process is.

    Raises:
        ConfigError: a variable has a value that means nothing here.
    """
    if (protocol := protocol_of(os.environ)) is None:
        return None
    from deployments.process.spans import Tracing

    return Tracing.by_otlp(part, protocol)


def protocol_of(environment: Mapping[str, str]) -> str | None:
    """The protocol by which traces are sent; None if none are asked for. An empty variable counts as not set.

    Raises:
        ConfigError: see `started_tracing`.
    """
    if environment.get(DISABLED_ENV, "").lower() == "true":
        return None
    exporter = environment.get(EXPORTER_ENV)
    if exporter == "none" or not (exporter or _first(environment, ENDPOINT_ENVS)):
        return None
    if exporter not in (None, "", "otlp"):
        raise ConfigError(f"{EXPORTER_ENV} is {exporter!r}: set it to otlp or none, or leave it out")
    protocol = _first(environment, PROTOCOL_ENVS) or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{' or '.join(PROTOCOL_ENVS)} is {protocol!r}: set it to one of {', '.join(PROTOCOLS)}")
    return protocol


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := environment.get(name))), None)
