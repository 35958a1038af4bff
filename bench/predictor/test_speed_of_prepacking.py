"""Prompts a second, packed against padded, 64 real prompts at a time, on this machine's CPU.

Not collected by default; run with `pytest -s bench/predictor/test_speed_of_prepacking.py`. Pairs: in each repeat both
ways score the same batches, and the order alternates. Padded is what a plain pipeline does: a batch as long as its
longest prompt, in the order of arrival.
"""

import time
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch

from bench.predictor.test_speed_of_serving import fresh_prompts
from bench.session import turns
from bench.summary import Spread
from predictor.calibration import DAY_0
from predictor.checkpoint import Ranker
from predictor.model import head

BATCH, BATCHES, REPEATS = 64, 4, 7


def padded_scores(ranker: Ranker, prompts: list[list[int]]) -> np.ndarray:
    width = max(map(len, prompts))
    token_ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    lengths = torch.tensor([float(len(prompt)) for prompt in prompts])
    mask = torch.arange(width) < lengths[:, None]
    with torch.inference_mode():
        hidden = ranker.encoder.model(input_ids=token_ids, attention_mask=mask.long()).last_hidden_state.float()
        mean = (hidden * mask[:, :, None]).sum(1) / lengths[:, None]
        features = torch.cat((hidden[:, 0], mean, lengths.log()[:, None]), dim=1)
        return np.asarray(head(ranker._weights, features)[:, 0].numpy())


def packed_scores(ranker: Ranker, prompts: list[list[int]]) -> np.ndarray:
    return np.asarray(ranker.outputs(prompts)[:, 0])


def seconds(
    call: Callable[[Ranker, list[list[int]]], np.ndarray], ranker: Ranker, batches: list[list[list[int]]]
) -> float:
    started_s = time.perf_counter()
    for batch in batches:
        call(ranker, batch)
    return time.perf_counter() - started_s


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_a_second(dtype: str) -> None:
    ranker = Ranker.load(DAY_0, dtype=dtype)  # type: ignore[arg-type]
    prompts = ranker.tokenizer.encode(list(islice(fresh_prompts(), BATCH * BATCHES)))
    batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    tolerance = 1e-4 if dtype == "float32" else 0.05
    np.testing.assert_allclose(packed_scores(ranker, batches[0]), padded_scores(ranker, batches[0]), atol=tolerance)
    ratios, rates = [], []
    for repeat in range(REPEATS):
        taken = {way: seconds(way, ranker, batches) for way in turns((packed_scores, padded_scores), repeat)}
        ratios.append(taken[padded_scores] / taken[packed_scores])
        rates.append(len(prompts) / taken[packed_scores])
    print(
        f"\n{dtype}, {np.mean([len(p) for p in prompts]):.0f} tokens a prompt: packed is "
        f"{Spread.of(ratios):.2f} times padded, {Spread.of(rates):.0f} prompts/s"
    )
