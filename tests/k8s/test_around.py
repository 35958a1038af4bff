"""What stands around the cluster: policies, budgets, alerts, dashboards, the test and the drain script."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.batches.metrics import BatchMetrics
from deployments.config.application import AppConfig
from deployments.serving.engine_metrics import engine_exposition
from router.candidate_metrics import CandidateMetrics
from router.exposition import shared_exposition
from router.metrics import RouterMetrics, SplitMetrics
from router.state_store import ReplicaLoad, Snapshot
from tests.k8s.cases import named, with_password
from tests.k8s.engines import CHART, Helm3, Helm4, Manifest, application, documents
from tests.k8s.fake_api import serve
from tests.k8s.schemas import templates_of

EVERYTHING = "everything-values"


def _all(text: str, kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in documents(text) if m["kind"] == kind}


def _metric_names() -> set[str]:
    metrics = RouterMetrics()
    metrics.of("standard")
    metrics.note_build({"version": "0"})
    metrics.keys.ended("team", "stop")
    metrics.keys.took("team", 1, 1)
    SplitMetrics(metrics.registry)
    CandidateMetrics(metrics.registry)
    load = ReplicaLoad(slots=1, running=0, outstanding_s=0.0)
    shared = shared_exposition(Snapshot(lanes={}, replicas={"r": load}, routers=1)).decode()
    moved = ("kv_transfers", "kv_transfer_seconds", "kv_transfer_bytes", "kv_transfer_failures", "kv_expired")
    cache = ("kv_cache_usage_ratio", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    numbers: dict[str, Any] = dict.fromkeys((*moved, *cache, "preemptions"), 1)
    means = {"requests": 1, "missed": 0, "promised_s": 0.1, "believed_s": 0.1, "in_steps_s": 0.1, "came_s": 0.1}
    numbers |= {"step_margin": 0.1, "promised_gaps": {"standard": means}}
    status = {**numbers, "background_failures": {"heartbeat": 1}, "limited_by": "memory", "out_of_reach": None}
    of_batches = BatchMetrics().exposition().decode()
    text = metrics.exposition().decode() + shared + engine_exposition({"r": status}).decode() + of_batches
    return set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def _names_in(text: str) -> set[str]:
    """As families: a histogram's buckets count as the histogram."""
    return {re.sub(r"_(bucket|count)$", "", name) for name in re.findall(r"\bsluice_\w+", text)}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads((CHART / "files/dashboards/sluice.json").read_text()))


# What explains a slow answer, and who takes what.
SHOWN = {
    "sluice_engine_kv_cache_usage_ratio", "sluice_engine_preemptions_total", "sluice_engine_limited_by",
    "sluice_replica_slowness", "sluice_e2e_seconds", "sluice_ttft_seconds", "sluice_itl_seconds",
    "sluice_engine_prefix_cache_hit_tokens_total", "sluice_prompt_tokens_total", "sluice_output_tokens_total",
    "sluice_key_prompt_tokens_total", "sluice_key_output_tokens_total", "sluice_build_info",
}  # fmt: skip


def test_the_dashboard_shows_metrics_that_there_are_of_the_models_that_are_chosen(dashboard: dict[str, Any]) -> None:
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "namespace", "model", "pod"]
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert SHOWN <= _names_in(" ".join(expressions)) <= _metric_names()
    for expression in expressions:
        selectors = re.findall(r"{.*?}", expression)
        assert len(selectors) == len(re.findall(r"\bsluice_\w+", expression)), expression
        assert all('model=~"$model"' in selector for selector in selectors), expression


def test_panels_of_the_dashboard_are_described_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    assert all(panel["description"] for panel in panels)


def _alerts(rendered: dict[str, str]) -> list[dict[str, Any]]:
    rule = _all(rendered[EVERYTHING], "PrometheusRule")["full"]
    return list(rule["spec"]["groups"][0]["rules"])


def test_alerts_watch_metrics_that_there_are_and_only_this_release(rendered: dict[str, str]) -> None:
    alerts = _alerts(rendered)
    names = {alert["alert"] for alert in alerts}
    assert {"SluiceErrors", "SluiceFirstTokenSlow", "SluiceKVTransfersFail", "SluiceRelayFailures"} <= names
    assert {"SluiceNoEngine", "SluiceNobodyServes"} <= names
    for alert in alerts:
        assert _names_in(alert["expr"]) <= _metric_names()
        assert re.search(r'namespace="prod",pod=~"full-', alert["expr"].replace("{ ", "{"))
        assert alert["annotations"]["summary"]


def test_engines_that_are_not_there_are_no_engines_that_stand_still(rendered: dict[str, str]) -> None:
    (alert,) = [alert for alert in _alerts(rendered) if alert["alert"] == "SluiceNobodyServes"]
    _, _, unless = alert["expr"].rpartition("unless on (model) ")
    assert unless.startswith("max by (model) (sluice_replica_missing{")


RUNBOOK = CHART.parents[1] / "docs/guides/runbook.md"


def test_every_alert_links_to_its_section_of_the_runbook(rendered: dict[str, str]) -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    alerts = _alerts(rendered)
    assert {alert["alert"] for alert in alerts} == set(sections) and len(set(sections)) == len(sections)
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"docs/guides/runbook.md#{alert['alert'].lower()}"


def test_a_section_of_the_runbook_says_how_grave_it_is_and_what_to_do(rendered: dict[str, str]) -> None:
    severity = {alert["alert"]: alert["labels"]["severity"] for alert in _alerts(rendered)}
    for name, text in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL):
        assert f"**{severity[name].capitalize()}.**" in text, name
        assert "\nLook: " in text and "\nDo: " in text, name


def test_thresholds_are_those_of_values_and_the_runbook_names_them(helm4: Helm4) -> None:
    names = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]["thresholds"]
    given = {name: 0.901 + index / 100 for index, name in enumerate(names)}
    rule = {"enabled": True, "thresholds": given, "runbookUrl": "https://runbooks.example.org/sluice"}
    text = helm4.render(with_password({"prometheusRule": rule}))
    alerts = _all(text, "PrometheusRule")["my-sluice"]["spec"]["groups"][0]["rules"]
    expressions = " ".join(alert["expr"] for alert in alerts)
    for name, value in given.items():
        assert expressions.count(f"> {value:g}") == 1, name
        assert f"`{name}`" in RUNBOOK.read_text(), name
    assert all(a["annotations"]["runbook_url"].startswith("https://runbooks.example.org/sluice#sluice") for a in alerts)


def test_a_model_whose_engines_are_missing_is_told_from_one_that_is_idle_or_needs_none(
    rendered: dict[str, str],
) -> None:
    (expression,) = [rule["expr"] for rule in _alerts(rendered) if rule["alert"] == "SluiceNoEngine"]
    (missing,) = re.findall(r"\bsluice_\w+", expression)
    idle = {"r": ReplicaLoad(slots=1, running=0, outstanding_s=0.0)}

    def fires(snapshot: Snapshot, *, may_be_none: bool) -> bool:
        page = shared_exposition(snapshot, may_be_none=may_be_none).decode()
        return bool(re.search(rf"^{missing} 1", page, re.MULTILINE))

    assert fires(Snapshot(), may_be_none=False)
    assert fires(Snapshot(asked=True), may_be_none=True)
    assert not fires(Snapshot(), may_be_none=True)
    assert not any(fires(Snapshot(replicas=idle), may_be_none=each) for each in (False, True))


def test_routers_without_redis_are_told_from_routers_that_do_not_report(rendered: dict[str, str]) -> None:
    """Their pages have then what they count themselves, before any request too, and nothing shared."""
    expressions = {rule["alert"]: rule["expr"] for rule in _alerts(rendered)}
    there, missing = re.findall(r"\bsluice_\w+", expressions["SluiceSharedStateAway"])
    own, shared = RouterMetrics().exposition().decode(), shared_exposition(Snapshot(routers=1)).decode()
    assert re.search(rf"^{there} 0", own, re.MULTILINE)
    assert re.search(rf"^{missing} 1", shared, re.MULTILINE) and missing not in own
    assert re.findall(r"\bsluice_\w+", expressions["SluiceSilent"]) == [there]


def test_alerts_on_single_failures_see_the_first_one(rendered: dict[str, str]) -> None:
    """A labelled counter begins with it, at 1, in which `increase` alone sees no growth."""
    grown = {
        alert["alert"]: alert["expr"] for alert in _alerts(rendered) if re.match(r"increase\(.*\) > 0", alert["expr"])
    }
    assert grown.keys() == {"SluiceBackgroundFailures", "SluiceRelayFailures", "SluiceBatchFailures"}
    for expression in grown.values():
        ((failures, began),) = re.findall(r"^increase\((.+?)\[15m\]\) > 0 or \((.+)\)$", expression)
        before = f"ignoring (pod, instance) last_over_time({failures}[15m] offset 15m)"
        assert began == f"{failures} > 0 unless {before}"


def test_redis_is_open_to_ray_pods_alone(rendered: dict[str, str]) -> None:
    policy = _all(rendered[EVERYTHING], "NetworkPolicy")["full-redis"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy
    assert len(policy["ingress"]) == 1 and policy["ingress"][0]["ports"] == [{"port": 6379}]
    assert "app.kubernetes.io/instance" in str(policy["ingress"][0]["from"])


def test_ray_pods_are_open_to_named_clients_on_one_port_and_to_the_operator(rendered: dict[str, str]) -> None:
    policy = _all(rendered[EVERYTHING], "NetworkPolicy")["full-ray"]["spec"]
    clients = [rule for rule in policy["ingress"] if rule.get("ports") == [{"port": 8000}]]
    assert len(clients) == 1 and "web" in str(clients[0]["from"]) and "test" in str(clients[0]["from"])
    operator = [rule for rule in policy["ingress"] if "kuberay-operator" in str(rule["from"])]
    assert {port["port"] for port in operator[0]["ports"]} == {8265, 52365, 8000}
    assert all(rule.get("from") for rule in policy["ingress"])


def test_the_operator_is_known_by_its_namespace_where_that_is_named(rendered: dict[str, str]) -> None:
    """Ray's dashboard runs what it is sent, and any namespace may have pods with the operator's label."""
    pod = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    named = {"matchLabels": {"kubernetes.io/metadata.name": "ray-system"}}
    for file, name, namespace in ((EVERYTHING, "full-ray", named), ("default-values", "my-sluice-ray", {})):
        policy = _all(rendered[file], "NetworkPolicy")[name]["spec"]
        (rule,) = [rule for rule in policy["ingress"] if {"port": 8265} in rule.get("ports", [])]
        assert rule["from"] == [{"namespaceSelector": namespace, "podSelector": pod}]


def test_nothing_leaves_an_air_gapped_release_but_names_redis_and_ray(rendered: dict[str, str]) -> None:
    egress = _all(rendered["air-gapped"], "NetworkPolicy")["my-sluice-ray"]["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule.get("ports", [])] == [53, 53, 6379]


def test_pods_reach_the_ports_of_servers_that_run_already(helm4: Helm4) -> None:
    urls = ["http://10.0.0.7:8001", "https://servers.example/a", "http://b:8001"]
    served = {"model": "theirs", "engine": {"kind": "openai", "openai": {"urls": urls}}}
    more = {"model": "others", "engine": {"kind": "openai", "openai": {"urls": ["http://[fd00::1]"]}}}
    text = helm4.render(with_password({"gpusPerEngine": 1, "app": {**served, "more_models": [more]}}))
    args = application(text)["args"]
    assert [each["engine"] for each in (args, *args["more_models"])] == [
        {**each["engine"], "num_cpus": 0} for each in (served, more)
    ]
    assert AppConfig.model_validate(args).more_models[0].engine.replicas == 1
    egress = _all(text, "NetworkPolicy")["my-sluice-ray"]["spec"]["egress"]
    assert {"ports": [{"port": 8001}, {"port": 443}, {"port": 80}]} in egress


def test_servers_that_run_already_need_no_pods_of_engines(helm4: Helm4) -> None:
    served = {"model": "theirs", "engine": {"kind": "openai", "openai": {"urls": ["http://10.0.0.7:8001"]}}}
    text = helm4.render(with_password({"gpusPerEngine": 0, "engineGroups": [], "app": served}))
    groups = _all(text, "RayService")["my-sluice"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == ["router"]


@pytest.mark.parametrize("component", ["router", "engine"])
def test_budgets_select_the_pods_they_are_for(rendered: dict[str, str], component: str) -> None:
    selector = _all(rendered[EVERYTHING], "PodDisruptionBudget")[f"full-{component}"]["spec"]["selector"]["matchLabels"]
    service = _all(rendered[EVERYTHING], "RayService")["full"]
    labels = [template["metadata"]["labels"] for template in templates_of(service).values()]
    assert any(selector.items() <= pod.items() for pod in labels)


HEADS = [("auto", True, False), ("auto", False, True), ("always", True, True), ("never", False, False)]


@pytest.mark.parametrize(("head", "survives", "kept"), HEADS)
def test_a_drain_of_nodes_waits_for_the_head_where_engines_would_end_with_it(
    helm4: Helm4, head: str, survives: bool, kept: bool
) -> None:
    """With Ray's state in Redis they outlive it: tests/k8s/test_semantic.py."""
    values = with_password({"podDisruptionBudget": {"head": head}, "redis": {"gcsFaultTolerance": survives}})
    budgets = _all(helm4.render(values), "PodDisruptionBudget")
    assert ("my-sluice-head" in budgets) == kept
    if kept:
        spec = budgets["my-sluice-head"]["spec"]
        assert spec["maxUnavailable"] == 0
        assert spec["selector"]["matchLabels"]["app.kubernetes.io/component"] == "head"


def test_the_services_that_routes_name_is_the_one_that_kuberay_makes(rendered: dict[str, str]) -> None:
    ingress = _all(rendered[EVERYTHING], "Ingress")["full"]["spec"]["rules"][0]["http"]["paths"][0]["backend"]
    route = _all(rendered[EVERYTHING], "HTTPRoute")["full"]["spec"]["rules"][0]["backendRefs"][0]
    assert ingress["service"]["name"] == route["name"] == "full-serve-svc"


@pytest.mark.parametrize("script", ["drain.py", "completion.py"])
def test_scripts_are_rendered_as_they_are(rendered: dict[str, str], script: str) -> None:
    source = (CHART / "files" / script).read_text()
    texts = [_all(rendered["one-gpu"], "ConfigMap")["my-sluice-scripts"]["data"]["drain.py"]]
    texts += _all(rendered["one-gpu"], "Pod")["my-sluice-test"]["spec"]["containers"][0]["command"]
    assert any(ast.dump(ast.parse(text)) == ast.dump(ast.parse(source)) for text in texts if "\n" in text)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """A cluster that has KubeRay."""
    with serve() as (_, text):
        (tmp_path / "kubeconfig").write_text(text)
        yield tmp_path / "kubeconfig"


def test_notes_of_an_incremental_upgrade_name_the_gateway(kubeconfig: Path) -> None:
    notes = Helm3().notes(named("incremental"), kubeconfig)
    assert "get gateway my-sluice-gateway" in notes and "serve-svc" not in notes


def test_notes_name_the_next_three_commands(kubeconfig: Path) -> None:
    notes = Helm3().notes({}, kubeconfig)
    commands = ("kubectl -n prod wait rayservice/my-sluice", "helm -n prod test my", "kubectl -n prod port-forward")
    found = [notes.find(command) for command in commands]
    assert -1 not in found and found == sorted(found)
    assert "does not know RayService" not in notes and "No API keys are set" in notes
