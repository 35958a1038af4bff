"""A traced request's time on a replica, as the replica sees it: what the router's `engine` takes beyond is the way.

vLLM's own spans of a request are not made: they need its statistics, which cost time with every token, and are off.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.trail import TraceHeaders

if TYPE_CHECKING:
    from deployments.process.spans import Attributes, OpenSpan, Tracing


@dataclass(slots=True)
class ReplicaTrace:
    """One request's.

    Attributes:
        finish: how the engine said that it ended; None where it was stopped.
    """

    span: "OpenSpan"
    came_s: float
    first_s: float | None = None
    finish: Any = None

    def end(self, output_tokens: int, now_s: float) -> None:
        """output_tokens: of the answer, those that were made here."""
        self.span.add("prefill", self.came_s, now_s if self.first_s is None else self.first_s)
        if self.first_s is not None:
            self.span.add("decode", self.first_s, now_s)
        finish = "stopped" if self.finish is None else str(self.finish)
        self.span.end(now_s, {"gen_ai.usage.output_tokens": output_tokens, "sluice.finish": finish})


class ReplicaTraces:
    """Begins those of the requests whose router has them traced."""

    def __init__(self, tracing: "Tracing", replica_id: str) -> None:
        self._tracing, self._replica_id = tracing, replica_id

    def begin(self, headers: TraceHeaders, prompt_tokens: int, now_s: float) -> ReplicaTrace | None:
        attributes: Attributes = {"sluice.replica": self._replica_id, "gen_ai.usage.input_tokens": prompt_tokens}
        span = self._tracing.begin_server("replica", now_s, attributes, headers=headers)
        return None if span is None else ReplicaTrace(span, now_s)
