"""Prompts are cut beside drafts, and beside images that vLLM reads piece by piece: times per token hold there too."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.virtual_engine import TIMES, VirtualEngine

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

TPOT_S = 0.02  # a step of decodes takes half of it, and one that reads a whole prompt of these two and a half of it
READERS, LONG_PROMPTS = 8, 80


def busy(engine: VirtualEngine, **params: Any) -> None:
    """Readers that decode, and long prompts that come meanwhile."""
    engine.add_all([(20, 200)] * READERS)
    engine.step(30)
    for number in range(LONG_PROMPTS):
        engine.add(f"long{number}", 2000 - 64, 5, **params)
        engine.step(2)
    engine.run()


def longest_mean_s(engine: VirtualEngine) -> float:
    """The greatest mean time per token of the readers."""
    answers = [engine.answers[f"r{number}"] for number in range(READERS)]
    return max((one.times_s[-1] - one.times_s[0]) / (len(one.times_s) - 1) for one in answers)


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("mode", ["mixed", "auto"])
def test_beside_drafts_times_per_token_hold_and_no_prompt_is_kept_out(mode: str, accepted: int) -> None:
    stock = VirtualEngine({"mode": "stock"}, drafts=3, accepted=accepted)
    engine = VirtualEngine({"mode": mode, "tpot_s": TPOT_S}, drafts=3, accepted=accepted).measure()
    for each in (stock, engine):
        busy(each)
        assert each.drafted > 500
        assert all(answer.whole for answer in each.answers.values()) and each.all_free
    assert longest_mean_s(engine) <= TPOT_S
    if not accepted:
        assert longest_mean_s(stock) > TPOT_S


def test_all_drafts_have_their_place_in_a_step_that_reads() -> None:
    engine = VirtualEngine({"mode": "mixed", "tpot_s": TPOT_S / 4}, drafts=3, accepted=3).measure()
    engine.add_all([(20, 400)] * READERS)
    engine.step(30)
    engine.add("long", 1900, 20)
    engine.step(2)
    before = engine.drafted
    engine.step()
    assert engine.log[-1].prefill_tokens >= 16
    assert engine.drafted - before == 3 * READERS


def test_drafts_that_prove_right_count_for_promised_times() -> None:
    """A step brings four tokens: it may take four times as long, so prompts are read as fast as without promises."""
    stock = VirtualEngine({"mode": "stock"}, drafts=3, accepted=3)
    engine = VirtualEngine({"mode": "mixed", "tpot_s": TPOT_S}, drafts=3, accepted=3).measure()
    took_s = []
    for each in (stock, engine):
        began_s = each.clock.now()
        busy(each)
        took_s.append(each.clock.now() - began_s)
    assert took_s[1] <= 1.05 * took_s[0]
    assert longest_mean_s(engine) <= TPOT_S


@pytest.mark.parametrize(("accepted", "least", "most"), [(0, 0.0, 0.1), (3, 0.95, 1.0)])
def test_drafts_are_verified_as_far_as_they_are_worth_it(accepted: int, least: float, most: float) -> None:
    engine = VirtualEngine({"mode": "auto"}, drafts=3, accepted=accepted).measure()
    engine.add_all([(20, 600)] * 32)
    engine.step(40)
    before, seen = engine.drafted, len(engine.log)
    engine.step(60)
    decodes = sum(step.decodes for step in engine.log[seen:])
    assert least <= (engine.drafted - before) / (3 * decodes) <= most
    engine.run()
    assert all(answer.whole for answer in engine.answers.values()) and engine.all_free
    told = engine.scheduler.status()["drafts"]
    assert told["verified"] == engine.drafted and (told["left_out"] > 0) == (accepted == 0)
    assert told["tokens_per_step"][""] == pytest.approx(1 + accepted, abs=0.1)


def takes_images(engine: VirtualEngine) -> VirtualEngine:
    """With the room for images that a model with an encoder has."""
    engine.scheduler.max_num_encoder_input_tokens = 1024
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1024)
    return engine


def images(name: str = "", places: Sequence[int] = (0, 700, 1300)) -> dict[str, Any]:
    """A request's; those of one name are the same."""
    where = [PlaceholderRange(offset=offset, length=576) for offset in places]
    found = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=f"{name}{at}", mm_position=place)
        for at, place in enumerate(where)
    ]
    return {"mm_features": found}


@pytest.mark.parametrize("mode", ["mixed", "auto"])
def test_prompts_with_images_are_cut_and_all_of_them_end(mode: str) -> None:
    engine = takes_images(VirtualEngine({"mode": mode, "tpot_s": TPOT_S}).measure())
    busy(engine, **images())
    assert all(answer.whole for answer in engine.answers.values()) and engine.all_free
    assert max(step.prefill_tokens for step in engine.log if step.decodes) < 576
    assert longest_mean_s(engine) <= TPOT_S


@pytest.mark.parametrize("mode", ["mixed", "auto"])
def test_the_encoders_time_is_learned_and_paid_from_the_accounts(mode: str) -> None:
    """An image takes as long as a step of decodes, which is half of what was promised."""
    times = replace(TIMES, encoder_s=0.01 / 576)
    found = []
    for settings in ({"mode": "stock"}, {"mode": mode, "tpot_s": TPOT_S}):
        engine = takes_images(VirtualEngine(settings, times=times).measure())
        engine.add_all([(20, 200)] * READERS)
        engine.step(30)
        for number in range(LONG_PROMPTS):
            engine.add(f"long{number}", 700, 5, **images(f"of {number} ", (0,)))
            engine.step(2)
        engine.run()
        assert all(answer.whole for answer in engine.answers.values()) and engine.all_free
        found.append(longest_mean_s(engine))
    assert found[1] <= TPOT_S < found[0]
    learned = engine.scheduler.planner.policy.phases.model.times()
    assert learned.encoder_s == pytest.approx(times.encoder_s, rel=0.2)


def test_what_waits_is_priced_with_its_images() -> None:
    times = replace(TIMES, encoder_s=3 * TIMES.prefill.prefill_s)
    engine = takes_images(VirtualEngine({"mode": "mixed"}, times=times, slots=1).measure())
    engine.add_all([(number, 3) for number in range(100, 1100, 50)])
    engine.run()
    for number in range(12):  # it learns what an image takes
        engine.add(f"{number}", 700, 2, **images(f"of {number} ", (0,)))
    engine.run()
    engine.add("runs", 20, 50)
    engine.step(2)
    engine.add("waits", 700, 2, **images("another", (0,)))
    unread = engine.scheduler.status()["unread_prompt_tokens"]
    assert unread == pytest.approx(700 + 3 * 576, rel=0.2)
    engine.add("text", 700, 2)
    assert engine.scheduler.status()["unread_prompt_tokens"] - unread == 700
