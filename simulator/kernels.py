"""Step times summed up from measured kernel times: finer than any linear form, for engines whose kernels were profiled.

    step = dense(tokens) + per_sequence(requests) + attention(chunk, decodes, context)

over all layers; tables are interpolated linearly along each axis and go on with their last slope. Attention of a mixed
step is its own measurement: on the GPUs measured it costs 1.2 to 1.7 times what its prefill and its decodes cost apart.

The compact tables in simulator/data are made by `simulator.make_kernels`, which names source and departures.
"""

import csv
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from policies.engine.step_time import StepTimeConfig, StepTimeModel
from policies.errors import ConfigError, InputError
from policies.types import FloatArray, Phase, StepResult, StepTimes
from simulator.engine import StepClock

DATA = Path(__file__).with_name("data")
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

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
    ) -> float:
        """A chunk takes as long as a prompt of its length: what it reads before itself was not measured."""
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
