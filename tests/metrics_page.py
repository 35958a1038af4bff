"""Writes docs/metrics.md: every metric of Sluice's own, as its code declares it.

    python -m tests.metrics_page

tests/test_metrics_page.py holds that the page is up to date.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.metrics import MetricWrapperBase

from deployments.serving import engine_metrics
from router.metrics import RouterMetrics, SplitMetrics, shared_exposition
from router.state_store import ReplicaLoad, Snapshot

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
HEAD = """\
# Metrics

<!-- Written by `python -m tests.metrics_page` from the code that declares them. -->

`GET /metrics` of any router has all of them, of all routers and replicas; [operate](operate.md#is-it-well) says which
are worth an alert, and [runbook](runbook.md) what to do then. All samples have the label `model` besides those below,
those of a router also `router`. A histogram `x` has the series `x_bucket`, `x_sum` and `x_count`. With `engine.prefill`
those of each router and those that are shared are there a second time for the replicas that only read prompts, as
`sluice_prefill_...`. What begins with `vllm:`, `http_`, `process_` or `python_` is vLLM's front end's or the process's.
"""
_FAMILY = re.compile(r"^# HELP (\w+) (.*)\n# TYPE \w+ (\w+)\n(?:\w+(?:{(.*)})? .*)?", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="')


class Row(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def of_router() -> list[Row]:
    return _declared(vars(RouterMetrics()).values())


def of_split() -> list[Row]:
    return _declared(vars(SplitMetrics(RouterMetrics().registry)).values())


def shared() -> list[Row]:
    load = ReplicaLoad(slots=1, running=0, outstanding_s=0.0)
    snapshot = Snapshot(
        lanes={("standard", 0): 1},
        replicas={"r": load},
        routers=1,
        late={("standard", "passed"): 1},
        owed={"standard": 1},
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
    }
    return _exposed(engine_metrics.engine_exposition({"r": {**numbers, **words, **nested}}))


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
        "Of routers, where prefill and decode may be on different replicas": of_split(),
        "Shared by all routers": shared(),
        "Of each engine replica": of_engines(),
    }
    tables = (line for title, rows in sections.items() for line in [f"\n## {title}\n\n", *_table(rows)])
    return HEAD + "".join(tables)


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| metric | type | labels | meaning |\n|---|---|---|---|\n"
    for row in rows:
        yield f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {row.meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
