import dataclasses

from bench.cpu import Role
from bench.load import LoadReport
from bench.pairing import Pairing, Plan, Run
from bench.report import Comparison, as_markdown


def make_load(*, requests_per_s: float, ttft_s: float | None, errors: dict[str, int] | None = None) -> LoadReport:
    return LoadReport(
        concurrency=1,
        answered=10,
        errors=errors or {},
        duration_s=4.0,
        output_tokens=1000,
        requests_per_s=requests_per_s,
        output_tokens_per_s=requests_per_s * 100,
        ttft_p50_s=ttft_s,
        ttft_p99_s=ttft_s,
        itl_p50_s=0.002,
        itl_p99_s=0.002,
        chunks_per_token=0.95,
        client_cpu_s=0.02,
    )


def make_run(system: str, repeat: int, load: LoadReport) -> Run:
    cpu_s = {Role.ENGINE_CORE: 1.0, Role.ROUTER: 0.06, Role.RAY: 0.04}
    return Run(system=system, concurrency=1, repeat=repeat, load=load, cpu_s=cpu_s, other_programs_cpu_s=2.0)


def make_comparison(ours: list[LoadReport], theirs: list[LoadReport]) -> Comparison:
    runs = [
        make_run(name, repeat, load)
        for name, loads in (("ours", ours), ("plain", theirs))
        for repeat, load in enumerate(loads)
    ]
    idle = {"plain": {Role.ENGINE_CORE: 0.012}, "ours": {Role.RAY: 0.008, Role.ROUTER: 0.001}}
    pairing = Pairing(baseline="plain", contender="ours", idle_cpu_cores=idle, runs=tuple(runs))
    return Comparison(
        machine="a machine",
        versions="vllm 0",
        model="demo",
        engine_arguments=("--enforce-eager",),
        plan=Plan(concurrency=(1,), repeats=len(ours)),
        pairings=(pairing,),
    )


SLOW_PAIR = make_load(requests_per_s=2.0, ttft_s=0.010)
FAST_PAIR = make_load(requests_per_s=4.0, ttft_s=0.020)


def row_of(markdown: str, *start: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    return next(row for row in rows if row[: len(start)] == list(start))


def test_rows_hold_medians_and_the_ratio_is_paired() -> None:
    ours = [make_load(requests_per_s=1.0, ttft_s=0.011), make_load(requests_per_s=4.0, ttft_s=0.023)]
    markdown = as_markdown(make_comparison(ours, [SLOW_PAIR, FAST_PAIR]))
    assert row_of(markdown, "1", "plain")[2:5] == ["3.00", "300", "15.0"]
    assert row_of(markdown, "", "ours")[2:5] == ["2.50", "250", "17.0"]
    assert row_of(markdown, "", "ratio")[2] == "×0.75 [0.50, 1.00]"
    assert "Added TTFT p50 at concurrency 1, ms: +2.00 [+1.00, +3.00]." in markdown


def test_cpu_is_per_output_token_by_role_whole_and_above_idle() -> None:
    markdown = as_markdown(make_comparison([SLOW_PAIR], [SLOW_PAIR]))
    titles = row_of(markdown, "CPU, µs per output token")
    assert titles[2:] == ["c = 1", "c = 1, above idle", "idle, % of a core"]
    assert row_of(markdown, "router", "ours") == ["router", "ours", "60.0", "56.0", "0.10"]
    # 0.008 cores over 4 s and 1000 tokens are 32 µs a token.
    assert row_of(markdown, "Ray", "ours") == ["Ray", "ours", "40.0", "8.0", "0.80"]
    assert row_of(markdown, "all but the engine", "ours")[2:] == ["100.0", "64.0", "0.90"]
    assert row_of(markdown, "all but the engine", "plain")[2:] == ["100.0", "100.0", "0.00"]
    assert row_of(markdown, "engine core", "plain")[2:] == ["1000.0", "952.0", "1.20"]
    assert row_of(markdown, "1", "plain")[-2:] == ["100", "1000"]


def test_what_both_systems_take_from_each_other_is_told() -> None:
    markdown = as_markdown(make_comparison([SLOW_PAIR], [SLOW_PAIR]))
    assert "use 1.20 % (plain) and 0.90 % (ours) of a core" in markdown


def test_many_repeats_have_an_interval_of_the_median_too() -> None:
    loads = [make_load(requests_per_s=float(rate), ttft_s=0.01) for rate in range(1, 13)]
    one = make_load(requests_per_s=1.0, ttft_s=0.01)
    markdown = as_markdown(make_comparison(loads, 12 * [one]))
    assert row_of(markdown, "", "ratio")[2] == "×6.50 [1.00, 12.00] (3.00, 10.00)"
    assert "number 3 and number 10: the true median lies between them with 96%." in markdown


def test_the_machine_is_blamed_where_others_used_it() -> None:
    markdown = as_markdown(make_comparison([SLOW_PAIR], [SLOW_PAIR]))
    assert "Other programs used 0.50 cores during the runs (most: 0.50). They slowed these runs" in markdown
    assert "No request failed." in markdown


def test_a_quiet_machine_is_not_blamed() -> None:
    comparison = make_comparison([SLOW_PAIR], [SLOW_PAIR])
    (pairing,) = comparison.pairings
    quiet = tuple(dataclasses.replace(run, other_programs_cpu_s=0.4) for run in pairing.runs)
    markdown = as_markdown(dataclasses.replace(comparison, pairings=(dataclasses.replace(pairing, runs=quiet),)))
    assert "Other programs used 0.10 cores" in markdown
    assert "slowed" not in markdown


def test_failed_requests_are_shown_where_they_happened() -> None:
    failing = make_load(requests_per_s=1.0, ttft_s=0.01, errors={"HTTP 503: busy": 4})
    comparison = make_comparison([SLOW_PAIR, failing], [SLOW_PAIR, SLOW_PAIR])
    assert comparison.failed_requests == 4
    assert "**Failed** at concurrency 1, ours, repeat 2: error ×4: HTTP 503: busy" in as_markdown(comparison)


def test_a_latency_that_a_repeat_lacks_is_a_dash_and_not_a_ratio_of_others() -> None:
    without = make_load(requests_per_s=1.0, ttft_s=None)
    markdown = as_markdown(make_comparison([SLOW_PAIR, without], [SLOW_PAIR, FAST_PAIR]))
    assert row_of(markdown, "", "ours")[4] == "-"
    assert row_of(markdown, "", "ratio")[4] == "-"
    assert "Added TTFT p50 at concurrency 1, ms: unknown." in markdown


def test_repeats_are_paired_by_their_number_and_not_by_their_order_in_time() -> None:
    comparison = make_comparison([SLOW_PAIR, FAST_PAIR], [SLOW_PAIR, FAST_PAIR])
    (pairing,) = comparison.pairings
    turned = dataclasses.replace(pairing, runs=pairing.runs[::-1])
    markdown = as_markdown(dataclasses.replace(comparison, pairings=(turned,)))
    assert row_of(markdown, "", "ratio")[2] == "×1.00 [1.00, 1.00]"
