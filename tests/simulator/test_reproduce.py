"""The experiments' own arithmetic, and that each can be found; their results stand in docs/."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from policies.errors import InputError
from simulator.cluster import ClusterConfig
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.reproduce.__main__ import EXPERIMENTS, main
from simulator.reproduce.common import Setting, drawn, saturated, steady_rate, table, walk_forward
from simulator.reproduce.paper_001 import (
    _ALL_SLOTS,
    _STATIC,
    _TABLE_1,
    _TABLE_2,
    _at_once,
    _full_batch,
    _lost,
    _pace,
    _token_costs_s,
    _used,
)
from simulator.reproduce.paper_002 import _READERS, _capacity, _coupled_rate, _Point, _served, _split_rate
from simulator.reproduce.paper_003 import (
    _POLYNOMIALS,
    _TABLES,
    _Case,
    _costly_share,
    _drawn,
    _drifting,
    _drifting_sets,
    _requests_per_s,
    _set,
    _times,
    _tokens_per_s,
    _with_context,
)
from simulator.reproduce.paper_004 import _gains, _of_a_set, _seconds
from simulator.workload import Workload, length_law, synthetic

DOCS = Path(__file__).parents[2] / "docs"


def test_every_experiment_stands_in_the_docs() -> None:
    text = (DOCS / "measurements/reproduction.md").read_text() + (DOCS / "measurements/policies.md").read_text()
    assert not [name for name in EXPERIMENTS if f"`{name}`" not in text]


def test_an_experiment_without_its_data_says_where_they_come_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Azure/AzurePublicDataset"):
        Setting(data=tmp_path).workload("azure_conv")
    with pytest.raises(SystemExit, match="needs halueval_general_train.jsonl.gz"):
        main(["004-packing"])


def test_a_folder_for_figures_is_made_or_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["004-packing", "--figures", str(tmp_path / "file")])
    assert "--figures" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="needs halueval"):
        main(["004-packing", "--figures", str(tmp_path / "a" / "b")])
    assert (tmp_path / "a" / "b").is_dir()


def test_data_are_found_in_any_folder_below(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "azure2023_conv.csv.gz").write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,5,6\n"))
    assert Setting(data=tmp_path).workload("azure_conv").output_tokens.tolist() == [6]


def test_the_published_polynomial_is_the_cost_per_token_of_a_mixed_step() -> None:
    for engine, (a, b, c) in _POLYNOMIALS.items():
        mixed = _times(engine, "polynomial").mixed
        for share in (0.0, 0.3, 0.8, 1.0):
            decodes, prefill = 1000 * share, 1000 * (1 - share)
            step_s = mixed.step_s(prefill_tokens=prefill, decode_requests=decodes)
            assert step_s / 1000 == pytest.approx(a + b * share + c * share**2)


def test_what_is_learned_from_the_past_is_tried_on_each_later_part() -> None:
    tokens = np.arange(1, 8)
    source = Workload.of("ascending", np.arange(7.0), tokens, tokens)
    found = [(past.output_tokens.tolist(), part.output_tokens.tolist()) for past, part in walk_forward(source, 3)]
    assert found == [([1, 2], [3, 4]), ([1, 2, 3, 4], [5, 6, 7])]


def test_packing_gains_are_those_of_the_rows_and_nothing_against_full_ones() -> None:
    tokens, _, against_varlen, waste = _gains([100, 50, 50, 25, 25, 25, 25])
    assert tokens == pytest.approx(7 / 3)
    assert against_varlen == pytest.approx(1.0)
    assert waste == pytest.approx(1 - 300 / 700)


def test_a_set_is_packed_as_a_whole_or_ordered_or_batch_by_batch() -> None:
    """Batches of two: 100 and 25 of which nothing can be packed, then 50 and 50, then 25."""
    lengths = [100, 25, 50, 50, 25]
    full, each, by_length, whole = (len(lengths) * seconds for seconds in _of_a_set(lengths, 2))
    assert full == pytest.approx(_seconds(200) + _seconds(100) + _seconds(25))
    assert each == pytest.approx(full)
    assert by_length == pytest.approx(_seconds(200) + _seconds(100) + _seconds(25))
    assert whole == pytest.approx(_seconds(200) + _seconds(50))


def test_load_capacity_is_the_server_rate_at_which_four_of_five_meet_their_targets() -> None:
    points = [_Point(share, rate, (0.0, 0.0, 0.0)) for share, rate in ((1.0, 4.0), (0.9, 6.0), (0.7, 7.0), (0.2, 7.5))]
    assert _capacity(points) == "6.50"
    assert _capacity(points[:2]) == "above 6.00"
    assert _capacity(points[2:]) == "below all"


def test_reading_by_bucket_on_gpus_of_its_own_beats_padded_batches_that_read_and_answer() -> None:
    rng = np.random.default_rng(0)
    prompts = np.where(rng.random(240) < 0.5, rng.integers(5, 40, 240), rng.integers(1000, 4000, 240))
    work = Workload.of("mixed", np.zeros(240, dtype=np.float64), prompts, rng.integers(10, 300, 240))
    coupled, padded, by_bucket = (
        _coupled_rate(work),
        *(_split_rate(work, each, 2) for each in ("first come", "adaptive")),
    )
    assert coupled < padded < by_bucket


@pytest.mark.long
@pytest.mark.parametrize("reader", _READERS)
def test_prompts_read_by_bucket_meet_their_targets_at_light_load_and_the_parts_add_up(reader: str) -> None:
    drawn = synthetic("alpaca", length_law("uniform:5:40"), length_law("constant:50"), 300, np.random.default_rng(0))
    point = _served(drawn, reader, 4.0, seed=0)
    assert point.attainment == 1.0
    assert point.server_rate == pytest.approx(4.0, rel=0.15)
    wait_s, reading_s, answer_s = point.seconds
    assert wait_s < 0.02 < reading_s < 0.05 < 49 * 0.018 < answer_s < 49 * 0.03


@pytest.mark.long
def test_the_steady_rate_of_a_full_engine_is_its_capacity() -> None:
    """Eight slots, each taken for 40 decode steps on the mean."""
    profile = engine_profile("Llama-3.1-8B@h100_sxm")
    config = ClusterConfig(times=profile.times, engine=EngineConfig(slots=8))
    source = synthetic("equal", length_law("constant:10"), length_law("exponential:40"), 2000, np.random.default_rng(0))
    finished = saturated(config, drawn(source, 2000, 0))
    decode_s = profile.times.step_s(decode_requests=8, kv_tokens=8 * 50)
    assert steady_rate(finished) == pytest.approx(8 / (40 * decode_s), rel=0.15)


def test_decodes_make_a_mixed_step_costly_from_the_share_that_003_prints_for_the_slower_memory() -> None:
    engine, no_overhead = "Qwen3-8B@RTX_PRO_6000", 10**9
    assert _costly_share(_times(engine, "polynomial"), no_overhead) == pytest.approx(0.2, abs=0.015)
    assert _costly_share(_times(engine, "sum"), no_overhead) is None
    shares = [_costly_share(_times("Qwen3-8B@H200", "polynomial"), tokens) for tokens in (256, 512, no_overhead)]
    assert None not in shares and shares == sorted(shares, key=lambda share: -(share or 0.0))


def test_a_drift_of_sets_has_one_set_after_the_other(tmp_path: Path) -> None:
    rows = b"prompt_tokens,output_tokens\n" + b"7,900\n" * 4000
    (tmp_path / "sharegpt_lengths_nanoflow.csv.gz").write_bytes(gzip.compress(rows))
    work = _drifting_sets(Setting(data=tmp_path), 0)
    starts = np.cumsum([0, 2000, 2000, 2000])
    assert work.output_tokens[starts[0]] == 500
    assert work.cached_tokens[starts[1] : starts[2]].any() and not work.cached_tokens[starts[2] :].any()
    assert work.output_tokens[starts[2] : starts[3]].max() <= 20
    assert set(work.output_tokens[starts[3] :].tolist()) == {4000}


def test_the_requests_at_once_of_table_2_of_001_are_rate_times_answer_times_pace() -> None:
    assert [round(_at_once(row, float(row.static))) for row in _TABLE_2] == [62, 17, 67]


def test_swapping_costs_a_token_less_than_computing_it_again_where_links_are_its_own() -> None:
    (again_s, swapped_s), (_, small_s) = map(_token_costs_s, (_TABLE_1[0], _TABLE_1[1]))
    assert swapped_s == pytest.approx(2 * 80 * 8192 * 4 / (8 * 25e9))
    assert small_s == pytest.approx(swapped_s / 8) and swapped_s < again_s


def test_more_slots_use_more_of_the_engine_and_lose_tokens_where_the_cache_is_tight() -> None:
    row = _TABLE_1[3]._replace(requests=600, cache_tokens=70_000)
    static, all_slots = ((*_used((row, each, 0)), _lost((row, each, 0))[1]) for each in (_STATIC, _ALL_SLOTS))
    assert all(0.0 < share <= 1.0 for share in (*static[1:3], *all_slots[1:3]))
    assert static[0] <= all_slots[0] and static[3] <= all_slots[3] and all_slots[3] > 0


def test_tables_are_markdown() -> None:
    assert table(("a", "b"), [(1, 2.0)]) == ["| a | b |", "|---|---|", "| 1 | 2.000 |"]


def test_a_decode_costs_as_calibrated_at_the_calibrated_context_and_more_beyond() -> None:
    for engine in ("Qwen3-8B@H200", "Qwen3-8B@RTX_PRO_6000", "Qwen3-30B-A3B@H200"):
        times = _times(engine, "sum")
        sloped = _with_context(engine, times).decode
        assert sloped.step_s(decode_requests=64, kv_tokens=64 * 512) == pytest.approx(
            times.decode.step_s(decode_requests=64)
        )
        longer = [sloped.step_s(decode_requests=64, kv_tokens=64 * context) for context in (512, 1024, 4096)]
        assert longer == sorted(longer) and longer[2] > longer[0]


# Requests per second on the RTX PRO 6000 in table 2, v1 and EB.
@pytest.mark.long
@pytest.mark.parametrize(("name", "published"), [("NuminaMath", (0.73, 0.74)), ("LongBench", (8.35, 8.66))])
def test_rates_of_table_2_of_003_are_met_within_12_percent(name: str, published: tuple[float, float]) -> None:
    engine = "Qwen3-8B@RTX_PRO_6000"
    cell = _TABLES[engine, name]
    for scheduler, (budget, slots), rate in (
        ("v1", cell.v1_size, published[0]),
        ("exclusive", cell.eb_size, published[1]),
    ):
        case = _Case(
            engine=engine, mixing="sum", scheduler=scheduler, work=_set(Setting(), name, 0), any_context=True,
            slots=slots, max_batch_tokens=budget, clients=2048,
        )  # fmt: skip
        assert _requests_per_s(case) == pytest.approx(rate, rel=0.12)


@pytest.mark.long
def test_exclusive_batching_has_the_rate_of_table_4_of_003_with_2048_clients() -> None:
    case = _Case(
        engine="Qwen3-8B@RTX_PRO_6000", mixing="polynomial", scheduler="exclusive", slots=1024, clients=2048,
        work=_drawn("uniform:256:768", "uniform:128:384", 8192, 0),
    )  # fmt: skip
    assert _tokens_per_s(case) == pytest.approx(13179, rel=0.05)


@pytest.mark.long
def test_a_drift_of_lengths_gains_what_table_5_of_003_says() -> None:
    """On the RTX PRO 6000, mixed steps at their published cost: EB+ has 9582 tokens/s, 36.4 % more than v1."""
    v1, both = (
        _tokens_per_s(
            _Case(
                engine="Qwen3-8B@RTX_PRO_6000",
                mixing="polynomial",
                scheduler=scheduler,
                work=_drifting(0),
                any_context=True,
                slots=2048,
                max_batch_tokens=18_432,
                clients=2048,
            )  # fmt: skip
        )
        for scheduler in ("v1", "auto")
    )
    assert both == pytest.approx(9582, rel=0.05)
    assert both / v1 - 1 == pytest.approx(0.364, abs=0.04)


@pytest.mark.long
@pytest.mark.parametrize(("slots", "tokens_per_s"), [(100, 1900), (230, 2700)])
def test_full_batches_have_the_throughput_of_figure_3_of_001_less_the_prefills(slots: int, tokens_per_s: int) -> None:
    tpot_s, rate = _full_batch((slots, 0))
    assert 0.8 * tokens_per_s < rate < tokens_per_s
    assert rate == pytest.approx(slots / tpot_s, rel=0.1)


@pytest.mark.long
def test_static_batches_keep_50_ms_at_the_capacity_that_figure_4_of_001_gives_them() -> None:
    tpot_s, wait_s = _pace((_STATIC, 5.4, 0))
    assert tpot_s < 0.050 and wait_s < 0.1
