"""Which replica takes a request: the one that is predicted to send its first token soonest.

Of the replicas that offer credit and serve the request's class. What is cached of its prompt need not be read there;
what other prompts have to be read first counts, and where all replicas have prompts to read, that its own delays those
that come after it. Where that makes no difference, the least predicted work decides. No paper of the five treats
placement.

The decision is split so that a Redis script can take it: the `Offer` of each replica makes a small table, and `soonest`
is arithmetic on that table alone. Replica ids compare by code point, which for UTF-8 is the byte order.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from policies.checks import require_at_least
from policies.router.tickets import Ticket
from policies.types import RequestView, StepTimes

# Seconds of steps after which what was seen of a replica's speed has lost two thirds of its weight.
_SPEED_MEMORY_S = 60.0
# Bounds of the slowness, so that no odd minute puts a replica out of use.
_LEAST_SLOWNESS, _MOST_SLOWNESS = 1e-3, 1e3


def work_s(request: RequestView, step_times: StepTimes, *, output_tokens: float, shared_batch_size: int) -> float:
    """Seconds of engine time that a request adds: its prefill, and its share of the decode steps it takes part in.

        prefill_s * P + O * (overhead_s / shared_batch_size + decode_s) + kv_s * (O * C + O * (O - 1) / 2)

    P: prompt tokens to compute; O: ``output_tokens`` still to generate; C: context at the first of them. The prefill's
    own overhead is left out: chunks share a step with others. Adding up over requests gives the time to drain a
    replica that runs full batches.
    """
    context = request.prompt_tokens + request.output_tokens
    decode = step_times.decode
    return (
        step_times.prefill.prefill_s * request.prefill_tokens
        + output_tokens * (decode.overhead_s / shared_batch_size + decode.decode_s)
        + decode.kv_s * output_tokens * (context + (output_tokens - 1.0) / 2.0)
    )


class Offer(NamedTuple):
    """What a replica offers to a request.

    Attributes:
        ahead_s: predicted seconds until it has read the prompts that it was given.
        reading_s: predicted seconds in which it reads what it has not cached of this one.
        unread_prompts: how many are ahead.
        step_s: seconds of an engine step there.
        work_s: predicted seconds of the work that it would hold with the request.
        free_slots: how many requests it would still take.
        return_chance: that what its cache gives up for this prompt would be wanted again soon.
    """

    ahead_s: float
    reading_s: float
    unread_prompts: int
    step_s: float
    work_s: float
    free_slots: int = 1
    return_chance: float = 0.0

    @property
    def first_token_s(self) -> float:
        """Predicted seconds until the request's first token."""
        return self.ahead_s + self.reading_s + self.step_s


Placement = Callable[[Ticket, Mapping[str, Offer]], str | None]
"""Chooses one of the replicas that offer themselves to a ticket, by id; None where none does."""


def prices_s(offers: Mapping[str, Offer]) -> dict[str, float]:
    """One price for queue and hit: seconds until the first token, and those by which reading delays others.

        ahead_s + reading_s * (1 + others + return_chance),   others = the least unread_prompts of all replicas

    A replica that holds the prefix and has a queue competes with an idle one that does not. While some replica has
    nothing to read, reading there delays no other prompt. Where all have a queue, as many come after this one as wait
    now, and each waits longer by what it reads: a prompt that is read twice costs all of them. Decodes count through
    the pace. What is read anew takes the place of as much in the cache, which is read again where it would have come
    back.
    """
    others = min((offer.unread_prompts for offer in offers.values()), default=0)
    return {
        each: offer.ahead_s + offer.reading_s * (1 + others + offer.return_chance) for each, offer in offers.items()
    }


def soonest(offers: Mapping[str, Offer]) -> str | None:
    """The replica with the least price; of those at most a step dearer, the one with the least work.

    A prompt is read from the beginning of a step on, so less than a step makes no difference to the first token. Work
    does to the others. None when there are no offers; their order does not matter.
    """
    if not offers:
        return None
    prices = prices_s(offers)
    least_s = min(prices.values())
    near = (each for each, offer in offers.items() if prices[each] - offer.step_s <= least_s)
    return min(near, key=lambda each: (offers[each].work_s, prices[each], each))


def soonest_first_token(ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
    """The placement that serves, see `soonest`."""
    return soonest(offers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixIndexConfig:
    """Bounds of a `PrefixIndex`.

    Attributes:
        block_tokens: prefixes are known in whole blocks of this many tokens.
        max_blocks: blocks of a prompt that are looked at, from its start.
        max_entries: (replica, block) pairs remembered; about 200 bytes each.

    Raises:
        ConfigError: a value is below 1.
    """

    block_tokens: int = 64
    max_blocks: int = 4096
    max_entries: int = 65536

    def __post_init__(self) -> None:
        require_at_least(1, self, "block_tokens", "max_blocks", "max_entries")


class PrefixIndex:
    """Remembers which prompt prefixes went to which replica, in bounded memory.

    A prefix of whole blocks is known by a hash chained over them, so equal blocks after unequal beginnings differ. The
    least recently recorded pair is forgotten first, and of one prompt the last block before the first, because a
    remembered block is worth nothing without those before it. It guesses at the replicas' caches and does not know when
    they evict: use it to break ties, never to count on.
    """

    def __init__(self, config: PrefixIndexConfig) -> None:
        self.config = config
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()

    def record(self, replica_id: str, prompt_token_ids: Sequence[int], salt: str = "") -> None:
        """Note that a replica was given this prompt. Prompts of unlike salt have nothing in common."""
        for digest in reversed(list(self._digests(prompt_token_ids, salt))):
            self._known[replica_id, digest] = None
            self._known.move_to_end((replica_id, digest))
        while len(self._known) > self.config.max_entries:
            self._known.popitem(last=False)

    def known_tokens(
        self, replica_ids: Iterable[str], prompt_token_ids: Sequence[int], salt: str = ""
    ) -> dict[str, int]:
        """How many leading tokens of the prompt each replica was given before; those that know none are absent."""
        left, known = list(replica_ids), dict[str, int]()
        for blocks, digest in enumerate(self._digests(prompt_token_ids, salt), start=1):
            left = [replica_id for replica_id in left if (replica_id, digest) in self._known]
            if not left:
                break
            known.update(dict.fromkeys(left, blocks * self.config.block_tokens))
        return known

    def forget(self, replica_id: str) -> None:
        """Drop a replica that went away."""
        for entry in [entry for entry in self._known if entry[0] == replica_id]:
            del self._known[entry]

    def __len__(self) -> int:
        return len(self._known)

    def _digests(self, prompt_token_ids: Sequence[int], salt: str) -> Iterator[int]:
        size, digest = self.config.block_tokens, hash(salt)
        for start in islice(range(0, len(prompt_token_ids) - size + 1, size), self.config.max_blocks):
            digest = hash((digest, *prompt_token_ids[start : start + size]))
            yield digest


class ReplicaSpeed:
    """How many of its own seconds a replica needs for one second of engine steps as predicted.

        slowness = sum of measured step times / sum of predicted ones, both forgotten at exp(-measured / a minute)

    Compared step by step, with the requests that took part, so that a replica that runs half empty does not seem slow:
    it would get less work, run emptier, and seem slower still.
    """

    def __init__(self) -> None:
        self._measured_s = self._predicted_s = 0.0

    def observe(self, measured_s: float, predicted_s: float) -> None:
        kept = math.exp(-measured_s / _SPEED_MEMORY_S)
        self._measured_s = kept * self._measured_s + measured_s
        self._predicted_s = kept * self._predicted_s + predicted_s

    @property
    def slowness(self) -> float:
        """1 until a step was seen."""
        if self._predicted_s <= 0.0:
            return 1.0
        return min(_MOST_SLOWNESS, max(_LEAST_SLOWNESS, self._measured_s / self._predicted_s))
