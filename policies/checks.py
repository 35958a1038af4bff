"""Bounds that several configs or formulas share; what is wrong is named with its value.

``require_*`` look at fields of a config, a dataclass, and raise ConfigError; one whose type allows None may be None.
``check_*`` look at arguments and raise InputError.
"""

from math import inf
from typing import get_args, get_type_hints

from policies.errors import ConfigError, InputError

# What a float that stands for a whole number may be off by after a few operations.
ROUNDING = 1e-9


def require_at_least(minimum: float, config: object, *names: str) -> None:
    """Every named field is finite and at least ``minimum``."""
    for name in names:
        value = getattr(config, name)
        if not _is_none(value, config, name) and not minimum <= value < inf:
            raise ConfigError(f"{name} must be finite and at least {minimum}, got {value}")


def require_positive(config: object, *names: str) -> None:
    """Every named field is finite and above 0."""
    for name in names:
        value = getattr(config, name)
        if not _is_none(value, config, name) and not 0.0 < value < inf:
            raise ConfigError(f"{name} must be finite and positive, got {value}")


def _is_none(value: object, config: object, name: str) -> bool:
    """Raises ConfigError where it is and may not be."""
    if value is None and type(None) not in get_args(get_type_hints(type(config))[name]):
        raise ConfigError(f"{name} must be set")
    return value is None


def require_probability(config: object, *names: str) -> None:
    """Every named field lies strictly between 0 and 1."""
    for name in names:
        if not 0.0 < getattr(config, name) < 1.0:
            raise ConfigError(f"{name} must be in (0, 1), got {getattr(config, name)}")


def require_order(config: object, lower: str, upper: str) -> None:
    """The field ``upper`` is None or at least the field ``lower``."""
    low, high = getattr(config, lower), getattr(config, upper)
    if high is not None and high < low:
        raise ConfigError(f"{upper} must not be below {lower}, got {high} < {low}")


def require_one_of(allowed: tuple[str, ...], config: object, name: str) -> None:
    """The named field is one of the given words."""
    if getattr(config, name) not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")


def check_counts(**counts: int) -> None:
    """Every one is at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name} must be >= 1, got {value}")


def check_positive(**values: float) -> None:
    """Every one is finite and above 0."""
    for name, value in values.items():
        if not 0.0 < value < inf:
            raise InputError(f"{name} must be positive and finite, got {value}")


def check_range(l_min: float, l_max: float) -> None:
    """Finite lengths, at least 0, the lower first."""
    if not 0.0 <= l_min < l_max < inf:
        raise InputError(f"lengths must satisfy 0 <= l_min < l_max < inf, got {l_min} and {l_max}")
