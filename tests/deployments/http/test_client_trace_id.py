"""The trace of a client, as W3C Trace Context has it."""

import pytest
from starlette.datastructures import Headers

from deployments.http.traces import client_trace_id

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("traceparent", "found"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-what-comes-later", TRACE),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE[:-1]}-{PARENT}-01", None),
        ("", None),
    ],
)
def test_a_trace_is_taken_from_a_header_that_is_well_formed(traceparent: str, found: str | None) -> None:
    assert client_trace_id(Headers({"traceparent": traceparent})) == found


def test_a_request_without_the_header_has_none() -> None:
    assert client_trace_id(Headers()) is None
