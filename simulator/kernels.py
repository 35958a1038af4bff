"""Step times summed up from measured kernel times: finer than any linear form, for engines whose kernels were profiled.

    step = dense(tokens) + per_sequence(requests) + attention(chunk, decodes, context)

over all layers; tables are interpolated linearly along each axis and go on with their last slope. Attention of a mixed
step is its own measurement: on the GPUs measured it costs 1.2 to 1.7 times what its prefill and its decodes cost apart.

Source: casys-kaist/LLMServingSim, profiler/perf (MIT): vLLM 0.19, bf16, per layer, RTX PRO 6000 and RTX 4090. The
compact tables in simulator/data are made from it by `python -m simulator.kernels FOLDER`, with these departures:
prompts are taken for new ones (kv_prefill 0), all chunks of a step for one, and of a mixture of experts the expected
number of distinct ones out of a pool of E are active, E * (1 - (1 - 8/E)^tokens).

A pool of all 128 experts, each as likely as the other, would make a decode step of many requests wait for 42 ms of
experts alone. A router trained on text is not uniform: EB+ (weifang231/eb-vllm) measured 22.4 ms of overhead for a
decode step of the same model on the same GPU, all kernels included, which is what this table gives with E = 63. Its
engine ran without CUDA graphs, so part of that may be the processor's: 63 is an upper bound.
"""

import csv
import gzip
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from policies.errors import ConfigError, InputError
from policies.step_time import StepTimeConfig, StepTimeModel
from policies.types import FloatArray, Phase, StepResult, StepTimes
from simulator.engine import StepClock

DATA = Path(__file__).with_name("data")
_LAYERS = {"meta-llama/Llama-3.1-8B": 32, "Qwen/Qwen3-32B": 64, "Qwen/Qwen3-30B-A3B-Instruct-2507": 48}
# Operations that a step runs once, and those that a layer runs twice.
_ONCE = {"embedding", "final_layernorm", "lm_head", "sampler"}
_TWICE = {"layernorm", "qk_norm"}
_EXPERTS, _EXPERTS_PER_TOKEN = 63, 8
_MOST_TOKENS = 65_536

Row = tuple[str, int, int, int, float]


class Grid:
    """Values on a regular grid, linear between its points and beyond its ends."""

    def __init__(self, axes: Sequence[Sequence[float]], values: FloatArray) -> None:
        self._axes = [list(axis) for axis in axes]
        self._values = values.tolist()

    def at(self, *point: float) -> float:
        cells = [_cell(axis, x) for axis, x in zip(self._axes, point, strict=True)]
        return _blend(self._values, cells)


def _cell(axis: list[float], x: float) -> tuple[int, float]:
    low = min(max(bisect_right(axis, x) - 1, 0), len(axis) - 2)
    return low, max(0.0, (x - axis[low]) / (axis[low + 1] - axis[low]))


def _blend(values: list[float] | float, cells: list[tuple[int, float]]) -> float:
    if not isinstance(values, list):
        return values
    (low, share), rest = cells[0], cells[1:]
    first, second = values[low : low + 2]
    return (1.0 - share) * _blend(first, rest) + share * _blend(second, rest)


class KernelClock:
    """Seconds of a step by kernel tables; rows are (kind, x, y, z, microseconds) over all layers.

    Kinds: "dense" by tokens, "sequence" by requests, "prefill" by chunk, "decode" by requests and context, "mixed" by
    chunk, requests and context.

    Raises:
        InputError: a table is missing, or not a full grid.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        tables: dict[str, dict[tuple[int, ...], float]] = {}
        for kind, x, y, z, time_us in rows:
            tables.setdefault(kind, {})[(x, y, z)] = time_us * 1e-6
        try:
            self._dense = _lookup(tables["dense"], _MOST_TOKENS)
            self._sequence = _lookup(tables["sequence"], 8192)
            self._prefill = _lookup(tables["prefill"], _MOST_TOKENS)
            self._decode = _grid(tables["decode"], 2)
            self._mixed = _grid(tables["mixed"], 3)
        except KeyError as error:
            raise InputError(f"kernel tables lack {error}") from error

    def step_s(self, *, prefill_tokens: float = 0.0, decode_requests: float = 0.0, kv_tokens: float = 0.0) -> float:
        if not prefill_tokens and not decode_requests:
            return 0.0
        tokens, requests = int(prefill_tokens + decode_requests), int(decode_requests) + bool(prefill_tokens)
        attention = self._attention_s(prefill_tokens, decode_requests, kv_tokens)
        return self._dense[min(tokens, _MOST_TOKENS)] + self._sequence[min(requests, 8192)] + attention

    def _attention_s(self, prefill_tokens: float, decode_requests: float, kv_tokens: float) -> float:
        if not decode_requests:
            return self._prefill[min(int(prefill_tokens), _MOST_TOKENS)]
        context = kv_tokens / decode_requests
        if not prefill_tokens:
            return self._decode.at(decode_requests, context)
        return self._mixed.at(prefill_tokens, decode_requests, context)


def _lookup(table: Mapping[tuple[int, ...], float], most: int) -> list[float]:
    """A value for every whole number up to ``most``."""
    known = sorted((key[0], value) for key, value in table.items())
    x, y = np.array(known).T
    points = np.arange(most + 1)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    inside = np.interp(points, x, y)
    values: list[float] = np.where(points > x[-1], y[-1] + slope * (points - x[-1]), inside).tolist()
    return values


def _grid(table: Mapping[tuple[int, ...], float], dimensions: int) -> Grid:
    axes = [sorted({key[d] for key in table}) for d in range(dimensions)]
    padding = (0,) * (3 - dimensions)
    try:
        values = [table[(*point, *padding)] for point in product(*axes)]
    except KeyError as error:
        raise InputError(f"a kernel table has no value at {error}") from error
    return Grid(axes, np.array(values).reshape([len(axis) for axis in axes]))


def built_in() -> list[str]:
    """Names of the engines whose kernel tables come with Sluice."""
    return sorted(path.name.removesuffix(".csv") for path in DATA.glob("kernels_*.csv"))


def read_kernels(path: Path) -> KernelClock:
    """A clock from a compact table.

    Raises:
        InputError: the file cannot be read, or is not such a table.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                (row["kind"], int(row["x"]), int(row["y"]), int(row["z"]), float(row["time_us"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"cannot read kernel tables from {path}: {error!r}") from error
    return KernelClock(rows)


def built_in_clock(name: str) -> KernelClock:
    """Raises ConfigError for a name that `built_in` does not list."""
    if name not in built_in():
        raise ConfigError(f"no kernel tables {name!r}; there are {', '.join(built_in())}")
    return read_kernels(DATA / f"{name}.csv")


def linear_fit(clock: StepClock, *, max_batch_tokens: int = 8192) -> StepTimes:
    """The linear forms that a policy would learn on such an engine: `StepTimeModel` over a grid of steps."""
    return fitted(
        [
            (prefill, decodes, kv, clock.step_s(prefill_tokens=prefill, decode_requests=decodes, kv_tokens=kv))
            for prefill, decodes, kv in _typical_steps(max_batch_tokens)
        ]
    )


def _typical_steps(max_batch_tokens: int) -> Iterator[tuple[int, int, int]]:
    chunks = [0, *(size for size in (64, 256, 512, 1024, 2048, 4096, 8192) if size <= max_batch_tokens)]
    contexts = (128, 512, 1024, 2048, 4096, 8192)
    for chunk, count, each in product(chunks, (0, 1, 4, 16, 32, 64, 96, 128, 192, 256), contexts):
        if chunk or count:
            yield chunk, count, count * each


def fitted(steps: Sequence[tuple[int, int, int, float]]) -> StepTimes:
    """`StepTimeModel` over all steps alike, each as prefill tokens, decode requests, tokens of context and seconds.

    Raises:
        InputError: they are too few.
    """
    model = StepTimeModel(StepTimeConfig(forgetting=1.0))
    for prefill, decodes, kv_tokens, step_s in steps:
        model.observe(
            StepResult(
                now_s=0.0,
                step_s=step_s,
                phase=Phase.MIXED,
                prefill_tokens=prefill,
                prefill_requests=int(prefill > 0),
                decode_requests=decodes,
                kv_tokens=kv_tokens,
                max_batch_size=1,
                running_count=decodes,
                waiting_count=0,
            )
        )
    times = model.times()
    if times is None:
        raise InputError(f"{len(steps)} steps are too few to fit step times to")
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """One engine of LLMServingSim's tables."""

    folder: Path
    gpu: str
    model: str
    tensor_parallel: int

    def rows(self) -> Iterator[Row]:
        layers = _LAYERS[self.model]
        yield from (("dense", tokens, 0, 0, time_us) for tokens, time_us in sorted(self._dense(layers).items()))
        yield from (("sequence", n, 0, 0, us) for n, us in sorted(self._sums("per_sequence", "sequences").items()))
        for row in self._mine("attention"):
            if int(row["kv_prefill"]):
                continue
            chunk, n, context = int(row["prefill_chunk"]), int(row["n_decode"]), int(row["kv_decode"])
            if not _regular(chunk, 16) or not _regular(n, 1) or not _regular(context, 16):
                continue
            kind = "mixed" if chunk and n else "prefill" if chunk else "decode"
            point = (chunk, n, context) if chunk and n else (chunk, 0, 0) if chunk else (n, context, 0)
            yield kind, *point, layers * float(row["time_us"])

    def _mine(self, table: str) -> Iterator[dict[str, str]]:
        wanted = (self.gpu, self.model, str(self.tensor_parallel))
        with gzip.open(self.folder / f"llmservingsim_{table}_us.csv.gz", "rt", newline="") as file:
            yield from (row for row in csv.DictReader(file) if (row["gpu"], row["model"], row["tp"]) == wanted)

    def _dense(self, layers: int) -> dict[int, float]:
        sums = self._sums("dense", "tokens", layers)
        experts = list(self._mine("moe"))
        if experts:
            for tokens in sums:
                sums[tokens] += layers * _experts_us(experts, tokens)
        return sums

    def _sums(self, table: str, axis: str, layers: int = 1) -> dict[int, float]:
        sums: dict[int, float] = {}
        for row in self._mine(table):
            times = 1 if row["layer"] in _ONCE else layers * (2 if row["layer"] in _TWICE else 1)
            at = int(row[axis])
            sums[at] = sums.get(at, 0.0) + times * float(row["time_us"])
        return sums


def _regular(size: int, least: int) -> bool:
    return size == 0 or (size >= least and size & (size - 1) == 0)


def _experts_us(rows: list[dict[str, str]], tokens: int) -> float:
    active = _EXPERTS * (1.0 - (1.0 - _EXPERTS_PER_TOKEN / _EXPERTS) ** tokens)
    known: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        known.setdefault(int(row["tokens"]), []).append((int(row["activated_experts"]), float(row["time_us"])))
    at = sorted(known)
    by_tokens = [float(np.interp(active, *np.array(sorted(known[count])).T)) for count in at]
    return float(np.interp(tokens, at, by_tokens))


def _write(profile: _Profile, name: str) -> None:
    with (DATA / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "x", "y", "z", "time_us"))
        writer.writerows((kind, x, y, z, f"{time_us:.1f}") for kind, x, y, z, time_us in profile.rows())


def main() -> None:
    folder = Path(sys.argv[1])
    for gpu, model, name in (
        ("RTX4090", "meta-llama/Llama-3.1-8B", "kernels_rtx4090_llama-3.1-8b"),
        ("RTXPRO6000", "meta-llama/Llama-3.1-8B", "kernels_rtxpro6000_llama-3.1-8b"),
        ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", "kernels_rtxpro6000_qwen3-30b-a3b"),
        ("RTXPRO6000", "Qwen/Qwen3-32B", "kernels_rtxpro6000_qwen3-32b"),
    ):
        _write(_Profile(folder=folder, gpu=gpu, model=model, tensor_parallel=1), name)


if __name__ == "__main__":
    main()
