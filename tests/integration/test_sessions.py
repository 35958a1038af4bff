"""What sessions had is found again after traffic that never returns, and tasks have deadlines, on real engines.

The cache holds 128 blocks of 32 tokens. Two sessions take 50 of them, and twelve other requests 300.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import openai
import pytest
from openai.types import Completion

from deployments.config.model import DEMO_MODEL
from tests.integration.application import EXACT, Sluice
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

KEPT, PLAIN = "kept", "plain"
BLOCK, BLOCKS, PROMPT, TURN = 32, 128, 800, 20
_TOKEN_BYTES = 6 * 2 * 2 * 64 * 4  # layers, keys and values, heads, their size, float32
ARGS = (
    *EXACT, "--max-model-len=1024", "--enforce-eager", "--enable-prompt-tokens-details", f"--block-size={BLOCK}",
    f"--kv-cache-memory-bytes={BLOCKS * BLOCK * _TOKEN_BYTES}",
)  # fmt: skip


@pytest.fixture(scope="module")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    """The same model twice, once without a share for sessions."""

    def model(name: str, **scheduler: float) -> dict[str, object]:
        engine = {"replicas": 1, "scheduler": {"mode": "mixed", **scheduler}}
        return {"model": str(DEMO_MODEL), "served_model_name": name, "engine": engine, "vllm_args": list(ARGS)}

    settings = {**model(KEPT), "more_models": [model(PLAIN, kept_fraction=0.0)]}
    with Sluice(tmp_path_factory.mktemp("sessions"), settings=settings) as application:
        yield application


class Turns(NamedTuple):
    """What the second turns of all sessions found in the cache, and what was answered in both."""

    cached_tokens: list[int]
    answers: list[str]


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 4000) for _ in range(count)]


def asked(client: openai.OpenAI, model: str, prompt: list[int], **headers: str) -> Completion:
    return client.completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0, extra_headers=headers, extra_body={"ignore_eos": True}
    )


def cached_in(answer: Completion) -> int:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def second_turns_after_others(sluice: Sluice, model: str) -> Turns:
    client, prompts = sluice.client(), {f"build-{number}": tokens(PROMPT, number) for number in range(2)}
    first = [asked(client, model, prompt, **{"x-sluice-session": name}) for name, prompt in prompts.items()]
    assert [cached_in(answer) for answer in first] == [0, 0]
    for number in range(100, 112):
        assert cached_in(asked(client, model, tokens(PROMPT, number))) == 0
    second = [
        asked(client, model, [*prompt, *tokens(TURN, 7)], **{"x-sluice-session": name})
        for name, prompt in prompts.items()
    ]
    return Turns([cached_in(answer) for answer in second], [each.choices[0].text for each in (*first, *second)])


def test_a_session_s_next_turn_finds_what_it_had_after_others_have_filled_the_cache(sluice: Sluice) -> None:
    with_share, without = (second_turns_after_others(sluice, model) for model in (KEPT, PLAIN))
    assert with_share.cached_tokens == [PROMPT, PROMPT] and without.cached_tokens == [0, 0]
    assert with_share.answers == without.answers

    def told(model: str) -> bool:
        """Both sessions pause again, by the replica's latest word."""
        blocks = sluice.counted("sluice_engine_kept_blocks", model=model)
        return blocks >= 2 * PROMPT / BLOCK if model == KEPT else blocks == 0

    wait_until(lambda: told(KEPT) and told(PLAIN), PATIENCE_S, "blocks of both sessions are counted")
    assert sluice.counted("sluice_hit_tokens_total", model=KEPT) == 2 * PROMPT
    assert sluice.counted("sluice_wrong_hit_tokens_total", model=KEPT) == 0


def test_an_answer_says_what_its_task_has_left(sluice: Sluice) -> None:
    def left_ms(**headers: str) -> int:
        answer = sluice.client().completions.with_raw_response.create(
            model=KEPT, prompt="Rivers:", max_tokens=4, extra_headers={"x-sluice-session": "task", **headers}
        )
        return int(answer.headers["x-sluice-task-left-ms"])

    assert left_ms(**{"x-slo-task-ms": "600000"}) == 600_000
    assert 0 < left_ms(**{"x-slo-task-ms": "600000"}) < 600_000


def test_a_task_without_a_session_is_refused(sluice: Sluice) -> None:
    with pytest.raises(openai.BadRequestError, match="x-sluice-session"):
        asked(sluice.client(), KEPT, tokens(8, 0), **{"x-slo-task-ms": "600000"})
