"""Files of settings, and what is different by default where an application has one machine to itself."""

from pathlib import Path
from typing import Any

from deployments.config.application import AppConfig
from deployments.config.model import DEMO
from deployments.config.yaml_text import load_yaml
from policies.errors import ConfigError

PRESETS = {"papers": Path(__file__).parents[1] / "configs" / "papers.yaml"}
"""Whole systems by name, in files for `serve deploy`."""


def read_settings(path: Path) -> dict[str, Any]:
    """Raises ConfigError that names a file that cannot be read, or holds no mapping."""
    try:
        settings = load_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, as under `args` in deployments/configs/local.yaml")
    return settings


def of_one_machine(path: Path) -> dict[str, Any]:
    """Raises ConfigError as `read_settings`, and for a file that is for `serve deploy`."""
    settings = read_settings(path)
    if "applications" in settings:
        raise ConfigError(f"{path} is for `serve deploy`: give `sluice serve` a file of what stands under `args` in it")
    return settings


def of_preset(name: str) -> dict[str, Any]:
    """The settings of a whole system of PRESETS."""
    (application,) = read_settings(PRESETS[name])["applications"]
    settings: dict[str, Any] = application["args"]
    return settings


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """The same mapping, changed. Raises ConfigError for a section that is no mapping."""
    settings.setdefault("model", DEMO)
    settings["vllm_args"] = settings.get("vllm_args") or []  # left empty it is null
    engine, router = section(settings, "engine"), section(settings, "router")
    if engine.get("kind") != "openai":  # whose servers are as many as there are
        engine.setdefault("replicas", 1 if engine.get("num_gpus") else 2)
    for each in (engine, *_engines_of_more_models(settings)):
        each.setdefault("drain_timeout_s", 5.0)  # a person who ends `sluice serve` does not wait for long streams
        each.setdefault("num_cpus", 0)  # one machine is what it is: Ray need not count its cores
    for each in (router, section(settings, "predictor"), section(settings, "batches")):
        each.setdefault("num_cpus", 0)
    return settings


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the file; one that was left empty is there all the same."""
    found = settings[name] = settings.get(name) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must hold a mapping of settings, got {found!r}")
    return found


def _engines_of_more_models(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Their sections, made where they are missing; what is no model is left for the check."""
    more = settings.get("more_models")
    return [section(each, "engine") for each in more if isinstance(each, dict)] if isinstance(more, list) else []


def sharing_memory(config: AppConfig) -> AppConfig:
    """Engines on this machine's processors get a part of its memory each."""
    engines = sum(each.ranks * each.engine_replicas for each in config.each_model() if each.engine.num_gpus == 0)
    more = tuple(each.sharing_memory(engines) for each in config.more_models)
    return config.sharing_memory(engines).model_copy(update={"more_models": more})
