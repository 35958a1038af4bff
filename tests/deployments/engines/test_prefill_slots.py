from deployments.engines.prefill_slots import PrefillSlots


def reader(*lengths: int, memory_share: float = 0.9) -> PrefillSlots:
    slots = PrefillSlots(1000, memory_share)
    for tokens in lengths:
        slots.came(tokens, tokens)
    return slots


def test_before_the_engine_says_what_is_free_slots_are_the_prompts_of_two_steps() -> None:
    assert reader().offered([]) == 2, "prompts of a whole step"
    assert reader(100, 100, 100).offered([100] * 3) == 20


def test_what_is_cached_of_a_prompt_takes_no_part_of_a_step_but_memory() -> None:
    slots = PrefillSlots(1000, 1.0)
    for _ in range(3):
        slots.came(500, 50)
    assert slots.offered([500] * 3) == 40
    slots.told({"free_tokens": 3000}, slots.ended_tokens)
    assert slots.offered([500] * 3) == 6
    slots.came(500, 0)
    assert slots.offered([]) == 6


def test_prompts_on_board_keep_to_their_share_of_the_free_cache() -> None:
    slots = reader(100, 100, memory_share=0.5)
    slots.told({"free_tokens": 1000}, slots.ended_tokens)
    assert slots.offered([]) == 5
    assert slots.offered([300, 100]) == 3, "with their own lengths, and one more of the mean"
    assert slots.offered([900, 100]) == 1


def test_what_was_read_since_the_engine_was_asked_may_still_hold_its_blocks() -> None:
    slots = reader(100, 100, memory_share=1.0)
    slots.ended(100)
    asked = slots.ended_tokens
    slots.ended(600)
    slots.told({"free_tokens": 1000}, asked)
    assert slots.offered([]) == 4
    slots.told({"free_tokens": 1000}, slots.ended_tokens)
    assert slots.offered([]) == 10, "fetched, says the engine"


def test_an_engine_full_of_caches_is_given_one_prompt_and_one_that_does_not_say_is_not_bound() -> None:
    slots = reader(100)
    slots.told({"free_tokens": 0}, slots.ended_tokens)
    assert slots.offered([]) == 1
    slots.told({}, slots.ended_tokens)
    assert slots.offered([]) == 20
