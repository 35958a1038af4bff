"""One application for all integration tests: two routers, two engine replicas, the demo model."""

from collections.abc import Iterator

import pytest

from tests.integration.application import Sluice, free_port

# Few slots, so that a test can fill them without being kept busy by its own streams.
OPTIONS = ("--router-replicas", "2", "--", "--max-num-seqs", "16")


@pytest.fixture(scope="session")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    application = Sluice(tmp_path_factory.mktemp("sluice"), free_port(), *OPTIONS)
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """64 prompts of many lengths and subjects."""
    subjects = [
        "rivers",
        "a bag of buttons",
        "the moon",
        "bread",
        "a film festival",
        "seven apples",
        "cats",
        "a garden",
    ]
    asks = [
        "Name three facts about {}.",
        "Write a short story about {}.",
        "How many {} are there if every one of 12 children has 3?",
        "Explain {} to a child in simple words, and give an example.",
        "What is the best way to think about {}?",
        "List the steps to draw {}.",
        "Say something about {} and then say why it matters to people who live far away from it. " * 6,
        "Is {} real?",
    ]
    return [ask.replace("{}", subject) for ask in asks for subject in subjects]
