"""Metrics of stored responses, as the state that all routers share has them."""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from deployments.responses.store import Usage


def exposition(usage: Usage) -> bytes:
    registry = CollectorRegistry()
    responses = Gauge("sluice_responses_stored", "Responses that are stored.", registry=registry)
    stored = Gauge("sluice_responses_stored_bytes", "Bytes of stored responses together.", registry=registry)
    responses.set(usage.responses)
    stored.set(usage.stored_bytes)
    return generate_latest(registry)
