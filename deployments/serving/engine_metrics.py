"""What engines say of themselves as Prometheus metrics, `sluice_engine_*`, one series for each replica."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from router.exposition import page

_GAUGES = {
    "running": "Requests in the running batch.",
    "waiting": "Requests in the engine's own queue; short as long as routers bind late.",
    "free_blocks": "Free KV blocks.",
    "total_blocks": "KV blocks.",
    "return_chance": "Chance that the cached block that is given up next would be used again within five minutes.",
    "kept_blocks": "Free KV blocks that sessions keep through their pauses: they are given up last.",
    "kv_cache_usage_ratio": "KV blocks in use, of all; those that are kept for prefixes alone are free.",
    "kv_cache_tokens": "Tokens that the cache of a gang batch may hold.",
    "batch_size": "Requests that the scheduler would admit at once as things stand: what the replica offers.",
    "max_batch_size": "Cap of the last step.",
    "max_batch_tokens": "Most tokens of a step.",
    "max_prefill_tokens": "Most prompt tokens of a step with decodes; only where a time per token bounds it.",
    "refill": "Requests per refill of exclusive batching.",
    "phase_steps": "Decode steps between two refills of exclusive batching.",
    "overcommit": "Share admitted beyond the forecast, below 0 where less is.",
    "step_margin": "Share by which steps beside promised times per token are planned longer than predicted.",
    "late_wait_seconds": "How long the oldest late request has waited in the engine.",
    "kv_held": "Ended requests whose KV cache another replica may still fetch.",
}
_COUNTERS = {
    "preemptions": "Requests that lost their cache.",
    "prefix_cache_query_tokens": "Tokens of starting requests, looked up in the prefix cache; without those preempted.",
    "prefix_cache_hit_tokens": "Tokens of starting requests that the prefix cache held, of those looked up.",
    "finished": "Requests that ended.",
    "phase_switches": "Changes of phase.",
    "busy_seconds": "Seconds of steps.",
    "between_seconds": "Of those, seconds between the result of a step and the begin of the next one.",
    "planning_seconds": "Seconds that planning added to steps.",
    "batches": "Gang batches.",
    "decode_steps": "Decode steps of gang batches.",
    "row_steps": "Rows computed in decode steps of gang batches.",
    "wasted_row_steps": "Those of requests that had ended.",
    "splits": "Gang batches cut in two because memory ran out.",
    "kv_transfers": "KV caches moved between replicas, as the side that moved them counts.",
    "kv_transfer_seconds": "Seconds that those took.",
    "kv_transfer_bytes": "Bytes of those.",
    "kv_transfer_failures": "KV caches that could not be moved.",
    "kv_expired": "KV caches that were kept for another replica and not fetched in time.",
}
_STATES = {
    "mode": "The configured mode.",
    "phase": "Phase of the last step.",
    "limited_by": "What bounds the batch: memory, sla (a promised time per token) or slots; of the papers' rules "
    "algorithm_1, algorithm_2 (001) or n_star (003).",
}


def engine_exposition(statuses: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str] | None = None) -> bytes:
    """The page of all replicas, by replica id, with `labels` besides; what a replica does not say is left out."""
    registry = CollectorRegistry()
    registry.register(_Collected(statuses))
    return page(registry, labels or {})


class _Collected:
    def __init__(self, statuses: Mapping[str, Mapping[str, Any]]) -> None:
        self._statuses = statuses

    def collect(self) -> list[Metric]:
        plain = [self._numbers(GaugeMetricFamily, name, text) for name, text in _GAUGES.items()]
        counted = [self._numbers(CounterMetricFamily, name, text) for name, text in _COUNTERS.items()]
        states = [self._words(name, text) for name, text in _STATES.items()]
        return [family for family in (*plain, *counted, *states, *self._nested()) if family.samples]

    def _numbers(self, kind: Any, name: str, text: str) -> Metric:
        family = kind(f"sluice_engine_{name}", text, labels=("replica",))
        for replica_id, status in self._statuses.items():
            if isinstance(status.get(name), (int, float)):
                family.add_metric((replica_id,), float(status[name]))
        return family  # type: ignore[no-any-return]

    def _words(self, name: str, text: str) -> Metric:
        family = GaugeMetricFamily(f"sluice_engine_{name}", f"{text} 1 for the one it is.", labels=("replica", name))
        for replica_id, status in self._statuses.items():
            if isinstance(status.get(name), str):
                family.add_metric((replica_id, status[name]), 1.0)
        return family

    def _nested(self) -> list[Metric]:
        steps = CounterMetricFamily("sluice_engine_steps", "Steps by what they held.", labels=("replica", "kind"))
        fit = GaugeMetricFamily(
            "sluice_engine_step_seconds", "Fitted step times.", labels=("replica", "kind", "coefficient")
        )
        lengths = GaugeMetricFamily(
            "sluice_engine_output_tokens", "Answers' lengths, as planned with.", labels=("replica", "percentile")
        )
        failures = CounterMetricFamily(
            "sluice_relay_background_failures", "Background tasks of its relay that failed.", labels=("replica", "task")
        )
        errors = GaugeMetricFamily(
            "sluice_engine_step_error",
            "Share by which steps took longer than predicted lately; of these the margin is made.",
            labels=("replica", "percentile"),
        )
        target = GaugeMetricFamily(
            "sluice_engine_target_out_of_reach",
            "1 where not even the smallest batch keeps the bound of a paper's rule; the status says which.",
            labels=("replica",),
        )
        off = GaugeMetricFamily(
            "sluice_engine_feature_off",
            "1 for what an engine cannot do, and for each thing that switches it off: docs/reference/features.md.",
            labels=("replica", "feature", "why"),
        )
        for replica_id, status in self._statuses.items():
            for feature, why in status.get("off", {}).items():
                for cause in why:
                    off.add_metric((replica_id, feature, cause), 1.0)
            if "out_of_reach" in status:
                target.add_metric((replica_id,), float(status["out_of_reach"] is not None))
            for kind, count in status.get("steps", {}).items():
                steps.add_metric((replica_id, kind), count)
            for kind, form in status.get("step_times", {}).items():
                for coefficient, seconds in form.items():
                    fit.add_metric((replica_id, kind, coefficient), seconds)
            for percentile, tokens in status.get("output_tokens", {}).items():
                lengths.add_metric((replica_id, percentile), tokens)
            for percentile, share in status.get("step_errors", {}).items():
                errors.add_metric((replica_id, percentile), share)
            for task, count in status.get("background_failures", {}).items():
                failures.add_metric((replica_id, task), count)
        return [steps, fit, lengths, errors, failures, target, off, *self._gaps(), *self._drafts()]

    def _drafts(self) -> list[Metric]:
        """Of engines that draft tokens."""
        tokens = CounterMetricFamily(
            "sluice_engine_draft_tokens",
            "Drafted tokens: verified and accepted or rejected, or left_out, as not worth a step's time.",
            labels=("replica", "outcome"),
        )
        brought = GaugeMetricFamily(
            "sluice_engine_decode_tokens",
            "Tokens that a decode brings a request with its drafts, lately.",
            labels=("replica", "slo_class"),
        )
        for replica_id, status in self._statuses.items():
            if (drafts := status.get("drafts")) is not None:
                tokens.add_metric((replica_id, "accepted"), drafts["accepted"])
                tokens.add_metric((replica_id, "rejected"), drafts["verified"] - drafts["accepted"])
                tokens.add_metric((replica_id, "left_out"), drafts["left_out"])
                for slo_class, mean in drafts["tokens_per_step"].items():
                    brought.add_metric((replica_id, slo_class), mean)
        return [tokens, brought]

    def _gaps(self) -> list[Metric]:
        """Of requests that were promised a time per token."""
        requests = CounterMetricFamily(
            "sluice_engine_promised_requests",
            "Whole answers of several tokens that were promised a mean time per token, kept or not at the engine.",
            labels=("replica", "slo_class", "tpot"),
        )
        means = CounterMetricFamily(
            "sluice_engine_promise_gap_seconds",
            "Sum of their mean times per token: promised, believed when steps were planned, in_steps (from the begin "
            "of steps to their results), and as tokens came.",
            labels=("replica", "slo_class", "of"),
        )
        for replica_id, status in self._statuses.items():
            for slo_class, found in status.get("promised_gaps", {}).items():
                met = found["requests"] - found["missed"]
                requests.add_metric((replica_id, slo_class, "met"), met)
                requests.add_metric((replica_id, slo_class, "missed"), found["missed"])
                for of in ("promised", "believed", "in_steps", "came"):
                    means.add_metric((replica_id, slo_class, of), found[f"{of}_s"])
        return [requests, means]
