"""What is switched off, by what, and in which words."""

from pathlib import Path

import pytest

from deployments.engines.features import (
    IN_WORDS,
    SWITCHES_OFF,
    WITH,
    WITHOUT,
    Cause,
    Feature,
    off_in_words,
    switched_off,
    why_off,
)
from tests import features_page

TESTS = Path(features_page.__file__).parent


def test_without_a_cause_nothing_is_off() -> None:
    assert switched_off(()) == {}
    assert off_in_words(()) == []


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_switches_something_off_and_has_words(cause: Cause) -> None:
    off = switched_off({cause})
    assert off and all(why == {cause: IN_WORDS[cause]} for why in off.values())


def test_each_feature_says_what_is_with_and_without_it() -> None:
    assert WITH.keys() == WITHOUT.keys() == SWITCHES_OFF.keys() == set(Feature)


def test_all_causes_are_told_and_no_other() -> None:
    causes = {Cause.ADAPTERS, Cause.WHOLE_MEDIA, Cause.LOADS}
    assert why_off(Feature.PHASES, causes) == [Cause.LOADS, Cause.ADAPTERS]
    assert why_off(Feature.CUT_PROMPTS, causes) == [Cause.WHOLE_MEDIA]
    assert why_off(Feature.EXACT_HITS, causes) == []
    assert off_in_words({Cause.ADAPTERS}) == [
        f"phases off, with {IN_WORDS[Cause.ADAPTERS]}: steps read prompts and decode together"
    ]


def test_the_page_is_up_to_date() -> None:
    """After a change of the table: python -m tests.features_page"""
    assert features_page.PAGE.read_text() == features_page.page()


@pytest.mark.parametrize("test", [test for kind in features_page.KINDS for test in kind.tests])
def test_each_kind_of_model_is_run_by_a_test_that_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()
