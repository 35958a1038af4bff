"""Step times from kernel tables, and engines by name."""

import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from policies.errors import ConfigError, InputError
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import cache_tokens_of, engine_names, engine_profile, read_calibration
from simulator.kernels import Grid, KernelClock, Row, built_in, built_in_clock, linear_fit
from simulator.make_step_times import _AllReduce, _Kernels
from simulator.workload import length_law, synthetic

_ONE_STEP = "prefill_tokens,decode_requests,kv_tokens,step_s\n1,0,0,0.1\n"
LINEAR: list[Row] = [
    *(("dense", n, 0, 0, 5000.0 + 20.0 * n) for n in (1, 1024)),
    *(("sequence", n, 0, 0, 3.0 * n) for n in (1, 64)),
    *(("prefill", n, 0, 0, 1.0 * n) for n in (16, 1024)),
    *(("decode", n, kv, 0, 0.05 * n * kv) for n, kv in product((1, 64), (16, 4096))),
    *(("mixed", c, n, kv, 1.0 * c + 0.1 * n * kv) for c, n, kv in product((16, 1024), (1, 64), (16, 4096))),
]


def test_a_grid_is_exact_for_what_is_linear_in_each_axis_and_beyond_its_end() -> None:
    grid = Grid([[1, 2, 4], [0, 10]], np.array([[x * y + 1.0 for y in (0, 10)] for x in (1, 2, 4)]))
    for x, y in ((1, 5), (3, 7), (4, 10), (8, 20)):
        assert grid.at(x, y) == pytest.approx(x * y + 1)


def test_a_step_is_the_sum_of_its_kernels() -> None:
    clock = KernelClock(LINEAR)
    assert clock.step_s() == 0.0
    assert clock.step_s(prefill_tokens=100) == pytest.approx((5000 + 2000 + 3 + 100) * 1e-6)
    assert clock.step_s(decode_requests=8, kv_tokens=8000) == pytest.approx((5000 + 160 + 24 + 400) * 1e-6)
    mixed = clock.step_s(prefill_tokens=100, decode_requests=8, kv_tokens=8000)
    assert mixed == pytest.approx((5000 + 2160 + 27 + 100 + 800) * 1e-6)


def test_what_a_policy_learns_of_linear_kernels_is_those_lines() -> None:
    times = linear_fit(KernelClock(LINEAR))
    assert times.decode.overhead_s == pytest.approx(5e-3, rel=0.01)
    assert times.decode.decode_s == pytest.approx(23e-6, rel=0.05)
    assert times.decode.kv_s == pytest.approx(0.05e-6, rel=0.01)


def test_kernel_tables_with_a_hole_are_refused() -> None:
    with pytest.raises(InputError, match="no value"):
        KernelClock([row for row in LINEAR if row[:3] != ("decode", 64, 4096)])
    with pytest.raises(InputError, match="sequence"):
        KernelClock([row for row in LINEAR if row[0] != "sequence"])


@pytest.mark.parametrize("name", built_in())
def test_built_in_tables_cost_more_for_more_work(name: str) -> None:
    clock = built_in_clock(name)
    by_chunk = [clock.step_s(prefill_tokens=n, decode_requests=16, kv_tokens=16_000) for n in (256, 512, 1024, 2048)]
    by_context = [clock.step_s(decode_requests=64, kv_tokens=64 * n) for n in (256, 1024, 4096, 8192, 30_000)]
    assert by_chunk == sorted(by_chunk) and by_context == sorted(by_context)


def test_every_engine_that_is_listed_can_be_had() -> None:
    for name in engine_names():
        profile = engine_profile(name)
        assert profile.clock.step_s(decode_requests=8, kv_tokens=8000) > 0.0


def test_an_unknown_engine_is_refused_with_a_list() -> None:
    with pytest.raises(ConfigError, match="Llama-3.1-8B@h100_sxm"):
        engine_profile("Llama-9@abacus")


def test_the_cache_is_what_memory_leaves_beside_the_weights() -> None:
    assert cache_tokens_of("Llama-3.1-8B", "h100_sxm", 1) == int((0.9 * 80e9 - 16.1e9) / 131_072)
    assert cache_tokens_of("Llama2-70b", "A100-80gb", 1) is None
    assert cache_tokens_of("Llama2-70b", "abacus", 8) is None


def test_a_calibration_of_steps_is_fitted_and_one_of_coefficients_taken_as_it_is(tmp_path: Path) -> None:
    steps = tmp_path / "steps.csv"
    lines = [f"0,{n},{n * kv},{0.01 + 1e-4 * n + 1e-7 * n * kv}" for n in range(1, 65) for kv in (100, 900)]
    lines += [f"{p},0,0,{0.004 + 5e-5 * p}" for p in range(16, 1024, 16)]
    steps.write_text("\n".join(["prefill_tokens,decode_requests,kv_tokens,step_s", *lines]))
    fitted, cache_tokens = read_calibration(steps)
    assert cache_tokens is None
    assert fitted.decode.overhead_s == pytest.approx(0.01, rel=0.01)
    assert fitted.prefill.prefill_s == pytest.approx(5e-5, rel=0.01)
    given = tmp_path / "given.json"
    form = {"overhead_s": 0.02, "decode_s": 1e-4}
    given.write_text(json.dumps({"prefill": form, "decode": form, "mixed": form, "cache_tokens": 4096}))
    times, cache_tokens = read_calibration(given)
    assert times.decode.step_s(decode_requests=10) == pytest.approx(0.021)
    assert cache_tokens == 4096


def test_a_compressed_calibration_that_was_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    text = "prefill_tokens,decode_requests,kv_tokens,step_s\n" + "0,1,9,0.1\n" * 1000
    (tmp_path / "steps.csv.gz").write_bytes(gzip.compress(text.encode())[:-12])
    with pytest.raises(InputError, match="steps.csv.gz"):
        read_calibration(tmp_path / "steps.csv.gz")


def test_a_calibration_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", "{}"),
        ("b.csv", "prefill_tokens\n1\n"),
        ("c.json", "not json"),
        ("d.csv", _ONE_STEP),
        ("e.csv, line 3", "prefill_tokens,decode_requests,kv_tokens,step_s\n0,1,9,0.1\n0,1,9,nan\n"),
        ("f.csv, line 2", "prefill_tokens,decode_requests,kv_tokens,step_s\n0,1\n"),
    ):
        path = tmp_path / name.partition(",")[0]
        path.write_text(text)
        with pytest.raises(InputError, match=name):
            read_calibration(path)
    with pytest.raises(InputError, match="absent"):
        read_calibration(tmp_path / "absent.csv")


def test_a_mixture_of_experts_has_the_decode_overhead_that_another_laboratory_measured() -> None:
    """EB+ fitted 16 to 1024 requests at a context of 512, on the same GPU; uniform routing would give 37 ms."""
    clock, published = built_in_clock("kernels_rtxpro6000_qwen3-30b-a3b"), engine_profile("Qwen3-30B-A3B@RTX_PRO_6000")
    requests = (16, 32, 64, 128, 256, 512)
    step_s = [clock.step_s(decode_requests=count, kv_tokens=512 * count) for count in requests]
    _, overhead_s = np.polyfit(requests, step_s, 1)
    assert overhead_s == pytest.approx(published.times.decode.overhead_s, rel=0.05)


# Of the rows that come with Sluice: models whose shards were derived, on GPUs whose all-reduce was measured.
PARALLEL = ("Llama-3.1-8B@h100_sxm", "Llama-3.1-8B@a100_sxm", "Qwen3-32B@h100_sxm", "Qwen3-32B@a100_sxm")


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("gpus", [2, 4])
def test_more_gpus_are_faster_but_by_less_than_their_number(name: str, gpus: int) -> None:
    one, many = engine_profile(name), engine_profile(f"{name}/{gpus}")
    for work in (
        {"prefill_tokens": 4096.0},
        {"decode_requests": 256.0, "kv_tokens": 256.0 * 1024},
        {"decode_requests": 16.0, "kv_tokens": 16.0 * 1024},
    ):
        ratio = one.clock.step_s(**work) / many.clock.step_s(**work)
        assert 1.0 < ratio < gpus


def test_n_gpus_leave_more_than_n_times_the_cache_of_one() -> None:
    """The weights stand in their memory once."""
    one, four = engine_profile("Qwen3-32B@h100_sxm"), engine_profile("Qwen3-32B@h100_sxm/4")
    assert (one.gpus, four.gpus) == (1, 4)
    assert one.cache_tokens and four.cache_tokens == int((0.9 * 80e9 * 4 - 65.5e9) / 262_144) > 4 * one.cache_tokens


MEASURED_TPOT_MS = {2: {8: 16.4783, 32: 20.9956}, 4: {8: 10.7295, 32: 14.1821}, 8: {8: 8.0468, 32: 10.897}}


def test_tensor_parallelism_scales_as_it_was_measured_to() -> None:
    """Derived steps lack small kernels, launches and scheduling: all are too short, but alike for 2, 4 and 8 GPUs."""
    shares = {
        gpus: np.mean([_tpot_s(gpus, clients) / (1e-3 * measured) for clients, measured in row.items()])
        for gpus, row in MEASURED_TPOT_MS.items()
    }
    assert all(0.75 < share < 0.95 for share in shares.values())
    assert max(shares.values()) - min(shares.values()) < 0.06


def _tpot_s(gpus: int, clients: int) -> float:
    profile = engine_profile(f"Qwen3-32B@h100_sxm/{gpus}")
    laws = length_law("constant:1024"), length_law("constant:512")
    work = synthetic("measured", *laws, 3 * clients, np.random.default_rng(0))
    engine = EngineConfig(total_blocks=(profile.cache_tokens or 0) // 16)
    finished = run(ClusterConfig(times=profile.times, engine=engine, clients=clients), work)
    return float(np.mean([request.tpot_s for request in finished.requests if request.tpot_s is not None]))


def test_an_all_reduce_takes_no_longer_than_a_larger_one_or_one_among_more_gpus() -> None:
    """So a launch that stalled on record does not count."""
    sizes = np.array([1e3, 1e6, 1e9])
    measured = _AllReduce(bytes=sizes, ms={2: np.array([0.04, 0.01, 3.0]), 4: np.array([0.03, 0.02, 2.0])})
    assert [measured.at(2, size) for size in (1e3, 1e6, 1e9)] == [0.01, 0.01, 2.0]
    assert [measured.at(4, size) for size in (1e3, 1e6, 1e9)] == [0.02, 0.02, 2.0]


def test_a_gemm_that_was_not_measured_is_scaled_by_its_weights_and_a_batch_by_its_requests() -> None:
    kernels = _Kernels(
        gemm={(4096, 4096): {(1,): 1.0, (3,): 2.0}, (64, 64): {(1,): 9.0}},
        prefill={},
        decode={(8, 1): {(16, 511): 1.0, (32, 511): 1.5, (64, 127): 7.0}},
    )
    assert kernels.gemm_ms(8192, 4096, 2) == pytest.approx(2 * 1.5)
    assert [kernels.decode_ms((8, 1), requests, 512) for requests in (16, 32, 64)] == [1.0, 1.5, 3.0]
