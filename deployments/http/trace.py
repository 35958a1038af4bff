"""The id of a client's trace, from the header of W3C Trace Context: `traceparent: 00-TRACE-PARENT-FLAGS`."""

import re

from starlette.datastructures import Headers

# Level 1 of the recommendation, 3.2: version ff and ids of zeros are invalid, and later versions than 00 may append.
_TRACEPARENT = re.compile(
    r"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)


def trace_id(headers: Headers) -> str | None:
    """None where there is no trace, or the header is malformed: a client's trace is never worth a refusal."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return found[1] if found else None
