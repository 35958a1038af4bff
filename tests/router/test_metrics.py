from prometheus_client.parser import text_string_to_metric_families

from router.metrics import RouterMetrics, merge, shared_exposition
from router.state_store import ReplicaLoad, Snapshot


def sample(page: bytes, name: str, **labels: str) -> float:
    (found,) = [
        s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
        if s.name == name and labels.items() <= s.labels.items()
    ]
    return found


def two_routers() -> bytes:
    first, second = RouterMetrics(), RouterMetrics()
    first.requests.labels("standard", "0", "stop").inc(3)
    second.requests.labels("standard", "0", "stop").inc(4)
    second.requests.labels("offline", "1", "length").inc()
    first.of("standard").ttft_s.observe(0.02)
    second.replicas_lost.inc(2)
    return merge([({"router": "a"}, first.exposition()), ({"router": "b"}, second.exposition())])


def test_a_merged_page_tells_routers_apart() -> None:
    page = two_routers()
    assert sample(page, "sluice_requests_total", router="a") == 3
    assert sample(page, "sluice_requests_total", router="b", slo_class="standard") == 4
    assert sample(page, "sluice_requests_total", router="b", slo_class="offline", bin="1", outcome="length") == 1
    assert sample(page, "sluice_replicas_lost_total", router="b") == 2
    assert sample(page, "sluice_ttft_seconds_bucket", router="a", le="0.025") == 1
    assert sample(page, "sluice_ttft_seconds_bucket", router="a", le="0.01") == 0


def test_a_merged_page_has_every_family_once() -> None:
    types = [line.split()[2] for line in two_routers().decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 10


def test_a_merged_page_keeps_types_and_help() -> None:
    families = {family.name: family for family in text_string_to_metric_families(two_routers().decode())}
    assert families["sluice_requests"].type == "counter"
    assert families["sluice_ttft_seconds"].type == "histogram"
    assert "arrival" in families["sluice_ttft_seconds"].documentation


def test_merging_nothing_gives_an_empty_page() -> None:
    assert merge([]) == b""


def test_a_label_with_quotes_and_newlines_survives() -> None:
    metrics = RouterMetrics()
    metrics.requests.labels('a "class"\n', "0", "stop").inc()
    assert (
        sample(merge([({"router": "a"}, metrics.exposition())]), "sluice_requests_total", slo_class='a "class"\n') == 1
    )


def test_the_children_of_a_class_are_made_once() -> None:
    metrics = RouterMetrics()
    assert metrics.of("standard") is metrics.of("standard")
    assert metrics.of("standard") is not metrics.of("offline")


def test_shared_state_is_shown_by_bin_and_replica() -> None:
    load = ReplicaLoad(slots=4, running=1, outstanding_s=2.5)
    page = shared_exposition(Snapshot(lanes={("standard", 2): 7}, replicas={"r": load}, routers=3))
    assert sample(page, "sluice_queue_length", slo_class="standard", bin="2") == 7
    assert sample(page, "sluice_replica_running", replica="r") == 1
    assert sample(page, "sluice_replica_credit", replica="r") == 3
    assert sample(page, "sluice_replica_work_seconds", replica="r") == 2.5
    assert sample(page, "sluice_routers") == 3


def test_a_draining_replica_has_no_credit_rather_than_less_than_none() -> None:
    assert ReplicaLoad(slots=0, running=3, outstanding_s=1.0).credit == 0
