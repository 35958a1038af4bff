"""Prompt lengths: after published statistics of data sets, and from files.

"-like" sets are lognormal between the least and the longest prompt that 004's table 2 gives for its 1000 prompts of
each set, with its mean; the longest of a thousand stands at the 99.9th percentile, which sets the spread:

    sigma = q - sqrt(q**2 - 2 ln(longest / mean)),  q = 3.09
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from policies.errors import InputError
from policies.types import IntArray

# Least, mean and longest, tokens.
PUBLISHED = {
    "wikitext-256-like": (1, 73, 256),
    "wikitext-512-like": (6, 120, 512),
    "mmlu-like": (4, 64, 1102),
    "alpaca-like": (43, 126, 527),
    "samsum-like": (21, 169, 942),
}
_QUANTILE = 3.09


def published(name: str, count: int, seed: int) -> IntArray:
    """Lengths drawn after the statistics of a set of PUBLISHED."""
    least, mean, longest = PUBLISHED[name]
    sigma = _QUANTILE - math.sqrt(_QUANTILE**2 - 2.0 * math.log(longest / mean))
    drawn = np.random.default_rng(seed).lognormal(math.log(mean) - sigma**2 / 2.0, sigma, count)
    return np.clip(drawn, least, longest).astype(np.int64)


def from_file(path: Path, count_tokens: Callable[[str], int]) -> IntArray:
    """The column prompt_tokens of a CSV file, or the token counts of `prompt` in a JSON Lines file; both may be .gz.

    Raises:
        InputError: it has neither, or cannot be read.
    """
    try:
        with cast(TextIO, gzip.open(path, "rt") if path.suffix == ".gz" else path.open()) as file:
            if ".jsonl" in path.name:
                prompts = {json.loads(line)["prompt"] for line in file if line.strip()}
                return np.array([count_tokens(prompt) for prompt in sorted(prompts)])
            return np.array([int(row["prompt_tokens"]) for row in csv.DictReader(file)])
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"{path} has no prompt lengths: {error!r}") from error


def batches(lengths: IntArray, batch_size: int, count: int, longest: int, seed: int) -> list[Sequence[int]]:
    """Random batches; prompts beyond the longest are cut to it, empty ones left out."""
    usable = np.minimum(lengths[lengths > 0], longest)
    drawn = np.random.default_rng(seed).choice(usable, size=(count, batch_size))
    return [cast(Sequence[int], row.tolist()) for row in drawn]
