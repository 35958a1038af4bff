import pytest

from policies.errors import ConfigError
from policies.router.promised_scale import (
    WINDOW_S,
    Forecast,
    PromisedState,
    RatioOfLoad,
    Ratios,
    ReplicasForPromises,
    ReplicasForPromisesConfig,
    StartTime,
)


class Service:
    """Replicas whose ratio is the square of their load, looked at once a second."""

    def __init__(self, replicas: int, **config: float) -> None:
        self.rule = ReplicasForPromises(ReplicasForPromisesConfig(**config))  # type: ignore[arg-type]
        self.replicas, self.starting = replicas, 0
        self.now_s = self.arrived_s = self.waiting_s = 0.0

    def look(self, rate: float, seconds: int = 1, ratio: float | None = None) -> int:
        """What it wants after so many seconds of work that comes at this rate, without any coming or going."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.arrived_s += rate
            seen = (rate / self.replicas) ** 2 if ratio is None and rate else ratio
            wanted = self.rule.choose(
                PromisedState(
                    now_s=self.now_s,
                    replicas=self.replicas,
                    starting=self.starting,
                    arrived_s=self.arrived_s,
                    waiting_s=self.waiting_s,
                    ratio=seen,
                )
            )
        return wanted


def test_the_worst_class_and_kind_counts_by_its_ninetieth_percentile_of_a_minute() -> None:
    ratios = Ratios()
    assert ratios.worst(0.0) is None
    for number in range(101):
        ratios.note(0.0, "fast", "ttft_s", number / 100)
        ratios.note(1.0, "slow", "tpot_s", 0.5)
    assert ratios.worst(1.0) == pytest.approx(0.9)
    assert ratios.worst(WINDOW_S + 0.5) == 0.5, "the older ones are forgotten"
    assert ratios.worst(WINDOW_S + 2.0) is None


def test_a_forecast_follows_a_trend_and_waits_for_a_fall() -> None:
    rising, falling, amount, less = Forecast(), Forecast(), 0.0, 0.0
    for second in range(1000):
        amount += 1.0 + 0.01 * second
        less += 11.0 - 0.01 * second
        rising.observe(second, amount, memory_s=50.0)
        falling.observe(second, less, memory_s=50.0)
    assert rising.level == pytest.approx(11.0, rel=0.05)
    assert rising.at(100.0) == pytest.approx(12.0, rel=0.05)
    assert falling.at(100.0) == falling.level


def test_who_leaves_takes_its_work_along_and_none_came() -> None:
    forecast = Forecast()
    for second, amount in enumerate((10.0, 12.0, 14.0, 5.0)):
        forecast.observe(float(second), amount, memory_s=1e-9)
    assert forecast.level == 0.0


def test_who_tells_again_brings_no_work_that_came_before() -> None:
    """A router that fell silent for a while, or all of them, after the shared state has lost its pages."""
    forecast = Forecast()
    told = (
        [(100.0 + second, 1) for second in range(60)] + [(0.0, 0)] + [(100.0 + second, 1) for second in range(61, 90)]
    )
    told += [(500_000.0 + second, 2) for second in range(90, 120)]
    for second, (amount, tellers) in enumerate(told):
        forecast.observe(float(second), amount, memory_s=60.0, tellers=tellers)
    assert forecast.level == pytest.approx(1.0)
    assert forecast.at(120.0) == pytest.approx(1.0)


def test_a_load_is_found_by_the_steepness_that_was_seen() -> None:
    fit = RatioOfLoad()
    assert fit.most_load(1.0) is None
    fit.observe(1.0, 0.5, 0.25)
    assert fit.most_load(0.5) == pytest.approx(1.0), "of one load a proportional rule is known"
    for _ in range(500):
        fit.observe(1.0, 0.5, 0.25)
        fit.observe(1.0, 1.0, 1.0)
    assert fit.most_load(1.0) == pytest.approx(1.0, rel=0.05)
    assert fit.most_load(0.25) == pytest.approx(0.5, rel=0.05)


def test_without_requests_it_keeps_what_there_is() -> None:
    service = Service(3)
    assert service.look(0.0, 10) == 3


def test_it_wants_as_many_as_keep_the_ratio() -> None:
    service = Service(2)
    service.look(1.0, 300)
    assert service.look(3.0, 600) > 2
    service.replicas = 4
    assert service.look(3.0, 600) == 4


def test_it_goes_down_only_where_promises_are_kept_with_fewer() -> None:
    service = Service(4)
    service.look(3.6, 600)
    assert service.look(2.6, 1800) == 3
    service.replicas = 3
    assert service.look(2.6, 600) == 3


def test_it_keeps_what_there_is_while_promises_break() -> None:
    service = Service(3)
    service.look(1.5, 900)
    assert service.look(1.5) < 3
    assert service.look(1.5, ratio=1.2) == 4
    service.starting = 1
    assert service.look(1.5, ratio=1.2) == 4, "one is on its way"


def test_what_waits_needs_replicas_when_nothing_comes_any_more() -> None:
    service = Service(4)
    service.look(3.6, 900)
    service.waiting_s = 2000.0
    assert service.look(0.0, 600) >= 4
    service.waiting_s = 0.0
    assert service.look(0.0, 600) == 1


def test_the_time_of_a_start_is_learned_from_the_first_look_that_wanted_one() -> None:
    start, first_s = StartTime(), StartTime().seconds

    def look(now_s: float, replicas: int, starting: int, wanted: int) -> None:
        state = PromisedState(
            now_s=now_s, replicas=replicas, starting=starting, arrived_s=0.0, waiting_s=0.0, ratio=None
        )
        start.observe(state, wanted)

    look(0.0, 2, 0, 3)
    look(5.0, 2, 0, 2)
    look(100.0, 2, 0, 3)
    look(110.0, 2, 1, 3)
    look(140.0, 3, 0, 3)
    assert start.seconds == (first_s + 40.0) / 2


@pytest.mark.parametrize("wrong", [{"most_ratio": 0.0}, {"min_replicas": 0}])
def test_a_value_out_of_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReplicasForPromisesConfig(**wrong)  # type: ignore[arg-type]
