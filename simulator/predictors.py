"""What a predictor would have said, without one: perfect, none, wrong by a confusion matrix, or noisy in rank.

The real predictor's answers come with the trace, as its column predicted_output_tokens.

Sources: the confusion of bins of paper 000, section 6.2 (`policies.papers.bin_worth.neighbour_error_matrix`) and
appendix C.1. The noise in rank is this project's fit to the accuracies of its Table 1: normal scores of the true ranks
plus 0.44 times Student's t with 3 degrees of freedom give 84 % of 2 bins, 63 % of 4 and 41 % of 8 right (ERRATA 0.16).
"""

from dataclasses import replace

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from policies.errors import InputError
from policies.papers.bin_worth import neighbour_error_matrix
from policies.router.bin_edges import equal_mass_edges
from policies.types import FloatArray, IntArray
from simulator.workload import Workload


def predicted(workload: Workload, predictor: str, rng: Generator) -> Workload:
    """The workload with predictions by a named model.

    oracle  none  trace (keep the file's own)  noise:SCALE  neighbour:BINS:PROBABILITY

    Raises:
        InputError: the name is none of these.
    """
    kind, *numbers = predictor.split(":")
    try:
        given = [float(number) for number in numbers]
        if not np.isfinite(given).all():
            raise ValueError("its numbers must be finite")
        match kind, given:
            case "trace", []:
                if np.isnan(workload.predicted_output_tokens).all():
                    raise ValueError(f"{workload.name} has no predicted_output_tokens")
                return workload
            case "none", []:
                return _with(workload, np.full(len(workload), np.nan))
            case "oracle", []:
                return _with(workload, workload.output_tokens.astype(np.float64))
            case "noise", [scale]:
                return _with(workload, rank_noise(workload.output_tokens, scale, rng))
            case "neighbour", [bins, probability]:
                matrix = neighbour_error_matrix(int(bins), probability)
                return _with(workload, confused(workload.output_tokens, matrix, rng))
    except ValueError as error:
        raise InputError(f"predictor {predictor!r}: {error}") from error
    known = "oracle, none, trace, noise:SCALE, neighbour:BINS:PROBABILITY"
    raise InputError(f"unknown predictor {predictor!r}; there are {known}")


def _with(workload: Workload, predictions: FloatArray) -> Workload:
    return replace(workload, predicted_output_tokens=predictions)


def rank_noise(output_tokens: IntArray, scale: float, rng: Generator) -> FloatArray:
    """Lengths of the set, handed out by noisy ranks: the law stays, the order errs."""
    n = len(output_tokens)
    order = np.argsort(output_tokens + rng.random(n))
    score = np.empty(n)
    score[order] = _normal_scores(n)
    noisy = np.argsort(score + scale * rng.standard_t(3, n), kind="stable")
    predictions: FloatArray = np.empty(n)
    predictions[noisy] = np.sort(output_tokens)
    return predictions


def _normal_scores(n: int) -> FloatArray:
    """Normal quantiles of the middles of n equal shares, by a rational approximation good to 5e-4."""
    share = (np.arange(n) + 0.5) / n
    tail = np.minimum(share, 1.0 - share)
    t: FloatArray = np.sqrt(-2.0 * np.log(tail))
    upper = t - (2.515517 + 0.802853 * t + 0.010328 * t**2) / (1.0 + 1.432788 * t + 0.189269 * t**2 + 0.001308 * t**3)
    return np.asarray(np.where(share < 0.5, -upper, upper))


def confused(output_tokens: IntArray, matrix: ArrayLike, rng: Generator) -> FloatArray:
    """The middle length of the bin that a predictor with this confusion matrix would name.

    Bins are of equal mass over the lengths given.

    Args:
        matrix: shape (k, k), row = true bin, column = predicted bin, rows summing to 1.

    Raises:
        InputError: the matrix is not square, or a row is no distribution.
    """
    shares = np.asarray(matrix, dtype=np.float64)
    if shares.ndim != 2 or shares.shape[0] != shares.shape[1]:
        raise InputError(f"a confusion matrix is square, got shape {shares.shape}")
    if shares.min() < 0.0 or not np.allclose(shares.sum(axis=1), 1.0):
        raise InputError("the rows of a confusion matrix are shares that sum to 1")
    edges = equal_mass_edges(output_tokens, len(shares))
    true_bin = np.searchsorted(edges[1:-1], output_tokens, side="right")
    cumulated = np.cumsum(shares, axis=1)[true_bin]
    named = np.minimum((rng.random(len(output_tokens))[:, None] > cumulated).sum(axis=1), len(shares) - 1)
    members = (output_tokens[true_bin == bin_index] for bin_index in range(len(shares)))
    middles = [float(np.median(own)) if len(own) else edges[index] for index, own in enumerate(members)]
    return np.asarray(np.array(middles)[named], dtype=np.float64)
