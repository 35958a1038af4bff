"""From the lines of a step-time profile to `StepTimes`.

A profile is a CSV file with a row for each model, GPU, tensor parallelism and decode context:

    source, model, gpu, tp, alpha_p_ms, beta_p_ms_per_token, decode_range, alpha_d_ms, beta_d_ms_per_seq

and optionally, from measurements of steps that hold both kinds (`sluice calibrate` writes them),

    alpha_m_ms, beta_mp_ms_per_token, beta_md_ms_per_seq, beta_mkv_ms_per_token, gamma_m_ms

T_prefill = alpha_p + beta_p * tokens and T_decode = alpha_d + beta_d * requests, with `decode_range` naming the context
at which beta_d was taken ("16..1024 seqs at context 512"). Beta_d grows with the context (four- to fivefold from 512 to
4096), because attention reads the KV of every token: rows that differ in nothing but their context therefore become one
decode form, beta_d(context) = decode_s + kv_s * context by least squares.

Departure: fitted overheads below zero (a prefill whose cost bends upwards gives such lines) become 0.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import numpy as np

from policies.engine.step_time import joined
from policies.errors import ConfigError, InputError
from policies.strict_text import csv_rows
from policies.types import StepCoefficients, StepTimes

COLUMNS = (
    "source",
    "model",
    "gpu",
    "tp",
    "alpha_p_ms",
    "beta_p_ms_per_token",
    "decode_range",
    "alpha_d_ms",
    "beta_d_ms_per_seq",
)
MIXED_COLUMNS = (
    "alpha_m_ms",
    "beta_mp_ms_per_token",
    "beta_md_ms_per_seq",
    "beta_mkv_ms_per_token",
    "gamma_m_ms",
)
_CONTEXT = re.compile(r"context (\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One line of a profile, in seconds; context_tokens and mixed are None where the source does not say them."""

    source: str
    model: str
    gpu: str
    tensor_parallel: int
    prefill_overhead_s: float
    prefill_s_per_token: float
    decode_overhead_s: float
    decode_s_per_request: float
    context_tokens: float | None
    mixed: StepCoefficients | None = None


def parse_profile(lines: Iterable[str], name: str) -> list[ProfileRow]:
    """All rows of a profile; `name` is what errors call it.

    Raises:
        InputError: a column is missing, or a number cannot be read.
    """
    rows = []
    for number, line in csv_rows(lines, name):
        try:
            rows.append(_row(line))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{name}, line {number}: {error!r}") from error
    return rows


def _row(line: dict[str, str]) -> ProfileRow:
    return ProfileRow(
        source=line["source"],
        model=line["model"],
        gpu=line["gpu"],
        tensor_parallel=int(line["tp"] or 1),
        prefill_overhead_s=_seconds(line["alpha_p_ms"]),
        prefill_s_per_token=_seconds(line["beta_p_ms_per_token"]),
        decode_overhead_s=_seconds(line["alpha_d_ms"]),
        decode_s_per_request=_seconds(line["beta_d_ms_per_seq"]),
        context_tokens=_context_tokens(line["decode_range"]),
        mixed=_mixed_form(line),
    )


def _mixed_form(line: dict[str, str]) -> StepCoefficients | None:
    if not line.get(MIXED_COLUMNS[0]):
        return None
    overhead, prefill, decode, kv, interference = (_seconds(line[name]) for name in MIXED_COLUMNS)
    return StepCoefficients(
        overhead_s=overhead, prefill_s=prefill, decode_s=decode, kv_s=kv, interference_s=interference
    )


def _seconds(milliseconds: str) -> float:
    if not isfinite(number := float(milliseconds)):
        raise ValueError(f"{milliseconds} is no number")
    return number * 1e-3


def _context_tokens(decode_range: str) -> float | None:
    """The context in "16..1024 seqs at context 512"; the middle of a range of contexts."""
    found = _CONTEXT.search(decode_range)
    if found is None:
        return None
    low, high = float(found[1]), float(found[2] or found[1])
    return (low + high) / 2


def step_times(
    rows: list[ProfileRow], *, model: str, gpu: str, tensor_parallel: int = 1, source: str | None = None
) -> StepTimes:
    """The step times of one engine out of a profile; `source` is needed where several sources measured it.

    With several contexts the decode form depends on the context; with one, or none said, kv_s is 0 and the form holds
    at that context only. Where no mixed steps were measured, their form adds the two slopes to the larger overhead.

    Raises:
        ConfigError: the profile has no such engine, or has it from several sources; the message lists what it has.
    """
    wanted = (model, gpu, tensor_parallel)
    chosen = [row for row in rows if (row.model, row.gpu, row.tensor_parallel) == wanted]
    chosen = [row for row in chosen if source in (None, row.source)]
    if len(sources := {row.source for row in chosen}) > 1:
        raise ConfigError(f"several sources have step times of {wanted}: name one of {sorted(sources)}")
    if not chosen:
        known = sorted({(row.model, row.gpu, row.tensor_parallel) for row in rows})
        raise ConfigError(f"no step times of {wanted}; there are {known}")
    prefill = StepCoefficients(
        overhead_s=max(0.0, chosen[0].prefill_overhead_s), prefill_s=max(0.0, chosen[0].prefill_s_per_token)
    )
    decode = _decode_form(chosen)
    return StepTimes(prefill=prefill, decode=decode, mixed=chosen[0].mixed or joined(prefill, decode))


def only_engine(rows: list[ProfileRow], name: str) -> StepTimes:
    """The one engine of a profile, as `sluice calibrate` writes it; `name` is what errors call it.

    Raises:
        ConfigError: it holds none or several.
    """
    engines = {(row.model, row.gpu, row.tensor_parallel) for row in rows}
    if len(engines) != 1:
        raise ConfigError(f"{name} must hold one engine, as `sluice calibrate` writes it, got {engines}")
    model, gpu, tensor_parallel = engines.pop()
    return step_times(rows, model=model, gpu=gpu, tensor_parallel=tensor_parallel)


def _decode_form(rows: list[ProfileRow]) -> StepCoefficients:
    overhead_s = max(0.0, float(np.mean([row.decode_overhead_s for row in rows])))
    by_context = {row.context_tokens: row.decode_s_per_request for row in rows if row.context_tokens is not None}
    if len(by_context) < 2:
        return StepCoefficients(overhead_s=overhead_s, decode_s=max(0.0, rows[0].decode_s_per_request))
    kv_s, decode_s = np.polyfit(list(by_context), list(by_context.values()), deg=1)
    return StepCoefficients(overhead_s=overhead_s, decode_s=max(0.0, float(decode_s)), kv_s=max(0.0, float(kv_s)))
