"""Why a replica takes more requests, or does not."""

from typing import Any

import pytest

from deployments.serving.in_words import now_in_words
from policies.types import Limit
from router.state_store import ReplicaLoad


@pytest.mark.parametrize(
    ("load", "engine", "words"),
    [
        ({}, {}, "it takes more"),
        ({}, {"limited_by": "slots"}, "it takes more"),
        ({"running": 4}, {"limited_by": "slots"}, "all slots are in use"),
        ({"running": 4}, {"limited_by": "memory"}, "the KV cache bounds the batch"),
        ({}, {"limited_by": "sla"}, "a promised time per token bounds the batch"),
        ({}, {"limited_by": "algorithm_1"}, "001's Algorithm 1 bounds the batch, for the KV cache"),
        ({}, {"limited_by": "algorithm_2"}, "001's Algorithm 2 bounds the batch, for the time between tokens"),
        ({}, {"limited_by": "n_star"}, "003's N* bounds the batch, for the KV cache"),
        ({"unread_tokens": 8, "max_unread_tokens": 8}, {"limited_by": "sla"}, "it has enough prompts to read"),
        ({}, {"limited_by": "sla", "out_of_reach": "a batch of 1 misses"}, "a batch of 1 misses"),
        ({"slots": 0}, {}, "it is leaving: it takes nothing more and ends what it has"),
        ({"slots": 0}, {"error": "it hangs"}, "it hangs"),
    ],
)
def test_a_replica_is_told_by_what_bounds_it_first(load: dict[str, Any], engine: dict[str, Any], words: str) -> None:
    given = {"slots": 4, "running": 1, "outstanding_s": 0.0, **load}
    assert now_in_words(ReplicaLoad(**given), engine) == words


@pytest.mark.parametrize("limit", [each for each in Limit if each is not Limit.SLOTS])
def test_every_bound_of_a_batch_has_words_of_its_own(limit: Limit) -> None:
    load = ReplicaLoad(slots=4, running=1, outstanding_s=0.0)
    words = {each: now_in_words(load, {"limited_by": each.value}) for each in Limit}
    assert "bounds the batch" in words[limit] and list(words.values()).count(words[limit]) == 1
