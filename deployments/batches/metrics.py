"""Metrics of batches, which one runner has for all routers."""

from collections import Counter as Count
from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from deployments.batches.places import Places
from deployments.batches.run import BatchRun
from deployments.batches.state import Result, Tokens


class BatchMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests of batches that were answered.", "model", "outcome")
        self.tokens = self._counter("tokens", "Tokens of answered requests of batches.", "model", "kind")
        self.open = self._gauge("open", "Batches that have not ended, by their state.", "status")
        self.remaining = self._gauge("requests_remaining", "Requests of batches that are not answered yet.", "model")
        self.in_flight = self._gauge("requests_in_flight", "Requests of batches that routers have.", "model")
        self.limit = self._gauge("requests_limit", "How many requests of batches routers may have now.", "model")
        late = "Batches that at their pace will not end within their windows."
        self.expected_late = self._gauge("expected_late", late, "model")
        self.troubled = self._gauge("troubled", "Batches that wait, as their folder fails: nothing of them is sent.")
        self.failures = self._counter("task_failures", "Failures of what runs batches, by task.", "task")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"sluice_batches_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"sluice_batches_{name}", meaning, labels, registry=self.registry)

    def count(self, model: str, result: Result, tokens: Tokens) -> None:
        self.requests.labels(model, "error" if result.is_error else "completed").inc()
        self.tokens.labels(model, "input").inc(tokens.input)
        self.tokens.labels(model, "output").inc(tokens.output)

    def show(self, runs: Collection[BatchRun | None], places: Mapping[str, Places]) -> None:
        """Set the gauges to the present state."""
        known = [run for run in runs if run is not None]
        states = Count(run.progress.status for run in known)
        for status in ("validating", "in_progress", "finalizing"):
            self.open.labels(status).set(states[status])
        self.troubled.set(sum(run.folder.trouble is not None for run in known))
        for model, of_model in places.items():
            batches = [run for run in known if run.progress.model == model]
            self.remaining.labels(model).set(sum(run.progress.remaining for run in batches))
            self.in_flight.labels(model).set(of_model.in_flight)
            self.limit.labels(model).set(of_model.policy.limit)
            self.expected_late.labels(model).set(sum(run.is_expected_late for run in batches))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
