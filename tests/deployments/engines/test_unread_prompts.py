import math

from deployments.engines.unread_prompts import UnreadPrompts
from policies.live import Live
from policies.router.tickets import Reading


def prompts(credit_s: float | None = 1.0, **status: float) -> UnreadPrompts:
    made = UnreadPrompts(Live(credit_s))
    made.told({"seconds_per_prompt_token": 0.01, **status}, 0, None)
    return made


def test_enough_is_what_takes_the_credit_to_read() -> None:
    assert prompts().max_unread_tokens == 100
    assert prompts(0.001).max_unread_tokens == 1, "one is always taken"
    assert prompts(None).max_unread_tokens is None
    for unknown in (0.0, math.nan):
        assert prompts(seconds_per_prompt_token=unknown).max_unread_tokens is None
    assert UnreadPrompts(Live(1.0)).max_unread_tokens is None


def test_what_the_engine_does_not_say_is_predicted() -> None:
    made = UnreadPrompts(Live(1.0))
    made.told({}, 0, 0.1)
    assert made.max_unread_tokens == 10


def test_each_prompt_is_told_once_when_it_is_read_and_never_when_it_has_left() -> None:
    made = prompts()
    for name in "abc":
        made.came(name, 10)
    made.read("a")
    made.read("b")
    made.left("b")
    made.left("c")
    assert made.report() == Reading(read=("a",), max_unread_tokens=100, prompt_token_s=0.01)
    assert made.report() == Reading(max_unread_tokens=100, prompt_token_s=0.01)


def test_what_was_not_heard_is_told_again_while_it_is_there() -> None:
    made = prompts()
    for name in "ab":
        made.came(name, 10)
        made.read(name)
    read = made.report().read
    made.not_heard(read, {"b"})
    assert (read, made.report().read) == (("a", "b"), ("b",))


def test_it_is_urgent_to_tell_what_was_read_once_there_was_enough() -> None:
    made = prompts(1e-7, seconds_per_prompt_token=1e-9)
    made.came("a", 60)
    assert not made.read("a")
    for name in "bc":
        made.came(name, 60)
    assert made.read("b")
    made.report()
    assert not made.read("c")


def test_it_is_urgent_to_tell_of_prompts_that_took_long_to_read() -> None:
    made = prompts(None)
    for name, tokens in (("a", 3), ("b", 3), ("c", 4)):
        made.came(name, tokens)
    assert [made.read(name) for name in "ab"] == [False, True]
    made.report()
    assert not made.read("c")


def test_what_the_engine_has_read_or_cached_does_not_count_and_what_came_since_does() -> None:
    made = prompts()
    made.came("a", 60)
    asked = made.came_tokens
    made.came("b", 20)
    made.told({"unread_prompt_tokens": 15}, asked, 0.01)
    assert made.report().known_tokens == 45  # 15 of a, and all of b, are unread
    made.came("c", 5)
    assert made.report().known_tokens == 45
    made.read("a")
    assert made.report().known_tokens == 0, "of what is left nothing is known"


def test_what_was_taken_for_cached_and_is_not_counts_as_far_as_the_engine_says_so() -> None:
    made = prompts()
    made.came("evicted", 10, 90)
    made.came("cached", 10, 40)
    made.told({"unread_prompt_tokens": 110}, made.came_tokens, 0.01)
    assert made.report().known_tokens == -90
    made.came("later", 5, 500)
    assert made.report().known_tokens == -90
    made.read("evicted")
    made.left("later")
    assert made.report().known_tokens == -40, "the other was taken for no more"
    made.read("cached")
    assert made.report().known_tokens == 0


def test_the_pace_is_told_once_it_is_known() -> None:
    assert UnreadPrompts(Live(1.0)).report().prompt_token_s is None
    assert prompts(None).report().prompt_token_s == 0.01
    assert prompts(seconds_per_prompt_token=math.inf).report().prompt_token_s is None
