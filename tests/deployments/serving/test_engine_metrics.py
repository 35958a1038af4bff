from dataclasses import asdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.serving.engine_metrics import engine_exposition

STATUS = {
    "running": 3,
    "mode": "auto",
    "phase": "decode",
    "limited_by": "memory",
    "preemptions": 2,
    "steps": {"prefill": 4, "mixed": 0},
    "step_times": {"decode": {"overhead_s": 0.01}},
    "output_tokens": {"p50": 80.0},
    "kv_held": 1,
    "kv_transfer_bytes": 4096,
    "out_of_reach": "a batch of 1 misses 0.001 s between tokens",
    "background_failures": {"heartbeat": 2},
    "off": {"phases": {"adapters": "LoRA", "connector": "a KV connector"}},
    "step_margin": 0.25,
    "drafts": {"verified": 9, "accepted": 6, "left_out": 2, "tokens_per_step": {"chat": 2.5}},
    "step_errors": {"p90": 0.5},
    "promised_gaps": {
        "chat": {"requests": 5, "missed": 2, "promised_s": 0.5, "believed_s": 0.3, "in_steps_s": 0.2, "came_s": 0.4}
    },
}


def test_every_figure_stands_under_its_replica() -> None:
    page = engine_exposition({"a": STATUS, "b": {"error": "gone"}}).decode()
    samples = {
        (s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(page) for s in f.samples
    }
    assert samples[("sluice_engine_running", "a")] == 3
    assert samples[("sluice_engine_preemptions_total", "a")] == 2
    assert samples[("sluice_engine_limited_by", "a", "memory")] == 1
    assert samples[("sluice_engine_steps_total", "a", "prefill")] == 4
    assert samples[("sluice_engine_step_seconds", "a", "decode", "overhead_s")] == 0.01
    assert samples[("sluice_engine_output_tokens", "a", "p50")] == 80
    assert samples[("sluice_engine_kv_held", "a")] == 1
    assert samples[("sluice_engine_kv_transfer_bytes_total", "a")] == 4096
    assert samples[("sluice_relay_background_failures_total", "a", "heartbeat")] == 2
    assert samples[("sluice_engine_target_out_of_reach", "a")] == 1
    off = [key[1:] for key in samples if key[0] == "sluice_engine_feature_off"]
    assert sorted(off) == [("a", "adapters", "phases"), ("a", "connector", "phases")]
    assert samples[("sluice_engine_step_margin", "a")] == 0.25
    assert samples[("sluice_engine_step_error", "a", "p90")] == 0.5
    kept = [samples[("sluice_engine_promised_requests_total", *sorted(("a", "chat", of)))] for of in ("met", "missed")]
    assert kept == [3, 2]
    of = ("promised", "believed", "in_steps", "came")
    gaps = [samples[("sluice_engine_promise_gap_seconds_total", *sorted(("a", "chat", each)))] for each in of]
    assert gaps == [0.5, 0.3, 0.2, 0.4]
    drafts = [samples[("sluice_engine_draft_tokens_total", *sorted(("a", of)))] for of in ("accepted", "rejected")]
    assert (drafts, samples[("sluice_engine_draft_tokens_total", "a", "left_out")]) == ([6, 3], 2)
    assert samples[("sluice_engine_decode_tokens", "a", "chat")] == 2.5
    assert not [key for key in samples if "b" in key[1:]]


def test_no_replica_is_an_empty_page() -> None:
    assert engine_exposition({}) == b""


@pytest.mark.slow  # importing vLLM takes seconds
def test_what_an_engine_of_gang_batches_says_is_shown_as_well() -> None:
    from deployments.engines.transformers.batch import GangCounts

    status = {"running": 2, "waiting": 0, "mode": "prepacked", "kv_cache_tokens": 4096, **asdict(GangCounts(batches=3))}
    page = engine_exposition({"r": status}).decode()
    assert 'sluice_engine_batches_total{replica="r"} 3.0' in page
    assert 'sluice_engine_kv_cache_tokens{replica="r"} 4096.0' in page
    assert 'sluice_engine_decode_steps_total{replica="r"} 0.0' in page
