"""What a router knows of its replicas' prefix caches: as they tell it, else by what they were given."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.router.tiers import Load, Loadable
from router import cached_blocks, prompt_caches
from router.cached_blocks import BlockHashing, Tier, tier_mark
from router.metrics import RouterMetrics
from tests.fakes import FakeCache, FakeCodec, FakeRequest
from tests.router.service import FrontEnd, Replica, Service, request
from tests.waiting import until, until_async

pytestmark = pytest.mark.timeout(120)

PROMPT = list(range(41))  # ten blocks of a `FakeCache`


async def test_prompts_that_begin_alike_go_to_one_replica(service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=64)
    front_end = await service.front_end(prefill_s=1e-3)
    for n in range(10):
        await service.finish([await front_end.ask(request(3, prompt=[*range(200), n]))])
    assert sorted(replica.engine.taken for replica in service.replicas) == [0, 10]
    assert front_end.metrics.hits["predicted"] == 9 * 192


async def test_hits_are_counted_and_so_is_by_how_much_they_were_mistaken(service: Service) -> None:
    replica = await service.replica()
    replica.engine.prefixes = set()
    front_end = await service.front_end(prefill_s=1e-3)
    for n in range(3):
        if n == 2:
            replica.engine.prefixes.clear()  # all that it had was evicted
        await service.finish([await front_end.ask(request(2, prompt=[*range(200), n]))])
    assert front_end.metrics.hits == {"predicted": 384, "found": 192, "missing": 192, "unforeseen": 0}


async def hits(front_end: FrontEnd) -> dict[str, int]:
    return dict((await front_end.client.caches.sized(request(1, prompt=PROMPT))).hits)


async def hits_are(front_end: FrontEnd, **expected: int) -> None:
    async def are() -> bool:
        return await hits(front_end) == expected

    await until_async(are)


async def caching(service: Service, number: int, slots: int = 64) -> list[tuple[Replica, FakeCache]]:
    """Replicas that tell what they have cached."""
    made = [await service.replica(slots) for _ in range(number)]
    for replica in made:
        replica.engine.cache = FakeCache()
    return [(replica, replica.engine.cache) for replica in made if replica.engine.cache is not None]


def fill(cache: FakeCache) -> None:
    cache.blocks = set(FakeCodec().block_hashes(request(1, prompt=PROMPT), cache.hashing))


async def test_a_router_that_has_sent_nothing_knows_where_a_prompt_is_cached(service: Service) -> None:
    _, (_, cache), _ = await caching(service, 3)
    fill(cache)
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=0, r1=40, r2=0)
    await service.finish([await front_end.ask(request(3, prompt=PROMPT))])
    assert [replica.engine.taken for replica in service.replicas] == [0, 1, 0]
    assert front_end.count("predicted_hit_tokens_total", slo_class="standard", replica="r1") == 40


async def test_a_request_that_is_moved_goes_on_where_its_prompt_is_cached(service: Service) -> None:
    (lost, cache), _, (holder, other_cache) = await caching(service, 3)
    fill(cache)
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=40, r1=0, r2=0)
    answer = await front_end.ask(request(2000, prompt=PROMPT))
    fill(other_cache)
    await front_end.ask(request(3, prompt=[1]))
    holder.relay._blocks.due.set()
    await hits_are(front_end, r0=40, r1=0, r2=40)
    await lost.die()
    await holder.holds(1)
    await front_end.cancel(answer)


async def test_each_router_hears_of_what_the_other_one_sent(service: Service) -> None:
    ((replica, cache),) = await caching(service, 1)
    one, other = [await service.front_end() for _ in range(2)]
    await hits_are(one, r0=0)
    await service.finish([await one.ask(request(3, prompt=PROMPT))])
    await hits_are(other, r0=40)
    cache.blocks.clear()
    await service.finish([await one.ask(request(3, prompt=[1]))])
    await hits_are(other, r0=0)


async def test_what_was_just_sent_counts_before_the_replica_tells_it(service: Service) -> None:
    ((replica, cache),) = await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    replica.engine.pause()
    answer = await front_end.ask(request(3, prompt=PROMPT))
    assert await hits(front_end) == {"r0": 40}
    replica.engine.resume()
    await service.finish([answer])


async def test_a_replica_that_evicts_is_not_taken_for_one_that_was_given_the_prompt(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of what was sent where is for replicas that do not tell."""
    monkeypatch.setattr(cached_blocks, "ON_THE_WAY_S", 0.0)
    ((replica, cache),) = await caching(service, 1)
    front_end = await service.front_end()
    prompt = list(range(100))  # longer than a block of that memory
    await hits_are(front_end, r0=0)
    await service.finish([await front_end.ask(request(3, prompt=prompt))])
    size = await front_end.client.caches.sized(request(3, prompt=prompt))
    silent, told = replace(size, hits={}), replace(size, hits={"r0": 0})
    assert [front_end.client.caches.hits(each, ["r0"]) for each in (silent, told)] == [(("r0", 64),), ()]


async def test_what_a_lost_replica_had_cached_is_forgotten_and_told_again(service: Service) -> None:
    ((replica, cache),) = await caching(service, 1)
    fill(cache)
    front_end = await service.front_end()
    await hits_are(front_end, r0=40)
    replica.hang_up()
    await hits_are(front_end)
    await hits_are(front_end, r0=40)


async def test_nobody_waits_for_a_killed_replica_because_it_had_the_prompt_cached(service: Service) -> None:
    (holder, cache), (other, _) = await caching(service, 2, slots=1)
    for replica in (holder, other):
        replica.engine.pause()
    fill(cache)
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=40, r1=0)
    answers = [await front_end.ask(request(3, prompt=prompt)) for prompt in (PROMPT, [1], PROMPT)]
    await until(lambda: (holder.engine.held, other.engine.held) == (1, 1))
    await holder.die()
    other.engine.resume()
    await service.finish(answers)
    assert other.engine.taken == 3
    assert await hits(front_end) == {"r1": 40}
    assert front_end.count("predicted_hit_tokens_total", slo_class="standard", replica="r0") == 0


async def test_a_router_that_missed_changes_asks_for_the_whole(service: Service) -> None:
    ((replica, cache),) = await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    fill(cache)
    front_end.client.caches.blocks._replicas["r0"].told.sequence = 1000
    await service.finish([await front_end.ask(request(3, prompt=[1]))])
    await hits_are(front_end, r0=40)
    assert front_end.count("cached_block_gaps_total") == 1


async def test_a_long_prompt_is_hashed_beside_the_event_loop(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    await caching(service, 1)
    front_end = await service.front_end()
    await hits_are(front_end, r0=0)
    threads: list[str] = []
    hashed = FakeCodec.block_hashes

    def noting(codec: FakeCodec, asked: FakeRequest, hashing: BlockHashing) -> Sequence[int]:
        threads.append(threading.current_thread().name)
        return hashed(codec, asked, hashing)

    monkeypatch.setattr(FakeCodec, "block_hashes", noting)
    monkeypatch.setattr(prompt_caches, "LONG_PROMPT_TOKENS", len(PROMPT))
    for prompt in (PROMPT, PROMPT[:-1]):
        await front_end.client.caches.sized(request(3, prompt=prompt))
    assert [name == threading.main_thread().name for name in threads] == [False, True]


async def test_a_request_goes_where_its_prompt_is_loaded_sooner_than_it_is_read(service: Service) -> None:
    _, (holder, cache), _ = await caching(service, 3)
    fill(cache)
    cache.blocks = {each ^ tier_mark("CPU") for each in cache.blocks}
    cache.tiers = (Tier("CPU", 1e-4),)
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=0, r1=36, r2=0)
    await service.finish([await front_end.ask(request(3, prompt=PROMPT))])
    assert [replica.engine.taken for replica in service.replicas] == [0, 1, 0]
    assert front_end.count("predicted_hit_tokens_total", slo_class="standard", replica="r1") == 40


async def test_what_is_read_as_fast_draws_nothing(service: Service) -> None:
    _, (holder, cache) = await caching(service, 2)
    fill(cache)
    cache.blocks = {each ^ tier_mark("STORAGE") for each in cache.blocks}
    cache.tiers = (Tier("STORAGE", 1e-3),)
    front_end = await service.front_end(prefill_s=1e-3)
    await hits_are(front_end, r0=0, r1=0)
    assert not (await front_end.client.caches.sized(request(1, prompt=PROMPT))).loads


def test_loads_are_counted_by_tier_the_nearest_first() -> None:
    metrics = RouterMetrics()
    host, disk = (Loadable(tier=tier, tokens=40, token_s=1e-4) for tier in ("CPU", "STORAGE"))
    metrics.note_loads("standard", Load(parts=(host, disk)), 60)
    metrics.note_loads("standard", Load(parts=(host,)), 50)
    metrics.note_loads("standard", Load(), 0)
    assert metrics.loads == {"CPU": 80, "STORAGE": 20, "unknown": 10}
