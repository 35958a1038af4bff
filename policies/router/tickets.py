"""What the dispatcher is told: tickets of requests, what replicas take and have read; and what it answers."""

from dataclasses import dataclass, replace

from policies.checks import require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One queued request.

    Attributes:
        request_id: unique among all routers.
        bin_index: its bin of predicted output length.
        deadline_key: by which its lane is sorted; the least goes first. `late_key` takes its place when the request is
            called late, and its router gives it another one when it is queued again with a part of its answer.
        work_s: predicted seconds of engine time, on a replica of slowness 1 that has most of its prompt cached.
        router_id: the router that queued it, and is told of its assignment.
        slo_class: its service class; replicas may be reserved for some classes.
        arrival_s: on the store's clock, for the overtaking that is reported; None when it does not count, as after a
            lost replica.
        deadline_s: when its first token is due, on the store's clock, or when it must come so that a short answer can
            still be whole in time; None when neither was promised.
        tpot_s: promised seconds per token after the first; None when none were promised.
        late_key: its sort key once its first token cannot be in time; None where its order knows no late requests.
        unread_tokens: prompt tokens that a replica with an empty cache would read.
        prefixes: how many of them each replica has cached, as (replica id, tokens); only replicas with some.
        prompt_token_s: predicted seconds in which a replica of slowness 1 reads a prompt token; a replica's own word
            goes before it.
        step_s: predicted seconds of an engine step. Replicas whose first token would come within one step of each other
            count as equal.
        predicted_output_tokens: by which it moves to another bin when the edges of bins change; None never moves.
        fills_idle: its class takes only slots that no other class wants.
        recallable: whether its slot may be taken back for another class while it runs, on a replica that serves all.
        bucket: its bucket of prompt length; class, bin and bucket make its lane. 0 where there are no buckets.
        prompt_tokens: by which it moves to another bucket when the edges of buckets change; None never moves.
        api_key: name of its API key, for the turns of keys (policies.router.turns); "" without a key.
        avoids: replicas that its router cannot reach: none of them takes it while another has a slot for it.
    """

    request_id: str
    bin_index: int
    deadline_key: float
    work_s: float
    router_id: str
    slo_class: str = "standard"
    arrival_s: float | None = None
    deadline_s: float | None = None
    tpot_s: float | None = None
    late_key: float | None = None
    unread_tokens: int = 0
    prefixes: tuple[tuple[str, int], ...] = ()
    prompt_token_s: float = 0.0
    step_s: float = 0.0
    predicted_output_tokens: float | None = None
    fills_idle: bool = False
    recallable: bool = False
    bucket: int = 0
    prompt_tokens: int | None = None
    api_key: str = ""
    avoids: tuple[str, ...] = ()

    def unread_at(self, replica_id: str) -> int:
        """Prompt tokens that this replica has to read."""
        return max(0, self.unread_tokens - dict(self.prefixes).get(replica_id, 0))

    @property
    def least_unread_tokens(self) -> int:
        """Prompt tokens to read on the replica that has most of the prompt cached."""
        return max(0, self.unread_tokens - max((tokens for _, tokens in self.prefixes), default=0))

    def token_s(self, slowness: float, said_s: float | None) -> float:
        """Seconds in which a replica of this slowness reads a prompt token; ``said_s`` is the replica's own word."""
        return self.prompt_token_s * slowness if said_s is None else said_s

    def of_prompt(self, prompt_tokens: int, prefixes: tuple[tuple[str, int], ...]) -> "Ticket":
        """The ticket with another prompt, or with what replicas have cached by now."""
        new = replace(self, unread_tokens=prompt_tokens, prefixes=prefixes)
        more_s = self.prompt_token_s * (new.least_unread_tokens - self.least_unread_tokens)
        return replace(new, work_s=max(0.0, self.work_s + more_s))

    def work_at_s(self, replica_id: str) -> float:
        """As `work_s`, on this replica if its slowness is 1."""
        return self.work_s + self.prompt_token_s * (self.unread_at(replica_id) - self.least_unread_tokens)


def unknown_ticket(request_id: str) -> Ticket:
    """The ticket of a request that a replica runs, and that no router has queued."""
    return Ticket(request_id=request_id, bin_index=0, deadline_key=0.0, work_s=0.0, router_id="", slo_class="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a replica says of the prompts that it holds.

    Attributes:
        read: ids of requests whose prompt it has read, since it said so last.
        known_tokens: of the unread tokens of all others, those that it has read, or had in its cache; below 0 by those
            that it has to read though they were taken for cached.
        max_unread_tokens: at this many it takes no more; None sets no bound.
        prompt_token_s: its seconds per prompt token, decodes in between included; None while it cannot tell.
    """

    read: tuple[str, ...] = ()
    known_tokens: int = 0
    max_unread_tokens: int | None = None
    prompt_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTerms:
    """Which requests a replica takes.

    Attributes:
        classes: service classes for which it is reserved; none serves all.
        gang_max_wait_s: None takes single requests. Else it takes batches of one class and bin, up to all its slots and
            only when all are free; one that is not full goes when a request has waited so long (policies.gang.batches).
        gang_patience_s: for which batches of shorter answers go before one; 0 is first formed, first served.
        rolling_size: of one that takes single requests: once all its slots are taken, it takes the next ones when so
            many are free again; and as many of one class, bin and bucket one after the other. 1 takes each as it comes.

    Raises:
        ConfigError: rolling_size is below 1.
    """

    classes: tuple[str, ...] = ()
    gang_max_wait_s: float | None = None
    gang_patience_s: float = 0.0
    rolling_size: int = 1

    def __post_init__(self) -> None:
        require_at_least(1, self, "rolling_size")

    def takes(self, slo_class: str) -> bool:
        return not self.classes or slo_class in self.classes


@dataclass(frozen=True, slots=True)
class Assignment:
    """A ticket was given a slot of a replica."""

    request_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Recall:
    """A running request is to give its slot back and be queued again: a more urgent one waits."""

    request_id: str


Notice = Assignment | Recall
