"""What a run comes to, as plain numbers: the same run gives the same bytes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from policies.errors import InputError
from policies.router.promise import TARGETS, Promise
from policies.types import Phase
from simulator.cluster import Run
from simulator.metrics import EngineTotals, GapHistogram
from simulator.requests import Request
from simulator.workload import Workload

_PERCENTILES = (50, 90, 99)
_SECONDS = r"(-|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|inf)"
_TARGET = re.compile(rf"(.+?):{_SECONDS}:{_SECONDS}(?::{_SECONDS})?", re.ASCII)
EVERY_CLASS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a class was promised: first token within ttft_s, then tpot_s per token on the mean, last token within e2e_s;
    inf promises nothing.

    An answer of one token meets tpot_s; what never ended, because it was refused or lost, meets none.
    """

    ttft_s: float = inf
    tpot_s: float = inf
    e2e_s: float = inf

    def ttft_met(self, request: Request) -> bool:
        return request.finished_s is not None and request.ttft_s is not None and request.ttft_s <= self.ttft_s

    def tpot_met(self, request: Request) -> bool:
        return request.finished_s is not None and (request.tpot_s is None or request.tpot_s <= self.tpot_s)

    def e2e_met(self, request: Request) -> bool:
        return request.latency_s is not None and request.latency_s <= self.e2e_s

    def met(self, request: Request) -> bool:
        """Whether the request is in time."""
        return self.ttft_met(request) and self.tpot_met(request) and self.e2e_met(request)

    def promise(self) -> Promise:
        """The same, as requests are told of it."""
        told = {name: getattr(self, name) for name in TARGETS}
        return Promise(**{name: None if seconds == inf else seconds for name, seconds in told.items()})


def parse_target(text: str) -> tuple[str, Target]:
    """CLASS:TTFT_S:TPOT_S, or CLASS:TTFT_S:TPOT_S:E2E_S; "-" promises nothing of a kind, and the class * stands for
    every one not named.

    Raises:
        InputError: it is not of that form.
    """
    found = _TARGET.fullmatch(text)
    seconds = [inf if each == "-" else float(each) for each in found.groups("-")[1:]] if found else []
    if not found or not all(each > 0.0 for each in seconds):
        raise InputError(
            f"a target is CLASS:TTFT_S:TPOT_S, such as *:1:0.05, or CLASS:TTFT_S:TPOT_S:E2E_S where whole answers are "
            f"due, such as agents:-:-:8, got {text!r}"
        )
    return found[1], Target(**dict(zip(TARGETS, seconds, strict=True)))


def check_classes(what: str, names: Iterable[str], workload: Workload) -> None:
    """Raises InputError: one is of a class that the workload has not."""
    classes = set(workload.slo_class or ())
    if unknown := set(names) - classes:
        has = ", ".join(sorted(classes)) or "none (a trace names them in the column slo_class)"
        raise InputError(f"{what} of classes that no request has: {', '.join(sorted(unknown))}; there are: {has}")


def check_targets(targets: Mapping[str, Target], workload: Workload, *, all_classes: bool) -> None:
    """Raises InputError: a target is of a class that the workload has not, or of ``all_classes`` one has none."""
    check_classes("targets", targets.keys() - {EVERY_CLASS}, workload)
    classes: set[str | None] = set(workload.slo_class or (None,))
    if all_classes and EVERY_CLASS not in targets and (left := classes - targets.keys()):
        names = ", ".join(sorted(name or "requests without a class" for name in left))
        raise InputError(f"no target for {names}: add one, or one for all others such as *:2:0.1")


def summary(run: Run, targets: Mapping[str, Target] | None = None) -> dict[str, Any]:
    """The numbers of a run, times in seconds, shares between 0 and 1; None where there is nothing to count."""
    totals, targets = _sum([engine.totals for engine in run.engines]), targets or {}
    span_s = run.makespan_s
    blocks = run.engines[0].config.total_blocks
    output_tokens = sum(request.output_tokens for request in run.requests)
    prompt_tokens = sum(request.prompt_tokens for request in run.requests)
    return {
        "requests": len(run.requests),
        "refused": len(run.refused),
        "makespan_s": span_s,
        "requests_per_s": _per(len(run.requests), span_s),
        "output_tokens_per_s": _per(output_tokens, span_s),
        "total_tokens_per_s": _per(prompt_tokens + output_tokens, span_s),
        "in_time": _attained(run.requests + run.refused, targets, span_s),
        "classes": _classes(run, targets),
        "ttft_s": _spread([r.ttft_s for r in run.requests]),
        "tpot_s": _spread([r.tpot_s for r in run.requests]),
        "latency_s": _spread([r.latency_s for r in run.requests]),
        "itl_s": _gaps(totals.gaps),
        "preemptions": totals.preemptions,
        "moved": sum(request.moves for request in run.requests),
        "batch_size_mean": _per(totals.batch_s, totals.busy_s),
        "kv_used_mean_fraction": _per(totals.blocks_s, totals.busy_s * blocks),
        "kv_used_peak_fraction": totals.peak_blocks / blocks,
        "phase_fractions": {phase.value: _per(totals.phase_s[phase], totals.busy_s) for phase in Phase},
        "busy_fraction": _per(totals.busy_s, run.replica_s),
        "recomputed_fraction": _per(totals.recomputed_tokens, totals.prefill_tokens),
        "prefix_reuse_fraction": _reused(run.requests, totals),
        **_loaded(run, prompt_tokens),
        "replica_s": run.replica_s,
        "steps": totals.steps,
        "events": run.events,
    }


def _sum(all_totals: Sequence[EngineTotals]) -> EngineTotals:
    total = EngineTotals()
    for each in all_totals:
        for name in ("steps", "busy_s", "prefill_tokens", "decode_tokens", "preemptions", "recomputed_tokens"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        total.batch_s += each.batch_s
        total.blocks_s += each.blocks_s
        total.peak_blocks = max(total.peak_blocks, each.peak_blocks)
        for phase in Phase:
            total.phase_s[phase] += each.phase_s[phase]
        total.gaps.merge(each.gaps)
    return total


def _per(amount: float, of: float) -> float | None:
    return amount / of if of else None


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return {name: None for name in ("mean", *(f"p{p}" for p in _PERCENTILES))}
    points = np.percentile(known, _PERCENTILES)
    return {"mean": float(known.mean()), **{f"p{p}": float(x) for p, x in zip(_PERCENTILES, points, strict=True)}}


def _gaps(gaps: GapHistogram) -> dict[str, float | None]:
    return {"mean": gaps.mean(), **{f"p{p}": gaps.percentile(p) for p in _PERCENTILES}}


def _reused(requests: Sequence[Request], totals: EngineTotals) -> float | None:
    """Share of the prompts' tokens that a cached prefix spared, recomputation aside."""
    prompts = sum(request.prompt_tokens for request in requests)
    return _per(max(0, prompts + totals.recomputed_tokens - totals.prefill_tokens), prompts)


def _loaded(run: Run, prompt_tokens: int) -> dict[str, float | None]:
    """Of engines with a tier: the share of the prompts' tokens that were loaded from there."""
    if run.engines[0].config.tier is None:
        return {}
    return {"prefix_loaded_fraction": _per(sum(each.loaded_tokens for each in run.requests), prompt_tokens)}


def _classes(run: Run, targets: Mapping[str, Target]) -> dict[str, dict[str, float | None]]:
    return {
        name: {
            "requests": len(requests),
            "refused": sum(request.finished_s is None for request in requests),
            "ttft_p99_s": _spread([r.ttft_s for r in requests])["p99"],
            "tpot_mean_s": _spread([r.tpot_s for r in requests])["mean"],
            **_attained(requests, targets, run.makespan_s),
        }
        for name, requests in by_class(run).items()
    }


def by_class(run: Run) -> dict[str, list[Request]]:
    """All requests that came, the refused ones too; those without a class are "*"."""
    found: dict[str, list[Request]] = {}
    for request in run.requests + run.refused:
        found.setdefault(request.slo_class or EVERY_CLASS, []).append(request)
    return dict(sorted(found.items()))


def attainment(run: Run, targets: Mapping[str, Target]) -> float:
    """Share of the requests with a target that were in time."""
    return float(_attained(run.requests + run.refused, targets, run.makespan_s)["attainment"] or 0.0)


def target_of(slo_class: str | None, targets: Mapping[str, Target]) -> Target | None:
    return targets.get(slo_class or EVERY_CLASS, targets.get(EVERY_CLASS))


def _attained(requests: Sequence[Request], targets: Mapping[str, Target], span_s: float) -> dict[str, float | None]:
    """Shares of these requests, those whose class has no target aside, that kept each target, and all."""
    judged = [(request, target) for request in requests if (target := target_of(request.slo_class, targets))]
    met = sum(target.met(request) for request, target in judged)
    return {
        "attainment": _per(met, len(judged)),
        "ttft_met": _per(sum(target.ttft_met(request) for request, target in judged), len(judged)),
        "tpot_met": _per(sum(target.tpot_met(request) for request, target in judged), len(judged)),
        "e2e_met": _per(sum(target.e2e_met(request) for request, target in judged), len(judged)),
        "goodput_per_s": _per(met, span_s) if judged else None,
    }


def table(numbers: Mapping[str, Any]) -> str:
    """The summary for reading."""
    lines = [f"{'requests':<22}{numbers['requests']} served, {numbers['refused']} refused"]
    for name, unit in (
        ("makespan_s", "s"), ("requests_per_s", "/s"), ("output_tokens_per_s", "/s"), ("total_tokens_per_s", "/s"),
    ):  # fmt: skip
        lines.append(f"{name.removesuffix('_s').removesuffix('_per'):<22}{_shown(numbers[name])} {unit}")
    lines.append(f"{'':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name in ("ttft_s", "tpot_s", "itl_s", "latency_s"):
        lines.append(f"{name:<22}" + "".join(f"{_shown(numbers[name][x]):>10}" for x in ("mean", "p50", "p90", "p99")))
    for name in (
        "batch_size_mean", "kv_used_mean_fraction", "kv_used_peak_fraction", "busy_fraction", "preemptions", "moved",
        "recomputed_fraction", "prefix_reuse_fraction",
    ):  # fmt: skip
        lines.append(f"{name:<22} {_shown(numbers[name])}")
    phases = ", ".join(f"{name} {_shown(share)}" for name, share in numbers["phase_fractions"].items() if share)
    lines.append(f"{'phases':<22} {phases}")
    lines += _in_time(numbers)
    return "\n".join(lines)


def _in_time(numbers: Mapping[str, Any]) -> list[str]:
    """Shares of all that came by class, and of all together: all targets, and each."""
    columns = ("requests", "refused", "in time", "TTFT met", "TPOT met", "E2E met", "in time/s", "TTFT p99")
    lines = [f"{'':<22}" + "".join(f"{column:>10}" for column in columns)]
    rows = {f"class {name}": one for name, one in numbers["classes"].items()} | {"all": everything(numbers)}
    for name, one in rows.items():
        shares = (_percent(one[key]) for key in ("attainment", "ttft_met", "tpot_met", "e2e_met"))
        last = (_shown(one[key]) for key in ("goodput_per_s", "ttft_p99_s"))
        cells = (str(one["requests"]), str(one["refused"]), *shares, *last)
        lines.append(f"{name:<22}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def everything(numbers: Mapping[str, Any]) -> dict[str, float | None]:
    """All requests together, as each class stands in a summary."""
    return {
        "requests": numbers["requests"] + numbers["refused"],
        "refused": numbers["refused"],
        "ttft_p99_s": numbers["ttft_s"]["p99"],
        **numbers["in_time"],
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
