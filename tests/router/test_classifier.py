import asyncio
import math
import time
from dataclasses import replace

import pytest

from policies.errors import StateStoreError
from policies.gang.buckets import AdaptiveBucketsConfig, PromptBuckets
from policies.lengths.drift import DriftConfig
from policies.live import Live
from policies.papers.bucket_serve import BucketServeConfig
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.order import Band, IdleOrder, banded
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.promise import NO_PROMISE, Promise
from policies.router.tickets import Ticket
from policies.types import StepCoefficients, StepTimes
from predictor.asking import Asking, AskingConfig
from predictor.base import LengthPrediction
from predictor.calibration import LOW, Curve
from predictor.histogram import MIN_SAMPLES, HistogramPredictor
from predictor.learned import Foresight, LearnedConfig, LearnedPredictor, Question
from router.classifier import MAX_UNSENT_LENGTHS, Classifier, Mode
from router.codec import RequestSize
from router.memory_store import MemoryStateStore
from router.metrics import RouterMetrics
from router.prefix_hits import MOST_HITS
from router.redis_store import RedisStateStore, connect
from router.state_store import FinishedLength, ReplicaInfo
from router.terms import TicketTerms
from tests.own_order import ByClass

# 1 ms for a prompt token, 10 ms for a decode step that four requests share.
STEP_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.0, prefill_s=0.001),
    decode=StepCoefficients(overhead_s=0.01),
    mixed=StepCoefficients(overhead_s=0.01),
)


TWO_BINS = MultiBinConfig(bins=2, rule="fixed", initial_edges=(0.0, 50.0, 1000.0), window_requests=MAX_UNSENT_LENGTHS)
CURVE = Curve(scores=(0.0, 1000.0), means=(0.0, 1000.0), fractions=(), quantiles=())


class Scorer:
    """A score is the prompt read as a number; a prompt that is none never comes to an end."""

    async def score(self, prompt: str) -> float:
        await asyncio.sleep(0.0 if prompt.isdigit() else 3600.0)
        return float(prompt)


def learned(deadline_s: float = 60.0) -> LearnedPredictor:
    """Short is the deadline only of a question without an answer: an answer comes in the next turn of the loop, but
    uvloop looks at its timers first, and a machine that stood still has used them up."""
    drift = DriftConfig(window_requests=16, patience=4)
    return LearnedPredictor(Asking(Scorer(), AskingConfig(deadline_s=deadline_s)), CURVE, LearnedConfig(drift=drift))


def question(prompt: str, slo_class: str = "fast") -> Question:
    return Question(prompt=prompt, model="m", slo_class=slo_class)


def classifier(
    metrics: RouterMetrics | None = None,
    predictor: LearnedPredictor | None = None,
    buckets: PromptBuckets | None = None,
    mode: Mode = "full",
    bins: MultiBinConfig = TWO_BINS,
    terms: Live[TicketTerms] | None = None,
    step_times: StepTimes = STEP_TIMES,
) -> Classifier:
    order = ByClass({"fast": 1.0, "slow": 60.0})
    return Classifier(
        predictor=HistogramPredictor(),
        bins=MultiBin(bins),
        terms=terms or Live(TicketTerms(order=order)),
        step_times=step_times,
        shared_batch_size=4,
        default_output_tokens=100,
        metrics=metrics or RouterMetrics(),
        prefixes=PrefixIndex(PrefixIndexConfig()),
        learned=predictor,
        buckets=buckets,
        mode=mode,
    )


def size(prompt_tokens: int = 1000, max_output_tokens: int | None = None, min_output_tokens: int = 0) -> RequestSize:
    return RequestSize(
        request_id="x",
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        min_output_tokens=min_output_tokens,
    )


async def teach(taught: Classifier, **lengths: int) -> None:
    """Each class by enough answers of one length."""
    for slo_class, output_tokens in lengths.items():
        for _ in range(MIN_SAMPLES):
            taught.observe(slo_class, output_tokens)
    await taught.exchange(MemoryStateStore(time.monotonic), time.monotonic())


async def foreseen(taught: Classifier, prompt: str | None) -> Foresight | None:
    return None if prompt is None else await taught.foresee(question(prompt), NO_PROMISE)


@pytest.mark.parametrize(
    ("learnt", "asked", "limit", "tokens"),
    [
        pytest.param(None, None, None, 100, id="the default"),
        pytest.param(None, None, 10, 10, id="the limit caps the default"),
        pytest.param(200, None, None, 200, id="by the histogram"),
        pytest.param(200, None, 10, 10, id="the limit caps the histogram"),
        pytest.param(20, "200", None, 200, id="as foreseen, and not by the histogram"),
        pytest.param(None, "200", 10, 10, id="the limit caps what is foreseen"),
    ],
)
async def test_the_predicted_length_sets_bin_and_work(
    learnt: int | None, asked: str | None, limit: int | None, tokens: int
) -> None:
    metrics = RouterMetrics()
    taught = classifier(metrics, learned())
    if learnt is not None:
        await teach(taught, fast=learnt)
    foresight = await foreseen(taught, asked)
    ticket = taught.ticket(size(max_output_tokens=limit), "fast", "a", 0.0, foresight=foresight).ticket
    assert (ticket.request_id, ticket.router_id) == ("x", "a")
    assert ticket.work_s == pytest.approx(1.0 + tokens * 0.0025)
    is_predicted = learnt is not None or asked is not None
    assert ticket.bin_index == (is_predicted and tokens >= 50)
    fallbacks = metrics.registry.get_sample_value("sluice_predictor_fallbacks_total", {"slo_class": "fast"})
    assert (fallbacks or 0) == (not is_predicted)


async def test_an_answer_that_nothing_ends_earlier_counts_whole() -> None:
    taught = classifier()
    await teach(taught, fast=20)
    asked = size(max_output_tokens=500, min_output_tokens=400)
    known, unknown = [taught.ticket(asked, slo_class, "a", 0.0) for slo_class in ("fast", "slow")]
    assert known.ticket.bin_index == 1
    assert (known.ticket.predicted_output_tokens, known.tokens, unknown.tokens) == (400, 1400, 1400)
    assert known.ticket.work_s == pytest.approx(1.0 + 400 * 0.0025)


async def test_a_stalled_predictor_leaves_the_word_to_the_histogram_and_is_counted() -> None:
    metrics = RouterMetrics()
    taught = classifier(metrics, learned(deadline_s=0.01))
    await teach(taught, fast=20)
    foresight = await asyncio.wait_for(taught.foresee(question("stalled"), NO_PROMISE), timeout=30.0)
    assert taught.ticket(size(), "fast", "a", 0.0, foresight=foresight).ticket.work_s == pytest.approx(1.05)
    assert metrics.registry.get_sample_value("sluice_predictor_questions_total", {"outcome": "late"}) == 1


async def test_without_a_learned_predictor_nothing_is_foreseen() -> None:
    assert await classifier().foresee(question("200"), NO_PROMISE) is None


async def test_a_predictor_that_does_worse_than_the_histogram_is_left_and_the_page_says_so() -> None:
    metrics = RouterMetrics()
    taught = classifier(metrics, learned())
    await teach(taught, fast=20)
    for _ in range(8):
        taught.observe("fast", 20, await taught.foresee(question("900"), NO_PROMISE))
    foresight = await taught.foresee(question("900"), NO_PROMISE)
    assert foresight is not None
    assert foresight.source is None
    labels = {"model": "m", "slo_class": "fast"}
    assert metrics.registry.get_sample_value("sluice_predictor_believed", labels) == 0
    assert taught.ticket(size(), "fast", "a", 0.0, foresight=foresight).ticket.work_s == pytest.approx(1.05)


def test_the_deadline_key_grows_with_arrival_and_target() -> None:
    sorter = classifier()
    base = sorter.ticket(size(), "fast", "a", 0.0).ticket.deadline_key
    assert sorter.ticket(size(), "fast", "a", 10.0).ticket.deadline_key == pytest.approx(base + 10.0)
    assert sorter.ticket(size(), "slow", "a", 0.0).ticket.deadline_key == pytest.approx(base + 59.0)


async def test_a_length_counts_after_the_exchange_and_once() -> None:
    store, first, second = MemoryStateStore(time.monotonic), classifier(), classifier()
    for _ in range(MIN_SAMPLES):
        first.observe("fast", 20)
    assert first.ticket(size(), "fast", "a", 0.0).ticket.work_s == pytest.approx(1.25)
    for _ in range(3):
        await first.exchange(store, time.monotonic())
        await second.exchange(store, time.monotonic())
    for taught in (first, second):
        assert taught.ticket(size(), "fast", "a", 0.0).ticket.work_s == pytest.approx(1.05)
    assert (await store.exchange_lengths(0, [], 4096))[0] == MIN_SAMPLES


async def test_a_router_predicts_by_what_another_one_learnt() -> None:
    store = MemoryStateStore(time.monotonic)
    busy, idle = (classifier(predictor=learned()) for _ in range(2))
    for _ in range(64):
        busy.observe("fast", 700, await busy.foresee(question("200"), NO_PROMISE))
    for taught in (busy, idle):
        await taught.exchange(store, time.monotonic())
        foresight = await taught.foresee(question("200"), NO_PROMISE)
        assert foresight is not None
        assert foresight.learned is not None
        assert foresight.learned.mean_tokens == pytest.approx(700.0, rel=0.01)


def two_buckets() -> PromptBuckets:
    return PromptBuckets(AdaptiveBucketsConfig(max_buckets=2), refit_every=16)


def see_prompts(taught: Classifier) -> None:
    """Short ones and long ones, enough to adjust the buckets."""
    for prompt_tokens in (10, 1000) * 8:
        taught.ticket(size(prompt_tokens), "fast", "a", 0.0)


async def test_buckets_that_one_router_found_are_in_force_for_all_and_move_what_waits() -> None:
    store = MemoryStateStore(time.monotonic)
    busy, idle = classifier(buckets=two_buckets()), classifier(buckets=two_buckets())
    waits = busy.ticket(size(600), "fast", "a", 0.0).ticket
    await store.enqueue(waits)
    see_prompts(busy)
    for each in (busy, idle, busy):
        await each.exchange(store, time.monotonic())
    assert busy.bucket_edges == idle.bucket_edges == (0.0, 305.0, math.inf)
    assert [idle.ticket(size(tokens), "fast", "b", 0.0).ticket.bucket for tokens in (304, 305)] == [0, 1]
    assert (waits.bucket, store.dispatcher.places["x"].ticket.bucket) == (0, 1)


async def test_buckets_of_algorithm_1_are_in_force_for_all_and_the_longest_prompts_are_in_the_last() -> None:
    store = MemoryStateStore(time.monotonic)
    literal = BucketServeConfig(l_max=2048, max_buckets=2)
    busy, idle = [classifier(buckets=PromptBuckets(literal, refit_every=16, max_requests=8)) for _ in range(2)]
    see_prompts(busy)
    for each in (busy, idle):
        await each.exchange(store, time.monotonic())
    assert idle.bucket_edges == (0.0, 1024.0, 2048.0)
    assert [idle.ticket(size(tokens), "fast", "b", 0.0).ticket.bucket for tokens in (1023, 1024, 4000)] == [0, 1, 1]


async def test_routers_of_other_bins_do_not_overwrite_each_others_edges() -> None:
    store = MemoryStateStore(time.monotonic)
    old, new = [
        classifier(bins=MultiBinConfig(bins=bins, rule="equal_mass", window_requests=64, refit_every=16))
        for bins in (2, 3)
    ]
    for output_tokens in range(16):
        old.observe("fast", output_tokens)
    for each in (old, new) * 3:
        await each.exchange(store, time.monotonic())
    assert (old._edges_version, new._edges_version) == (1, 1)
    assert (len(old.bin_edges), len(new.bin_edges)) == (3, 4)


async def test_prompts_are_not_told_apart_where_nobody_asked_or_policies_are_off() -> None:
    plain, stock = classifier(), classifier(buckets=two_buckets(), mode="stock")
    for each in (plain, stock):
        see_prompts(each)
        ticket = each.ticket(size(1000), "fast", "a", 0.0).ticket
        assert (ticket.bucket, ticket.prompt_tokens) == (0, None)


async def test_lengths_wait_while_the_store_is_away_and_the_newest_are_kept() -> None:
    away = RedisStateStore(connect("redis://127.0.0.1:1/0"), "nowhere")
    store, taught = MemoryStateStore(time.monotonic), classifier()
    for length in range(MAX_UNSENT_LENGTHS):
        taught.observe("fast", length)
    with pytest.raises(StateStoreError):
        await taught.exchange(away, time.monotonic())
    taught.observe("fast", 7777)
    await taught.exchange(store, time.monotonic())
    _, lengths = await store.exchange_lengths(0, [], MAX_UNSENT_LENGTHS)
    assert lengths == [FinishedLength("fast", length) for length in (*range(1, MAX_UNSENT_LENGTHS), 7777)]
    await away.close()


@pytest.mark.parametrize(("order", "started"), [("shortest_first", [5, 30, 900]), ("longest_first", [900, 30, 5])])
async def test_offline_work_starts_by_prompt_length_and_behind_all_else(order: IdleOrder, started: list[int]) -> None:
    store, sorter = MemoryStateStore(lambda: 1.8e9), classifier(terms=Live(TicketTerms(fills_idle={"offline": order})))
    for number, prompt_tokens in enumerate((30, 900, 5, 7)):
        asked = replace(size(prompt_tokens), request_id=str(prompt_tokens))
        slo_class, promise = "fast" if number == 3 else "offline", Promise(ttft_s=600.0)
        await store.enqueue(sorter.ticket(asked, slo_class, "a", 1.8e9 + number, promise=promise).ticket)
    info = ReplicaInfo(replica_id="r", host="127.0.0.1", port=1, max_model_len=2048)
    await store.register_replica(info, slots=1)
    seen = []
    for _ in range(4):
        (running,) = [name for name, place in store.dispatcher.places.items() if place.replica_id]
        seen.append(int(running))
        await store.release("r", [running])
    assert seen == [7, *started]


def test_tickets_from_now_on_go_by_another_order_and_other_classes() -> None:
    changed = classifier(terms=(terms := Live(TicketTerms(order=ByClass(default_s=60.0)))))
    before = changed.ticket(size(), "slow", "a", 100.0).ticket
    sooner = ByClass(default_s=2.0)
    terms.replace(TicketTerms(order=sooner, fills_idle={"slow": "deadline"}))
    after = changed.ticket(size(), "slow", "a", 100.0).ticket
    assert (before.fills_idle, after.fills_idle) == (False, True)
    assert before.deadline_key > after.deadline_key == 102.0


def prompt(tokens: int, salt: str = "") -> RequestSize:
    ids = range(tokens)
    return RequestSize(request_id="x", prompt_tokens=tokens, max_output_tokens=None, prompt_token_ids=ids, salt=salt)


def test_what_a_replica_has_of_a_prompt_is_no_work() -> None:
    made = classifier()
    made.prefixes.placed("r", prompt(640))
    ticket = made.ticket(prompt(1000), "fast", "a", 0.0, ["q", "r"]).ticket
    assert ticket.prefixes == (("r", 640),)
    assert (ticket.unread_at("r"), ticket.unread_at("q")) == (360, 1000)
    assert ticket.work_s == ticket.work_at_s("r") == pytest.approx(0.36 + 100 * 0.0025)
    assert ticket.work_at_s("q") == pytest.approx(1.0 + 100 * 0.0025)


def test_images_are_priced_apart_from_text() -> None:
    media = replace(prompt(1000), media_tokens=400)
    made = classifier(step_times=replace(STEP_TIMES, encoder_s=0.0005))
    text, images = (made.ticket(each, "fast", "a", 0.0) for each in (prompt(1000), media))
    assert (text.prompt_tokens, images.prompt_tokens) == (1000, 1200)
    assert images.tokens == text.tokens + 200, "quotas"
    assert images.ticket.unread_at("q") == 1200, "placement"
    assert images.ticket.work_s > text.ticket.work_s
    assert classifier().ticket(media, "fast", "a", 0.0).prompt_tokens == 1000


def test_a_ticket_names_the_replicas_alone_that_have_most() -> None:
    made = classifier()
    replica_ids = [f"r{n:02}" for n in range(MOST_HITS + 3)]
    for number, replica_id in enumerate(replica_ids, start=1):
        made.prefixes.placed(replica_id, prompt(64 * number))
    assert [name for name, _ in made.prefixes.hits(prompt(1000), replica_ids)] == replica_ids[:2:-1]


def test_prompts_of_unlike_salt_have_nothing_in_common() -> None:
    made = classifier()
    made.prefixes.placed("r", prompt(640, "m"))
    assert made.prefixes.hits(prompt(640, "n"), ["r"]) == made.prefixes.hits(prompt(640), ["r"]) == ()
    assert made.prefixes.hits(prompt(640, "m"), ["r"]) == (("r", 639),), "the last token is always read"


@pytest.mark.parametrize("mode", ["stock", "shadow"])
def test_without_the_policies_nothing_is_remembered_and_the_fewest_requests_decide(mode: Mode) -> None:
    made = classifier(mode=mode)
    made.prefixes.placed("r", prompt(640))
    ticket = made.ticket(prompt(640), "fast", "a", 0.0, ["r"]).ticket
    assert (made.prefixes.have_a_say, made.prefixes.entries) == (False, 0)
    assert (ticket.prefixes, ticket.work_s, ticket.prompt_token_s, ticket.step_s) == ((), 1.0, 0.0, math.inf)


def test_a_ticket_of_a_prompt_that_has_grown_has_more_work_but_for_what_is_cached() -> None:
    made = classifier()
    ticket = made.ticket(prompt(1000), "fast", "a", 0.0).ticket
    assert ticket.of_prompt(1010, ()).work_s == pytest.approx(ticket.work_s + 0.01)
    moved = ticket.of_prompt(1010, (("r", 960),))
    assert (moved.unread_at("r"), moved.work_s) == (50, pytest.approx(ticket.work_s - 0.95))


def test_a_whole_answer_by_a_time_stands_by_its_cost_and_starts_in_time_for_a_short_one() -> None:
    sorter = classifier(terms=Live(TicketTerms()))

    def asked(prompt_tokens: int, low: float | None = None, ttft_s: float | None = None) -> Ticket:
        promise = Promise(ttft_s=ttft_s, e2e_s=10.0)
        quantiles = {} if low is None else {LOW: low}
        told = LengthPrediction(mean_tokens=200.0, quantile_tokens=quantiles)
        foresight = Foresight(question=question("x"), prediction=told, source="learned", score=None, learned=told)
        return sorter.ticket(size(prompt_tokens), "fast", "a", 100.0, foresight=foresight, promise=promise).ticket

    usual, dear = asked(1000), asked(9000)
    assert usual.deadline_key == banded(Band.IN_TIME, 110.0)
    assert dear.deadline_key > usual.deadline_key > asked(10).deadline_key
    assert usual.late_key == dear.late_key == banded(Band.LATE, 160.0)
    assert usual.deadline_s == 110.0
    step_s = STEP_TIMES.decode.step_s(decode_requests=4)
    assert asked(1000, low=50.0).deadline_s == pytest.approx(110.0 - 50.0 * step_s)
    assert asked(1000, ttft_s=1.0).deadline_s == 101.0
