"""How a request names its session."""

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from deployments.http.errors import HttpError
from deployments.http.sessions import MAX_NAME_CHARS, digest, named_in, session_of
from router.admission import Tenant

UUID = "57a121ec-f78c-48c3-a745-e3036a3ecc33"


@pytest.mark.parametrize(
    "name",
    ["x-sluice-session", "X-Dynamo-Session-ID", "X-Session-ID", "session-id", "session_id", "X-Claude-Code-Session-Id"],
)
def test_headers_that_clients_send_name_a_session(name: str) -> None:
    assert session_of(Headers({name: "s1"}), "in the body", None) == digest("s1", None)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt_cache_key": "s1", "session_id": "s2"}, "s1"),
        ({"session_id": "s2"}, "s2"),
        ({"metadata": {"user_id": f"user_{'a' * 64}_account__session_{UUID}"}}, UUID),
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID})}}, UUID),
        ({"metadata": {"user_id": "a person"}}, None),
        ({"metadata": {"user_id": '{"session_id": 7}'}}, None),
        ({"metadata": {"user_id": "{not json"}}, None),
        ({"metadata": {"user_id": "{" * 500}}, None),
        ({"metadata": ["user_id"]}, None),
        ({"prompt_cache_key": ["s1"]}, None),
        ({"prompt_cache_key": "s" * (MAX_NAME_CHARS + 1)}, None),
        ({"user": "a person", "previous_response_id": "resp_1"}, None),
    ],
)
def test_fields_that_clients_send_name_a_session(body: dict[str, Any], name: str | None) -> None:
    assert named_in(body) == name


def test_our_own_header_goes_before_all_others() -> None:
    headers = Headers({"x-sluice-session": "mine", "x-session-id": "theirs"})
    assert session_of(headers, "in the body", None) == digest("mine", None)
    assert session_of(Headers(), "in the body", None) == digest("in the body", None)
    assert session_of(Headers(), None, None) is None


@pytest.mark.parametrize("name", ["", "s" * (MAX_NAME_CHARS + 1)])
def test_our_own_header_is_refused_where_a_header_of_others_is_passed_over(name: str) -> None:
    with pytest.raises(HttpError, match="1 to 256 characters"):
        session_of(Headers({"x-sluice-session": name}), None, None)
    assert session_of(Headers({"session-id": name}), None, None) is None


def test_a_name_belongs_to_its_key_and_is_not_told() -> None:
    one, other = (digest("s1", Tenant(name=name)) for name in ("a", "b"))
    assert len({one, other, digest("s1", None)}) == 3
    assert "s1" not in one and len(one) == 24
