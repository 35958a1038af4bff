"""What Sluice does with an engine, and what switches it off: one table, by which all decide that decide, and all tell.

`sluice config check` and `sluice serve` know the arguments; the engine knows its model as well, and says so in its
status, which the page, `sluice status` and `sluice_engine_feature_off` show.
"""

from collections.abc import Collection
from enum import StrEnum


class Feature(StrEnum):
    """By the names that status and metrics have."""

    CUT_PROMPTS = "cut_prompts"
    PHASES = "phases"
    EXACT_HITS = "exact_hits"
    RESUMED_ANSWERS = "resumed_answers"
    DRAFT_LENGTHS = "draft_lengths"


class Cause(StrEnum):
    """What an engine has that switches something off, by the names that status and metrics have."""

    STOCK = "stock"
    TRANSFORMERS = "transformers"
    OPENAI = "openai"
    WHOLE_MEDIA = "whole_media"
    STATE_BLOCKS = "state_blocks"
    WHOLE_PROMPTS = "whole_prompts"
    LOADS = "loads"
    ADAPTERS = "adapters"
    DATA_PARALLEL = "data_parallel"
    NO_PREFIX_CACHE = "no_prefix_cache"
    STATES = "states"
    LOGITS_PROCESSORS = "logits_processors"
    SCHEDULED_AHEAD = "scheduled_ahead"


WITH = {
    Feature.CUT_PROMPTS: "steps read as much of a prompt as the promises of running answers leave",
    Feature.PHASES: "steps that read prompts are kept apart from steps that decode, where that pays",
    Feature.EXACT_HITS: "routers know which blocks each prefix cache holds",
    Feature.DRAFT_LENGTHS: "a step verifies as many drafted tokens of each request as are worth its time",
    Feature.RESUMED_ANSWERS: "an answer whose replica is lost goes on where it was, where its sampling allows it",
}
WITHOUT = {
    Feature.CUT_PROMPTS: "prompts are read as vLLM cuts them, and times per token may not hold meanwhile",
    Feature.PHASES: "steps read prompts and decode together",
    Feature.EXACT_HITS: "routers guess, from what they sent where",
    Feature.DRAFT_LENGTHS: "every step verifies all that is drafted",
    Feature.RESUMED_ANSWERS: "such an answer is computed anew, and compared with what its client has",
}
IN_WORDS = {
    Cause.STOCK: "vLLM's own scheduler (engine.scheduler.mode: stock)",
    Cause.TRANSFORMERS: "whole batches (engine.kind: transformers)",
    Cause.OPENAI: "servers of others (engine.kind: openai)",
    Cause.WHOLE_MEDIA: "images or sounds that are read whole (--disable-chunked-mm-input)",
    Cause.STATE_BLOCKS: "states that are cached by blocks (--mamba-cache-mode align)",
    Cause.WHOLE_PROMPTS: "prompts read whole (--no-enable-chunked-prefill)",
    Cause.LOADS: "KV caches that a connector is loading, for as long as that lasts",
    Cause.ADAPTERS: "requests of more adapters than --max-loras, for as long as they are there",
    Cause.DATA_PARALLEL: "data parallelism of a model with experts",
    Cause.NO_PREFIX_CACHE: "no prefix cache (--no-enable-prefix-caching)",
    Cause.STATES: "layers that keep a state, or windows beside a draft model",
    Cause.LOGITS_PROCESSORS: "logits processors other than vLLM's",
    Cause.SCHEDULED_AHEAD: "drafts for steps that are scheduled ahead (--async-scheduling)",
}
# Where nothing can be cut anywhere, a smaller step might let nothing through. Ranks of a model with experts step
# together. A request whose cache has been loaded starts in the next step, and not at the end of a phase. vLLM tells
# which adapters are in use by the decodes of a step: one without them would start more adapters than a later one can
# hold. A hit of layers that keep a state, or of several kinds of layers beside a draft model, hangs on more than the
# blocks. Logits processors may look back over the tokens of an answer. Ahead of its results a step has drafts of full
# length, which captured graphs count with.
SWITCHES_OFF = {
    Feature.CUT_PROMPTS: (
        Cause.STOCK, Cause.TRANSFORMERS, Cause.OPENAI, Cause.WHOLE_MEDIA, Cause.STATE_BLOCKS, Cause.WHOLE_PROMPTS,
    ),
    Feature.PHASES: (
        Cause.STOCK, Cause.TRANSFORMERS, Cause.OPENAI, Cause.LOADS, Cause.ADAPTERS, Cause.DATA_PARALLEL,
    ),
    Feature.EXACT_HITS: (
        Cause.TRANSFORMERS, Cause.OPENAI, Cause.NO_PREFIX_CACHE, Cause.STATES,
    ),
    Feature.RESUMED_ANSWERS: (Cause.OPENAI, Cause.LOGITS_PROCESSORS),
    Feature.DRAFT_LENGTHS: (Cause.STOCK, Cause.OPENAI, Cause.SCHEDULED_AHEAD),
}  # fmt: skip


def why_off(feature: Feature, causes: Collection[Cause]) -> list[Cause]:
    """Empty where it is on."""
    return [cause for cause in SWITCHES_OFF[feature] if cause in causes]


def switched_off(causes: Collection[Cause]) -> dict[str, dict[str, str]]:
    """What is off, and why: causes and their words, by feature."""
    found = {feature: why_off(feature, causes) for feature in Feature}
    return {str(feature): {str(each): IN_WORDS[each] for each in why} for feature, why in found.items() if why}


def off_in_words(causes: Collection[Cause]) -> list[str]:
    """A line for each feature that is off."""
    return [
        f"{feature.replace('_', ' ')} off, with {', '.join(why.values())}: {WITHOUT[Feature(feature)]}"
        for feature, why in switched_off(causes).items()
    ]
