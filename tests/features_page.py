"""Writes docs/reference/features.md: what Sluice does with an engine, and what switches it off.

    python -m tests.features_page

tests/deployments/engines/test_features.py holds that the page is up to date.
"""

from pathlib import Path
from typing import NamedTuple

from deployments.engines.features import IN_WORDS, SWITCHES_OFF, WITH, WITHOUT, Cause, Feature, why_off

PAGE = Path(__file__).parents[1] / "docs/reference/features.md"
HEAD = """\
# What can be off

<!-- Written by `python -m tests.features_page` from deployments/engines/features.py. -->

Sluice does more with some engines than with others. `sluice config check` and the start of `sluice serve` say what the
settings switch off. What hangs on the model as well, the running engine says: `off` in `/sluice/status`, the table
"Switched off" of the page and of `sluice status`, and the metric `sluice_engine_feature_off{feature,why}`.
"""


class Kind(NamedTuple):
    """
    always: what such a model or engine always has.
    at_times: what it has for a while, or on some machines.
    tests: which run one; each is in a file below `tests/`.
    """

    name: str
    tests: tuple[str, ...]
    always: tuple[Cause, ...] = ()
    at_times: tuple[Cause, ...] = ()


_EQUAL = "integration/test_scheduler_equality.py::"
_CUT = "deployments/engines/vllm/scheduler/test_cut_prompts.py::"
_PLUG_IN = "deployments/engines/vllm/scheduler/test_plug_in.py::"
_KINDS = "integration/test_kinds_of_models.py::"
_CACHED = "deployments/engines/vllm/test_cached_blocks.py::"
_RANKS = "deployments/engines/vllm/test_ranks.py::"
_SERVERS = "integration/test_any_server.py::"
KINDS = (
    Kind("plain", (f"{_EQUAL}test_every_mode_gives_the_tokens_of_stock",)),
    Kind(
        "drafts",
        (f"{_EQUAL}test_drafts_change_no_token", f"{_CUT}test_drafts_that_prove_right_count_for_promised_times"),
        at_times=(Cause.SCHEDULED_AHEAD,),
    ),
    Kind(
        "images",
        (
            f"{_EQUAL}test_a_model_with_images_gives_the_tokens_of_stock",
            f"{_KINDS}test_images_are_seen_by_value_and_by_url_from_networks_that_are_allowed",
        ),
        at_times=(Cause.WHOLE_MEDIA,),
    ),
    Kind(
        "sliding windows, chunked attention",
        (
            f"{_EQUAL}test_a_model_with_sliding_windows_gives_the_tokens_of_stock",
            f"{_CACHED}test_hits_of_several_kinds_of_layers_are_vllms_own_whatever_blocks_are_there",
            f"{_KINDS}test_prefix_hits_of_a_model_with_sliding_windows_are_known_before",
        ),
    ),
    Kind(
        "layers that keep a state",
        (
            f"{_EQUAL}test_a_model_with_states_gives_the_tokens_of_stock",
            f"{_PLUG_IN}test_a_prompt_whose_chunks_must_end_at_a_block_is_not_kept_out_by_a_small_budget",
        ),
        always=(Cause.STATES,),
        at_times=(Cause.STATE_BLOCKS,),
    ),
    Kind(
        "LoRA",
        (f"{_PLUG_IN}test_phases_go_on_beside_as_many_adapters_as_a_batch_may_hold",),
        at_times=(Cause.ADAPTERS,),
    ),
    Kind(
        "a KV connector",
        (f"{_PLUG_IN}test_phases_go_on_beside_a_connector_that_loads_nothing",),
        at_times=(Cause.LOADS,),
    ),
    Kind(
        "data parallelism",
        (
            f"{_RANKS}test_each_rank_answers_as_one_engine_alone_does",
            f"{_RANKS}test_the_death_of_a_rank_is_that_of_all",
            f"{_KINDS}test_a_model_with_experts_is_served_by_ranks_that_step_together",
        ),
        at_times=(Cause.DATA_PARALLEL,),
    ),
    Kind(
        "servers of others",
        (
            f"{_SERVERS}test_answers_are_the_servers_own",
            f"{_SERVERS}test_a_killed_server_costs_no_request_and_is_used_again_once_it_is_back",
        ),
        always=(Cause.OPENAI,),
    ),
)


def page() -> str:
    parts = [HEAD, "\n", _meanings(), "\nOff, by what the engine has:\n\n", _matrix()]
    return "".join([*parts, "\nBy kind of model or engine, with the tests that run one:\n\n", _kinds()])


def _kinds() -> str:
    rows = []
    for kind in KINDS:
        tests = "<br>".join(f"`{each}`" for each in kind.tests)
        rows.append((kind.name, *(_answer(kind, feature) for feature in Feature), tests))
    return _table(("kind", *(f"`{feature}`" for feature in Feature), "tests"), rows)


def _answer(kind: Kind, feature: Feature) -> str:
    if never := why_off(feature, kind.always):
        return "no: " + ", ".join(f"`{cause}`" for cause in never)
    if at_times := why_off(feature, kind.at_times):
        return "yes, not with " + ", ".join(f"`{cause}`" for cause in at_times)
    return "yes"


def _meanings() -> str:
    rows = [(f"`{feature}`", WITH[feature], WITHOUT[feature]) for feature in Feature]
    return _table(("feature", "on", "off"), rows)


def _matrix() -> str:
    rows = [
        (IN_WORDS[cause], f"`{cause}`", *("off" if cause in SWITCHES_OFF[feature] else "" for feature in Feature))
        for cause in Cause
    ]
    return _table(("with", "why", *(f"`{feature}`" for feature in Feature)), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
