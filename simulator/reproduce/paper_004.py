"""Paper 004 (Zhao, Israel, Van den Broeck, Grover, Prepacking): what packing spares a padded prefill.

Prompts of real sets in random batches, packed by `policies.gang.packing`. The gain is that of tokens computed, and of
step times (overhead + slope * tokens; Llama-3.1-8B on an A100, the paper: 1.3B to 13B models on an A6000). Attention's
mask costs, which the packed rows add, are not in it (ERRATA 4.4), and against prefill without padding there is no gain
at all (ERRATA 4.10).
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from policies.gang.packing import first_fit_decreasing
from policies.types import FloatArray
from simulator.engines import engine_profile
from simulator.reproduce.common import Setting, mean, spread, table

_SETS = ("alpaca", "lmsys", "gsm8k", "azure_conv")
_BATCHES = (8, 16, 32, 64)
_DRAWS = 200
# The paper takes 1000 prompts of each set.
_PROMPTS, _MAX_TOKENS = 1000, 4096
_TIMED_TOKENS = 2048  # to which the kernels of figure 2's engine were measured


def _seconds(tokens: int) -> float:
    return engine_profile("Llama-3.1-8B@a100_sxm").times.prefill.step_s(prefill_tokens=tokens)


def packing(setting: Setting) -> list[str]:
    """Figures 4 and 6: padded prefill against packed, by set and batch size (the paper: 1.6 to 6 times faster)."""
    rows = []
    for name, size in product(_SETS, _BATCHES):
        lengths = setting.workload(name).prompt_tokens
        rng = np.random.default_rng(0)
        gains = [_gains(np.minimum(rng.choice(lengths, size), _MAX_TOKENS).tolist()) for _ in range(_DRAWS)]
        tokens, seconds, against_varlen = (mean([gain[at] for gain in gains]) for at in range(3))
        waste = mean([gain[3] for gain in gains])
        rows.append((name, size, f"{waste:.0%}", f"x{tokens:.2f}", f"x{seconds:.2f}", f"x{against_varlen:.2f}"))
    heading = ("prompts", "batch", "padding", "tokens, padded/packed", "time, padded/packed", "time, unpadded/packed")
    return table(heading, rows)


def _gains(lengths: list[int]) -> tuple[float, float, float, float]:
    padded, packed = _padded(lengths), _packed(lengths)
    padded_s, packed_s, plain_s = map(_seconds, (padded, packed, sum(lengths)))
    return padded / packed, padded_s / packed_s, plain_s / packed_s, 1.0 - sum(lengths) / padded


def _padded(lengths: Sequence[int]) -> int:
    """Tokens computed, with a row for each prompt."""
    return len(lengths) * max(lengths)


def _packed(lengths: Sequence[int]) -> int:
    """And with rows as long as the longest, of which prompts share one."""
    return len(first_fit_decreasing(lengths, max(lengths))) * max(lengths)


def figure_2(setting: Setting) -> list[str]:
    """Milliseconds of a prefill of k prompts of m tokens: from some k on it grows with k (the paper: batches cost)."""
    sizes, tokens = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64, 128, 256)
    clock = engine_profile("kernels_rtxpro6000_llama-3.1-8b").clock
    times_ms = {m: [1e3 * clock.step_s(prefill_tokens=k * m) for k in sizes if k * m <= _TIMED_TOKENS] for m in tokens}
    lines = {f"{m} tokens": (sizes[: len(series)], series) for m, series in times_ms.items()}
    setting.draw(
        "004_figure_2", lines, x="prompts in the batch", y="ms", title="004, figure 2: prefill of equal prompts"
    )
    rows = [(f"m = {m}", *([f"{each:.1f}" for each in times_ms[m]] + ["-"] * len(sizes))[: len(sizes)]) for m in tokens]
    return table(("k =", *map(str, sizes)), rows)


def figure_7(setting: Setting) -> list[str]:
    """A whole set at once: milliseconds of prefill per prompt, by batches of k prompts or rows."""
    rows = []
    for name, size in product(_SETS, (16, 32)):
        lengths = np.minimum(setting.workload(name).prompt_tokens, _MAX_TOKENS)
        draws = [np.random.default_rng(seed).choice(lengths, _PROMPTS).tolist() for seed in range(setting.runs)]
        mean_s = np.mean([_of_a_set(drawn, size) for drawn in draws], axis=0)
        rows.append((name, size, *(f"{1e3 * each:.2f}" for each in mean_s)))
    heading = ("prompts", "k", "full batches", "prepacked batches", "length-ordered", "prepacked set")
    return table(heading, rows)


def _of_a_set(lengths: list[int], size: int) -> tuple[float, float, float, float]:
    """Seconds per prompt: full batching; each batch packed; length-ordered; all packed, and batches of the rows."""
    drawn, ordered = _cut(lengths, size), _cut(sorted(lengths, reverse=True), size)
    packed = first_fit_decreasing(lengths, max(lengths))
    rows = _cut([sum(lengths[index] for index in row) for row in packed], size)
    layouts = (map(_padded, drawn), map(_packed, drawn), map(_padded, ordered), map(_padded, rows))
    full, each, by_length, whole = (sum(map(_seconds, tokens)) / len(lengths) for tokens in layouts)
    return full, each, by_length, whole


def _cut(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def figure_8(setting: Setting) -> list[str]:
    """Figures 8 and 11: speedup by batch size reduction, and by longest less mean length; lengths uniform, 1 to 512."""
    rows = []
    for size in _BATCHES:
        lengths = np.random.default_rng(0).integers(1, 513, size=5000)
        batches = [batch for batch in _cut(lengths.tolist(), size) if len(batch) == size]
        reduction = np.array([_padded(batch) / _packed(batch) for batch in batches])
        deviation = np.array([max(batch) - np.mean(batch) for batch in batches])
        speedup = np.array([_seconds(_padded(batch)) / _seconds(_packed(batch)) for batch in batches])
        rows.append((size, spread(speedup), *_fitted(reduction, speedup), *_fitted(deviation, speedup)))
        order = np.argsort(reduction)
        line = {"batches": (reduction[order].tolist(), speedup[order].tolist())}
        setting.draw(f"004_figure_8_{size}", line, x="k / r", y="speedup", title=f"004, figure 8: batches of {size}")
    reduced, deviated = ("k/r", "speedup by it"), ("longest - mean", "speedup by it")
    return table(("k", "speedup", *reduced, *deviated), rows)


def _fitted(xs: FloatArray, speedup: FloatArray) -> tuple[str, str]:
    """Range of a measure, and the line through the speedups with the share of their variance that it explains."""
    slope, offset = np.polyfit(xs, speedup, 1)
    explained = np.corrcoef(xs, speedup)[0, 1] ** 2
    return spread(xs), f"{offset:.2f} + {slope:.3g} x, R2 {explained:.2f}"


def figure_13(setting: Setting) -> list[str]:
    """How busy a GPU is that full batching would just keep busy, at the same batches (the paper: less utilization)."""
    rows = []
    for name, size in product(_SETS, _BATCHES):
        lengths = np.minimum(setting.workload(name).prompt_tokens, _MAX_TOKENS)
        rng = np.random.default_rng(0)
        batches = [rng.choice(lengths, size).tolist() for _ in range(_DRAWS)]
        ordered = _cut(sorted((tokens for batch in batches for tokens in batch), reverse=True), size)
        full_s, packed_s = (sum(_seconds(computed(batch)) for batch in batches) for computed in (_padded, _packed))
        ordered_s = sum(_seconds(_padded(batch)) for batch in ordered)
        rows.append((name, size, "100%", f"{ordered_s / full_s:.0%}", f"{packed_s / full_s:.0%}"))
    return table(("prompts", "batch", "full batching", "length-ordered", "prepacked"), rows)
