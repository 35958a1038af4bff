from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families

from router.exposition import PROCESS_FRESH_S, ProcessPage, merge, shared_exposition
from router.metrics import RouterMetrics
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
    first, second = (RouterMetrics(labels={"router": router}) for router in "ab")
    first.requests.labels("standard", "0", "stop").inc(3)
    second.requests.labels("standard", "0", "stop").inc(4)
    second.requests.labels("offline", "1", "length").inc()
    first.of("standard").ttft_s.observe(0.02)
    second.replicas_lost.inc(2)
    return merge([first.exposition(), second.exposition()])


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
    metrics = RouterMetrics(labels={"router": 'a\n# HELP "'})
    metrics.requests.labels('a "class"\n# HELP x', "0", "stop").inc()
    page = merge([metrics.exposition()])
    assert sample(page, "sluice_requests_total", router='a\n# HELP "', slo_class='a "class"\n# HELP x') == 1


def test_the_children_of_a_class_are_made_once() -> None:
    metrics = RouterMetrics()
    assert metrics.of("standard") is metrics.of("standard")
    assert metrics.of("standard") is not metrics.of("offline")


def test_missed_promises_of_some_classes_do_not_count() -> None:
    metrics = RouterMetrics()
    for kept in (
        ("met", "missed", "met"),
        ("missed", "missed", "met"),
        ("met", "met", "missed"),
        ("met", "met", "met"),
    ):
        metrics.slo_requests.labels("a", *kept).inc()
    metrics.slo_requests.labels("idle", "missed", "met", "met").inc()
    assert metrics.missed(all_but={"idle"}) == 3


def test_shared_state_is_shown_by_bin_and_replica() -> None:
    load = ReplicaLoad(slots=4, running=1, outstanding_s=2.5)
    snapshot = Snapshot(lanes={("standard", 2): 7}, replicas={"r": load}, routers=3, batches={(2, "full"): 5})
    page = shared_exposition(snapshot)
    assert sample(page, "sluice_batches_total", bin="2", why="full") == 5
    assert sample(page, "sluice_queue_length", slo_class="standard", bin="2") == 7
    assert sample(page, "sluice_replica_running", replica="r") == 1
    assert sample(page, "sluice_replica_credit", replica="r") == 3
    assert sample(page, "sluice_replica_work_seconds", replica="r") == 2.5
    assert sample(page, "sluice_routers") == 3


def test_no_page_says_when_a_counter_was_made() -> None:
    """For counters kept elsewhere it would be the time of the page."""
    metrics = RouterMetrics(labels={"router": "a"})
    metrics.of("standard").ttft_s.observe(0.1)
    metrics.requests.labels("standard", "0", "stop").inc()
    shared = shared_exposition(Snapshot(late={("standard", "passed"): 1}, owed={"standard": 1}))
    assert sample(shared, "sluice_late_requests_total", slo_class="standard") == 1
    assert b"_created" not in metrics.exposition() + shared


def test_the_versions_that_a_router_runs_on_are_labels() -> None:
    metrics = RouterMetrics(labels={"router": "a"})
    assert b"build_info" not in metrics.exposition()
    metrics.note_build({"version": "1.2.3", "vllm": "0.32.0"})
    assert sample(metrics.exposition(), "sluice_build_info", router="a", version="1.2.3", vllm="0.32.0") == 1


def test_a_draining_replica_has_no_credit_rather_than_less_than_none() -> None:
    assert ReplicaLoad(slots=0, running=3, outstanding_s=1.0).credit == 0


class Clock:
    now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def counted() -> Iterator[Counter]:
    """In the common registry, as vLLM's front end counts."""
    counter = Counter("counted_by_the_test", "For the test.", ("model",))
    yield counter
    REGISTRY.unregister(counter)


def test_what_its_process_counts_is_on_the_page_of_a_router_under_its_own_labels(counted: Counter) -> None:
    """Any router may answer a scrape, and one whose counters are taken for another's makes rates of nothing."""
    counted.labels("theirs").inc()
    metrics = RouterMetrics(labels={"router": "a", "model": "ours"}, process=ProcessPage({"router": "a"}, Clock()))
    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    assert [sample.labels for sample in families["process_cpu_seconds"].samples] == [{"router": "a"}]
    assert families["process_cpu_seconds"].type == "counter"
    assert {"router": "a", "model": "theirs"} in [each.labels for each in families["counted_by_the_test"].samples]
    assert families["sluice_replicas_lost"].samples[0].labels == {"router": "a", "model": "ours"}


def test_that_page_is_made_anew_every_few_seconds(counted: Counter) -> None:
    clock = Clock()
    process = ProcessPage({"router": "a"}, clock)

    def count() -> float:
        return sample(process(), "counted_by_the_test_total", model="m")

    counted.labels("m").inc()
    assert count() == 1
    counted.labels("m").inc()
    clock.now_s += PROCESS_FRESH_S - 1
    assert count() == 1
    clock.now_s += 1
    assert count() == 2


def test_what_has_grown_beyond_measure_is_left_out_with_a_word(
    counted: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", logger="router.metrics")
    for number in range(15_000):
        counted.labels(f"{number:040}").inc()
    assert ProcessPage({"router": "a"}, Clock())() == b""
    assert "left out" in caplog.text
