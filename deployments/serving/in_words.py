"""What a replica's numbers mean, in a sentence for people."""

from collections.abc import Mapping
from typing import Any

from router.state_store import ReplicaLoad, Snapshot

BOUNDS = {
    "memory": "the KV cache bounds the batch",
    "sla": "a promised time per token bounds the batch",
    "algorithm_1": "001's Algorithm 1 bounds the batch, for the KV cache",
    "algorithm_2": "001's Algorithm 2 bounds the batch, for the time between tokens",
    "n_star": "003's N* bounds the batch, for the KV cache",
}


def without_replicas(snapshot: Snapshot, *, may_be_none: bool) -> str | None:
    """Why no replica is there, and when one will be; None where one is."""
    if snapshot.replicas:
        return None
    took = f"; the last start took {snapshot.start_s:.0f} s" if snapshot.start_s else ""
    if not may_be_none:
        return f"no replica is there{took}"
    return f"the first one starts{took}" if snapshot.asked else f"none is needed: one starts when a request comes{took}"


def now_in_words(load: ReplicaLoad, engine: Mapping[str, Any]) -> str:
    """Why it takes more requests, or does not.

    Args:
        engine: what its engine says of itself; empty where it has not been asked.
    """
    if error := engine.get("error"):
        return str(error)
    if load.slots == 0:
        return "it is leaving: it takes nothing more and ends what it has"
    if load.is_full:
        return "it has enough prompts to read"
    if out_of_reach := engine.get("out_of_reach"):
        return str(out_of_reach)
    takes = "it takes more" if load.credit > 0 else "all slots are in use"
    return BOUNDS.get(engine.get("limited_by", ""), takes)
