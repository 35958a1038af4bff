"""The commands `sluice simulate` and `sluice plan`."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from tqdm import tqdm

from policies.engine.plans import out_of_reach
from policies.errors import ConfigError, InputError
from policies.router.order import IdleOrder
from policies.router.prefill_decode import PrefillDecodeConfig, TransferTimes
from policies.strict_text import json_value
from simulator import inputs
from simulator.cluster import ClusterConfig, Run, run
from simulator.curves import curves
from simulator.disaggregated import PoolsConfig, run_disaggregated
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile, engine_names, engine_profile
from simulator.plan_page import Answered, plan_page
from simulator.planner import (
    PLANNED,
    Change,
    PlanConfig,
    Point,
    Trials,
    Tried,
    ablations,
    cheapest,
    contribution,
    most_in_time,
    workers,
)
from simulator.predictors import predicted
from simulator.presets import SYSTEMS, system
from simulator.real_times import RealTimes
from simulator.report import Target, check_classes, check_targets, parse_target, summary, table
from simulator.run_page import run_page
from simulator.tier import TierConfig
from simulator.traces import read_workload
from simulator.workload import Workload, arrival_law, length_law, synthetic

DEFAULT_ENGINE = "kernels_rtxpro6000_llama-3.1-8b"
DEFAULT_TARGET = "*:2:0.1"

_SIMULATE_EPILOG = """\
examples:
  sluice simulate                                        2000 made-up requests, one engine
  sluice simulate --trace mine.csv --engine Llama-3.1-8B@h100_sxm --replicas 4
  sluice simulate --trace mine.csv --system stock        the same under plain vLLM and a plain balancer
  sluice simulate --trace mine.csv --system stock --max-num-queued-tokens 10000   the same, with vLLM's own refusals
  sluice simulate --trace mine.csv --speed 2 --html report.html
  sluice simulate --trace mine.csv --fills-idle nightly:shortest_first   offline work behind all else, by prompt length
  sluice simulate --prompts lognormal:800:1 --outputs exponential:300 --arrivals gamma:8:3 --requests 10000
  sluice simulate --batch auto --batch-args '{"mode": "exclusive", "papers": {"phase_rule": "threshold"}}'
  sluice simulate --engine steps.csv --cache-tokens 40000  on your own engine, from its measured steps

A trace is CSV or JSON Lines (gzipped or not) with the columns prompt_tokens and output_tokens, and arrival_s,
slo_class, predicted_output_tokens, reusable_prefix_tokens, api_key if you have them. Traces of Azure, BurstGPT,
Mooncake, ServeGen and ShareGPT are read as they are, and so is what guidellm, inference-perf and `vllm bench serve`
write of each request (docs/guides/simulate.md). `--list-engines` lists the built-in engines;
a calibration of your own is a CSV file with a row per step (prefill_tokens, decode_requests, kv_tokens, step_s)."""

_PLAN_EPILOG = """\
examples:
  sluice plan --trace mine.csv --engine Llama-3.1-8B@h100_sxm --engine Llama-3.1-8B@l40s \\
      --price Llama-3.1-8B@h100_sxm=2.5 --price Llama-3.1-8B@l40s=0.8 --replicas 1,2,4 --target '*:1:0.05'
  sluice plan --trace mine.csv --load 1,1.5,2 --html plan.html --json plan.json

The answer, for each load, is the cheapest combination in which the given share of every class meets its target, or,
where none does, the one with the most requests in time per cost. Then comes what each feature of Sluice adds there: the
change when it is taken out, 0 where it adds nothing. goodput/s counts requests in time, beside it those per GPU. The
cheapest are tried first, and what costs more than the answer is not tried without --all."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", style: str) -> None:
    """Add both commands; what runs one is its default `run`, which also wants `command_line`, for reports to name it.

    Args:
        style: of reports, CSS.
    """
    one = _command(commands, "simulate", "what would a serving system do with this traffic?", _SIMULATE_EPILOG)
    one.add_argument("--system", choices=SYSTEMS, default="sluice", help="policies (default: %(default)s)")
    one.add_argument("--replicas", type=int, default=1, help="engines (default: %(default)s)")
    one.add_argument("--batch", help="another batch policy, such as memory_aware, or your own: package.module:Class")
    one.add_argument("--batch-args", default="{}", metavar="JSON", help="settings of --batch: '{\"window\": 500}'")
    one.add_argument("--order", help="another order of the queue, such as fcfs, or your own: package.module:Class")
    one.add_argument("--order-args", default="{}", metavar="JSON", help="settings of --order")
    one.add_argument(
        "--fills-idle",
        action="append",
        default=[],
        metavar="CLASS[:ORDER]",
        help=f"a class that takes what others leave; ORDER is {', '.join(get_args(IdleOrder))} (default: deadline)",
    )
    one.add_argument("--clients", type=int, help="closed loop: this many requests in the system, arrival times ignored")
    one.add_argument("--prefill-replicas", type=int, help="engines besides, that only prefill (P/D pools)")
    one.add_argument(
        "--split", choices=("always", "auto"), default="always", help="which requests go there (default: %(default)s)"
    )
    one.add_argument(
        "--real-times",
        metavar="NAME=NUMBER,...",
        help="how engines' steps differ from what policies believe: factor, wander, wander_steps, "
        "between_s, between_decode_s (default: not at all)",
    )
    refusals = one.add_argument_group("vLLM's own refusals (--system stock)")
    refusals.add_argument(
        "--max-num-queued-reqs",
        type=int,
        metavar="N",
        help="most requests in an engine at once, waiting or running; new ones are refused (default: no limit)",
    )
    refusals.add_argument(
        "--max-num-queued-tokens",
        type=int,
        metavar="N",
        help="most prompt tokens of requests without a first token, a partly read prompt counted whole; "
        "new ones are refused when the limit is reached (default: no limit)",
    )
    one.add_argument("--list-engines", action="store_true", help="list the engines that are built in, and end")
    plan = _command(commands, "plan", "which replicas, and what does each feature add?", _PLAN_EPILOG)
    plan.add_argument("--replicas", default="1,2,4", help="counts to try (default: %(default)s)")
    plan.add_argument(
        "--systems", default=",".join(PLANNED), help="systems to try; split is sluice with P/D pools (%(default)s)"
    )
    plan.add_argument("--load", default="1", help="factors on the arrival rate (default: %(default)s)")
    plan.add_argument("--price", action="append", default=[], metavar="ENGINE=PRICE", help="per replica (default: 1)")
    plan.add_argument("--attainment", type=float, default=0.95, help="share that must meet the target (default: 0.95)")
    plan.add_argument("--all", action="store_true", help="try also what costs more than the answer")
    plan.add_argument("--processes", type=int, default=workers(64), help="simulations at once (default: %(default)s)")
    one.set_defaults(run=simulate, style=style)
    plan.set_defaults(run=make_plan, style=style)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=what, description=what, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    traffic = command.add_argument_group("traffic")
    traffic.add_argument("--trace", type=Path, help="file of requests or of lengths")
    traffic.add_argument("--prompt-tokens", type=int, help="for files without prompts")
    traffic.add_argument("--prompts", default="lognormal:600:1", help="law without a trace (default: %(default)s)")
    traffic.add_argument("--outputs", default="lognormal:250:0.8", help="law without a trace (default: %(default)s)")
    traffic.add_argument("--requests", type=int, help="how many: the first of a trace, or made up (default: 2000)")
    traffic.add_argument("--arrivals", help="trace, poisson:RATE, gamma:RATE:CV, square:LOW:HIGH:PERIOD_S or all")
    traffic.add_argument("--speed", type=float, default=1.0, help="factor on the arrival rate (default: %(default)s)")
    traffic.add_argument(
        "--predictor", default="noise:0.44", help="oracle, none, trace, noise:SCALE, neighbour:BINS:P (%(default)s)"
    )
    traffic.add_argument("--no-prefix-reuse", action="store_true", help="ignore the trace's reusable prefixes")
    traffic.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="CLASS:TTFT_S:TPOT_S",
        help=f"what Sluice is told and all are judged by (default: judged by {DEFAULT_TARGET})",
    )
    traffic.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    engine = command.add_argument_group("engine")
    engine.add_argument("--engine", action="append", default=[], help=f"name or file (default: {DEFAULT_ENGINE})")
    engine.add_argument("--slots", type=int, default=256, help="max_num_seqs (default: %(default)s)")
    engine.add_argument(
        "--max-batch-tokens", "--max-num-batched-tokens", type=int, default=8192, help="per step (default: %(default)s)"
    )
    engine.add_argument(
        "--watermark",
        type=float,
        default=0.0,
        help="fraction of KV cache blocks to keep free when a request starts beside others (default: %(default)s)",
    )
    engine.add_argument("--transfer-gb-per-s", type=float, default=25.0, help="of KV between pools (%(default)s)")
    engine.add_argument("--kv-bytes-per-token", type=int, default=131_072, help="moved (default: %(default)s)")
    engine.add_argument(
        "--offload-gb", type=float, help="memory of the host for KV cache, of each replica (default: none)"
    )
    engine.add_argument("--offload-gb-per-s", type=float, default=50.0, help="loaded from there (%(default)s)")
    engine.add_argument("--cache-tokens", type=int, help="KV cache (default: what the GPU's memory leaves)")
    output = command.add_argument_group("output")
    output.add_argument("--json", type=Path, help="write all numbers here")
    output.add_argument("--html", type=Path, help="write a report with plots here: one file, which needs no other")
    return command


def simulate(options: argparse.Namespace) -> None:
    """`sluice simulate`."""
    if options.list_engines:
        print("\n".join(engine_names()))
        return
    if len(options.engine) > 1:
        raise ConfigError("simulate takes one --engine; `sluice plan` compares several")
    _check_outputs(options)
    workload, targets = _workload(options), _targets(options)
    check_targets(targets, workload, all_classes=False)
    check_classes("--fills-idle", _fills_idle(options), workload)
    profile = engine_profile((options.engine or [DEFAULT_ENGINE])[0])
    config = _config(options, profile)
    with tqdm(total=len(workload), unit="request", disable=None) as bar:
        finished = _run(options, config, workload, bar.update)
    for said in dict.fromkeys(out_of_reach([engine.policy]) for engine in finished.engines):
        if said is not None:
            print(f"at the end {said}", file=sys.stderr)
    numbers = {
        "system": options.system,
        "engine": profile.name,
        "workload": workload.name,
        **summary(finished, targets),
    }
    print(table(numbers))
    _write_json(options.json, numbers)
    if options.html is not None:
        given = _inputs_of_run(options, workload, config, profile)
        drawn = curves(finished, targets)
        options.html.write_text(run_page(numbers, drawn, given, options.command_line, options.style))


def _inputs_of_run(
    options: argparse.Namespace, workload: Workload, config: ClusterConfig, profile: EngineProfile
) -> dict[str, inputs.Group]:
    return {
        "Traffic": inputs.traffic(options, workload),
        "Targets": inputs.promises(_targets(options), told=bool(options.target)),
        "System": inputs.served(options, config),
        f"Engine {profile.name}": inputs.engine(profile, config.engine),
    }


def _run(
    options: argparse.Namespace, config: ClusterConfig, workload: Workload, on_progress: Callable[[int], object]
) -> Run:
    if options.prefill_replicas is None:
        return run(config, workload, on_progress)
    pools = PoolsConfig(
        prefill_replicas=options.prefill_replicas,
        split=_split(options, options.split, 1 if options.split == "always" else 256),
        itl_targets_s={name: target.tpot_s for name, target in _targets(options).items()},
    )
    return run_disaggregated(config, pools, workload, on_progress)


def _split(options: argparse.Namespace, mode: Literal["always", "auto"], min_prompt_tokens: int) -> PrefillDecodeConfig:
    if options.transfer_gb_per_s <= 0:
        raise ConfigError(f"--transfer-gb-per-s must be positive, got {options.transfer_gb_per_s}")
    return PrefillDecodeConfig(
        mode=mode,
        min_prompt_tokens=min_prompt_tokens,
        max_batch_tokens=options.max_batch_tokens,
        transfer=TransferTimes(s_per_token=options.kv_bytes_per_token / (options.transfer_gb_per_s * 1e9)),
    )


def _config(options: argparse.Namespace, profile: EngineProfile) -> ClusterConfig:
    changes = {"clients": options.clients, **_other_policy(options, "batch"), **_other_policy(options, "order")}
    promised = _targets(options) if options.target else None
    refusing = {name: getattr(options, name) for name in ("max_num_queued_reqs", "max_num_queued_tokens")}
    engine = replace(_engine(options, profile), **refusing)
    config = system(options.system, profile, engine, options.replicas, promised, **changes)
    router = replace(config.router, fills_idle=_fills_idle(options))
    return replace(config, router=router, real_times=_real_times(options))


def _real_times(options: argparse.Namespace) -> RealTimes | None:
    return RealTimes.parsed(options.real_times) if options.real_times else None


def _fills_idle(options: argparse.Namespace) -> dict[str, IdleOrder]:
    """Raises ConfigError for an order that there is not, and where no order of Sluice is in force."""
    if options.fills_idle and options.system == "stock":
        raise ConfigError("--fills-idle is of --system sluice: stock serves all classes as they come")
    found: dict[str, IdleOrder] = {}
    for text in options.fills_idle:
        name, _, order = text.partition(":")
        known = next((each for each in get_args(IdleOrder) if each == (order or "deadline")), None)
        if known is None:
            raise ConfigError(
                f"--fills-idle takes CLASS or CLASS:ORDER with one of {get_args(IdleOrder)}, got {text!r}"
            )
        found[name] = known
    return found


def _other_policy(options: argparse.Namespace, family: Literal["batch", "order"]) -> dict[str, Any]:
    """Fields of ClusterConfig; none where the system's own policy stays."""
    name, text = getattr(options, family), getattr(options, f"{family}_args")
    try:
        settings = json_value(text)
    except ValueError as error:
        raise ConfigError(f"--{family}-args must be JSON, got {text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--{family}-args must be a JSON object of settings, got {text!r}")
    if not name and settings:
        raise ConfigError(f"--{family}-args needs --{family}")
    return {family: name, f"{family}_settings": settings} if name else {}


def _engine(options: argparse.Namespace, profile: EngineProfile) -> EngineConfig:
    return EngineConfig(
        slots=options.slots,
        total_blocks=profile.cache(options.cache_tokens) // EngineConfig().block_size,
        max_batch_tokens=options.max_batch_tokens,
        watermark=options.watermark,
        tier=_tier(options),
    )


def _tier(options: argparse.Namespace) -> TierConfig | None:
    """Raises ConfigError: its size or speed is not positive."""
    if options.offload_gb is None:
        return None
    for name in ("offload_gb", "offload_gb_per_s", "kv_bytes_per_token"):
        if not 0 < getattr(options, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive and finite, got {getattr(options, name)}")
    tokens = int(options.offload_gb * 1e9 / options.kv_bytes_per_token)
    return TierConfig(tokens=tokens, token_s=options.kv_bytes_per_token / (options.offload_gb_per_s * 1e9))


def _workload(options: argparse.Namespace) -> Workload:
    """Also settles `arrivals`, whose default depends on the trace."""
    for name, least in (("requests", 1), ("prompt_tokens", 1), ("seed", 0)):
        if (given := getattr(options, name)) is not None and given < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {given}")
    rng = np.random.default_rng(options.seed)
    if options.trace:
        options.told = list[str]()

        def tell(text: str) -> None:
            """At once: an error may follow from it."""
            options.told.append(text)
            print(f"{options.trace}: {text}", file=sys.stderr)

        workload = read_workload(options.trace, rng=rng, prompt_tokens=options.prompt_tokens, tell=tell)
        if not options.arrivals and not workload.rate:
            tell("it has no arrival times: requests come as by --arrivals poisson:4, unless you say how")
        options.arrivals = options.arrivals or ("trace" if workload.rate else "poisson:4")
        workload = workload.head(options.requests) if options.requests else workload
    else:
        laws = length_law(options.prompts), length_law(options.outputs)
        workload = synthetic("made-up requests", *laws, options.requests or 2000, rng)
        options.arrivals = options.arrivals or "poisson:4"
    if options.arrivals != "trace":
        workload = workload.arriving(arrival_law(options.arrivals)(len(workload), rng))
    if options.no_prefix_reuse:
        workload = workload.without_prefixes()
    if not 0 < options.speed < math.inf:
        raise InputError(f"--speed must be positive and finite, got {options.speed}")
    return predicted(workload.faster(options.speed), options.predictor, rng)


def _targets(options: argparse.Namespace) -> dict[str, Target]:
    return dict(parse_target(text) for text in options.target or [DEFAULT_TARGET])


def _check_outputs(options: argparse.Namespace) -> None:
    """Before anything runs: what comes out must have somewhere to go."""
    for path in (options.json, options.html):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} to write {path.name} to")


def _write_json(path: Path | None, numbers: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")


def make_plan(options: argparse.Namespace) -> None:
    """`sluice plan`. What is known is printed at once: every trial, and each load's answer before what features add."""
    _check_outputs(options)
    workload, config = _workload(options), _plan_config(options)
    check_targets(config.targets, workload, all_classes=True)
    tried = list[Tried]()
    answers: dict[str, Any] = {}
    loads: list[Answered] = []

    def say(line: str) -> None:
        print(line, flush=True)

    with Trials(config, workload, options.processes) as trials:
        for load in config.loads:
            say(_heading())
            points = config.points(load)
            for each in _watched(trials.until_answered(load), len(points)):
                tried.append(each)
                say(_line(each))
            best, most = cheapest(tried, config.attainment, load), most_in_time(tried, load)
            answers[str(load)] = None if best is None else asdict(best)
            say(text := _answer(load, best, most, config))
            at = (best or most).point
            of_load = [each for each in tried if each.point.load == load]
            has_tier = config.profiles[at.engine][1].tier is not None
            loads.append(Answered(load, of_load, text, at, _features(trials, at, say, has_tier=has_tier)))
    added = {str(each.load): each.features for each in loads}
    _write_json(options.json, {"tried": [asdict(each) for each in tried], "cheapest": answers, "features": added})
    if options.html is not None:
        given = _inputs_of_plan(options, workload, config)
        page = plan_page(workload.name, loads, config.attainment, given, options.command_line, options.style)
        options.html.write_text(page)


def _inputs_of_plan(options: argparse.Namespace, workload: Workload, config: PlanConfig) -> dict[str, inputs.Group]:
    return {
        "Traffic": inputs.traffic(options, workload),
        "Targets": inputs.promises(config.targets, told=config.told),
        "Plan": inputs.planned(config),
        **{
            f"Engine {name}": inputs.engine(profile, sizes, config.prices.get(name, 1.0))
            for name, (profile, sizes) in config.profiles.items()
        },
    }


def _features(trials: Trials, at: Point, say: Callable[[str], None], *, has_tier: bool) -> dict[str, Change]:
    """What each adds at that point."""
    say(f"  what each feature adds there ({at.replicas} x {at.engine}):")
    points = ablations(at, has_tier=has_tier)
    results, changes = _watched(trials.each(points), len(points)), dict[str, Change]()
    whole = next(results)
    for each in results:
        feature = each.point.without or "everything (against stock)"
        changes[feature] = contribution(whole, each)
        say(_contribution_line(feature, changes[feature]))
    say("")
    return changes


def _watched(trials: Iterable[Tried], most: int) -> Iterator[Tried]:
    """With a bar on a terminal, which is out of the way while one is dealt with."""
    with tqdm(total=most, unit="simulation", disable=None) as bar:
        for each in trials:
            bar.clear()
            yield each
            bar.update()


def _plan_config(options: argparse.Namespace) -> PlanConfig:
    profiles = [engine_profile(name) for name in options.engine or [DEFAULT_ENGINE]]
    try:
        prices = {name: float(price) for name, price in (text.rsplit("=", 1) for text in options.price)}
        replicas = [int(count) for count in options.replicas.split(",")]
        loads = [float(load) for load in options.load.split(",")]
    except ValueError as error:
        raise ConfigError(f"--price takes ENGINE=NUMBER, --replicas and --load numbers with commas: {error}") from error
    if unknown := prices.keys() - {profile.name for profile in profiles}:
        raise ConfigError(f"prices of engines that are not planned with: {', '.join(sorted(unknown))}")
    return PlanConfig(
        profiles={profile.name: (profile, _engine(options, profile)) for profile in profiles},
        prices=prices,
        targets=_targets(options),
        told=bool(options.target),
        replicas=replicas,
        systems=options.systems.split(","),
        loads=loads,
        attainment=options.attainment,
        everything=options.all,
        split=_split(options, "auto", 256),
    )


def _heading() -> str:
    engine = f"{'engine':<36}{'system':<9}{'replicas':>9}{'load':>6}"
    return f"{engine}{'cost':>8}{'attained':>10}{'in time':>9}{'goodput/s':>11}{'/GPU':>8}{'TTFT p99':>10}"


def _line(each: Tried) -> str:
    at, ttft_s = each.point, each.numbers["ttft_s"]["p99"]
    shown = "-" if ttft_s is None else f"{ttft_s:.2f}"
    return (
        f"{at.engine:<36}{at.system:<9}{at.replicas:>9}{at.load:>6g}{each.cost:>8.2f}"
        f"{each.attainment:>10.1%}{each.in_time:>9.1%}{each.goodput_per_s:>11.2f}{each.goodput_per_gpu_s:>8.2f}{shown:>10}"
    )


def _answer(load: float, best: Tried | None, most: Tried, config: PlanConfig) -> str:
    wanted = f"{config.attainment:.0%} of every class within its target at load {load:g}"
    if best is None:
        return f"{wanted}: nothing that was tried does it; the most requests in time per cost: {_recommended(most)}"
    return f"{wanted}: {_recommended(best)}"


def _recommended(tried: Tried) -> str:
    at = tried.point
    return (
        f"{at.replicas} x {at.engine} with {at.system}, cost {tried.cost:.2f}, {tried.in_time:.1%} in time, "
        f"{tried.goodput_per_gpu_s:.2f} requests in time/s a GPU"
    )


def _contribution_line(feature: str, change: Change) -> str:
    shown = "  ".join(f"{name} {'-' if x is None else f'{x:+.1%}'}" for name, x in change.items())
    return f"    {feature:<28} {shown}"
