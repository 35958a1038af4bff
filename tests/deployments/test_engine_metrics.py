from prometheus_client.parser import text_string_to_metric_families

from deployments.engine_metrics import engine_exposition

STATUS = {
    "running": 3,
    "mode": "auto",
    "phase": "decode",
    "limited_by": "memory",
    "preemptions": 2,
    "steps": {"prefill": 4, "mixed": 0},
    "step_times": {"decode": {"overhead_s": 0.01}},
    "output_tokens": {"p50": 80.0},
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
    assert not [key for key in samples if "b" in key[1:]]


def test_no_replica_is_an_empty_page() -> None:
    assert engine_exposition({}) == b""
