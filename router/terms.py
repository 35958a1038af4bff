"""What a router goes by and may be changed while it serves. Its parts hold `Live` terms, and read them at each use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.checks import require_at_least, require_positive
from policies.router.order import IdleOrder, Order
from router.admission import Door


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedClientConfig:
    """How long requests may wait and how often they may move.

    Attributes:
        max_wait_s: the longest that a request may wait for a replica before it fails.
        max_moves: how often one request may be moved off a lost replica that it was sent to.
        max_recalls: how often one that fills idle capacity may lose its slot to a more urgent one.
        heartbeat_s, silence_s: how often this router beats, and the silence after which it is taken for dead.

    Raises:
        ConfigError: max_moves or max_recalls is below 0, or a time is not positive.
    """

    max_wait_s: float = 600.0
    max_moves: int = 3
    max_recalls: int = 3
    heartbeat_s: float = 1.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "max_moves", "max_recalls")
        require_positive(self, "max_wait_s", "heartbeat_s", "silence_s")


@dataclass(frozen=True, slots=True)
class RouterTerms:
    """What all routed clients of one model go by.

    Attributes:
        door: the limits of every class.
        config: times and bounds; a changed `heartbeat_s` holds for clients that start later.
    """

    door: Door
    config: RoutedClientConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketTerms:
    """By which tickets wait.

    Attributes:
        order: of the tickets; None goes by what each request is promised.
        fills_idle: the classes that fill idle capacity, and in which order each does.
        late_patience_s: after which a request behind those in time is owed a start, see `deadline_keys`.
    """

    order: Order | None = None
    fills_idle: Mapping[str, IdleOrder] = field(default_factory=dict)
    late_patience_s: float = 60.0
