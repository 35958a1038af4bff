"""Reading and making workloads, and predictions with errors."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from policies.errors import InputError
from policies.router.bin_edges import equal_mass_edges
from simulator.predictors import confused, predicted, rank_noise
from simulator.workload import (
    Workload,
    arrival_law,
    gamma_bursts,
    length_law,
    mixed,
    poisson,
    read_workload,
    square_wave,
    synthetic,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def made(rng: np.random.Generator, count: int = 1000, output: str = "exponential:100") -> Workload:
    return synthetic("made", length_law("uniform:10:90"), length_law(output), count, rng)


def test_a_trace_is_read_with_all_its_columns(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "trace.csv.gz"
    text = "arrival_s,prompt_tokens,output_tokens,reusable_prefix_tokens,client\n5.0,10,20,0,a\n3.0,30,40,16,b\n"
    path.write_bytes(gzip.compress(text.encode()))
    read = read_workload(path, rng=rng)
    assert read.arrival_s.tolist() == [0.0, 2.0]
    assert read.prompt_tokens.tolist() == [30, 10]
    assert read.cached_tokens.tolist() == [16, 0]
    assert read.slo_class == ("b", "a")


@pytest.mark.parametrize(
    ("name", "text", "prompt_tokens", "output_tokens"),
    [
        ("words.csv", "prompt_words,output_words,output_tokens\n100,100,7\n", [133], [7]),
        ("chars.jsonl", '{"prompt": "aaaaaaaa", "output_chars": 80, "output_words": 9}\n', [2], [20]),
        ("said.jsonl", '{"prompt_chars": 400, "output_tokens": 5}\n', [100], [5]),
        (
            "of_unequal_keys.jsonl",
            '{"prompt": "aaaa", "output_chars": 40, "output_tokens": 7}\n{"prompt": "b", "output_chars": 80}\n',
            [1, 1],
            [10, 20],
        ),
    ],
    ids=["words", "characters", "told", "rows of unequal keys"],
)
def test_words_and_characters_become_tokens_where_not_all_rows_have_tokens(
    name: str, text: str, prompt_tokens: list[int], output_tokens: list[int], tmp_path: Path, rng: np.random.Generator
) -> None:
    (tmp_path / name).write_text(text)
    read = read_workload(tmp_path / name, rng=rng)
    assert (read.prompt_tokens.tolist(), read.output_tokens.tolist()) == (prompt_tokens, output_tokens)


def test_sessions_start_within_an_hour_and_keep_their_own_times(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "sessions.csv"
    rows = "".join(f"s{n},{t},10,5\n" for n in range(20) for t in (0.0, 7.5))
    path.write_text("session,t_in_session_s,prompt_tokens,output_tokens\n" + rows)
    read = read_workload(path, rng=rng)
    assert len(read) == 40 and 1800 < read.arrival_s[-1] < 3608


def test_published_probabilities_are_drawn_from(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "pmf.csv"
    path.write_text("kind,tokens_upto,probability\nprompt,10,1.0\noutput,1,0.25\noutput,101,0.75\n")
    read = read_workload(path, rng=rng)
    assert read.output_tokens.mean() == pytest.approx(0.25 * 1 + 0.75 * 51.5, rel=0.02)
    assert read.prompt_tokens.min() == 1 and read.prompt_tokens.max() == 10


@pytest.mark.parametrize(
    ("name", "text"),
    [("bare.csv", "output_tokens\n5\n"), ("bare.jsonl", '{"output_tokens": 5}\n')],
    ids=["csv", "jsonl"],
)
def test_a_file_without_prompts_takes_the_prompt_tokens_given(
    name: str, text: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match="--prompt-tokens"):
        read_workload(path, rng=rng)
    assert read_workload(path, rng=rng, prompt_tokens=64).prompt_tokens.tolist() == [64]


def test_a_file_without_outputs_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("prompt_tokens\n5\n")
    with pytest.raises(InputError, match="needs output_tokens"):
        read_workload(path, rng=rng)
    path.write_text("prompt_tokens,output_tokens\n5,many\n")
    with pytest.raises(InputError, match="many"):
        read_workload(path, rng=rng)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "trace.csv",
            "prompt_tokens,output_tokens,predicted_output_tokens,reusable_prefix_tokens\n5,10,,\n5,10,12.5,4\n",
        ),
        (
            "trace.jsonl",
            '{"prompt": "abcd", "output_tokens": 10, "predicted_output_tokens": null}\n'
            '{"prompt": "abcd", "output_tokens": 10, "predicted_output_tokens": 12.5, "reusable_prefix_tokens": 4}\n',
        ),
    ],
)
def test_where_a_prediction_or_a_prefix_is_missing_there_is_none(
    tmp_path: Path, rng: np.random.Generator, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    read = read_workload(tmp_path / name, rng=rng)
    assert [request.predicted_output_tokens for request in read.requests()] == [None, 12.5]
    assert read.cached_tokens.tolist() == [0, 4]


def test_a_missing_file_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(InputError, match="nowhere.csv"):
        read_workload(tmp_path / "nowhere.csv", rng=rng)


def test_arrival_laws_keep_their_rate_and_their_spread(rng: np.random.Generator) -> None:
    for times, rate, cv in ((poisson(4.0, 40_000, rng), 4.0, 1.0), (gamma_bursts(4.0, 3.0, 40_000, rng), 4.0, 3.0)):
        gaps = np.diff(times)
        assert 1.0 / gaps.mean() == pytest.approx(rate, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.07)


def test_a_square_wave_is_slow_in_one_half_and_fast_in_the_other(rng: np.random.Generator) -> None:
    times = square_wave(2.0, 20.0, 10.0, 50_000, rng)
    fast = times % 10.0 >= 5.0
    assert np.all(np.diff(times) >= 0)
    assert fast.mean() == pytest.approx(20 / 22, rel=0.02)
    assert len(times) / times[-1] == pytest.approx(11.0, rel=0.02)


WRONG_ARRIVALS = "poisson poisson:0 waves:1 gamma:1 square:1:2 all:3 poisson:x poisson:nan poisson:-1 square:5:5:0"
WRONG_LAWS = (
    "normal:3 uniform:1 lognormal:x:1 constant uniform:9:2 lognormal:-5:1 lognormal:5:1e200 constant:-3 exponential:inf"
)


@pytest.mark.parametrize("text", WRONG_ARRIVALS.split())
def test_unknown_arrivals_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(InputError, match="poisson:RATE"):
        arrival_law(text)


@pytest.mark.parametrize("text", WRONG_LAWS.split())
def test_unknown_length_laws_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(InputError, match="lognormal:MEAN:SIGMA"):
        length_law(text)


def test_a_lognormal_law_is_given_by_its_mean(rng: np.random.Generator) -> None:
    assert length_law("lognormal:200:1")(rng, 200_000).mean() == pytest.approx(200.0, rel=0.02)


def test_parts_of_a_mixture_keep_their_names(rng: np.random.Generator) -> None:
    short, long = made(rng, output="constant:10"), made(rng, output="constant:500")
    both = mixed("both", short, long)
    assert len(both) == 2000 and both.slo_class is not None and set(both.slo_class) == {"made"}


def test_the_noise_of_table_1_gives_its_accuracies(rng: np.random.Generator) -> None:
    lengths = made(rng, 40_000, "lognormal:300:1").output_tokens
    predictions = rank_noise(lengths, 0.44, rng)
    for bins, accuracy in ((2, 0.84), (4, 0.63), (8, 0.41)):
        inner = equal_mass_edges(lengths, bins)[1:-1]
        right = np.searchsorted(inner, lengths, side="right") == np.searchsorted(inner, predictions, side="right")
        assert right.mean() == pytest.approx(accuracy, abs=0.02)


def test_a_confusion_matrix_sends_its_shares_to_each_bin(rng: np.random.Generator) -> None:
    lengths = made(rng, 30_000).output_tokens
    swapped = confused(lengths, [[0.0, 1.0], [1.0, 0.0]], rng)
    median = np.median(lengths)
    assert np.all((swapped > median) == (lengths < equal_mass_edges(lengths, 2)[1]))
    with pytest.raises(InputError, match="sum to 1"):
        confused(lengths, [[0.5, 0.4], [0.0, 1.0]], rng)


def test_predictors_are_known_by_name(rng: np.random.Generator) -> None:
    work = made(rng)
    assert np.array_equal(predicted(work, "oracle", rng).predicted_output_tokens, work.output_tokens)
    assert np.isnan(predicted(work, "none", rng).predicted_output_tokens).all()
    assert len(set(predicted(work, "neighbour:4:0.1", rng).predicted_output_tokens.tolist())) == 4
    for wrong in ("psychic", "noise", "neighbour:4:0.9"):
        with pytest.raises(InputError, match=wrong):
            predicted(work, wrong, rng)
