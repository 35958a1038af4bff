"""Drafted tokens of one vLLM scheduler, for `policies.engine.drafts`: what proved right, and what a step takes of them.

vLLM (0.32) drafts after a step and verifies in the next one whatever `Request.spec_token_ids` then holds. Where a step
ends before the next begins, the plug-in may shorten that. Where steps are scheduled ahead, each request has the full
length as a placeholder, which the captured graphs of a GPU count with: there it stays.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from deployments.engines.features import Feature, why_off
from deployments.engines.vllm.causes import causes_of_scheduler
from policies.engine.drafts import Drafts
from policies.types import BatchPolicy, Priced


class Place(NamedTuple):
    """A request's row among the drafts, and its class."""

    row: int
    slo_class: str


class DraftedTokens:
    """Attributes:
    drafts: what is known of them.
    """

    def __init__(self, scheduler: Any, place_of: Callable[[Request], Place | None]) -> None:
        """place_of: None for one that is not known any more."""
        self.drafts = Drafts()
        self._scheduler, self._place_of = scheduler, place_of
        self._shortens = not why_off(Feature.DRAFT_LENGTHS, causes_of_scheduler(scheduler))
        self._drafted = self._accepted = self._left_out = 0

    def waiting(self) -> int:
        """Tokens that the next step verifies."""
        return sum([len(request.spec_token_ids) for request in self._scheduler.running])

    def shorten(self, policy: BatchPolicy, kv_tokens: float) -> None:
        """Leave out of the next step what is not worth its time.

        Args:
            kv_tokens: context of all that decode.
        """
        if not self._shortens or not isinstance(policy, Priced) or (price := policy.decode_price(kv_tokens)) is None:
            return
        known = [(one, self._place_of(one)) for one in self._scheduler.running if one.spec_token_ids]
        drafted = [(one, place.row) for one, place in known if place is not None]
        if not drafted:
            return
        lengths = np.array([len(one.spec_token_ids) for one, _ in drafted])
        taken = self.drafts.worth_taking(
            np.array([row for _, row in drafted]),
            lengths,
            others=len(self._scheduler.running) - len(drafted),
            fixed_s=price[0],
            token_s=price[1],
        )
        for (request, _), length, take in zip(drafted, lengths.tolist(), taken.tolist(), strict=True):
            if take < length:
                self._left_out += length - take
                request.spec_token_ids = request.spec_token_ids[:take]

    def verified(self, output: SchedulerOutput, sampled: Any) -> int:
        """The results of a step have come, and no request has taken note of them.

        Args:
            sampled: what vLLM's model runner says of the step.

        Returns:
            Drafted tokens that proved right.
        """
        tried: Mapping[str, Any] = output.scheduled_spec_decode_tokens
        places, drafted, accepted = list[Place](), list[int](), list[int]()
        for request_id in output.num_scheduled_tokens:
            request = self._scheduler.requests.get(request_id)
            got = (
                len(sampled.sampled_token_ids[sampled.req_id_to_index[request_id]]) if sampled.sampled_token_ids else 0
            )
            if request is None or not request.num_output_tokens or not got:
                continue  # gone, or it has only got its first token
            if (place := self._place_of(request)) is not None:
                places.append(place)
                drafted.append(len(tried.get(request_id, ())))
                accepted.append(min(got - 1, drafted[-1]))
        if places:
            rows = np.array([place.row for place in places])
            classes = [place.slo_class for place in places]
            self.drafts.observe(rows, classes, np.array(drafted), np.array(accepted))
        self._drafted += sum(drafted)
        self._accepted += sum(accepted)
        return sum(accepted)

    def numbers(self) -> dict[str, Any]:
        """For people and monitoring."""
        return {
            "most": self._scheduler.num_spec_tokens,
            "verified": self._drafted,
            "accepted": self._accepted,
            "left_out": self._left_out,
            "tokens_per_step": self.drafts.of_classes(),
        }
