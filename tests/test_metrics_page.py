"""docs/reference/metrics.md has every metric that there is. Other pages: tests/test_documents.py."""

import json
import re
from pathlib import Path

import pytest

from router.metrics import RouterMetrics, SplitMetrics
from tests import metrics_page

DOCS = metrics_page.PAGE.parents[1]
CHART = DOCS.parent / "k8s/sluice"


def test_the_page_of_metrics_is_up_to_date() -> None:
    """After a change of a metric: python -m tests.metrics_page"""
    assert metrics_page.PAGE.read_text() == metrics_page.page()


def test_every_metric_has_a_meaning_and_stands_there_once() -> None:
    rows = metrics_page.rows()
    assert len(rows) > 50 and len({row.name for row in rows}) == len(rows)
    assert all(row.meaning.endswith(".") for row in rows)


# What `promtool check metrics` looks at, of https://prometheus.io/docs/practices/naming/
UNITS = {"seconds", "bytes", "ratio"}
OTHER_UNITS = {
    *("s", "sec", "secs", "ms", "us", "ns", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days"),
    *("b", "kb", "mb", "gb", "kilobytes", "megabytes", "gigabytes", "bits"),
    *("percent", "fraction", "per"),
}


@pytest.mark.parametrize("row", metrics_page.rows(), ids=lambda row: row.name)
def test_a_metric_is_named_by_the_rules_of_prometheus(row: metrics_page.Row) -> None:
    words = row.name.split("_")
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", row.name)
    assert (words[-1] == "total") == (row.kind == "counter")
    assert words[-1] not in ("bucket", "count", "sum", "created")
    assert not OTHER_UNITS & set(words), "units are base units, and written out"
    last = [word for word in words if word != "total"][-1]
    assert last in UNITS or not UNITS & set(words), "the unit stands at the end"
    assert row.kind != "histogram" or last == "seconds"
    assert not {"quantile", "le"} & set(row.labels), "they are those of summaries and histograms"


def test_the_page_has_all_that_a_router_registers() -> None:
    metrics = RouterMetrics()
    SplitMetrics(metrics.registry)
    families = {family.name for family in metrics.registry.collect()}
    listed = {row.name.removesuffix("_total") for row in [*metrics_page.of_router(), *metrics_page.of_split()]}
    listed.remove("sluice_build_info")  # once the versions are known
    assert families == listed


def test_the_dashboard_asks_for_labels_that_its_metrics_have() -> None:
    labels = {
        row.name: {*row.labels, "le", "namespace", "pod", "model", "router", "instance"} for row in metrics_page.rows()
    }
    dashboard = json.loads(Path(CHART / "files/dashboards/sluice.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for expression in expressions:
        for name, selector in re.findall(r"\b(sluice_\w+){(.*?)}", expression):
            asked = set(re.findall(r"(\w+)=", selector))
            grouped = {each.strip() for by in re.findall(r"by \((.*?)\)", expression) for each in by.split(",")}
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            assert asked | grouped <= labels[family], expression
