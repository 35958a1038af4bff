"""Responses with state, by the official client: each call over a connection of its own, to whichever router has it."""

from typing import Any

import openai
import pytest

from tests.integration.application import Sluice
from tests.waiting import wait_until

MODEL = "sluice-demo"
QUESTION = "Name three facts about rivers."
# As many tokens as are always the same, and more than are made while somebody looks.
SHORT: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}
LONG: dict[str, Any] = {"model": MODEL, "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
PATIENCE_S = 120.0


def running(sluice: Sluice) -> int:
    return sum(replica["running"] for replica in sluice.status()["replicas"].values())


def test_a_conversation_goes_on_as_if_its_client_had_sent_it_whole(sluice: Sluice) -> None:
    first = sluice.client().responses.create(input=QUESTION, **SHORT)
    second = sluice.client().responses.create(input="Say more.", previous_response_id=first.id, **SHORT)
    third = sluice.client().responses.create(input="And?", previous_response_id=second.id, **SHORT)
    said = [QUESTION, first.output_text, "Say more.", second.output_text, "And?"]
    roles = ("user", "assistant") * 3
    whole: Any = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    plain = sluice.client().responses.create(input=whole, store=False, **SHORT)
    assert third.output_text == plain.output_text
    assert third.usage is not None and plain.usage is not None
    assert third.usage.input_tokens == plain.usage.input_tokens
    assert sluice.client().responses.retrieve(second.id).output_text == second.output_text


def test_one_in_the_background_says_what_it_would_have_said_at_once(sluice: Sluice) -> None:
    at_once = sluice.client().responses.create(input=QUESTION, **SHORT)
    begun = sluice.client().responses.create(input=QUESTION, background=True, **SHORT)
    assert begun.status == "queued"
    states = [begun.status]

    def has_ended() -> bool:
        states.append(sluice.client().responses.retrieve(begun.id).status)
        return states[-1] not in ("queued", "in_progress")

    wait_until(has_ended, PATIENCE_S, "the response in the background has ended")
    done = sluice.client().responses.retrieve(begun.id)
    assert (done.status, done.output_text) == (at_once.status, at_once.output_text)


def test_one_in_the_background_is_cancelled_and_gives_its_slot_back(sluice: Sluice) -> None:
    begun = sluice.client().responses.create(input=QUESTION, background=True, **LONG)
    assert sluice.client().responses.cancel(begun.id).status == "cancelled"
    wait_until(lambda: running(sluice) == 0, PATIENCE_S, "its slot is free")
    assert sluice.client().responses.retrieve(begun.id).status == "cancelled"


def test_a_deleted_response_is_gone_and_nothing_goes_on_from_it(sluice: Sluice) -> None:
    answer = sluice.client().responses.create(input=QUESTION, store=True, **SHORT)
    sluice.client().responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        sluice.client().responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        sluice.client().responses.create(input="And?", previous_response_id=answer.id, **SHORT)


def test_the_metrics_say_how_much_is_stored(sluice: Sluice) -> None:
    answer = sluice.client().responses.create(input=QUESTION, store=True, **SHORT)

    wait_until(lambda: sluice.counted("sluice_responses_stored_bytes"), PATIENCE_S, "the page shows it")
    assert sluice.counted("sluice_responses_stored_bytes") >= len(answer.output_text)
