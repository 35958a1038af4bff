"""Policies out of other packages: ``package.module:Class`` where a registered name could stand.

Such a class is not under our contract tests. So what it answers is checked here, for every driver alike: a plan that
lets nothing run would stop an engine without a word.
"""

import inspect
import re
from collections.abc import Mapping
from math import isfinite
from pkgutil import resolve_name
from typing import Any

from policies.errors import ConfigError, PolicyError
from policies.router.order import Order
from policies.types import BatchPolicy, BatchState, Phase, StepPlan, StepResult

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def load_policy(path: str, protocol: type, settings: Mapping[str, Any]) -> Any:
    """A new policy of the class at ``path``, with ``settings`` as its keywords.

    It runs the code that ``path`` names: take it from configuration or a command line, never from a request.

    Raises:
        ConfigError: it cannot be imported, is no class with the methods of ``protocol``, or refuses the settings.
    """
    methods = {name: method for name, method in vars(protocol).items() if inspect.isfunction(method) and name[0] != "_"}
    found = _imported(path)
    if not inspect.isclass(found):
        raise ConfigError(f"{path} is no class, but {type(found).__name__}")
    if lacks := [name for name in methods if not callable(getattr(found, name, None))]:
        raise ConfigError(f"{path} has no method {' and no method '.join(lacks)}, see {protocol.__module__}")
    try:
        policy = found(**settings)
    except Exception as error:  # whatever the code of others raises
        given = ", ".join(settings) or "no settings"
        raise ConfigError(f"{path} could not be made with {given}: {type(error).__name__}: {error}") from error
    for name, method in methods.items():
        _check_arguments(f"{path}.{name}", getattr(policy, name), list(inspect.signature(method).parameters)[1:])
    return policy


def _imported(path: str) -> Any:
    if not _PATH.fullmatch(path):
        raise ConfigError(f"a policy of your own is named package.module:Class, got {path!r}")
    try:
        return resolve_name(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: {error}; its package must be installed, or on PYTHONPATH, wherever Sluice runs"
        ) from error
    except Exception as error:  # importing runs the code of others
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _check_arguments(name: str, method: Any, arguments: list[str]) -> None:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{name} must take ({', '.join(arguments)}): {error}") from error


class CheckedBatchPolicy:
    """Another's batch policy, every answer checked."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError as `load_policy` does."""
        self._path = path
        self._policy: BatchPolicy = load_policy(path, BatchPolicy, settings)

    def plan(self, state: BatchState) -> StepPlan:
        """Raises PolicyError: the plan is none, or lets nothing run where something could."""
        plan = self._policy.plan(state)
        if (fault := _fault(plan, state)) is not None:
            raise PolicyError(f"{self._path}.plan {fault}")
        return plan

    def observe(self, result: StepResult) -> None:
        self._policy.observe(result)


def _fault(plan: object, state: BatchState) -> str | None:
    """What is wrong with a plan, None where nothing is."""
    if not isinstance(plan, StepPlan):
        return f"must answer a StepPlan, got {plan!r}"
    for name, least in (("max_batch_size", 1), ("max_batch_tokens", 1), ("steps", 1), ("starts", 0), ("departures", 0)):
        if not (value := getattr(plan, name)) >= least:
            return f"must answer {name} of {least} or more, got {value}"
    if plan.max_prefill_tokens is not None and not plan.max_prefill_tokens >= 0:
        return f"must answer max_prefill_tokens of 0 or more, or None, got {plan.max_prefill_tokens}"
    decodes, prompts = state.running_count - state.prefilling_count, state.prefilling_count
    if plan.phase is Phase.DECODE and not decodes and (prompts or state.waiting):
        return "answered DECODE where no request decodes, and others could start"
    may_start = bool(state.waiting) and plan.starts > 0 and plan.max_batch_size > state.running_count
    if plan.phase is Phase.PREFILL and not (prompts or may_start) and (decodes or state.waiting):
        return "answered PREFILL where no request has a prompt to read, and others could go on"
    return None


class CheckedOrder:
    """Another's order, every key checked."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError as `load_policy` does."""
        self._path = path
        self._order: Order = load_policy(path, Order, settings)

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        """Raises PolicyError: there is no finite key. It is not the client's fault, whatever was raised inside."""
        try:
            key = float(self._order.key(arrival_s, slo_class, estimated_work_s, prompt_tokens))
        except Exception as error:
            raise PolicyError(f"{self._path}.key: {type(error).__name__}: {error}") from error
        if not isfinite(key):
            raise PolicyError(f"{self._path}.key must answer a finite number, got {key}")
        return key
