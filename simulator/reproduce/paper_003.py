"""Paper 003 (EB+, arXiv 2606.00516): exclusive against mixed batching, from the authors' published calibrations.

Source of calibrations, settings and published results: weifang231/eb-vllm, reproduce/ (Apache-2.0); the numbers below
are the paper's and, after a slash, those of the authors' own rerun. The calibrations hold at a decode context of 512 in
eager mode. A mixed step is costed in two ways: "sum" adds the two slopes to the larger overhead, so mixing is free of
interference; "polynomial" is the published cost per token a + b r + c r^2, which was fitted to 1/throughput and so
contains its overhead already (ERRATA 3.12).

`workloads` and `drift` leave the context of 512: there a decode also costs what the GPU's derived kernel times say of a
further token of context, scaled by the model's bytes per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from policies.engine.step_time import StepTimeConfig
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import Run, run
from simulator.engines import engine_profile, kv_bytes_of
from simulator.reproduce.common import Setting, cluster, mean, spread, table
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, mixed, synthetic

_CALIBRATED_CONTEXT = 512
_KERNELS = {"H200": "Qwen3-8B@h200_sxm", "RTX_PRO_6000": "Qwen3-8B@rtx_pro_6000_server"}
_POLYNOMIALS = {
    "Qwen3-8B@H200": (2.493675e-05, 5.192856e-05, 1.477785e-05),
    "Qwen3-8B@RTX_PRO_6000": (6.29342675989941e-05, 1.9689261661008702e-04, 9.8989734316548e-06),
}
_SCHEDULERS = {"v1": "v1", "EB": "exclusive", "EB+": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Case:
    """``scheduler`` is a value of _SCHEDULERS; ``any_context``: decodes cost what their context does."""

    engine: str
    mixing: str
    scheduler: str
    work: Workload
    slots: int
    clients: int
    max_batch_tokens: int = 8192
    any_context: bool = False


def _times(engine: str, mixing: str) -> StepTimes:
    times = engine_profile(engine).times
    if mixing == "sum":
        return times
    a, b, c = _POLYNOMIALS[engine]
    # a + b r + c r^2 = a (1 - r) + (a + b + c) r - c r (1 - r)
    mixed = StepCoefficients(overhead_s=0.0, prefill_s=a, decode_s=a + b + c, interference_s=-c)
    return replace(times, mixed=mixed)


def _with_context(engine: str, times: StepTimes) -> StepTimes:
    """The same at a context of 512 tokens, more beyond it and less before."""
    model, gpu = engine.split("@")
    kernels = _KERNELS[gpu]
    kv_s = engine_profile(kernels).times.decode.kv_s * kv_bytes_of(model) / kv_bytes_of(kernels)
    return replace(times, decode=_sloped(times.decode, kv_s), mixed=_sloped(times.mixed, kv_s))


def _sloped(form: StepCoefficients, kv_s: float) -> StepCoefficients:
    return replace(form, decode_s=max(0.0, form.decode_s - _CALIBRATED_CONTEXT * kv_s), kv_s=kv_s)


def _run(case: _Case) -> Run:
    times = _times(case.engine, case.mixing)
    times = _with_context(case.engine, times) if case.any_context else times
    settings: dict[str, Any] = {"step_times": StepTimeConfig(prior=times)}
    batch, mode = ("stock", None) if case.scheduler == "v1" else ("exclusive_mixed", case.scheduler)
    config = cluster(
        case.engine,
        slots=case.slots,
        max_batch_tokens=case.max_batch_tokens,
        times=times,
        clock=None,
        batch=batch,
        batch_settings={**settings, "mode": mode} if mode else {},
        router=RouterConfig(credit_lookahead=None),
        clients=case.clients,
    )
    return run(config, case.work)


def _tokens_per_s(case: _Case) -> float:
    finished = _run(case)
    return sum(r.prompt_tokens + r.output_tokens for r in finished.requests) / finished.makespan_s


# The share of decodes from which a mixed token costs more than a token of decode steps, as printed.
_SHARES = {"Qwen3-8B@H200": "80 %", "Qwen3-8B@RTX_PRO_6000": "20 %"}
# Tokens of a step; of so many that no overhead counts, the last.
_STEP_TOKENS = (256, 512, 1024, 10**9)


def shares(setting: Setting) -> list[str]:
    """The share r of decodes in a step from which a mixed token costs more than one of a decode step as large."""
    rows = []
    for engine, published in _SHARES.items():
        for mixing in ("sum", "polynomial"):
            times = _times(engine, mixing)
            found = [_costly_share(times, tokens) for tokens in _STEP_TOKENS]
            rows.append((engine, mixing, published, *("never" if r is None else f"{r:.0%}" for r in found)))
    return table(("engine", "mixed step", "paper", *map(str, _STEP_TOKENS[:-1]), "no overhead"), rows)


def _costly_share(times: StepTimes, tokens: int) -> float | None:
    """The least r, in percents, at which a step of so many tokens, r of them decodes, costs more than decodes alone."""
    decode_s = times.decode.step_s(decode_requests=tokens)
    for percent in range(101):
        decodes = tokens * percent / 100
        if times.mixed.step_s(prefill_tokens=tokens - decodes, decode_requests=decodes) > decode_s:
            return percent / 100
    return None


def _drawn(prompts: str, outputs: str, requests: int, seed: int) -> Workload:
    laws = length_law(prompts), length_law(outputs)
    return synthetic("published", *laws, requests, np.random.default_rng(seed))


_MIXES = {
    "decode-heavy 128/1024": (128, 1024, "13974/11200", "15725/11846", "+12.5 % / +5.8 %"),
    "balanced 512/512": (512, 512, "19509/17424", "20937/18343", "+7.3 % / +5.3 %"),
    "prefill-heavy 1024/128": (1024, 128, "32228/31539", "32863/30903", "+2.0 % / -2.0 %"),
}


def balance(setting: Setting) -> list[str]:
    """Total tokens per second at 1024 slots, saturated: mixed (v1) against exclusive (EB), Qwen3-8B."""
    keys = [(engine, name, mixing) for engine in _POLYNOMIALS for name in _MIXES for mixing in ("sum", "polynomial")]
    cases = [
        _Case(
            engine=engine, mixing=mixing, scheduler=scheduler, slots=1024, clients=2048,
            work=_drawn(f"exponential:{_MIXES[name][0]}", f"exponential:{_MIXES[name][1]}", 6000, seed),
        )
        for engine, name, mixing in keys for scheduler in ("v1", "exclusive") for seed in range(setting.runs)
    ]  # fmt: skip
    found = np.array(setting.each(_tokens_per_s, cases)).reshape(len(keys), 2, setting.runs)
    rows = []
    for (engine, name, mixing), (v1, eb) in zip(keys, found, strict=True):
        published = _MIXES[name][2:] if engine.endswith("H200") else ("-", "-", "-")
        gain = f"{spread(100 * (eb / v1 - 1))} %"
        rows.append((engine, name, *published, mixing, f"{mean(v1):.0f}", f"{mean(eb):.0f}", gain))
    heading = (
        "engine", "workload", "published v1", "published EB", "published gain", "mixed step", "v1", "EB", "gain"
    )  # fmt: skip
    return table(heading, rows)


# By engine and clients: tokens/s, TTFT in ms, TPOT in ms of v1, EB and EB+, paper/rerun.
_CLIENTS = {
    ("Qwen3-8B@H200", 32): (
        "11584/11543, 49/42, 8.2/8.4", "8609/10779, 1046/60, 7.1/9.0", "11586/11673, 50/42, 8.2/8.3"
    ),
    ("Qwen3-8B@H200", 512): (
        "27464/24099, 700/646, 52.7/65.5", "27207/23876, 4600/926, 36.8/69.8", "27460/24435, 700/636, 52.7/64.8"
    ),
    ("Qwen3-8B@H200", 2048): (
        "26368/23055, 24400/24806, 128/135.5", "27198/22957, 34600/26184, 72.8/137.7",
        "27043/23690, 33700/24466, 79.2/128.9",
    ),
    ("Qwen3-8B@RTX_PRO_6000", 32): ("-", "-", "4930, 61, 19.5"),
    ("Qwen3-8B@RTX_PRO_6000", 2048): ("8830, 83800, 207.3", "13179, 70800, 82.7", "13214, 68200, 101.6"),
}  # fmt: skip


def clients(setting: Setting) -> list[str]:
    """Table 4: 512/256 tokens with 32, 512 and 2048 clients; tokens/s, TTFT and TPOT in ms."""
    cases = [
        _Case(
            engine=engine, mixing=mixing, scheduler=scheduler, slots=1024, clients=count,
            work=_drawn("uniform:256:768", "uniform:128:384", max(1000, 4 * count), 0),
        )
        for engine, count in _CLIENTS for scheduler in _SCHEDULERS.values() for mixing in ("sum", "polynomial")
    ]  # fmt: skip
    found = iter(setting.each(_three, cases))
    rows = []
    for (engine, count), published in _CLIENTS.items():
        for name, paper in zip(_SCHEDULERS, published, strict=True):
            rows.append((engine, count, name, paper, next(found), next(found)))
    return table(
        ("engine", "clients", "scheduler", "published (paper/rerun)", "simulated, sum", "simulated, polynomial"), rows
    )


def _three(case: _Case) -> str:
    finished = _run(case)
    tokens = sum(r.prompt_tokens + r.output_tokens for r in finished.requests)
    ttft_s = mean([r.ttft_s for r in finished.requests if r.ttft_s is not None])
    tpot_s = mean([r.tpot_s for r in finished.requests if r.tpot_s is not None])
    return f"{tokens / finished.makespan_s:.0f}, {1e3 * ttft_s:.0f}, {1e3 * tpot_s:.1f}"


# Table 5, a drift of lengths: tokens/s of v1, EB and EB+, paper/rerun. Of the RTX PRO 6000 only EB+ is printed.
_DRIFTS = {
    "Qwen3-8B@H200": ("18307/20396", "17394/20762", "20776/21182 (+13.5 % / +3.9 %)"),
    "Qwen3-8B@RTX_PRO_6000": ("-", "-", "9582 (+36.4 %)"),
}
# Of a drift through the sets nothing is printed; these are the gains of table 5.
_DRIFT_OF_SETS = {"Qwen3-8B@H200": "(+13.5 % / +3.9 %)", "Qwen3-8B@RTX_PRO_6000": "(+36.4 %)"}


def _drifting(seed: int) -> Workload:
    """2000 requests each of 1024/128, 512/512 and 128/1024 tokens, answers within 25 % of their mean."""
    phases = ((1024, 128), (512, 512), (128, 1024))
    laws = ((f"constant:{prompt}", f"uniform:{0.75 * output}:{1.25 * output}") for prompt, output in phases)
    return mixed("drift", *(_drawn(*each, 2000, seed) for each in laws))


def drift(setting: Setting) -> list[str]:
    """Table 5: lengths that drift from long prompts to long answers, 2048 clients; tokens/s."""
    return _drifted(setting, [_drifting(seed) for seed in range(setting.runs)], _DRIFTS)


def drift_of_sets(setting: Setting) -> list[str]:
    """Traffic that drifts through the four sets of tables 2 and 3, 2048 clients; tokens/s."""
    published = {engine: ("-", "-", gain) for engine, gain in _DRIFT_OF_SETS.items()}
    return _drifted(setting, [_drifting_sets(setting, seed) for seed in range(setting.runs)], published)


def _drifting_sets(setting: Setting, seed: int) -> Workload:
    """2000 requests of each set after each other; 512 where each has 4000 tokens."""
    counts = {"ShareGPT": 2000, "WildChat": 2000, "LongBench": 2000, "NuminaMath": 512}
    parts = (_set(setting, name, seed).head(count) for name, count in counts.items())
    return mixed("drift of sets", *(part.arriving(np.zeros(len(part))) for part in parts))


def _drifted(setting: Setting, works: Sequence[Workload], published: Mapping[str, tuple[str, str, str]]) -> list[str]:
    """The three schedulers over each of the workloads, by both laws of mixed steps."""
    keys = [(engine, mixing) for engine in published for mixing in ("sum", "polynomial")]
    cases = [
        _Case(
            engine=engine, mixing=mixing, scheduler=scheduler, slots=2048, clients=2048, max_batch_tokens=18_432,
            work=work, any_context=True,
        )
        for engine, mixing in keys for scheduler in _SCHEDULERS.values() for work in works
    ]  # fmt: skip
    found = np.array(setting.each(_tokens_per_s, cases)).reshape(len(keys), len(_SCHEDULERS), len(works))
    rows = []
    for (engine, mixing), rates in zip(keys, found, strict=True):
        gain = f"{spread(100 * (rates[2] / rates[0] - 1))} %"
        rows.append((engine, *published[engine], mixing, *(f"{mean(each):.0f}" for each in rates), gain))
    heading = (
        "engine", "published v1", "published EB", "published EB+", "mixed step", "v1", "EB", "EB+", "EB+ against v1"
    )  # fmt: skip
    return table(heading, rows)


class _Published(NamedTuple):
    """A cell of tables 2 and 3: requests per second of v1 and EB, with the (token budget, slots) of each."""

    v1: str
    eb: str
    v1_size: tuple[int, int]
    eb_size: tuple[int, int]


# Sizes are those of the paper's appendix. Of the 30B model on the RTX PRO 6000 no single rate is printed.
_RTX, _H200, _H200_MOE = "Qwen3-8B@RTX_PRO_6000", "Qwen3-8B@H200", "Qwen3-30B-A3B@H200"
_TABLES = {
    (_RTX, "ShareGPT"): _Published("17.07", "19.68 (+15.3 %)", (16384, 1536), (14336, 1536)),
    (_RTX, "WildChat"): _Published("12.75", "14.19 (+11.3 %)", (18432, 1024), (10240, 1024)),
    (_RTX, "LongBench"): _Published("8.35", "8.66 (+3.7 %)", (10240, 1024), (16384, 512)),
    (_RTX, "NuminaMath"): _Published("0.73", "0.74 (+1.4 %)", (14336, 256), (4096, 256)),
    (_H200, "ShareGPT"): _Published("41.93/47.67", "42.88/48.65 (+2.3 % / +2.1 %)", (10240, 1024), (16384, 1536)),
    (_H200, "WildChat"): _Published("20.87/19.03", "21.50/21.98 (+3.0 % / +15.5 %)", (4096, 2048), (16384, 1024)),
    (_H200, "LongBench"): _Published("15.77/16.31", "15.81/15.78 (+0.3 % / -3.2 %)", (14336, 256), (14336, 2048)),
    (_H200, "NuminaMath"): _Published("1.99/1.95", "1.94/1.96 (-2.5 % / +0.5 %)", (14336, 256), (18432, 256)),
    (_H200_MOE, "ShareGPT"): _Published("48.81/48.96", "42.93/47.72 (-12.0 % / -2.5 %)", (8192, 2048), (4096, 1536)),
    (_H200_MOE, "WildChat"): _Published("26.46/25.21", "26.66/25.21 (+0.8 % / 0.0 %)", (4096, 1536), (14336, 1024)),
    (_H200_MOE, "LongBench"): _Published("24.43/24.45", "24.03/23.99 (-1.6 % / -1.9 %)", (14336, 2048), (16384, 1024)),
    (_H200_MOE, "NuminaMath"): _Published("1.93/1.83", "1.71/1.68 (-11.4 % / -8.2 %)", (8192, 512), (10240, 512)),
}
# Gains that the paper prints for all four sets together.
_MEAN_GAINS = {
    "Qwen3-8B@RTX_PRO_6000": "+7.9 %",
    "Qwen3-8B@H200": "+0.8 % / +3.7 %",
    "Qwen3-30B-A3B@H200": "-6.1 % / -3.2 %",
}
_CLIENTS_OF_TABLES = 2048
_TURNS, _USER_TOKENS, _ANSWER_TOKENS = 9, 208, 310


def _set(setting: Setting, name: str, seed: int) -> Workload:
    """A set of tables 2 and 3 as the authors' scripts cut it: 4000 requests; 1024 where each has 4000 tokens.

    ShareGPT: first turns, answers cut at 500 tokens. LongBench: chunks of 1000 to 4000 tokens, answers of 2 to 20 (the
    paper's mean is 11). NuminaMath: 4000 tokens each, which alone fits the printed rates. WildChat: conversations of 9
    turns whose history is cached, 310 tokens an answer; a turn of the user has 208, as many to 310 as 296 to 441 in
    WildChat's own table. For no set is the mean length of prompts printed.
    """
    if name == "LongBench":
        return _drawn("uniform:1000:4000", "uniform:2:20", 4000, seed)
    if name == "NuminaMath":
        return _drawn("lognormal:100:0.6", "constant:4000", 1024, seed)
    rng = np.random.default_rng(seed)
    if name == "ShareGPT":
        drawn = setting.workload("sharegpt_turns").shorter_than(32_768).sample(4000, rng)
        return replace(drawn, output_tokens=np.minimum(drawn.output_tokens, 500))
    turns = _drawn(f"exponential:{_USER_TOKENS}", f"exponential:{_ANSWER_TOKENS}", 4000, seed)
    history = rng.integers(0, _TURNS, 4000) * (_USER_TOKENS + _ANSWER_TOKENS)
    return replace(turns, prompt_tokens=turns.prompt_tokens + history, cached_tokens=history)


def _requests_per_s(case: _Case) -> float:
    finished = _run(case)
    return len(finished.requests) / finished.makespan_s


def workloads(setting: Setting) -> list[str]:
    """Tables 2 and 3: requests per second on four sets, 2048 clients; mixed (v1) against exclusive (EB)."""
    keys = [key for key in _TABLES for _ in _mixings(key[0])]
    mixings = [mixing for engine, _ in _TABLES for mixing in _mixings(engine)]
    cases = [
        _Case(
            engine=engine, mixing=mixing, scheduler=scheduler, work=_set(setting, name, seed), any_context=True,
            slots=slots, max_batch_tokens=budget, clients=_CLIENTS_OF_TABLES,
        )
        for (engine, name), mixing in zip(keys, mixings, strict=True)
        for scheduler, (budget, slots) in (
            ("v1", _TABLES[engine, name].v1_size), ("exclusive", _TABLES[engine, name].eb_size)
        )
        for seed in range(setting.runs)
    ]  # fmt: skip
    found = np.array(setting.each(_requests_per_s, cases)).reshape(len(keys), 2, setting.runs)
    rows: list[tuple[object, ...]] = []
    gains: dict[tuple[str, str], list[float]] = {}
    for (engine, name), mixing, (v1, eb) in zip(keys, mixings, found, strict=True):
        cell, gain = _TABLES[engine, name], 100 * (eb / v1 - 1)
        gains.setdefault((engine, mixing), []).append(mean(gain))
        rates = f"{mean(v1):.2f}", f"{mean(eb):.2f}"
        rows.append((engine, name, cell.v1, cell.eb, mixing, *rates, f"{spread(gain)} %"))
    rows += [
        (engine, "mean of the four", "", _MEAN_GAINS[engine], mixing, "", "", f"{mean(each):+.1f} %")
        for (engine, mixing), each in gains.items()
    ]
    return table(("engine", "set", "published v1", "published EB", "mixed step", "v1", "EB", "gain"), rows)


def _mixings(engine: str) -> Sequence[str]:
    return ("sum", "polynomial") if engine in _POLYNOMIALS else ("sum",)
