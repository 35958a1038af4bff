import math

import pytest

from policies.errors import ConfigError
from policies.router.admission import ClassLimits
from router.admission import Door, Tenant


def test_a_class_without_limits_of_its_own_has_the_defaults() -> None:
    door = Door({"fast": ClassLimits(max_waiting=3, refuses_late=True)})
    fast, other = door.limits("fast", None, 10, 2.0), door.limits("other", None, 10, 2.0)
    assert (fast.max_waiting, fast.max_wait_s, fast.quotas) == (3, 2.0, ())
    assert (other.max_waiting, other.max_wait_s) == (ClassLimits().max_waiting, math.inf)
    assert (door.max_waiting("fast"), door.refuses_late("fast"), door.refuses_late("other")) == (3, True, False)


def test_what_nothing_is_promised_bears_any_wait() -> None:
    door = Door({"fast": ClassLimits(refuses_late=True)})
    assert door.limits("fast", None, 10).max_wait_s == math.inf


def test_a_key_has_a_share_of_what_may_wait_and_a_request_without_one_has_all() -> None:
    door = Door({"fast": ClassLimits(max_waiting=7, max_key_share=0.4), "one": ClassLimits(max_waiting=1)})
    assert door.limits("fast", Tenant(name="a"), 10).max_of_key == 2
    assert door.limits("fast", None, 10).max_of_key == math.inf
    assert (door.limits("one", Tenant(name="a"), 10).max_of_key, door.limits("one", None, 10).max_waiting) == (1, 1)
    whole = Door({"fast": ClassLimits(max_waiting=7, max_key_share=1.0)}).limits("fast", Tenant(name="a"), 10)
    assert whole.max_of_key == math.inf


def test_a_tenant_pays_one_request_and_all_its_tokens() -> None:
    tenant = Tenant(name="a", requests_per_minute=60, tokens_per_minute=6000)
    requests, tokens = Door({}).limits("any", tenant, 150.0).quotas
    assert (requests.cost, requests.per_s, requests.burst) == (1, 1.0, 60)
    assert (tokens.cost, tokens.per_s, tokens.burst) == (150.0, 100.0, 6000)
    assert requests.name != tokens.name
    assert Tenant(name="a").quotas(150.0) == ()
    assert tenant.token_quota(150.0) == tokens
    assert Tenant(name="a", requests_per_minute=60).token_quota(150.0) is None


def test_a_tenant_may_be_kept_to_some_classes() -> None:
    assert Tenant(name="a").may_use("anything")
    assert not Tenant(name="a", classes=frozenset({"offline"})).may_use("interactive")


@pytest.mark.parametrize("wrong", [{"requests_per_minute": 0}, {"tokens_per_minute": -1}])
def test_a_rate_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Tenant(name="a", **wrong)


@pytest.mark.parametrize("wrong", [0.0, -0.5, 1.1, math.nan, math.inf])
def test_a_share_of_nothing_or_of_more_than_all_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="max_key_share"):
        ClassLimits(max_key_share=wrong)
