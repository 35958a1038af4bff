"""Engines by name: step times, and how many tokens of KV cache the GPU's memory leaves.

A name is one of the kernel tables that come with Sluice (`kernels_...`), MODEL@GPU or MODEL@GPU/N of the published
profiles, where N GPUs share one model (tensor parallelism), or the path of a calibration of one's own engine: the CSV
file that `sluice calibrate` writes, a CSV file with a row per step (prefill_tokens, decode_requests, kv_tokens,
step_s), to which `StepTimeModel` is fitted, or a JSON file with the coefficients of `StepTimes`.

    cache tokens = (0.9 * GPU memory * N - weights) / bytes per token

after vLLM's default share of memory; what activations and CUDA graphs take is not subtracted.
"""

import zlib
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path

from policies.errors import ConfigError, InputError
from policies.profile import COLUMNS, ProfileRow, step_times
from policies.strict_text import csv_rows, json_value
from policies.types import Phase, StepCoefficients, StepTimes
from simulator.engine import StepClock
from simulator.kernels import DATA, built_in, built_in_clock, fitted, linear_fit
from simulator.profiles import calibrated, opened, read_profile

_MEMORY_SHARE = 0.9
_GIGABYTES = {
    "a100": 80e9, "h100": 80e9, "h200": 141e9, "b300": 288e9, "l40s": 48e9, "rtxpro6000": 96e9, "rtx4090": 24e9,
}  # fmt: skip
# Bytes of weights and of KV per token, 16 bits each, as the models' configurations give them.
_MODELS = {
    "llama-3.1-8b": (16.1e9, 131_072), "qwen3-8b": (16.4e9, 147_456), "qwen3-32b": (65.5e9, 262_144),
    "qwen3-30b-a3b": (61.1e9, 98_304), "llama-3.1-70b": (141e9, 327_680), "llama2-70b": (138e9, 327_680),
    "opt-13b": (25.7e9, 819_200), "opt-66b": (132e9, 2_359_296), "qwen2.5-coder-7b": (15.2e9, 57_344),
    "qwen-7b": (15.2e9, 57_344), "mathstral-7b": (14.5e9, 131_072), "mistral-7b": (14.5e9, 131_072),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine to simulate.

    Attributes:
        cache_tokens: None where memory or model are not known.
        gpus: of one replica.
    """

    name: str
    times: StepTimes
    clock: StepClock
    cache_tokens: int | None
    gpus: int = 1

    def cache(self, tokens: int | None) -> int:
        """Tokens of KV cache: `tokens` if given, else those of the profile.

        Raises:
            ConfigError: neither is.
        """
        found = tokens or self.cache_tokens
        if found is None:
            raise ConfigError(f"how much KV cache {self.name} leaves is not known: say it with --cache-tokens")
        return found


def engine_profile(name: str) -> EngineProfile:
    """Raises ConfigError for an unknown name, InputError for a calibration file that cannot be read."""
    path = Path(name)
    if path.suffix in {".json", ".csv", ".gz"}:
        times, cache_tokens = read_calibration(path)
        return EngineProfile(name=path.name, times=times, clock=times, cache_tokens=cache_tokens)
    if name in built_in():
        clock = built_in_clock(name)
        _, gpu, model = name.split("_", 2)
        return EngineProfile(
            name=name, times=linear_fit(clock), clock=clock, cache_tokens=cache_tokens_of(model, gpu, 1)
        )
    row = _published().get(name)
    if row is None:
        known = ", ".join([*built_in(), *sorted(_published())])
        raise ConfigError(f"unknown engine {name!r}; a calibration file (.json, .csv), or one of {known}")
    model, gpu, tp = row.model, row.gpu, row.tensor_parallel
    times = step_times(list(_rows()), model=model, gpu=gpu, tensor_parallel=tp, source=row.source)
    return EngineProfile(name=name, times=times, clock=times, cache_tokens=cache_tokens_of(model, gpu, tp), gpus=tp)


def engine_names() -> list[str]:
    return [*built_in(), *sorted(_published())]


@cache
def _rows() -> tuple[ProfileRow, ...]:
    return tuple(row for name in ("step_times.csv", "measured.csv") for row in read_profile(DATA / name))


@cache
def _published() -> dict[str, ProfileRow]:
    """A row for each name; sources that measured the same engine are told apart by a suffix."""
    named: dict[str, ProfileRow] = {}
    for row in _rows():
        tp = f"/{row.tensor_parallel}" if row.tensor_parallel > 1 else ""
        name = f"{row.model.split('/')[-1]}@{row.gpu.replace(' ', '_')}{tp}"
        if name in named and named[name].source != row.source:
            name += "+" + row.source.split("(")[-1].split()[0]
        named.setdefault(name, row)
    return named


def cache_tokens_of(model: str, gpu: str, tensor_parallel: int) -> int | None:
    """KV cache of a model on a GPU, or None where one of them is not known here."""
    plain = gpu.lower().replace(" ", "").replace("_", "")
    memory = next((size for key, size in _GIGABYTES.items() if plain.startswith(key)), None)
    known = _sizes_of(model)
    if memory is None or known is None:
        return None
    left = _MEMORY_SHARE * memory * tensor_parallel - known[0]
    return int(left / known[1]) if left > 0 else None


def kv_bytes_of(model: str) -> int:
    """KV cache of a token, on all GPUs together.

    Raises:
        ConfigError: the model is not known here.
    """
    known = _sizes_of(model)
    if known is None:
        raise ConfigError(f"the sizes of {model!r} are not known; there are {', '.join(_MODELS)}")
    return known[1]


def _sizes_of(model: str) -> tuple[float, int] | None:
    return next((sizes for key, sizes in _MODELS.items() if key in model.lower().replace("meta-", "")), None)


def read_calibration(path: Path) -> tuple[StepTimes, int | None]:
    """Step times of one's own engine, and its cache if the file (JSON: cache_tokens) names it.

    A CSV file is what `sluice calibrate` wrote, or has a row per step.

    Raises:
        InputError: the file cannot be read, or holds neither coefficients nor steps.
    """
    try:
        if path.suffix == ".json":
            return _coefficients(json_value(path.read_text()))
        with opened(path) as file:
            rows = list(csv_rows(file, str(path)))
        if rows and rows[0][1].keys() >= set(COLUMNS):
            return calibrated(path), None
        return fitted([_step(row, f"{path}, line {line}") for line, row in rows]), None
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        said = error if isinstance(error, InputError) else repr(error)
        raise InputError(f"cannot read the calibration {path}: {said}") from error


def _coefficients(found: dict[str, dict[str, float]]) -> tuple[StepTimes, int | None]:
    prefill, decode, mixed = (
        StepCoefficients(**found[phase.value]) for phase in (Phase.PREFILL, Phase.DECODE, Phase.MIXED)
    )
    cache_tokens = found.get("cache_tokens")
    times = StepTimes(prefill=prefill, decode=decode, mixed=mixed)
    return times, None if cache_tokens is None else int(str(cache_tokens))


def _step(row: dict[str, str], place: str) -> tuple[int, int, int, float]:
    try:
        step = int(row["prefill_tokens"]), int(row["decode_requests"]), int(row["kv_tokens"]), float(row["step_s"])
    except (KeyError, ValueError) as error:
        raise InputError(f"{place} is no step: {error!r}") from error
    if not isfinite(step[3]) or min(step) < 0:
        raise InputError(f"{place} is no step: {row}")
    return step
