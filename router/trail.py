"""What is noted of a traced request on its way, on the router's clock. Spans are made of it once it is over.

Few requests are traced, so nothing is noted for each token, and a request without a trail pays for one comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.router.tickets import Ticket

TraceHeaders = Mapping[str, str]
"""W3C's `traceparent` and `tracestate`."""


@dataclass(slots=True)
class Stay:
    """A request's time on one replica.

    Attributes:
        sent_tokens: what its client had of the answer before.
        first_s: its first output came from there.
        because: why it went on elsewhere: the replica was lost, the request recalled, or its KV cache stalled on the
            way; None where it did not.
        way: how it did: requeued, resumed or replayed.
    """

    replica_id: str
    sent_s: float
    sent_tokens: int
    first_s: float | None = None
    left_s: float | None = None
    because: str | None = None
    way: str | None = None


@dataclass(slots=True)
class KVTransfer:
    """Its prompt was to be read by a prefill replica.

    Attributes:
        trail: of the request for that.
        ended_s: the KV cache could be fetched, or it was not waited for any more.
        fell_back: why its decode replica read the prompt all the same.
    """

    began_s: float
    trail: "Trail"
    ended_s: float | None = None
    fell_back: str | None = None


@dataclass(slots=True)
class Trail:
    """One engine request. Times are None until it happened.

    Attributes:
        headers: what its replicas go on with.
        ticket: the first that was written for it, at classified_s.
        hit_tokens: of its prompt, what its first replica had cached; None where that did not say.
        queued_s: when that went into the queue.
        stays: in order; bounded by how often a request may be moved and recalled.
    """

    headers: TraceHeaders
    ticket: Ticket | None = None
    prompt_tokens: int = 0
    hit_tokens: int | None = None
    max_output_tokens: int | None = None
    classified_s: float | None = None
    queued_s: float | None = None
    kv_transfer: KVTransfer | None = None
    stays: list[Stay] = field(default_factory=list)

    def classified(self, ticket: Ticket, prompt_tokens: int, max_output_tokens: int | None, now_s: float) -> None:
        self.ticket, self.classified_s = ticket, now_s
        self.prompt_tokens, self.max_output_tokens = prompt_tokens, max_output_tokens

    def found(self, hit_tokens: int) -> None:
        """The first replica's word counts: where a request goes on elsewhere, its prompt holds tokens of its answer."""
        if self.hit_tokens is None:
            self.hit_tokens = hit_tokens

    def queued(self, now_s: float) -> None:
        """The first time counts: a request that goes on elsewhere is queued again."""
        if self.queued_s is None:
            self.queued_s = now_s

    def sent(self, replica_id: str, sent_tokens: int, now_s: float) -> Stay:
        self.stays.append(stay := Stay(replica_id, now_s, sent_tokens))
        return stay

    def left(self, now_s: float, because: str | None = None) -> None:
        """The replica that it is on, if it is on one. With a reason it goes on elsewhere, or there again."""
        if self.stays and self.stays[-1].left_s is None:
            self.stays[-1].left_s, self.stays[-1].because = now_s, because

    def goes_on(self, way: str) -> None:
        if self.stays and self.stays[-1].way is None:
            self.stays[-1].way = way
