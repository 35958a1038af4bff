"""The gate: at no load may more requests be in time under plain vLLM than under Sluice.

Loads from half of what an engine of 64 slots can serve to more than half as much again. Answers are short, so that all
of it takes well under a minute.
"""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from simulator.cluster import run
from simulator.reproduce.common import mean, steady_rate
from simulator.reproduce.goodput import STOCK, Traffic, Variant, in_time

pytestmark = pytest.mark.long

REQUESTS = 300
SEEDS = range(3)
# One point: what three seeds of 300 requests can tell, since both systems get the same requests.
TOLERANCE = 0.01
SLOTS = {"slots": 64}
PLAIN, SLUICE = replace(STOCK, engine={**STOCK.engine, **SLOTS}), Variant(engine=SLOTS)

_CHAT = ("lognormal:400:1", "lognormal:60:0.8")
TRAFFIC = {
    "chat beside documents": {"interactive": _CHAT, "standard": ("lognormal:4000:0.6", "lognormal:60:0.6")},
    "chat": {"interactive": _CHAT},
    "code": {"standard": ("lognormal:2000:1", "lognormal:20:0.8")},
    "long answers": {"interactive": ("lognormal:50:0.8", "lognormal:150:0.6")},
    "chat beside very long prompts": {"interactive": _CHAT, "standard": ("constant:16000", "lognormal:60:0.6")},
}


def traffic(kind: str) -> Traffic:
    return Traffic(lengths=TRAFFIC[kind], cv=2.0)


@cache
def capacity(kind: str) -> float:
    """Requests per second of plain vLLM while more of them wait than it can run."""
    load = traffic(kind).drawn(1.0, REQUESTS, np.random.default_rng(0))
    return steady_rate(run(PLAIN.config(), load.arriving(np.zeros(REQUESTS))))


def share(variant: Variant, kind: str, rate: float, seed: int) -> float:
    return in_time(variant, traffic(kind).drawn(rate, REQUESTS, np.random.default_rng(seed)), seed)


@pytest.mark.parametrize("load", [0.5, 0.8, 1.0, 1.3, 1.6])
@pytest.mark.parametrize("kind", TRAFFIC)
def test_no_fewer_requests_are_in_time_than_with_plain_vllm(kind: str, load: float) -> None:
    rate = load * capacity(kind)
    plain, ours = (list(map(partial(share, variant, kind, rate), SEEDS)) for variant in (PLAIN, SLUICE))
    told = f"{kind} at {rate:.1f}/s, {load:g} of capacity, by seed: Sluice {ours}, plain vLLM {plain}"
    assert mean(ours) >= mean(plain) - TOLERANCE, told
