from predictor.conversation import Asked, asked_in

USER = {"role": "user", "content": "How far is the moon?"}


def test_the_last_message_of_the_user_is_what_is_asked() -> None:
    turns = [USER, {"role": "assistant", "content": "Far."}, {"role": "user", "content": "How far exactly?"}]
    assert asked_in(turns) == Asked("How far exactly?", "")


def test_instructions_become_a_short_name_that_tells_them_apart() -> None:
    names = []
    for text in ("Be brief.", "Be brief.", "Write essays. " * 1000):
        asked = asked_in([{"role": "system", "content": text}, USER])
        assert asked is not None
        assert asked.prompt == USER["content"]
        names.append(asked.system_prompt)
    assert names[0] == names[1] != names[2]
    assert all(len(name) == 16 for name in names)


def test_a_developers_message_instructs_like_the_systems() -> None:
    system, developer = (asked_in([{"role": role, "content": "Be brief."}, USER]) for role in ("system", "developer"))
    assert system == developer


def test_text_parts_are_read_and_pictures_are_not() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    assert asked_in([{"role": "user", "content": parts}]) == Asked("What is this?", "")


def test_without_a_word_of_the_user_nothing_is_asked() -> None:
    assert asked_in([]) is None
    assert asked_in([{"role": "assistant", "content": "Hello."}, {"role": "user", "content": None}]) is None
    assert asked_in([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]) is None
