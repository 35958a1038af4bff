"""Prompts that begin as others did: where they go, and what they find there."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from simulator.cluster import Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target, summary
from simulator.reproduce import prefixes
from simulator.reproduce.prefixes import Job, of_agents, of_mooncake, sessions_of
from simulator.workload import Workload

TARGETS = {"*": Target(ttft_s=5.0, tpot_s=0.1)}


def turns(arrivals: list[float], prompts: list[int], reusable: list[int], sessions: list[str]) -> Workload:
    """One request each, in order of arrival, with answers of four tokens."""
    return Workload.of(
        "turns",
        np.array(arrivals),
        np.array(prompts),
        np.full(len(arrivals), 4),
        cached_tokens=np.array(reusable),
        session=sessions,
    )


def served(work: Workload, cache_tokens: int = 400_000, placement: str = "soonest_first_token") -> Run:
    engine = EngineConfig(total_blocks=cache_tokens // 16)
    profile = engine_profile("Llama-3.1-8B@h100_sxm")
    return run(system("sluice", profile, engine, 2, TARGETS, placement=placement), work)


def test_a_session_goes_on_where_it_began() -> None:
    work = turns([0.0, 0.1, 20.0, 40.0], [5000, 5000, 6000, 7000], [0, 0, 5000, 6000], ["a", "b", "b", "b"])
    finished = served(work)
    first, *others = [each.replica_id for each in finished.requests]
    assert others == [others[0]] * 3 and first != others[0]
    assert [each.cached_tokens for each in finished.requests] == [0, 0, 4992, 6000]
    assert summary(finished, TARGETS)["prefix_reuse_fraction"] == pytest.approx(10_992 / 23_000)


def test_a_popular_prefix_spreads_when_waiting_costs_more_than_reading() -> None:
    followers = 24
    work = turns([0.0, *[20.0] * followers], [20_000] * 25, [0, *[18_000] * followers], ["s"] * 25)
    finished = served(work)
    counts = Counter(each.replica_id for each in finished.requests[1:])
    assert counts[finished.requests[0].replica_id or ""] > followers / 2
    assert len(counts) == 2, "and some read it elsewhere"


def test_two_sessions_do_not_chase_each_other_out_of_a_cache() -> None:
    """A replica's cache holds one of them."""
    rounds = 6
    arrivals = [10.0 * n + 5.0 * which for n in range(rounds) for which in (0, 1)]
    prompts = [100_000 + 1000 * n for n in range(rounds) for _ in (0, 1)]
    reusable = [0, 0, *[tokens - 1000 for tokens in prompts[2:]]]
    finished = served(turns(arrivals, prompts, reusable, ["a", "b"] * rounds), cache_tokens=120_000)
    assert all(each.cached_tokens >= each.prompt_tokens - 1016 for each in finished.requests[2:])


def test_sessions_are_reconstructed_by_what_had_been_seen_of_prompts() -> None:
    rows = [(1600, 0), (1700, 512), (2600, 1536), (2100, 1536), (3000, 2560), (9000, 512), (4000, 2048)]
    # The third follows on the second, the latest with three whole blocks; the fourth on the first, which has as many.
    assert sessions_of(rows) == ["0", "1", "1", "0", "1", "5", "0"]


def test_an_answer_that_was_asked_for_anew_follows_on_the_shortest_longer_prompt() -> None:
    assert sessions_of([(5200, 0), (3100, 0), (4200, 2048)]) == ["0", "1", "1"]


AGENTS = "session,agent,t_in_session_s,prompt_tokens,output_tokens,reusable_prefix_tokens\n" + "".join(
    f"{name},main,{60 * n},{20_000 + 1000 * n},40,{0 if n == 0 else 19_000 + 1000 * n}\n"
    for name, count in (("long", 9), ("short", 2))
    for n in range(count)
)


def test_sessions_of_agents_begin_at_random_and_then_go_by_their_own_clock() -> None:
    rows = [dict(zip(AGENTS.split("\n")[0].split(","), line.split(","), strict=True)) for line in AGENTS.split()[1:]]
    work = of_agents(rows, 0.05, 400.0, np.random.default_rng(0))
    assert work.session is not None
    by_session = Counter(work.session)
    assert len(by_session) > 10 and max(by_session.values()) <= 7, "sessions of two requests are left out"
    mine = work.arrival_s[[name == work.session[0] for name in work.session]]
    assert np.diff(mine) == pytest.approx(60.0)


def test_the_steps_of_mooncakes_clock_are_spread() -> None:
    rows = [
        {"arrival_s": str(3 * (n // 4)), "prompt_tokens": "900", "output_tokens": "50", "reusable_prefix_tokens": "0"}
        for n in range(40)
    ]
    work = of_mooncake(rows, 2.0, 100.0, np.random.default_rng(0))
    assert len(set(work.arrival_s.tolist())) == 40
    assert max(work.output_tokens) == prefixes.MOST_ANSWER_TOKENS


@pytest.mark.parametrize("placement", prefixes.PLACEMENTS)
def test_every_placement_is_measured(tmp_path: Path, placement: str) -> None:
    file = tmp_path / "agents.csv.gz"
    file.write_bytes(gzip.compress(AGENTS.encode()))
    found = prefixes.measured({"agents": str(file)}, Job("agents", 0.02, 4, 400_000, placement))
    assert found.requests > 50 and 0.0 < found.mean_s <= found.p99_s and 0.0 <= found.hits <= 1.0


@pytest.mark.parametrize("tier", prefixes.TIERS)
def test_every_tier_is_measured(tmp_path: Path, tier: str) -> None:
    file = tmp_path / "agents.csv.gz"
    file.write_bytes(gzip.compress(AGENTS.encode()))
    found = prefixes.measured({"agents": str(file)}, Job("agents", 0.02, 4, 60_000, "first token", tier))
    assert (found.loaded > 0) == (tier == "50 GB/s")  # reading takes less than a disk
    assert found.loaded <= found.hits <= 1.0 and found.read_again >= 0
