import time

from prometheus_client.parser import text_string_to_metric_families

from router.exposition import merge
from router.key_metrics import MAX_KEYS, OTHER_KEYS, KeyMetrics
from router.metrics import RouterMetrics

LABELS = {"model": "m", "router": "a"}


def counts(page: bytes) -> dict[tuple[str, ...], float]:
    """By the metric's name, the key's and what else there is besides model and router."""
    return {
        (s.name, s.labels.pop("key"), *(s.labels[each] for each in s.labels if each not in LABELS)): s.value
        for family in text_string_to_metric_families(page.decode())
        for s in family.samples
    }


def test_requests_and_tokens_are_counted_by_key() -> None:
    keys = KeyMetrics("sluice", LABELS)
    for _ in range(2):
        keys.ended("team", "stop")
        keys.took("team", 10, 3)
    keys.ended("other", "refused")
    assert counts(keys.page()) == {
        ("sluice_key_requests_total", "team", "stop"): 2,
        ("sluice_key_requests_total", "other", "refused"): 1,
        ("sluice_key_prompt_tokens_total", "team"): 20,
        ("sluice_key_output_tokens_total", "team"): 6,
    }


def test_all_samples_have_the_labels_of_their_router() -> None:
    keys = KeyMetrics("sluice", LABELS)
    keys.took("team", 1, 1)
    samples = [s for family in text_string_to_metric_families(keys.page().decode()) for s in family.samples]
    assert samples and all(s.labels == {**LABELS, "key": "team"} for s in samples)


def test_without_keys_there_is_nothing() -> None:
    assert KeyMetrics("sluice", LABELS).page() == b""
    assert b"sluice_key_" not in RouterMetrics(labels=LABELS).exposition()


def test_a_name_with_quotes_and_newlines_survives() -> None:
    keys, name = KeyMetrics("sluice", {}), 'a\\n"team"\n# HELP x\\'
    keys.ended(name, "stop")
    assert counts(merge([keys.page()])) == {("sluice_key_requests_total", name, "stop"): 1}


def test_names_beyond_the_most_are_counted_together() -> None:
    keys = KeyMetrics("sluice", {})
    for number in range(MAX_KEYS + 5):
        keys.ended(f"k{number}", "stop")
        keys.took(f"k{number}", 2, 1)
    keys.took("k0", 2, 1)
    found = counts(keys.page())
    assert len({key for _, key, *_ in found}) == MAX_KEYS + 1
    assert found["sluice_key_requests_total", OTHER_KEYS, "stop"] == 5
    assert found["sluice_key_prompt_tokens_total", OTHER_KEYS] == 10
    assert found["sluice_key_output_tokens_total", "k0"] == 2


def test_a_page_of_as_many_keys_as_there_may_be_is_made_in_a_moment() -> None:
    """At every heartbeat the loop that sends tokens waits for it."""
    keys = KeyMetrics("sluice", LABELS)
    for number in range(MAX_KEYS):
        for outcome in ("stop", "length", "cancelled", "error", "refused"):
            keys.ended(f"k{number}", outcome)
        keys.took(f"k{number}", 2, 1)
    took_s = []
    for _ in range(10):
        began_s = time.perf_counter()
        keys.page()
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 0.02
