"""Which parts of the policy act, and why others do not, in words for people."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deployments.config.application import AppConfig
from deployments.serving.in_words import BOUNDS
from policies.engine.exclusive import ExclusiveMixedConfig


class Part(NamedTuple):
    """Attributes:
    acts: whether it decides anything as things stand.
    why: how it acts, or why it does not.
    """

    acts: bool
    why: str


_KINDS = {"prefill": "prompts alone", "decode": "decodes", "mixed": "mixed"}


def parts_of_router(config: AppConfig) -> dict[str, dict[str, Any]]:
    """By name: bins and prediction."""
    return {"bins": _bins(config)._asdict(), "prediction": _prediction(config)._asdict()}


def parts_of_engine(engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By name: phases and the batch's control; nothing of an engine that plans no steps, or does not answer."""
    if "limited_by" not in engine:
        return {}
    return {"phases": _phases(engine)._asdict(), "batch_control": _batch_control(engine)._asdict()}


def steps_in_words(engine: Mapping[str, Any]) -> str | None:
    """Shares of its steps by what they held, since it started; None before the first."""
    counts = engine.get("steps", {})
    held = {words: counts.get(kind, 0) for kind, words in _KINDS.items()}
    if not (steps := sum(held.values())):
        return None
    return ", ".join(f"{100 * count / steps:.0f} % {words}" for words, count in held.items())


def _bins(config: AppConfig) -> Part:
    bins, gangs = config.bins, config.engine.kind == "transformers"
    if config.mode != "full":
        return Part(False, f"mode: {config.mode} goes by no bins")
    if bins.dispatch == "requests" and not gangs:
        return Part(False, "bins.dispatch: requests sends each as soon as a slot is free, whatever its bin")
    if bins.count == 1:
        return Part(False, "bins.count: 1 does not tell lengths apart")
    how = "rolling batches" if bins.dispatch == "rolling" and not gangs else "batches"
    return Part(True, f"{how} of one bin each, of {bins.count}")


def _prediction(config: AppConfig) -> Part:
    if config.predictor.reads_prompts(config.promises().values()):
        return Part(True, "a model reads prompts, and is believed where it has proved better than the histogram")
    kind = config.predictor.kind
    return Part(False, f"predictor.kind: {kind} reads no prompts: the answers of each class so far are its prediction")


def _phases(engine: Mapping[str, Any]) -> Part:
    if "exclusive" not in engine:
        return Part(False, f"{engine.get('policy', 'another policy')} plans the steps")
    if causes := engine.get("off", {}).get("phases"):
        return Part(False, f"off, with {', '.join(causes.values())}")
    if engine["exclusive"]:
        return Part(True, "prompts and decodes take turns, but for as long as a promised time per token binds")
    if engine.get("mode") == "mixed":
        return Part(False, "engine.scheduler.mode: mixed")
    if not engine.get("step_times"):
        return Part(False, "it is not known yet what steps cost")
    if engine.get("finished", 0) < (least := ExclusiveMixedConfig().min_samples):
        return Part(False, f"fewer than {least} answers have ended")
    return Part(False, "mixed steps cost no more here")


def _batch_control(engine: Mapping[str, Any]) -> Part:
    if (limit := engine["limited_by"]) is None:
        return Part(False, "no step was planned yet")
    if limit in BOUNDS:
        return Part(True, f"{BOUNDS[limit]}, to {engine['max_batch_size']}")
    return Part(False, "neither memory nor a time per token bounds the batch, but its slots")
