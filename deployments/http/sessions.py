"""The session that a request belongs to, in its client's own words, and the deadline of its task.

    x-sluice-session: any name        x-slo-task-ms: 600000

Where that header is not there, what clients send already is taken, the first of

    x-dynamo-session-id              NVIDIA Dynamo's, and what its clients send
    x-session-id                     vLLM's (0.32) and Ray Serve's
    session-id, session_id           Codex (openai/codex; with an underscore until the summer of 2026)
    x-claude-code-session-id         Claude Code from 2.1.86 on
    prompt_cache_key, session_id     in the body: OpenAI's API; vLLM's
    metadata.user_id                 in the body: Claude Code until then, `user_..._account_..._session_UUID`, and from
                                     2.1.78 on JSON with `session_id`; a user without a session is none

A chain of Responses goes by the id of its first one, see `deployments.engines.vllm.responses`. A name counts only among
the requests of its API key, and its digest alone goes any further.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from deployments.http.errors import bad_request
from router.admission import Tenant

SESSION_HEADER = "x-sluice-session"
HEADERS_OF_OTHERS = ("x-dynamo-session-id", "x-session-id", "session-id", "session_id", "x-claude-code-session-id")
FIELDS = ("prompt_cache_key", "session_id")
MAX_NAME_CHARS = 256
_DIGEST_BYTES = 12  # two of a billion sessions are alike by a chance of one in ten billions
_CLAUDE_CODE = re.compile(r"_session_([0-9A-Za-z-]{8,64})$", re.ASCII)


def digest(name: str, tenant: Tenant | None) -> str:
    """What a session goes by."""
    whose = "" if tenant is None else tenant.name
    return hashlib.blake2b(f"{whose}\0{name}".encode(errors="replace"), digest_size=_DIGEST_BYTES).hexdigest()


def session_of(headers: Headers, in_body: str | None, tenant: Tenant | None) -> str | None:
    """The digest of a request's session; None where its client names none.

    Args:
        in_body: as `named_in` found it.

    Raises:
        HttpError: our own header is empty or too long. A name of others that is too long is none.
    """
    if (own := headers.get(SESSION_HEADER)) is not None:
        if not 0 < len(own) <= MAX_NAME_CHARS:
            raise bad_request(f"{SESSION_HEADER} must have 1 to {MAX_NAME_CHARS} characters, got {len(own)}")
        return digest(own, tenant)
    of_others = (headers.get(name, "") for name in HEADERS_OF_OTHERS)
    name = next((each for each in of_others if 0 < len(each) <= MAX_NAME_CHARS), in_body)
    return None if name is None else digest(name, tenant)


def named_in(body: Mapping[str, Any]) -> str | None:
    """The name of a session in a body, of a bounded length."""
    for field in FIELDS:
        if isinstance(name := body.get(field), str) and 0 < len(name) <= MAX_NAME_CHARS:
            return name
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    return _claude_codes(user) if isinstance(user, str) and len(user) <= 4 * MAX_NAME_CHARS else None


def _claude_codes(user_id: str) -> str | None:
    if (found := _CLAUDE_CODE.search(user_id)) is not None:
        return found[1]
    if not user_id.startswith("{"):
        return None
    try:
        name = json.loads(user_id).get("session_id")
    except (ValueError, RecursionError):
        return None
    return name if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS else None
