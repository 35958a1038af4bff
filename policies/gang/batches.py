"""Gang batches: a replica that is busy until its longest request ends takes, when idle, a whole batch from one bin.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000), Algorithm 1, lines 4
to 7, and the two serving policies of its system model (section 3): the batch that was formed first goes first, or the
shortest one.

Departures (ERRATA numbers):
- 0.12 A bin's batch also counts as formed, as it is, when a request has waited max_wait_s. With 0 an idle replica takes
  what is there at once; a batch that has to wait for a replica grows until one is idle, up to its size.
- 0.18 There may be several replicas.
- Time of formation is told by the keys of the order policy, not by a clock: a bin holds requests of one class and like
  length, so their keys ascend as they arrive. With first come, first served it is the paper's order; by deadlines
  the classes' targets count between bins, and bound the wait.
- Shortest first would let short batches overtake a long one for ever: it ends with the long one's patience.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from policies.checks import require_at_least
from policies.errors import ConfigError
from policies.router.order import BAND_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GangConfig:
    """How many requests make a batch, for how long fewer wait for more, and which batch goes first.

    Attributes:
        batch_size: B.
        max_wait_s: after which a batch goes with fewer; infinite waits for full ones.
        bin_sizes: B of each bin, where memory allows no more than that; of bins beyond, nothing is known.
        patience_s: for so long the batches of bins of shorter answers go before one; then it goes before them. 0 is
            first formed, first served; infinite is shortest first without a bound.

    Raises:
        ConfigError: batch_size is below 1, or a time negative or not a number.
    """

    batch_size: int = 8
    max_wait_s: float = 0.1
    bin_sizes: tuple[int, ...] = ()
    patience_s: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size")
        for name in ("max_wait_s", "patience_s"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def size_of(self, bin_index: int) -> int:
        return min(self.batch_size, *self.bin_sizes[bin_index : bin_index + 1] or (self.batch_size,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """What waits in one bin of one class, or in one bucket of it.

    Attributes:
        bucket: of prompt length; 0 where prompts are not told apart.
        keys: of the order policy, ascending: of its first requests, up to the batch size of its bin.
        waited_s: how long the one of them has waited that waits longest.
    """

    slo_class: str
    bin_index: int
    keys: Sequence[float]
    waited_s: float
    bucket: int = 0


def formed_key(lane: LaneView, config: GangConfig) -> float | None:
    """When the lane's batch was formed, in terms of keys; None when it is not: it has less than B, and time left.

    The key of the B-th request, or that of the first plus max_wait_s if that is less.
    """
    size = config.size_of(lane.bin_index)
    if len(lane.keys) >= size:
        return min(lane.keys[size - 1], lane.keys[0] + config.max_wait_s)
    is_due = bool(lane.keys) and lane.waited_s >= config.max_wait_s
    return lane.keys[0] + config.max_wait_s if is_due else None


def next_batch(lanes: Iterable[LaneView], config: GangConfig) -> LaneView | None:
    """The lane whose batch goes next, None when no batch is formed.

    Within a band of the order, lanes that have no patience left come first, by the time of formation, then the lane of
    the shortest bin. Ties go by key, bin, bucket and class.
    """
    keys = ((lane, formed_key(lane, config)) for lane in lanes)
    formed = [(_turn(lane, key, config), lane) for lane, key in keys if key is not None]
    return min(formed, key=lambda entry: entry[0])[1] if formed else None


def _turn(lane: LaneView, key: float, config: GangConfig) -> tuple[float, int, float, int, int, str]:
    is_patient = lane.waited_s < config.patience_s
    return key // BAND_S, lane.bin_index if is_patient else -1, key, lane.bin_index, lane.bucket, lane.slo_class


def memory_safe_gang(
    rows_tokens: Sequence[int], capacity_tokens: float, most: int, overflow_probability: float = 0.05
) -> int:
    """The largest batch of a bin that needs more than the KV cache with at most this probability; 1 to `most`.

    What 001's eq. 12 asks for, P(need > eta) <= epsilon, where rows are as long as the longest of them. So b rows need
    b times the greatest of b lengths instead of their sum, and no central limit is needed:

        b * F^-1((1 - epsilon)^(1 / b)) <= eta,  F the distribution of the lengths seen

    Args:
        rows_tokens: prompt and answer of the bin's latest requests; at least one.
    """
    ascending = sorted(rows_tokens)
    for rows in range(most, 1, -1):
        place = ceil((1.0 - overflow_probability) ** (1.0 / rows) * len(ascending)) - 1
        if rows * ascending[place] <= capacity_tokens:
            return rows
    return 1


def rows_that_fit(
    prompts_tokens: Sequence[int], answers_tokens: Sequence[int], usual_answer_tokens: float, capacity_tokens: float
) -> int:
    """How many of the first requests of a batch fit into the KV cache together; at least 1.

    Rows of a gang are as long as the longest, so k of them need k * (longest prompt + longest answer). An answer is
    taken for the least of what the request allows and ``usual_answer_tokens``, a length that its bin seldom exceeds.

    Args:
        prompts_tokens, answers_tokens: of each request; the most tokens that its answer may have.
    """
    longest_prompt, longest_answer = 0, 0.0
    for rows, (prompt, answer) in enumerate(zip(prompts_tokens, answers_tokens, strict=True), start=1):
        longest_prompt = max(longest_prompt, prompt)
        longest_answer = max(longest_answer, min(answer, usual_answer_tokens))
        if rows > 1 and rows * (longest_prompt + longest_answer) > capacity_tokens:
            return rows - 1
    return len(prompts_tokens)


def tick_s(max_wait_s: float, heartbeat_s: float) -> float:
    """How often an idle replica asks whether a wait is over, so that none lasts much longer.

    A quarter of max_wait_s, at least 10 ms, and no less often than it beats. A wait of 0 is over on arrival, and one
    that is infinite never: the heartbeat's pace will do.
    """
    return heartbeat_s if max_wait_s == 0.0 else min(heartbeat_s, max(0.01, max_wait_s / 4.0))
