"""`sluice simulate` and `sluice plan`, from their arguments to what they write."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.command import cli
from deployments.command.calibrate import write_profile
from deployments.config.application import AppConfig
from deployments.config.scheduler import SchedulerSettings
from policies.errors import ConfigError, InputError, SluiceError
from policies.papers.auto_literal import AutoLiteralConfig
from policies.router.promise import Promise
from policies.types import StepCoefficients, StepTimes
from simulator import commands, planner
from simulator.cluster import run as simulated
from simulator.commands import DEFAULT_ENGINE
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.metrics import GapHistogram
from simulator.planner import Tried, _try
from simulator.predictors import predicted
from simulator.presets import FEATURES, system, without
from simulator.report import Target, parse_target, summary
from simulator.workload import length_law, poisson, synthetic

pytestmark = pytest.mark.long

H100, L40S = "Llama-3.1-8B@h100_sxm", "Llama-3.1-8B@l40s"
FEW = ("--requests", "24", "--arrivals", "poisson:20")


def run(*argv: str) -> None:
    options = cli.parse(argv)
    options.run(options)


def test_a_simulation_writes_the_same_bytes_for_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, seed in zip(paths, ("3", "3", "4"), strict=True):
        run("simulate", *FEW, "--seed", seed, "--json", str(path))
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other
    assert "TTFT p99" in capsys.readouterr().out


def test_a_class_that_fills_idle_capacity_is_one_of_the_trace_and_has_an_order(tmp_path: Path) -> None:
    trace, wrote = tmp_path / "two.csv", tmp_path / "run.json"
    rows = [f"{number / 50},{100 + number},50,{('chat', 'nightly')[number % 2]}" for number in range(60)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows]))
    given = ("simulate", "--trace", str(trace), "--slots", "4", "--json", str(wrote), "--target", "*:600:1")
    run(*given, "--fills-idle", "nightly:shortest_first")
    classes = json.loads(wrote.read_text())["classes"]
    assert classes["chat"]["ttft_p99_s"] < 0.5 * classes["nightly"]["ttft_p99_s"]
    with pytest.raises(InputError, match="--fills-idle of classes that no request has: batch; there are: chat, n"):
        run(*given, "--fills-idle", "batch")
    with pytest.raises(ConfigError, match="CLASS:ORDER with one of"):
        run(*given, "--fills-idle", "nightly:sjf")
    with pytest.raises(ConfigError, match="--system sluice"):
        run(*given, "--fills-idle", "nightly", "--system", "stock")


def test_the_numbers_of_a_simulation_add_up(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run("simulate", *FEW, "--system", "stock", "--json", str(path))
    numbers = json.loads(path.read_text())
    assert numbers["requests"] == numbers["classes"]["*"]["requests"] == 24
    assert sum(numbers["phase_fractions"].values()) == pytest.approx(1.0)
    assert numbers["ttft_s"]["p50"] <= numbers["ttft_s"]["p90"] <= numbers["ttft_s"]["p99"] <= numbers["makespan_s"]
    assert numbers["itl_s"]["mean"] == pytest.approx(numbers["tpot_s"]["mean"], rel=0.2)


def test_a_report_is_one_file_and_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = tmp_path / "report.html"
    run("simulate", *FEW, "--html", str(report))
    assert list(tmp_path.iterdir()) == [report] and "Time to first token" in report.read_text()


def test_what_is_told_of_a_trace_stands_before_the_error_that_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n2024-01-01T00:00:00Z,10,5\n")
    with pytest.raises(InputError, match="line 2: timestamp is"):
        run("simulate", "--trace", str(trace))
    assert "own.csv: read as ServeGen's" in capsys.readouterr().err


def test_the_first_requests_of_a_trace_keep_its_times_also_where_they_come_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "own.csv", tmp_path / "out.json"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "0,10,5\n" * 9 + "8,10,5\n")
    run("simulate", "--trace", str(trace), "--requests", "9", "--json", str(out))
    assert "no arrival times" not in capsys.readouterr().err
    assert json.loads(out.read_text())["makespan_s"] < 0.2


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--requests", "-3", "--requests must be at least 1, got -3"),
        ("--prompt-tokens", "-4", "--prompt-tokens must be at least 1"),
        ("--seed", "-1", "--seed must be at least 0"),
        ("--speed", "inf", "--speed must be positive and finite"),
        ("--target", "*:nan:1", "a target is CLASS:TTFT_S:TPOT_S"),
        ("--predictor", "noise:nan", "must be finite"),
        ("--predictor", "trace", "own has no predicted_output_tokens"),
    ],
)
def test_a_number_that_means_nothing_is_refused(option: str, value: str, why: str, tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,10,5\n")
    with pytest.raises(InputError) as refused:
        run("simulate", "--trace", str(trace), option, value)
    assert why in str(refused.value)


def test_a_target_that_no_batch_keeps_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    args = '{"itl_target_s": 1e-5, "window_steps": 4}'
    run("simulate", "--requests", "200", "--arrivals", "all", "--batch", "sla_constrained", "--batch-args", args)
    assert "at the end a batch of 1 misses 1e-05 s between tokens" in capsys.readouterr().err


def test_what_was_made_of_a_trace_is_printed_and_stands_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "mine.csv", tmp_path / "report.html"
    trace.write_text("prompt_tokens,output_tokens,colour\n10,20,red\n30,40,blue\n")
    run("simulate", "--trace", str(trace), "--html", str(page))
    errors, report = capsys.readouterr().err, page.read_text()
    for said in ("passed over: colour", "it has no arrival times: requests come as by --arrivals poisson:4"):
        assert said in errors and said in report


def test_a_trace_is_simulated_with_its_own_times_and_classes(tmp_path: Path) -> None:
    trace, out = tmp_path / "mine.csv", tmp_path / "out.json"
    rows = [f"{0.1 * n},200,{20 + n},{'chat' if n % 2 else 'batch'}" for n in range(40)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows]))
    run("simulate", "--trace", str(trace), "--target", "chat:1:0.05", "--target", "batch:inf:inf")
    run("simulate", "--trace", str(trace), "--target", "chat:1:0.05", "--json", str(out))
    with pytest.raises(InputError, match="no request has: chats; there are: batch, chat"):
        run("simulate", "--trace", str(trace), "--target", "chats:1:0.05")
    classes = json.loads(out.read_text())["classes"]
    assert classes["chat"]["attainment"] == 1.0
    assert classes["batch"]["attainment"] is None


TARGETS = ("--target", "chat:0.0000001:1", "--target", "batch:60:1")


def two_classes(path: Path) -> Path:
    rows = [f"{0.1 * n},200,{1 if n < 20 else 30},{'chat' if n % 2 else 'batch'}" for n in range(40)]
    text = "\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows])
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_requests_in_time_are_counted_by_class_and_in_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = two_classes(tmp_path / "mine.csv.gz"), tmp_path / "out.json"
    run("simulate", "--trace", str(trace), *TARGETS, "--json", str(out))
    numbers = json.loads(out.read_text())
    shares = {name: (one["ttft_met"], one["tpot_met"], one["attainment"]) for name, one in numbers["classes"].items()}
    assert shares == {"chat": (0.0, 1.0, 0.0), "batch": (1.0, 1.0, 1.0)}
    assert numbers["in_time"]["attainment"] == 0.5
    assert numbers["in_time"]["goodput_per_s"] == pytest.approx(20 / numbers["makespan_s"])
    assert [line.split()[:5] for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["class", "batch", "20", "0", "100.0%"],
        ["class", "chat", "20", "0", "0.0%"],
        ["all", "40", "0", "50.0%", "50.0%"],
    ]


def test_stock_refuses_by_vllms_own_options(tmp_path: Path) -> None:
    trace, out = two_classes(tmp_path / "mine.csv.gz"), tmp_path / "out.json"
    limits = ("--max-num-queued-reqs", "9", "--max-num-queued-tokens", "0", "--watermark", "0.05")
    argv = ("--trace", str(trace), *TARGETS, "--json", str(out), "--max-num-batched-tokens", "512")
    run("simulate", "--system", "stock", *argv, *limits)
    numbers = json.loads(out.read_text())
    assert (numbers["requests"], numbers["refused"], numbers["in_time"]["attainment"]) == (0, 40, 0.0)
    with pytest.raises(ConfigError, match="use them with system stock"):
        run("simulate", *argv, *limits)


def test_the_simulated_sluice_is_told_what_the_live_one_is() -> None:
    classes = {"chat": {"ttft_s": 0.5, "tpot_s": 0.03}, "batch": {"ttft_s": 60.0, "tpot_s": 1.0}}
    targets = {name: Target(ttft_s=each["ttft_s"], tpot_s=each["tpot_s"]) for name, each in classes.items()}
    live = AppConfig.model_validate({"model": "demo", "classes": classes, "default_class": "batch"})
    profile = engine_profile(L40S)
    simulated = system("sluice", profile, EngineConfig(), 1, targets)
    assert (simulated.order, simulated.promises) == (live.order.policy, live.promises())
    argv = live.engine_argv()
    settings = SchedulerSettings.of_vllm(json.loads(argv[argv.index("--additional-config") + 1]))
    told = AutoLiteralConfig(**simulated.batch_settings)
    assert told == settings.auto_config(profile.times)


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        ({"memory": "exact"}, {"memory": "linear"}),
        ({"memory": "exact"}, {"memory_basis": "resident"}),
        ({"memory": "exact"}, {"overflow_probability": 0.3}),
        ({"sla": "search"}, {"itl_target_s": 0.02}),
        ({"refill": 1}, {"refill": 16}),
        ({}, {"phase_rule": "threshold"}),
        ({}, {"phase_rule": "ifr"}),
        ({}, {"bounds_exclusive": True}),
        ({}, {"priority_margin_fraction": -1.0}),
        ({"priority_margin_fraction": -0.15}, {"mode_rule": "crossover"}),
    ],
    ids=str,
)
@pytest.mark.long
def test_rules_of_the_papers_are_simulated_as_they_are_served(
    tmp_path: Path, base: dict[str, Any], changed: dict[str, Any]
) -> None:
    load = ("--requests", "250", "--outputs", "lognormal:150:1", "--arrivals", "all", "--slots", "32")
    numbers = []
    mode = "auto" if "priority_margin_fraction" in base | changed else "exclusive"
    for rules in (base, base | changed):
        out = tmp_path / "out.json"
        told = ("--batch", "auto", "--batch-args", json.dumps({"mode": mode, "papers": rules}))
        run("simulate", *load, "--cache-tokens", "12000", *told, "--json", str(out))
        numbers.append(json.loads(out.read_text()))
    assert numbers[0]["makespan_s"] != numbers[1]["makespan_s"]


def test_settings_of_the_system_s_own_policy_lie_over_those_that_it_has() -> None:
    profile, targets = engine_profile(L40S), {"*": Target(ttft_s=0.5, tpot_s=0.03)}
    whole = system("sluice", profile, EngineConfig(), 1, targets)
    changed = system("sluice", profile, EngineConfig(), 1, targets, batch="auto", batch_settings={"mode": "exclusive"})
    other = system("sluice", profile, EngineConfig(), 1, targets, batch="memory_aware", batch_settings={"window": 500})
    assert changed.batch_settings == {**whole.batch_settings, "mode": "exclusive"}
    assert other.batch_settings == {"window": 500}


def plan(path: Path, *argv: str) -> Any:
    run("plan", *FEW, "--json", str(path), *argv)
    return json.loads(path.read_text())


def test_a_plan_in_which_a_target_and_a_class_do_not_meet_is_refused(tmp_path: Path) -> None:
    """It would judge nobody, and find everything good enough."""
    with pytest.raises(InputError, match="no request has: chat; there are: none"):
        run("plan", *FEW, "--target", "chat:1:0.05")
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,slo_class\n0,9,9,chat\n1,9,9,batch\n")
    with pytest.raises(InputError, match="no target for batch"):
        run("plan", "--trace", str(trace), "--target", "chat:1:0.05")


def test_what_calibrate_writes_is_an_engine_to_simulate(tmp_path: Path) -> None:
    times = StepTimes(
        prefill=StepCoefficients(overhead_s=0.004, prefill_s=5e-5),
        decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=5e-8),
        mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=5e-8, interference_s=1e-6),
    )
    write_profile(tmp_path / "mine.csv", times, (512, 4096), model="mine", gpu="mine")
    read = engine_profile(str(tmp_path / "mine.csv")).times
    for held in ({"prefill_tokens": 500}, {"decode_requests": 9, "kv_tokens": 9000}):
        assert read.step_s(**held) == pytest.approx(times.step_s(**held))
    mixed = {"prefill_tokens": 500, "decode_requests": 9, "kv_tokens": 9000}
    assert read.step_s(**mixed) == pytest.approx(times.step_s(**mixed))
    run("simulate", *FEW, "--engine", str(tmp_path / "mine.csv"), "--cache-tokens", "40000")


def test_a_plan_names_the_cheapest_that_meets_the_target_and_what_each_feature_adds(tmp_path: Path) -> None:
    asked = ("--engine", H100, "--engine", L40S, "--price", f"{H100}=3", "--price", f"{L40S}=1", "--replicas", "1,2")
    found = plan(tmp_path / "plan.json", *asked, "--target", "*:10:1")
    assert found["cheapest"]["1.0"]["point"]["engine"] == L40S
    assert found["cheapest"]["1.0"]["cost"] == pytest.approx(1.0)
    assert set(found["features"]["1.0"]) == {*FEATURES, "everything (against stock)"}


def test_every_feature_of_a_plan_changes_what_is_simulated_somewhere() -> None:
    """One that cannot would cost a simulation for each load, and be shown as measured."""
    rng = np.random.default_rng(0)
    drawn = synthetic("drawn", length_law("lognormal:600:1"), length_law("exponential:30"), 420, rng)
    labelled = replace(drawn.arriving(poisson(20.0, 420, rng)), slo_class=("chat", "batch") * 210)
    given = predicted(labelled, "noise:0.44", rng)
    targets = {"chat": Target(ttft_s=0.5, tpot_s=0.02), "batch": Target(ttft_s=10.0, tpot_s=1.0)}
    engine = EngineConfig(slots=16, total_blocks=300, max_batch_tokens=1024)
    idle = set(FEATURES)
    profile = engine_profile(L40S)
    mixed = replace(profile.times.mixed, prefill_s=1.5 * profile.times.mixed.prefill_s)
    dear = replace(profile, times=replace(profile.times, mixed=mixed), clock=None)
    for on, promised in ((profile, targets), (dear, None)):  # phases are for requests that were promised nothing
        whole = system("sluice", on, engine, 2, promised)
        numbers = summary(simulated(whole, given))
        idle = {name for name in idle if summary(simulated(without(name, whole), given)) == numbers}
    assert not idle


def test_a_plan_does_not_depend_on_how_many_cores_make_it(tmp_path: Path) -> None:
    one, two = (plan(tmp_path / f"{n}.json", "--replicas", "1", "--processes", n, "--engine", H100) for n in ("1", "2"))
    assert one == two


def test_a_plan_tries_the_cheapest_first_and_nothing_dearer_than_its_answer(tmp_path: Path) -> None:
    asked = ("--engine", H100, "--engine", L40S, "--price", f"{H100}=3", "--replicas", "2,1", "--target", "*:10:1")
    few = plan(tmp_path / "few.json", *asked)
    assert [each["cost"] for each in few["tried"]] == pytest.approx([1.0, 1.0]), "both systems, for they cost the same"
    found = plan(tmp_path / "all.json", *asked, "--all")
    assert len(found["tried"]) == 2 * (2 + 3)  # one replica cannot be split
    assert found["cheapest"] == few["cheapest"]
    costs = [each["cost"] for each in found["tried"]]
    assert costs == pytest.approx(sorted(costs))
    hard = plan(tmp_path / "hard.json", *asked, "--target", "*:0.000001:0.000001", "--requests", "6")
    assert len(hard["tried"]) == 2 * (2 + 3), "while nothing is good enough"


def test_a_plan_says_what_it_knows_as_soon_as_it_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def tried(*arguments: Any) -> Tried:
        events.append("runs")
        return _try(*arguments)

    def printed(line: str, *, flush: bool) -> None:
        assert flush, "into a pipe too"
        events.append(line.split()[0] if line else "")

    monkeypatch.setattr(planner, "_try", tried)
    monkeypatch.setattr(commands, "print", printed, raising=False)
    asked = ("--requests", "6", "--replicas", "1", "--systems", "stock", "--processes", "1")
    plan(tmp_path / "plan.json", *asked)
    features = [event for name in FEATURES for event in ("runs", name.split()[0])]
    answered = ["engine", "runs", DEFAULT_ENGINE, "95%", "what"]
    assert events == [*answered, "runs", *features, "everything", ""], "stock was tried before"


def test_what_nothing_reaches_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path / "plan.json", "--requests", "6", "--replicas", "1", "--target", "*:0.000001:0.000001")
    assert found["cheapest"] == {"1.0": None}
    assert "nothing that was tried does it; the most requests in time per cost: 1 x " in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["llama2-70b@h100-80gb/4", "Qwen3-32B@h100_sxm/4"])
def test_goodput_is_counted_per_gpu_of_each_replica(tmp_path: Path, engine: str) -> None:
    found = plan(tmp_path / "plan.json", "--engine", engine, "--replicas", "2", "--target", "*:60:1")
    whole = found["tried"][0]
    assert whole["in_time"] == 1.0
    assert whole["goodput_per_s"] == pytest.approx(24 / whole["numbers"]["makespan_s"])
    assert whole["goodput_per_gpu_s"] == pytest.approx(whole["goodput_per_s"] / 8)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("simulate", "--target", "chat"), "CLASS:TTFT_S:TPOT_S"),
        (("simulate", "--engine", "bloom-176b@a100-80gb/8"), "--cache-tokens"),
        (("simulate", "--engine", "a", "--engine", "b"), "sluice plan"),
        (("simulate", "--speed", "0"), "--speed"),
        (("simulate", "--batch", "fcfs"), "batch policy"),
        (("plan", "--price", "cheap"), "ENGINE=NUMBER"),
        (("plan", "--price", "other=3"), "not planned with"),
        (("plan", "--price", f"{L40S}=nan", "--engine", L40S), "prices must be at least 0"),
        (("plan", "--offload-gb", "0"), "--offload-gb must be positive"),
        (("simulate", "--offload-gb", "1", "--offload-gb-per-s", "nan"), "--offload-gb-per-s must be positive"),
        (("plan", "--load", "nan"), "loads must be positive"),
        (("plan", "--replicas", "0"), "must be positive"),
        (("plan", "--systems", "magic"), "unknown system"),
        (("plan", "--processes", "0"), "processes"),
    ],
)
def test_wrong_arguments_are_refused_with_the_way_out(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        run(*argv)


def test_an_output_without_a_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        run("plan", *FEW, "--json", str(tmp_path / "absent" / "plan.json"))


def test_the_command_says_what_is_wrong_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="sluice: unknown predictor"):
        cli.main(["simulate", "--predictor", "psychic"])
    assert issubclass(ConfigError, SluiceError)


def test_engines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run("simulate", "--list-engines")
    assert "Qwen3-8B@H200" in capsys.readouterr().out.split()


def test_a_target_is_read_from_its_end_so_that_classes_may_hold_colons() -> None:
    assert parse_target("a:b:1:0.05") == ("a:b", Target(ttft_s=1.0, tpot_s=0.05))


def test_a_target_may_be_the_whole_answer_by_a_time() -> None:
    assert parse_target("agents:-:-:8") == ("agents", Target(e2e_s=8.0))
    assert parse_target("*:1:-:8.5") == ("*", Target(ttft_s=1.0, e2e_s=8.5))
    assert parse_target("*:1:-:8.5")[1].promise() == Promise(ttft_s=1.0, e2e_s=8.5)


@pytest.mark.parametrize("text", ["a:-", "a:0:1", "a:1:2:0", "a:1", "a:1:2:3s", ":1:2"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a target is CLASS:TTFT_S:TPOT_S"):
        parse_target(text)


def test_percentiles_of_gaps_are_right_to_a_percent() -> None:
    rng = np.random.default_rng(0)
    gaps_s = rng.lognormal(-4.0, 1.0, 100_000)
    histogram = GapHistogram()
    for part in np.split(gaps_s, 100):
        histogram.add(part)
    histogram.add(np.full(10, 0.02))
    for percent in (1, 50, 90, 99.9):
        assert histogram.percentile(percent) == pytest.approx(float(np.percentile(gaps_s, percent)), rel=0.015)
    assert histogram.mean() == pytest.approx(gaps_s.mean(), rel=0.01)
