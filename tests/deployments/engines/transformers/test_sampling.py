"""Sampling of rows with parameters of their own."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from deployments.engines.transformers.sampling import RowSampling, choose
from tests.deployments.tiny_models import VOCABULARY

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

CPU = torch.device("cpu")
LOGITS = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3
HISTORY = [4, 8, 15, 16, 16, 23]


def sampling(prompt_tokens: int = 3, **params: Any) -> RowSampling:
    return RowSampling(SamplingParams(**params), prompt_tokens, VOCABULARY, CPU)


def tokens(*rows: RowSampling, logits: torch.Tensor = LOGITS) -> list[int]:
    return [choice.token_id for choice in choose(logits[: len(rows)], rows, [HISTORY] * len(rows))]


def test_greedy_takes_the_likeliest() -> None:
    assert tokens(*[sampling(temperature=0.0)] * 6) == LOGITS.argmax(dim=-1).tolist()


def test_a_seeded_row_draws_the_same_beside_any_others() -> None:
    def drawn(*others: RowSampling) -> list[int]:
        mine = sampling(temperature=1.5, seed=7)
        same = LOGITS[:1].expand(len(others) + 1, -1)
        return [tokens(mine, *others, logits=same)[0] for _ in range(8)]

    assert drawn() == drawn(sampling(temperature=1.5, seed=8), sampling(temperature=1.5)) == drawn(sampling(top_k=2))
    assert len(set(drawn())) > 1


def test_draws_follow_the_model_s_distribution() -> None:
    """Chi-square over the likeliest tokens and the rest, at one in a thousand."""
    row, count = sampling(temperature=1.0, seed=1), 4000
    expected = LOGITS[0].softmax(dim=-1)
    seen = torch.zeros(VOCABULARY)
    for _ in range(count // 100):
        for token in tokens(*[row] * 100, logits=LOGITS[:1].expand(100, -1)):
            seen[token] += 1
    best = expected.topk(8).indices
    observed = torch.cat((seen[best], (count - seen[best].sum())[None]))
    wanted = torch.cat((expected[best], (1 - expected[best].sum())[None])) * count
    assert float(((observed - wanted) ** 2 / wanted).sum()) < 26.1


@pytest.mark.parametrize(
    ("params", "most"), [({"top_k": 3}, 3), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1), ({"top_k": 5, "top_p": 1e-6}, 1)]
)
def test_cuts_leave_only_the_likeliest(params: dict[str, Any], most: int) -> None:
    row = sampling(temperature=2.0, seed=1, **params)
    likeliest = set(LOGITS[0].topk(most).indices.tolist())
    assert {tokens(row)[0] for _ in range(40)} <= likeliest


def test_penalties_count_what_was_generated_and_repetition_the_prompt_too() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 16], logits[0, 4], logits[0, 50] = 3.0, 2.0, 1.0  # 16 was generated twice, 4 is of the prompt
    assert tokens(sampling(temperature=0.0), logits=logits) == [16]
    assert tokens(sampling(temperature=0.0, presence_penalty=1.5), logits=logits) == [4]
    assert tokens(sampling(temperature=0.0, frequency_penalty=0.6), logits=logits) == [4]  # 3 - 2 * 0.6 < 2
    assert tokens(sampling(temperature=0.0, frequency_penalty=0.4), logits=logits) == [16]
    assert tokens(sampling(temperature=0.0, presence_penalty=0.9), logits=logits) == [16]  # once, not for each
    assert tokens(sampling(temperature=0.0, repetition_penalty=10.0), logits=logits) == [50]


def test_what_is_banned_or_biased() -> None:
    best = int(LOGITS[0].argmax())
    assert tokens(sampling(temperature=0.0, logit_bias={77: 100.0})) == [77]
    assert tokens(sampling(temperature=0.0, allowed_token_ids=[3])) == [3]
    held = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[best])
    assert held.all_stop_token_ids == {best}
    assert tokens(RowSampling(held, 3, VOCABULARY, CPU)) != [best]  # three were generated
    assert tokens(RowSampling(held, 2, VOCABULARY, CPU)) == [best]


def test_logprobs_are_the_model_s_own_before_any_processor() -> None:
    rows = [sampling(temperature=0.0, logprobs=2, logit_bias={77: 100.0}), sampling(logprobs=0, seed=1), sampling()]
    plain, sampled, silent = choose(LOGITS[:3], rows, [HISTORY] * 3)
    expected = LOGITS.log_softmax(dim=-1)
    assert plain.logprobs is not None and sampled.logprobs is not None and silent.logprobs is None
    assert plain.logprobs.token_ids == [77, *expected[0].topk(2).indices.tolist()]
    assert plain.logprobs.logprobs == pytest.approx([float(expected[0][i]) for i in plain.logprobs.token_ids])
    assert plain.logprobs.rank == int((expected[0] > expected[0][77]).sum()) + 1
    assert sampled.logprobs.token_ids == [sampled.token_id]
    (choice,) = choose(LOGITS[:1], [sampling(temperature=0.0, logprobs=-1)], [HISTORY])
    assert choice.logprobs is not None and len(choice.logprobs.token_ids) == VOCABULARY + 1, "all of them"
