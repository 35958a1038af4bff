"""Writes docs/reference/metrics.md: every metric of Sluice's own, as its code declares it.

    python -m tests.metrics_page

tests/test_metrics_page.py holds that the page is up to date.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from deployments.batches.metrics import BatchMetrics
from deployments.responses.metrics import exposition as exposition_of_responses
from deployments.responses.store import Usage
from deployments.serving import engine_metrics
from predictor.metrics import PredictorMetrics
from router.candidate_metrics import CandidateMetrics
from router.exposition import shared_exposition
from router.metrics import RouterMetrics, SplitMetrics
from router.state_store import ReplicaLoad, Snapshot

PAGE = Path(__file__).parents[1] / "docs/reference/metrics.md"
HEAD = """\
# Metrics

<!-- Written by `python -m tests.metrics_page` from the code that declares them. -->

`GET /metrics` of any router shows the metrics of all routers and replicas.
[Operate](../guides/operate.md#what-to-alert-on) says which are worth an alert, and [runbook](../guides/runbook.md) what
to do then. Names that end in `_total` are
counters, histograms are marked, all others are gauges. Labels stand in braces. All metrics but those of batches and of
stored responses also have the label `model`, those of a router `router`. A histogram `x` has the series `x_bucket`,
`x_sum` and `x_count`. With `engine.prefill` the metrics of routers and the shared ones are there a second time for the
prefill replicas, as `sluice_prefill_...`. Names with `vllm:`, `http_`, `process_` or `python_` are vLLM's or the
process's.

A request is one answer of an engine: `n` answers to a prompt are `n` requests, and its tokens count `n` times. Tokens
are counted when their request has ended. API keys appear by their names, which all readers of `/metrics` see.
"""
_FAMILY = re.compile(r"^# HELP (\w+) (.*)\n# TYPE \w+ (\w+)\n(?:\w+(?:{(.*)})? .*)?", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="')


class Row(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def of_router() -> list[Row]:
    metrics = RouterMetrics()
    return sorted([*_declared(vars(metrics).values()), *_of_build(metrics)])


def _of_build(metrics: RouterMetrics) -> list[Row]:
    metrics.note_build(dict.fromkeys(("version", "vllm", "ray"), "0"))
    return [row for row in _exposed(metrics.exposition()) if row.name == "sluice_build_info"]


def of_keys() -> list[Row]:
    keys = RouterMetrics().keys
    keys.ended("name", "stop")
    keys.took("name", 1, 1)
    return _exposed(keys.page())


def of_predictor() -> list[Row]:
    accuracy = SimpleNamespace(hit_fraction=0, reference_hit_fraction=0, bias=0, advantage=0, coverage_fraction=0)
    told: Any = SimpleNamespace(
        asking=SimpleNamespace(outcomes={"answered": 1}), accuracies=lambda: {("model", "standard"): (accuracy, True)}
    )
    registry = CollectorRegistry()
    registry.register(PredictorMetrics(told))
    return _exposed(generate_latest(registry))


def of_split() -> list[Row]:
    return _declared(vars(SplitMetrics(RouterMetrics().registry)).values())


def of_candidates() -> list[Row]:
    return _declared(vars(CandidateMetrics(RouterMetrics().registry)).values())


def of_batches() -> list[Row]:
    return _declared(vars(BatchMetrics()).values())


def of_responses() -> list[Row]:
    return _exposed(exposition_of_responses(Usage(responses=1, stored_bytes=1)))


def shared() -> list[Row]:
    load = ReplicaLoad(slots=1, running=0, outstanding_s=0.0)
    snapshot = Snapshot(
        lanes={("standard", 0): 1},
        replicas={"r": load},
        routers=1,
        late={("standard", "passed"): 1},
        owed={"standard": 1},
        batches={(0, "full"): 1},
    )
    return _exposed(shared_exposition(snapshot))


def of_engines() -> list[Row]:
    numbers = dict.fromkeys([*engine_metrics._GAUGES, *engine_metrics._COUNTERS], 1)
    words = dict.fromkeys(engine_metrics._STATES, "word")
    nested = {
        "steps": {"decode": 1},
        "step_times": {"decode": {"base_s": 1.0}},
        "output_tokens": {"p50": 1.0},
        "background_failures": {"task": 1},
        "step_errors": {"p50": 0.1},
        "drafts": {"verified": 0, "accepted": 0, "left_out": 0, "tokens_per_step": {"standard": 1.0}},
        "promised_gaps": {
            "chat": {"requests": 1, "missed": 0, "promised_s": 1, "believed_s": 1, "in_steps_s": 1, "came_s": 1}
        },
        "out_of_reach": "in words",
        "off": {"phases": {"adapters": "in words"}},
    }
    return _exposed(engine_metrics.engine_exposition({"r": {**numbers, **words, **nested}}))


def rows() -> list[Row]:
    """All that the page has."""
    beside = [*of_keys(), *of_predictor(), *of_split(), *of_candidates(), *of_batches(), *of_responses()]
    return [*of_router(), *shared(), *of_engines(), *beside]


def names() -> set[str]:
    """All that a document may call them: those of routers also as prefill replicas have them, and without `_total`."""
    prefill = (row.name.replace("sluice_", "sluice_prefill_", 1) for row in [*of_router(), *shared()])
    there = {*(row.name for row in rows()), *prefill}
    return there | {name.removesuffix("_total") for name in there}


def _declared(values: Iterable[object]) -> list[Row]:
    """Also those that have no sample before something happens."""
    return sorted(
        Row(
            metric._name + ("_total" if metric._type == "counter" else ""),
            metric._type,
            metric._labelnames,
            metric._documentation,
        )
        for metric in values
        if isinstance(metric, MetricWrapperBase)
    )


def _exposed(text: bytes) -> list[Row]:
    found = _FAMILY.findall(text.decode())
    return sorted(Row(name, kind, tuple(_LABEL.findall(labels)), meaning) for name, meaning, kind, labels in found)


def page() -> str:
    sections = {
        "Of each router": of_router(),
        "Of each router, where requests have API keys": of_keys(),
        "Of each router, with the learned predictor": of_predictor(),
        "Of routers, where prefill and decode may be on different replicas": of_split(),
        "Of each router, of a candidate": of_candidates(),
        "Shared by all routers": shared(),
        "Of each engine replica": of_engines(),
        "Of batches, where there are any": of_batches(),
        "Of stored responses": of_responses(),
    }
    tables = (line for title, rows in sections.items() for line in [f"\n## {title}\n\n", *_table(rows)])
    return HEAD + "".join(tables)


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| metric | meaning |\n|---|---|\n"
    for row in rows:
        labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
        kind = " histogram" if row.kind == "histogram" else ""
        yield f"| `{row.name}{labels}`{kind} | {row.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
