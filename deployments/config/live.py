"""What changes while engines serve: the live keys of a configuration, in `user_config` of the deployment `Router`.

    deployments:
      - name: Router
        user_config:
          classes: { interactive: { ttft_s: 0.4 }, batch: { ttft_s: 60, fills_idle: true } }
          default_class: interactive

It lies over `args`, in the same form: sections merge, any other value replaces that of `args`, a mapping as a whole.
Ray Serve gives it to the routers that run, and restarts none. Sections mark the keys that are live
(`section.LiveKey`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deployments.config.application import AppConfig, checked
from deployments.config.classes import ClassSection
from deployments.config.engine import Role
from deployments.config.section import Section
from deployments.process.log_settings import LogSettings
from policies.errors import ConfigError

ROUTER = "Router"
_HEAD = f"user_config of {ROUTER}: "


def with_live(config: AppConfig, user_config: object) -> AppConfig:
    """The configuration of `args` with a `user_config` over it; None changes nothing.

    Raises:
        ConfigError: naming each key that cannot change live, or is wrong.
    """
    if user_config is None:
        return config
    if not isinstance(user_config, Mapping):
        raise ConfigError(f"{_HEAD}must be a mapping of settings, got {type(user_config).__name__}")
    refused: list[str] = []
    merged = _over(config, user_config, "", refused)
    if "classes" in user_config:
        merged["classes"] = _with_own_replicas(config, merged["classes"], refused)
    if refused:
        raise ConfigError("\n".join([f"{_HEAD}wrong settings:", *(f"  {why}" for why in refused)]))
    try:
        changed = checked(merged)
    except ConfigError as error:
        raise ConfigError(f"{_HEAD}{error}") from None
    _refuse_unloaded(config, changed)
    return changed


def _over(section: Section, given: Mapping[Any, Any], path: str, refused: list[str]) -> dict[Any, Any]:
    """What was set in a section, with what lies over it. What is no key is for the whole check to name."""
    merged = {name: getattr(section, name) for name in section.model_fields_set}
    for name, value in given.items():
        here, place = getattr(section, str(name), None), f"{path}{name}"
        if isinstance(here, Section) and isinstance(value, Mapping):
            merged[name] = _over(here, value, f"{place}.", refused)
        elif name == "more_models":
            merged[name] = _over_each(here or (), value, place, refused)
        elif name in section.fixed_keys():
            refused.append(_cannot_change(place))
        else:
            merged[name] = value
    return merged


def _over_each(models: Sequence[Section], given: Any, place: str, refused: list[str]) -> list[dict[Any, Any]]:
    if not isinstance(given, list | tuple) or [type(each) for each in given] != [dict] * len(models):
        refused.append(f"{place}: must be a list with a mapping, maybe {{}}, for each of the {len(models)} of args")
        return []
    pairs = enumerate(zip(models, given, strict=True))
    return [_over(model, each, f"{place}[{number}].", refused) for number, (model, each) in pairs]


def _cannot_change(place: str) -> str:
    return f"{place}: cannot change while engines serve; it belongs into args, where a change restarts them"


def _with_own_replicas(config: AppConfig, classes: Any, refused: list[str]) -> Any:
    """Adds each class's `own_replicas` of args, which cannot change live; a class that has some cannot be taken out."""
    if not isinstance(classes, Mapping):
        return classes
    for name, section in classes.items():
        fixed = [key for key in section if key in ClassSection.fixed_keys()] if isinstance(section, Mapping) else []
        refused += [_cannot_change(f"classes.{name}.{key}") for key in fixed]
    own = {name: section.own_replicas for name, section in config.classes.items() if section.own_replicas}
    refused += [
        f"classes: {name} has own_replicas by args, and must be among them" for name in own if name not in classes
    ]
    kept = {name: own.get(name, 0) for name, section in classes.items() if isinstance(section, Mapping)}
    return {**classes, **{name: {**classes[name], "own_replicas": replicas} for name, replicas in kept.items()}}


def _refuse_unloaded(config: AppConfig, changed: AppConfig) -> None:
    """Raises ConfigError: engines that began without the plug-in are to plan their steps."""
    for before, after in zip(config.each_model(), changed.each_model(), strict=True):
        for role in _roles(before):
            if before.scheduler_settings(role) is None and after.scheduler_settings(role) is not None:
                raise ConfigError(
                    f"{_HEAD}engine.scheduler.mode of {before.public_name}: engines that began with mode stock have "
                    "not loaded the plug-in; set it in args, which restarts them"
                )


def _roles(config: AppConfig) -> tuple[Role, ...]:
    return ("decode",) if config.engine.prefill is None else ("decode", "prefill")


class EngineTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What follows for an engine replica.

    Attributes:
        scheduler: settings of its plug-in; None where it has none.
        credit_s: see `AppConfig.credit_s`.
        max_wait_s: the longest that a request waits.
        logs: how it logs.
    """

    scheduler: dict[str, Any] | None
    credit_s: float | None
    max_wait_s: float
    logs: LogSettings

    @classmethod
    def of(cls, config: AppConfig, changed: AppConfig, role: Role) -> "EngineTerms":
        """What one model's engines go by: `config` is what they began with."""
        begun = config.scheduler_settings(role)
        settings = None if begun is None else changed.plug_in_settings(role)
        live = None if settings is None else settings.model_dump(mode="json", include=settings.live_keys())
        return cls(
            scheduler=live,
            credit_s=changed.credit_s if role == "decode" else None,
            max_wait_s=changed.router.max_wait_s,
            logs=changed.logs.settings(),
        )


def configured_as(config: AppConfig) -> str:
    """A name for all replicas of a model that began with the same configuration."""
    return f"live-{hashlib.sha256(repr(config).encode()).hexdigest()[:12]}"
