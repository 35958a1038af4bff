"""What Sluice tells an engine about a request: one mapping under `sluice` in SamplingParams.extra_args.

A router writes it over what its client put there, so no client can claim a class or a deadline. Under plain
`vllm serve` with the plug-in, clients can by /inference/v1/generate, which takes extra_args as they are; vLLM's other
routes take flat values only (`vllm_xargs`), never a mapping. Everything is optional, and what cannot be read counts as
missing: a request is served all the same, only later or with a wider guess.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

KEY = "sluice"


class RequestMetadata(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Attributes:
    slo_class: the service class.
    predicted_output_tokens: the predictor's mean.
    bin_index: the bin of predicted output length.
    ttft_left_s: seconds until its first token is due, as of when the router sent it, below 0 when it is late; None when
        nothing is promised, or the client has its first token.
    tpot_s: seconds per token after the first that it was promised, on average over its answer; None when nothing is.
    e2e_left_s: seconds until its last token is due, as of when the router sent it, below 0 when it is late; None when
        nothing is promised.
    resumed: it goes on after a lost replica or a recall, and its client has a part of the answer.
    comes_back: its session will probably have another turn; None where nothing is known of a session.
    fills_idle: its class takes what the others leave.
    unread_tokens: of its prompt, those that a replica with nothing of it would read; None counts all.
    unread_at: those of replicas that are taken to have some of it cached, by their ids.
    measures: it is not a client's, and shows what steps cost: nothing is learned from its length.
    """

    slo_class: str | None = None
    predicted_output_tokens: float | None = None
    bin_index: int | None = None
    ttft_left_s: float | None = None
    tpot_s: float | None = None
    e2e_left_s: float | None = None
    resumed: bool = False
    comes_back: bool | None = None
    fills_idle: bool = False
    unread_tokens: int | None = None
    unread_at: Mapping[str, int] = msgspec.field(default_factory=dict)
    measures: bool = False

    def as_extra_args(self) -> dict[str, Any]:
        return {KEY: msgspec.to_builtins(self)}


NOTHING = RequestMetadata()


def metadata_of(extra_args: Mapping[str, Any] | None) -> RequestMetadata:
    """What `extra_args` says, or nothing."""
    given = extra_args.get(KEY) if extra_args else None
    if not isinstance(given, Mapping):
        return NOTHING
    try:
        return msgspec.convert(given, RequestMetadata)
    except msgspec.ValidationError:
        return NOTHING


def comes_back(extra_args: Mapping[str, Any] | None, session_id: str | None) -> bool:
    """Whether a request's session will probably have another turn; where nothing says so, whether it has a session.

    Args:
        session_id: as vLLM's own front end found it.
    """
    given = extra_args.get(KEY) if extra_args else None
    said = given.get("comes_back") if isinstance(given, Mapping) else None
    return said if isinstance(said, bool) else session_id is not None


def without_metadata(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the client itself gave."""
    rest = {name: value for name, value in (extra_args or {}).items() if name != KEY}
    return rest or None


def unread_tokens(extra_args: Mapping[str, Any] | None, prompt_tokens: int, replica_id: str) -> int:
    """Prompt tokens that this replica would read; all of them where nothing is said."""
    said = metadata_of(extra_args)
    everywhere = prompt_tokens if said.unread_tokens is None else said.unread_tokens
    return said.unread_at.get(replica_id, everywhere)
