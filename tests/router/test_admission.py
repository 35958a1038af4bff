import math

import pytest

from policies.errors import ConfigError
from router.admission import ClassLimits, Door, Tenant


def test_a_class_without_limits_of_its_own_has_the_defaults() -> None:
    door = Door({"fast": ClassLimits(max_waiting=3, max_wait_s=2.0)})
    fast, other = door.limits("fast", None, 10), door.limits("other", None, 10)
    assert (fast.max_waiting, fast.max_wait_s, fast.quotas) == (3, 2.0, ())
    assert (other.max_waiting, other.max_wait_s) == (ClassLimits().max_waiting, math.inf)
    assert door.max_waiting("fast") == 3


def test_a_tenant_pays_one_request_and_all_its_tokens() -> None:
    tenant = Tenant(name="a", requests_per_minute=60, tokens_per_minute=6000)
    requests, tokens = Door({}).limits("any", tenant, 150.0).quotas
    assert (requests.cost, requests.per_s, requests.burst) == (1, 1.0, 60)
    assert (tokens.cost, tokens.per_s, tokens.burst) == (150.0, 100.0, 6000)
    assert requests.name != tokens.name
    assert Tenant(name="a").quotas(150.0) == ()


def test_a_tenant_may_be_kept_to_some_classes() -> None:
    assert Tenant(name="a").may_use("anything")
    assert not Tenant(name="a", classes=frozenset({"offline"})).may_use("interactive")


@pytest.mark.parametrize("wrong", [{"requests_per_minute": 0}, {"tokens_per_minute": -1}])
def test_a_rate_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Tenant(name="a", **wrong)
