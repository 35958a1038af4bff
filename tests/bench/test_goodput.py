"""What bench.goodput and bench.in_time make of measurements."""

from pathlib import Path

import pytest

from bench.capacity import capacity_of, classes_of
from bench.chat_client import Answer
from bench.goodput import SLUICE, Measured, as_markdown
from bench.in_time import PLAIN, Run, write_figure
from bench.load import ServerUnusable
from bench.open_loop import LOOSE, TIGHT, Lengths, Outcome, Targets

TARGETS = {TIGHT: Targets(ttft_s=0.1, tpot_s=0.01), LOOSE: Targets(ttft_s=1.0, tpot_s=0.1, e2e_s=8.0)}


@pytest.mark.parametrize("start", [0.5, 3.0, 20.0])
def test_capacity_is_the_highest_rate_that_still_keeps_enough(start: float) -> None:
    tried: list[float] = []

    def kept_at(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 4.0 else 0.9

    found = capacity_of(kept_at, start)
    assert 4.0 / 1.06 < found <= 4.0
    assert len(tried) <= 14


def test_where_no_rate_is_too_high_none_is_made_up() -> None:
    with pytest.raises(ServerUnusable, match="no capacity to be found"):
        capacity_of(lambda rate: 1.0, 1.0)


def outcome(slo_class: str, ttft_s: float | None) -> Outcome:
    if ttft_s is None:
        return Outcome(slo_class=slo_class, answer=None, error="HTTP 429: full")
    answer = Answer(ttft_s=ttft_s, itl_s=(0.005,), output_tokens=2)
    return Outcome(slo_class=slo_class, answer=answer)


def test_what_is_refused_is_not_in_time_and_is_told_of() -> None:
    outcomes = [outcome(TIGHT, 0.05), outcome(TIGHT, None), outcome(LOOSE, 0.5), outcome(LOOSE, 1.5)]
    kept = [TARGETS[each.slo_class].kept_by(each.answer) for each in outcomes]
    run = Run.of(PLAIN, 1.3, [each.slo_class for each in outcomes], outcomes, kept)
    assert (run.in_time, run.by_kind, run.unanswered) == (0.5, {LOOSE: 0.5, TIGHT: 0.5}, 0.25)
    assert run.errors == {"HTTP 429: full": 1}


def measured() -> Measured:
    shares = {PLAIN: (0.5, 0.6, 0.4), SLUICE: (0.8, 0.7, 0.9)}
    runs = [
        Run(system=name, load=load, in_time=share, by_kind={TIGHT: share, LOOSE: 1.0}, unanswered=0.0, errors={})
        for name, each in shares.items()
        for load in (0.7, 1.3)
        for share in each
    ]
    return Measured(
        model="m",
        engine_arguments=("--x",),
        lengths=Lengths(),
        requests=400,
        targets=TARGETS,
        capacity=4.0,
        cap=1000,
        runs=tuple(runs),
    )


def test_the_table_has_medians_and_paired_differences() -> None:
    page = as_markdown(measured())
    (row,) = (line for line in page.splitlines() if "| 1.3" in line and SLUICE in line)
    assert "0.800 [0.700, 0.900]" in row
    assert "+0.300 [+0.100, +0.500]" in row
    assert "tight: first token within 100 ms, 10 ms a token; loose" in page
    assert "100 ms a token, last one within 8 s" in page


def test_the_server_is_told_the_targets_that_answers_are_judged_by() -> None:
    assert classes_of(TARGETS)[LOOSE] == {"ttft_s": 1.0, "tpot_s": 0.1, "e2e_s": 8.0}


def test_the_figure_is_written(tmp_path: Path) -> None:
    write_figure(measured().runs, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
