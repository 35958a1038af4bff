"""Step times learned online: recovery of the coefficients, robustness, following a shift, and never a negative cost."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.step_time import StepTimeConfig, StepTimeModel
from policies.errors import ConfigError
from policies.types import Phase, StepCoefficients, StepResult, StepTimes, chunk_kv_tokens
from tests.policies.states import result_of, same_times

TRUE = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.008, decode_s=3e-5, kv_s=6e-8),
    mixed=StepCoefficients(overhead_s=0.009, prefill_s=5e-5, decode_s=3e-5, kv_s=6e-8, interference_s=4e-5),
)


def make_result(step_s: float, prefill: int, decodes: int, kv: int, prefill_kv: int = 0) -> StepResult:
    return result_of(
        step_s=step_s, prefill_tokens=prefill, decode_requests=decodes, kv_tokens=kv, prefill_kv_tokens=prefill_kv
    )


def feed(
    model: StepTimeModel,
    times: StepTimes,
    steps: int,
    *,
    seed: int = 0,
    noise: float = 0.03,
    stalls: float = 0.0,
    kinds: tuple[Phase, ...] = tuple(Phase),
) -> None:
    """Steps of log-uniform content with multiplicative noise; a share of them stalls to 20 times their length."""
    rng = np.random.default_rng(seed)
    for index in range(steps):
        kind = kinds[index % len(kinds)]
        prefill = 0 if kind is Phase.DECODE else int(np.exp(rng.uniform(3, 8.3)))
        decodes = 0 if kind is Phase.PREFILL else int(np.exp(rng.uniform(0, 5.55)))
        kv = decodes * int(rng.integers(100, 3000))
        step_s = times.step_s(prefill_tokens=prefill, decode_requests=decodes, kv_tokens=kv)
        stall = 20.0 if rng.random() < stalls else 1.0
        model.observe(make_result(step_s * float(rng.lognormal(0, noise)) * stall, prefill, decodes, kv))


def assert_close(found: StepTimes | None, rel: float) -> None:
    """Compare predictions, not coefficients: an overhead of a long prefill says little."""
    assert found is not None
    for prefill in (0, 100, 4000):
        for decodes, context in ((0, 0), (4, 500), (250, 2000)):
            content = {"prefill_tokens": prefill, "decode_requests": decodes, "kv_tokens": decodes * context}
            assert found.step_s(**content) == pytest.approx(TRUE.step_s(**content), rel=rel)


class TestStepTimeModel:
    @pytest.mark.parametrize("step_s", [nan, inf, -inf, -0.01, 0.0])
    def test_a_time_that_no_step_takes_teaches_nothing(self, step_s: float) -> None:
        model, untouched = StepTimeModel(), StepTimeModel()
        for each in (model, untouched):
            feed(each, TRUE, 300)
        model.observe(make_result(step_s, 100, 4, 400))
        for each in (model, untouched):
            feed(each, TRUE, 300, seed=1)
        assert model.times() == untouched.times()

    def test_it_recovers_all_three_forms_from_steps(self) -> None:
        model = StepTimeModel()
        feed(model, TRUE, 3000)
        assert_close(model.times(), rel=0.03)

    def test_stalls_hardly_bend_it(self) -> None:
        model = StepTimeModel()
        feed(model, TRUE, 3000, stalls=0.05)
        assert_close(model.times(), rel=0.06)

    def test_a_stall_among_the_first_steps_is_no_harm_either(self) -> None:
        model = StepTimeModel()
        model.observe(make_result(3.0, 0, 8, 4000))
        feed(model, TRUE, 3000)
        assert_close(model.times(), rel=0.05)

    def test_one_very_large_prefill_among_small_ones_is_not_taken_for_a_stall(self) -> None:
        model = StepTimeModel()
        for tokens in (32_000, 200, 220, 240, 260, 280, 300, 320) * 3:
            model.observe(make_result(TRUE.step_s(prefill_tokens=tokens), tokens, 0, 0))
        times = model.times()
        assert times is not None
        assert times.prefill.overhead_s == pytest.approx(0.004, rel=0.01)
        assert times.prefill.prefill_s == pytest.approx(5e-5, rel=0.01)

    def test_exact_steps_leave_exact_coefficients_where_they_are(self) -> None:
        model = StepTimeModel(StepTimeConfig(prior=TRUE))
        feed(model, TRUE, 600, noise=0.0)
        for tokens in (1, 8000, 8000, 8000, 8000, 8000, 2, 8000) * 8:
            model.observe(make_result(TRUE.step_s(prefill_tokens=tokens), tokens, 0, 0))
        times = model.times()
        assert times is not None
        assert times.prefill.overhead_s == pytest.approx(TRUE.prefill.overhead_s, rel=1e-5)

    def test_a_lasting_shift_is_followed(self) -> None:
        slow = StepTimes(
            prefill=StepCoefficients(overhead_s=0.006, prefill_s=7.5e-5),
            decode=StepCoefficients(overhead_s=0.012, decode_s=4.5e-5, kv_s=9e-8),
            mixed=StepCoefficients(
                overhead_s=0.0135, prefill_s=7.5e-5, decode_s=4.5e-5, kv_s=9e-8, interference_s=6e-5
            ),
        )
        model = StepTimeModel(StepTimeConfig(forgetting=0.99))
        feed(model, slow, 1500)
        feed(model, TRUE, 3000, seed=1)
        assert_close(model.times(), rel=0.06)

    @pytest.mark.parametrize("seed", range(8))
    def test_long_prefills_before_short_ones_do_not_hide_what_short_ones_take(self, seed: int) -> None:
        """The first fit may have an overhead below 0, under which a short prefill would take no time at all."""
        rng = np.random.default_rng(seed)
        model = StepTimeModel()
        for tokens in (*rng.integers(4000, 8192, 16), *rng.integers(200, 1600, 200)):
            step_s = TRUE.prefill.step_s(prefill_tokens=float(tokens))
            model.observe(make_result(step_s * float(rng.normal(1.0, 0.1)), int(tokens), 0, 0))
        times = model.times()
        assert times is not None
        truth_s = TRUE.prefill.step_s(prefill_tokens=500)
        assert times.prefill.step_s(prefill_tokens=500) == pytest.approx(truth_s, rel=0.1)

    def test_a_prior_is_held_where_a_steady_load_says_nothing(self) -> None:
        model = StepTimeModel(StepTimeConfig(prior=TRUE))
        steady = TRUE.step_s(decode_requests=64, kv_tokens=64_000)
        for _ in range(5000):
            model.observe(make_result(steady, 0, 64, 64_000))
        assert_close(model.times(), rel=0.01)

    def test_without_prior_or_steps_nothing_is_known(self) -> None:
        model = StepTimeModel()
        assert model.times() is None
        feed(model, TRUE, 15, kinds=(Phase.DECODE,))
        assert model.times() is None
        assert not model.measured(Phase.DECODE)

    @pytest.mark.parametrize("kind", list(Phase))
    def test_one_measured_kind_lends_what_it_knows_to_the_others(self, kind: Phase) -> None:
        model = StepTimeModel()
        feed(model, TRUE, 200, kinds=(kind,))
        times = model.times()
        assert times is not None
        assert model.measured(kind)
        assert getattr(times, kind.value).overhead_s == pytest.approx(getattr(TRUE, kind.value).overhead_s, rel=0.15)
        assert times.mixed.overhead_s > 0

    def test_empty_steps_say_nothing(self) -> None:
        model = StepTimeModel()
        for _ in range(50):
            model.observe(make_result(0.01, 0, 0, 0))
            model.observe(make_result(0.0, 100, 0, 0))
        assert model.times() is None

    @given(
        steps=st.lists(
            st.tuples(st.floats(1e-5, 100), st.integers(0, 10_000), st.integers(0, 500), st.integers(0, 10**6)),
            min_size=16,
            max_size=80,
        )
    )
    @settings(deadline=None)
    def test_whatever_is_observed_no_cost_is_negative_but_the_interference(
        self, steps: list[tuple[float, int, int, int]]
    ) -> None:
        model = StepTimeModel(StepTimeConfig(min_steps=1))
        for step_s, prefill, decodes, kv in steps:
            model.observe(make_result(step_s, prefill, decodes, kv))
        times = model.times()
        if times is not None:
            for form in (times.prefill, times.decode, times.mixed):
                assert min(form.overhead_s, form.prefill_s, form.decode_s, form.kv_s, form.prefill_kv_s) >= 0

    @pytest.mark.parametrize("prior", [None, TRUE], ids=["no prior", "a prior without it"])
    def test_it_finds_what_chunks_pay_for_the_prompt_before_them(self, prior: StepTimes | None) -> None:
        """Chat beside long prompts, whose last chunks cost twice what their first ones do."""
        true = _deeper(TRUE, 5e-10)
        model = StepTimeModel(StepTimeConfig(prior=prior))
        rng = np.random.default_rng(0)
        for step in range(4000):
            computed = step % 200 * 1000 if step % 200 < 100 else 0  # of 100 000 tokens, then chat alone
            chunk = int(rng.integers(200, 1500))
            _see(model, true, rng, chunk, computed=computed, decodes=step % 3 * 20)
        times = model.times()
        assert times is not None
        for form in (times.prefill, times.mixed):
            assert form.prefill_kv_s == pytest.approx(5e-10, rel=0.1)
        deep = {"prefill_tokens": 1000, "decode_requests": 20, "kv_tokens": 20_000, "prefill_kv_tokens": 9e7}
        assert times.step_s(**deep) == pytest.approx(true.step_s(**deep), rel=0.05)

    @pytest.mark.parametrize("prior", [None, TRUE], ids=["no prior", "a prior without it"])
    @pytest.mark.parametrize("longest", [500, 2000])
    @pytest.mark.parametrize("seed", range(4))
    def test_short_prompts_do_not_say_that_long_ones_cost_more(
        self, seed: int, longest: int, prior: StepTimes | None
    ) -> None:
        """Here they do not: what noise says of the context of short ones is magnified far into a long one."""
        model, rng = StepTimeModel(StepTimeConfig(prior=prior)), np.random.default_rng(seed)
        for step in range(1500):
            _see(model, TRUE, rng, int(rng.integers(20, longest)), decodes=step % 3 * 20, noise=0.05)
        times = model.times()
        assert times is not None
        deep = {"prefill_tokens": 1000, "decode_requests": 20, "kv_tokens": 20_000, "prefill_kv_tokens": 1e8}
        assert times.step_s(**deep) == pytest.approx(TRUE.step_s(**deep), rel=0.05)

    @pytest.mark.long
    @given(seed=st.integers(0, 2**16), longest=st.integers(200, 2000), noise=st.floats(0.0, 0.1))
    @settings(deadline=None, max_examples=25)
    def test_where_all_prompts_are_short_it_predicts_what_it_would_without_what_chunks_read(
        self, seed: int, longest: int, noise: float
    ) -> None:
        fits = []
        for sees in (True, False):
            model, rng = StepTimeModel(), np.random.default_rng(seed)
            for step in range(1500):
                prompt = int(rng.integers(20, longest))
                _see(model, _deeper(TRUE, 5e-10), rng, prompt, decodes=step % 3 * 20, noise=noise, sees=sees)
            fits.append(model.times())
        found, without = fits
        assert found is not None and without is not None
        for prompt in (longest // 4, longest // 2, longest):
            for held in ({}, {"decode_requests": 20, "kv_tokens": 20_000}):
                read = chunk_kv_tokens(prompt, 0)
                predicted_s = found.step_s(prefill_tokens=prompt, prefill_kv_tokens=read, **held)
                assert predicted_s == pytest.approx(without.step_s(prefill_tokens=prompt, **held), rel=0.01)

    def test_a_forgetting_that_forgets_everything_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="forgetting"):
            StepTimeConfig(forgetting=0.4)


def _deeper(times: StepTimes, prefill_kv_s: float) -> StepTimes:
    deeper = {kind: replace(getattr(times, kind), prefill_kv_s=prefill_kv_s) for kind in ("prefill", "mixed")}
    return replace(times, **deeper)


def _see(
    model: StepTimeModel,
    times: StepTimes,
    rng: np.random.Generator,
    chunk: int,
    *,
    computed: int = 0,
    decodes: int = 0,
    noise: float = 0.03,
    sees: bool = True,
) -> None:
    """One step; ``sees``: whether the model is told what the chunk reads."""
    read, kv = chunk_kv_tokens(chunk, computed), decodes * int(rng.integers(100, 3000))
    step_s = times.step_s(prefill_tokens=chunk, decode_requests=decodes, kv_tokens=kv, prefill_kv_tokens=read)
    model.observe(make_result(step_s * float(rng.lognormal(0, noise)), chunk, decodes, kv, read if sees else 0))


def test_a_mixed_step_is_never_shorter_than_its_decodes_alone() -> None:
    """A fit to few mixed steps may find an interference far below zero; times must not follow it there."""
    times = StepTimes(
        prefill=StepCoefficients(overhead_s=0.0, prefill_s=1e-3),
        decode=StepCoefficients(overhead_s=2e-3, decode_s=1e-4),
        mixed=StepCoefficients(overhead_s=0.0, prefill_s=1e-3, interference_s=-7e-3),
    )
    assert times.step_s(prefill_tokens=20, decode_requests=30) == times.step_s(decode_requests=30)
    assert times.step_s(prefill_tokens=2000, decode_requests=30) > 1.0


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_decodes_are_counted_with_their_drafts_and_told_as_one(drafts: int) -> None:
    model, rng = StepTimeModel(), np.random.default_rng(3)
    for _ in range(2000):
        prefill, decodes = int(rng.integers(0, 2) * rng.integers(20, 2000)), int(rng.integers(1, 200))
        tokens = (1 + drafts) * decodes
        law = TRUE.mixed if prefill else TRUE.decode
        step_s = law.step_s(prefill_tokens=prefill, decode_requests=tokens, kv_tokens=500 * decodes)
        result = make_result(step_s, prefill, decodes, 500 * decodes)
        model.observe(result._replace(draft_tokens=drafts * decodes))
    times = model.times()
    assert times is not None
    assert model.tokens_per_decode == pytest.approx(1 + drafts, rel=1e-6)
    for prefill in (0, 30, 1500):
        for decodes in (4, 150):
            said = times.step_s(prefill_tokens=prefill, decode_requests=decodes, kv_tokens=500 * decodes)
            law = TRUE.mixed if prefill else TRUE.decode
            true = law.step_s(prefill_tokens=prefill, decode_requests=(1 + drafts) * decodes, kv_tokens=500 * decodes)
            assert said == pytest.approx(true, rel=0.02)


def test_what_encoding_takes_is_told_apart_and_bends_no_other_line() -> None:
    times = same_times(overhead_s=0.01, prefill_s=1e-5, decode_s=1e-4)
    model, plain = StepTimeModel(), StepTimeModel()
    for number in range(200):
        shape = {"prefill_tokens": 100 + 7 * number % 500, "decode_requests": number % 20}
        step = result_of(**shape, step_s=times.step_s(**shape))
        model.observe(step)
        plain.observe(step)
        if number % 3 == 0:
            model.observe(step._replace(encoder_tokens=500, step_s=step.step_s + 500 * 2e-5))
    learned = model.times()
    assert learned is not None and learned.encoder_s == pytest.approx(2e-5, rel=0.02)
    assert learned.media_price == pytest.approx(2.0, rel=0.05)
    assert replace(learned, encoder_s=0.0) == plain.times()


def test_before_a_step_without_media_was_seen_one_with_them_tells_nothing() -> None:
    model = StepTimeModel()
    model.observe(result_of(prefill_tokens=100, step_s=1.0)._replace(encoder_tokens=500))
    assert (model.times(), model.encoder_s) == (None, 0.0)
