"""The learned predictor's counts and live accuracy, as Prometheus metrics read when the page is asked for.

Prefix `sluice_predictor_`. While the predictor is not believed for a model and class, `..._believed` is 0 there.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from predictor.learned import LearnedPredictor

# Name and meaning, by attribute of `Accuracy`.
_GAUGES = {
    "hit_fraction": ("hit_ratio", "Requests put into the right bin."),
    "reference_hit_fraction": (
        "reference_hit_ratio",
        "Requests that the class's histogram would have put into the right bin.",
    ),
    "bias": ("bias", "Mean ln(predicted / actual) of lengths; positive is too long."),
    "advantage": (
        "advantage",
        "Error of the class's histogram minus the predictor's, in nats; positive is better.",
    ),
    "coverage_fraction": ("coverage_ratio", "Answers within the interval that should hold 80 %."),
}


class PredictorMetrics:
    """Register it with a registry of prometheus_client."""

    def __init__(self, predictor: LearnedPredictor) -> None:
        self._predictor = predictor

    def collect(self) -> Iterator[Metric]:
        asked = CounterMetricFamily(
            "sluice_predictor_questions", "Questions, by what came of them.", labels=("outcome",)
        )
        for outcome, count in self._predictor.asking.outcomes.items():
            asked.add_metric((outcome,), count)
        yield asked
        accuracies = self._predictor.accuracies()
        believed = GaugeMetricFamily(
            "sluice_predictor_believed", "1 while the predictor is used.", labels=("model", "slo_class")
        )
        for key, (_, is_on) in accuracies.items():
            believed.add_metric(key, is_on)
        yield believed
        for attribute, (name, help_text) in _GAUGES.items():
            family = GaugeMetricFamily(f"sluice_predictor_{name}", help_text, labels=("model", "slo_class"))
            for key, (accuracy, _) in accuracies.items():
                family.add_metric(key, getattr(accuracy, attribute))
            yield family
