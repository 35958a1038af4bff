import asyncio
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from policies.errors import AdmissionError, ReplicaLostError
from policies.lengths.drift import DriftConfig
from policies.router.promise import NO_PROMISE, Promise
from predictor.asking import Asking, AskingConfig, worth_waiting_s
from predictor.base import LengthPrediction
from predictor.calibration import Curve
from predictor.learned import Foresight, Kept, LearnedConfig, LearnedPredictor, Question
from predictor.metrics import PredictorMetrics

CURVE = Curve(
    scores=(0.0, 1000.0),
    means=(0.0, 1000.0),
    fractions=(0.1, 0.5, 0.9),
    quantiles=((0.0, 500.0), (0.0, 1000.0), (0.0, 2000.0)),
)
QUICK = DriftConfig(window_requests=32, margin=0.02, patience=8)
CONFIG = LearnedConfig(drift=QUICK, hints=DriftConfig(window_requests=32, patience=8, starts_on=False))


class Scorer:
    """A score is the prompt read as a number, unless `trouble` says otherwise."""

    def __init__(self, trouble: Exception | None = None, delay_s: float = 0.0) -> None:
        self.trouble, self.delay_s, self.asked = trouble, delay_s, 0

    async def score(self, prompt: str) -> float:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        if self.trouble is not None:
            raise self.trouble
        return float(prompt)


def predictor(scorer: Scorer | None = None) -> LearnedPredictor:
    return LearnedPredictor(Asking(scorer or Scorer()), CURVE, CONFIG)


def question(tokens: int = 100, **more: Any) -> Question:
    return Question(**{"prompt": str(tokens), "model": "m", "slo_class": "standard", "key": "", **more})


def finish(
    learned: LearnedPredictor, foresight: Foresight, output_tokens: int, histogram: float = 100.0, is_cut: bool = False
) -> None:
    learned.observe(
        foresight,
        output_tokens,
        is_cut=is_cut,
        histogram=LengthPrediction(mean_tokens=histogram),
        bin_of=lambda tokens: int(tokens >= 100),
    )
    if (scored := learned.scored(foresight, output_tokens, is_cut)) is not None:
        learned.learn([scored])


async def source_after(learned: LearnedPredictor, asked: Question, output_tokens: int, times: int) -> str | None:
    for _ in range(times):
        finish(learned, await learned.foresee(asked), output_tokens)
    return (await learned.foresee(asked)).source


async def learned_mean(learned: LearnedPredictor, asked: Question) -> float:
    known = (await learned.foresee(asked)).learned
    assert known is not None
    return known.mean_tokens


async def test_the_score_becomes_tokens_by_the_curve() -> None:
    foresight = await predictor().foresee(question(200))
    assert foresight.source == "learned"
    assert foresight.prediction == LengthPrediction(
        mean_tokens=200.0, quantile_tokens={0.1: 100.0, 0.5: 200.0, 0.9: 400.0}
    )


@pytest.mark.parametrize(
    ("trouble", "delay_s", "outcome"),
    [
        (None, 5.0, "late"),
        (AdmissionError("full"), 0.0, "saturated"),
        (ReplicaLostError("gone"), 0.0, "dead"),
        (RuntimeError("of Ray's, and none that was foreseen"), 0.0, "dead"),
    ],
)
async def test_a_predictor_in_trouble_leaves_the_word_to_the_histogram(
    trouble: Exception | None, delay_s: float, outcome: str
) -> None:
    learned = predictor(Scorer(trouble, delay_s))
    foresight = await learned.foresee(question())
    assert (foresight.prediction, foresight.source) == (None, None)
    assert learned.asking.outcomes == {outcome: 1}


@pytest.mark.parametrize("no_number", [math.nan, math.inf, -math.inf])
async def test_a_score_that_is_no_number_counts_as_none_and_goes_to_no_curve(no_number: float) -> None:
    """As of a checkpoint whose training diverged: its tickets would break the shared tables, and every router's fit."""
    learned = predictor()
    broken = await learned.foresee(Question(prompt=str(no_number), model="m", slo_class="standard"))
    assert (broken.prediction, broken.score, learned.scored(broken, 9, False)) == (None, None, None)
    assert learned.asking.outcomes == {"dead": 1}
    scored = learned.scored(await learned.foresee(question()), 9, False)
    assert scored is not None
    learned.learn([scored._replace(score=no_number)] * 64)  # as another router has told
    assert math.isfinite(await learned_mean(learned, question()))


async def test_a_stalled_predictor_costs_its_deadline_and_then_nothing_for_a_while() -> None:
    scorer = Scorer(delay_s=3600.0)
    asking = Asking(scorer, AskingConfig(deadline_s=0.01, failures_before_pause=3, pause_s=3600.0))
    async with asyncio.timeout(60.0):  # not the scorer's hour
        for _ in range(8):
            assert await asking.score("1") is None
    assert asking.outcomes == {"late": 3, "paused": 5}
    assert scorer.asked == 3


@pytest.mark.parametrize(
    ("promise", "wait_s"),
    [
        (NO_PROMISE, 0.015),
        (Promise(ttft_s=10.0, tpot_s=0.1), 0.015),
        (Promise(e2e_s=0.2), 0.015),  # of a short answer no more is taken than of others
        (Promise(e2e_s=8.0), 0.24),
        (Promise(e2e_s=8.0, ttft_s=2.0), 0.1),
        (Promise(e2e_s=86_400.0), 0.5),
    ],
)
def test_a_request_waits_as_long_as_its_promise_makes_worth_while(promise: Promise, wait_s: float) -> None:
    assert worth_waiting_s(promise) == pytest.approx(wait_s)


async def test_a_busy_machine_keeps_no_prediction_from_a_promised_answer() -> None:
    learned = predictor(Scorer(delay_s=0.1))
    assert (await learned.foresee(question(200), Promise(e2e_s=10.0))).source == "learned"
    assert (await learned.foresee(question(200))).source is None
    assert learned.asking.outcomes == {"answered": 1, "late": 1}


async def test_after_the_pause_it_is_asked_again() -> None:
    scorer = Scorer(ReplicaLostError("gone"))
    asking = Asking(scorer, AskingConfig(failures_before_pause=1, pause_s=0.01))
    assert await asking.score("1") is None
    scorer.trouble = None
    await asyncio.sleep(0.02)
    assert await asking.score("1") == 1.0


async def test_an_answer_ends_the_row_of_failures() -> None:
    scorer = Scorer()
    asking = Asking(scorer, AskingConfig(failures_before_pause=2, pause_s=3600.0))
    for trouble in (ReplicaLostError("gone"), None, ReplicaLostError("gone"), None):
        scorer.trouble = trouble
        await asking.score("1")
    assert asking.outcomes == {"dead": 2, "answered": 2}


async def test_more_questions_at_a_time_than_allowed_are_not_asked() -> None:
    scorer = Scorer(delay_s=3600.0)
    asking = Asking(scorer, AskingConfig(deadline_s=0.05, max_in_flight=2))
    await asyncio.gather(*(asking.score("1") for _ in range(5)))
    assert asking.outcomes == {"late": 2, "saturated": 3}


async def test_a_predictor_worse_than_the_histogram_is_left_and_comes_back() -> None:
    learned = predictor()
    assert await source_after(learned, question(5), output_tokens=100, times=7) == "learned"
    # The curve follows what came, so it is the rank that must mislead: short for long and long for short.
    learned = LearnedPredictor(Asking(Scorer()), CURVE, CONFIG)
    for _ in range(60):
        for score, tokens in ((50, 800), (900, 20)):
            foresight = await learned.foresee(question(score))
            finish(learned, foresight, tokens, histogram=float(tokens))
    foresight = await learned.foresee(question(50))
    assert (foresight.source, foresight.prediction) == (None, None)
    assert foresight.learned is not None
    for _ in range(200):
        for score, tokens in ((50, 20), (900, 800)):
            finish(learned, await learned.foresee(question(score)), tokens, histogram=3000.0)
    assert (await learned.foresee(question(50))).source == "learned"


async def test_a_hint_is_used_once_it_has_proved_right_for_its_key() -> None:
    learned = predictor()
    good = question(700, key="good", hinted_tokens=30)
    assert await source_after(learned, good, output_tokens=30, times=7) != "hint"
    assert await source_after(learned, good, output_tokens=30, times=20) == "hint"
    assert (await learned.foresee(good)).prediction == LengthPrediction(mean_tokens=30.0)


async def test_hints_prove_nothing_for_another_key_and_wrong_ones_are_never_used() -> None:
    learned = predictor()
    assert await source_after(learned, question(700, key="good", hinted_tokens=30), 30, times=40) == "hint"
    assert (await learned.foresee(question(700, key="other", hinted_tokens=30))).source != "hint"
    assert await source_after(predictor(), question(100, key="bad", hinted_tokens=5000), 100, times=60) == "learned"


async def test_a_limit_that_is_always_reached_predicts_and_one_that_is_not_does_not() -> None:
    learned = predictor()
    for _ in range(40):
        foresight = await learned.foresee(question(20, key="cut", max_output_tokens=64))
        finish(learned, foresight, 64, histogram=10.0, is_cut=True)
    assert (await learned.foresee(question(20, key="cut", max_output_tokens=64))).source == "limit"
    assert await source_after(learned, question(100, key="roomy", max_output_tokens=4096), 100, times=40) != "limit"


async def test_a_limit_that_cuts_half_of_the_answers_is_judged_against_what_is_believed() -> None:
    """It beats the histogram's 100 tokens, and not the learned predictor, which tells the cut answers from the rest."""
    learned = predictor()
    for _ in range(100):
        for tokens in (1000, 200):
            foresight = await learned.foresee(question(tokens, key="half", max_output_tokens=500))
            assert foresight.source != "limit"
            finish(learned, foresight, min(tokens, 500), is_cut=tokens > 500)


async def test_each_system_prompt_has_a_curve_of_its_own_once_it_is_known() -> None:
    learned = predictor()
    asked = {name: question(500, system_prompt=name) for name in ("brief", "essay")}
    for _ in range(120):
        finish(learned, await learned.foresee(asked["brief"]), 20)
        finish(learned, await learned.foresee(asked["essay"]), 900)
    assert await learned_mean(learned, asked["brief"]) == pytest.approx(20.0, rel=0.05)
    assert await learned_mean(learned, asked["essay"]) == pytest.approx(900.0, rel=0.05)


async def test_many_system_prompts_leave_the_models_curve_alone() -> None:
    """As a router that is new, and gets what the others have learnt at once."""
    learned = predictor()
    one = learned.scored(await learned.foresee(question(500)), 20, is_cut=False)
    assert one is not None
    learned.learn([one._replace(system_prompt=f"user {number}") for number in range(500)])
    assert await learned_mean(learned, question(500)) == pytest.approx(20.0, rel=0.05)


async def test_scores_of_another_checkpoint_teach_nothing() -> None:
    other = LearnedPredictor(Asking(Scorer()), CURVE.scaled(2.0), CONFIG)
    learned = predictor()
    for _ in range(120):
        scored = other.scored(await other.foresee(question(500)), 20, is_cut=False)
        assert scored is not None
        learned.learn([scored])
    assert await learned_mean(learned, question(500)) == 500.0


async def test_live_accuracy_is_on_the_metrics_page() -> None:
    learned, registry = predictor(), CollectorRegistry()
    registry.register(PredictorMetrics(learned))
    for _ in range(4):
        finish(learned, await learned.foresee(question(150)), 150, histogram=50.0)
    labels = {"model": "m", "slo_class": "standard"}
    assert registry.get_sample_value("sluice_predictor_questions_total", {"outcome": "answered"}) == 4
    assert registry.get_sample_value("sluice_predictor_believed", labels) == 1
    assert registry.get_sample_value("sluice_predictor_hit_ratio", labels) == 1.0
    assert registry.get_sample_value("sluice_predictor_reference_hit_ratio", labels) == 0.0
    assert registry.get_sample_value("sluice_predictor_bias", labels) == pytest.approx(0.0)


def test_what_is_kept_is_bounded() -> None:
    kept: Kept[int, list[int]] = Kept(2, list)
    kept[1].append(1)
    kept[2].append(2)
    assert kept[1] == [1]
    kept[3].append(3)
    assert (len(kept), kept[1], kept[2]) == (2, [1], [])
