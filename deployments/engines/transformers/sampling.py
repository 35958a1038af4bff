"""From logits to tokens, for rows that each have sampling parameters of their own.

The arithmetic is Transformers' logits processors, in its order: penalties and bans first, then temperature, top-k,
top-p and min-p. Presence and frequency penalties, which it does not have, stand here. Rows of equal parameters go
through temperature and cuts together. A row's chance comes from a generator of its own if it has a seed, so that its
tokens do not depend on the other requests of its batch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from vllm import SamplingParams

from deployments.engines.base import Logprobs

GREEDY_BELOW = 1e-5  # temperature, as in vLLM


class PresenceFrequencyPenalty(LogitsProcessor):  # type: ignore[misc]  # transformers is not checked
    """OpenAI's penalties: score - presence * [count > 0] - frequency * count, over what was generated."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = input_ids[:, self._prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, generated, torch.ones_like(generated, dtype=scores.dtype))
        return scores - self._presence * (counts > 0) - self._frequency * counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Temperature and what is cut off the distribution; rows with the same are processed together."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def processors(self) -> LogitsProcessorList:
        found = LogitsProcessorList()
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 0:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            found.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            found.append(MinPLogitsWarper(self.min_p))
        return found


@dataclass(frozen=True, slots=True)
class Choice:
    """logprobs is None where none were asked for."""

    token_id: int
    logprobs: Logprobs | None


class RowSampling:
    """One request's sampling; `max_tokens`, `stop_token_ids` and `eos_token_id` are the caller's to obey."""

    def __init__(self, params: SamplingParams, prompt_tokens: int, vocab_size: int, device: torch.device) -> None:
        self.cuts = Cuts(
            temperature=params.temperature, top_k=max(0, params.top_k), top_p=params.top_p, min_p=params.min_p
        )
        self.logprobs = vocab_size if params.logprobs == -1 else params.logprobs
        self.generator: torch.Generator | None = None
        if params.seed is not None:
            self.generator = torch.Generator(device).manual_seed(params.seed)
        self.looks_back = LogitsProcessorList(_looking_back(params, prompt_tokens, vocab_size, device))


def _looking_back(
    params: SamplingParams, prompt_tokens: int, vocab_size: int, device: torch.device
) -> Iterable[LogitsProcessor]:
    """Processors that need the tokens so far, or are seldom asked for: they run row by row."""
    if params.allowed_token_ids is not None:
        banned = sorted(set(range(vocab_size)) - set(params.allowed_token_ids))
        yield SuppressTokensLogitsProcessor(banned, device=str(device))
    if params.logit_bias:
        yield SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in params.logit_bias.items()])
    if params.bad_words_token_ids:
        yield NoBadWordsLogitsProcessor(params.bad_words_token_ids)
    if params.min_tokens and params.all_stop_token_ids:
        stops = sorted(params.all_stop_token_ids)
        yield MinNewTokensLengthLogitsProcessor(prompt_tokens, params.min_tokens, stops, device=str(device))
    if params.repetition_penalty != 1.0:
        yield RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        yield PresenceFrequencyPenalty(prompt_tokens, params.presence_penalty, params.frequency_penalty)


def choose(logits: torch.Tensor, rows: Sequence[RowSampling], histories: Sequence[Sequence[int]]) -> list[Choice]:
    """The next token of every row.

    Args:
        logits: shape (rows, vocabulary).
        histories: of each row, prompt and what was generated so far.
    """
    with torch.inference_mode():
        raw = logits.float()
        token_ids = _choose_tokens(_looked_back(raw, rows, histories), rows)
        found = _logprobs(raw, rows, token_ids)
    return [Choice(token_id, found.get(index)) for index, token_id in enumerate(token_ids.tolist())]


def _looked_back(raw: torch.Tensor, rows: Sequence[RowSampling], histories: Sequence[Sequence[int]]) -> torch.Tensor:
    """The logits as penalties and bans leave them."""
    scores = raw.clone() if any(row.looks_back for row in rows) else raw
    for index, row in enumerate(rows):
        if row.looks_back:
            tokens = torch.tensor([histories[index]], device=raw.device)
            scores[index] = row.looks_back(tokens, raw[index][None])[0]
    return scores


def _choose_tokens(scores: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    chosen = scores.argmax(dim=-1)
    alike: defaultdict[Cuts, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if not row.cuts.is_greedy:
            alike[row.cuts].append(index)
    for cuts, indices in alike.items():
        nothing = scores.new_empty(len(indices), 0, dtype=torch.long)  # none of these looks at the tokens so far
        weights = cuts.processors()(nothing, scores[indices]).softmax(dim=-1)
        chosen[indices] = (weights / _exponential(weights, [rows[index].generator for index in indices])).argmax(dim=-1)
    return chosen


def _exponential(like: torch.Tensor, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    """Exponential variates: the largest weight / variate is a draw by the weights."""
    drawn = torch.empty_like(like).exponential_()
    for row, generator in zip(drawn, generators, strict=True):
        if generator is not None:
            row.exponential_(generator=generator)
    return drawn


def _logprobs(raw: torch.Tensor, rows: Sequence[RowSampling], token_ids: torch.Tensor) -> dict[int, Logprobs]:
    """Log-probabilities of the model's own distribution, before any processor, as vLLM reports them by default."""
    asked = [index for index, row in enumerate(rows) if row.logprobs is not None]
    if not asked:
        return {}
    logprobs = raw[asked].log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[asked][:, None])
    ranks = (logprobs >= own).sum(dim=1).tolist()
    best, best_ids = logprobs.topk(max(rows[index].logprobs or 0 for index in asked), dim=-1)
    found = {}
    for place, index in enumerate(asked):
        count = rows[index].logprobs or 0
        ids = [int(token_ids[index]), *best_ids[place, :count].tolist()]
        found[index] = Logprobs(ids, [float(own[place]), *best[place, :count].tolist()], ranks[place])
    return found
