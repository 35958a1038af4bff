"""Paper 004 (Zhao, Israel, Van den Broeck, Grover, Prepacking): what packing spares a padded prefill.

Prompts of real sets in random batches, packed by `policies.gang.packing`. The gain is that of tokens computed, and of
step times (overhead + slope * tokens; Llama-3.1-8B on an A100, the paper: 1.3B to 13B models on an A6000). Attention's
mask costs, which the packed rows add, are not in it (ERRATA 4.4), and against prefill without padding there is no gain
at all (ERRATA 4.10).
"""

from itertools import product

import numpy as np

from policies.gang.packing import first_fit_decreasing
from simulator.engines import engine_profile
from simulator.reproduce.common import Setting, mean, table

_SETS = ("alpaca", "lmsys", "gsm8k", "azure_conv")
_BATCHES = (8, 16, 32, 64)
_DRAWS = 200


def packing(setting: Setting) -> list[str]:
    """Padded prefill against packed: tokens and seconds, by set and batch size (the paper: 1.6 to 6 times faster)."""
    rows = []
    for name, size in product(_SETS, _BATCHES):
        lengths = setting.workload(name).prompt_tokens
        rng = np.random.default_rng(0)
        gains = [_gains(np.minimum(rng.choice(lengths, size), 4096).tolist()) for _ in range(_DRAWS)]
        tokens, seconds, against_varlen = (mean([gain[at] for gain in gains]) for at in range(3))
        waste = mean([gain[3] for gain in gains])
        rows.append((name, size, f"{waste:.0%}", f"x{tokens:.2f}", f"x{seconds:.2f}", f"x{against_varlen:.2f}"))
    heading = ("prompts", "batch", "padding", "tokens, padded/packed", "time, padded/packed", "time, unpadded/packed")
    return table(heading, rows)


def _gains(lengths: list[int]) -> tuple[float, float, float, float]:
    prefill = engine_profile("Llama-3.1-8B@a100_sxm").times.prefill
    longest = max(lengths)
    padded, packed = len(lengths) * longest, len(first_fit_decreasing(lengths, longest)) * longest
    padded_s, packed_s, plain_s = (prefill.step_s(prefill_tokens=tokens) for tokens in (padded, packed, sum(lengths)))
    return padded / packed, padded_s / packed_s, plain_s / packed_s, 1.0 - sum(lengths) / padded
