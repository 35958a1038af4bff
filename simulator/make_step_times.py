"""python -m simulator.make_step_times FOLDER: the rows "derived" of simulator/data/step_times.csv, from kernel times.

    step = layers * (GEMMs of a shard + attention of a shard + 2 all-reduces) + the language model's head

FOLDER holds kernel times of ai-dynamo/aiconfigurator (Apache-2.0; vLLM, bf16) and, of microsoft/vidur (MIT), times of
NCCL's all-reduce on DGX A100 and H100. With N GPUs a shard has 1/N of the heads and of each matrix; the matrices that
end attention and the MLP are each followed by an all-reduce of tokens * hidden size * 2 bytes.

Departures: a GEMM shape that was not measured is scaled, by its number of weights, from the one nearest in the
logarithms of its sides; attention of a batch that was not measured at its context from the largest that was. Small
kernels, launches, sampling and scheduling are left out, so overheads are lower bounds. Times of all-reduces of small
messages scatter from 8 to 40 microseconds, because the processor launched each, which CUDA graphs spare: taken is the
least time of any message as large or larger among as many GPUs or more. An H200 has the H100's NVLink and takes its
times. Of the other GPUs no all-reduce is at hand, so they have rows of one GPU alone.
"""

import csv
import gzip
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from policies.types import FloatArray
from simulator.engines import cache_tokens_of
from simulator.kernels import DATA

_FILE = DATA / "step_times.csv"
_SOURCE = "derived: sum of aiconfigurator kernel times (no launch or CPU overhead)"
_METHOD = "lsq; gemm shapes scaled from the nearest measured one"
_GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "l40s", "rtx_pro_6000_server", "b300_sxm")
_CLUSTERS = {"a100_sxm": "a100_dgx", "h100_sxm": "h100_dgx", "h200_sxm": "h100_dgx"}
_PREFILL_TOKENS = (256, 512, 1024, 2048, 4096)
_DECODE_REQUESTS = (16, 32, 64, 128, 256, 512, 1024)
_CONTEXTS = (128, 512, 1024, 4096)
_HEAD_TOKENS = 128  # of one attention head

Times = dict[tuple[int, int], dict[tuple[int, ...], float]]
"""Milliseconds by two sizes, then by batch and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Sizes of a dense model; ``parallel``: numbers of GPUs whose shards' attention was measured."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    parallel: tuple[int, ...]
    kv_heads: int = 8

    def gemms(self, gpus: int) -> list[tuple[int, int]]:
        """(n, k) of the four matrices of a layer, of one shard."""
        attention, inside = _HEAD_TOKENS * self.heads // gpus, self.intermediate // gpus
        joint = attention + 2 * _HEAD_TOKENS * self.kv_heads // gpus
        return [(joint, self.hidden), (self.hidden, attention), (2 * inside, self.hidden), (self.hidden, inside)]


_MODELS = {
    "Llama-3.1-8B": _Model(
        layers=32, hidden=4096, heads=32, intermediate=14_336, vocabulary=128_256, parallel=(1, 2, 4)
    ),
    "Qwen3-8B": _Model(
        layers=36, hidden=4096, heads=32, intermediate=12_288, vocabulary=151_936, parallel=(1, 2, 4)
    ),
    "Qwen3-32B": _Model(
        layers=64, hidden=5120, heads=64, intermediate=25_600, vocabulary=151_936, parallel=(1, 2, 4, 8)
    ),
    "Llama-3.1-70B": _Model(
        layers=80, hidden=8192, heads=64, intermediate=28_672, vocabulary=128_256, parallel=(1, 2, 4, 8)
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """What was measured on one GPU."""

    gemm: Times
    prefill: Times
    decode: Times

    def gemm_ms(self, n: int, k: int, tokens: int) -> float:
        near = min(self.gemm, key=lambda shape: abs(np.log(shape[0] / n)) + abs(np.log(shape[1] / k)))
        counts, times = zip(*sorted(self.gemm[near].items()), strict=True)
        return float(np.interp(tokens, [count for count, *_ in counts], times)) * n * k / (near[0] * near[1])

    def decode_ms(self, heads: tuple[int, int], requests: int, context: int) -> float:
        """The tables count the tokens before the one that is computed."""
        measured = {count: time for (count, before), time in self.decode[heads].items() if before == context - 1}
        return measured[requests] if requests in measured else measured[max(measured)] * requests / max(measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllReduce:
    """All-reduce times of a cluster: sizes in bytes, ascending, with the milliseconds of each by number of GPUs."""

    bytes: FloatArray
    ms: dict[int, FloatArray] = field(default_factory=dict)

    def at(self, gpus: int, size: float) -> float:
        least = np.min([times for count, times in self.ms.items() if count >= gpus], axis=0)
        return float(np.interp(size, self.bytes, np.minimum.accumulate(least[::-1])[::-1]))


def rows(folder: Path) -> Iterator[tuple[object, ...]]:
    """As they stand in the file, a row for each GPU, model, number of GPUs and context."""
    for gpu in _GPUS:
        kernels = _Kernels(
            gemm=_read(folder / f"aiconfigurator_{gpu}_gemm_bf16_ms.csv.gz", ("n", "k"), ("m",)),
            prefill=_attention(folder / f"aiconfigurator_{gpu}_prefill_attention_bf16_ms.csv.gz", "isl"),
            decode=_attention(folder / f"aiconfigurator_{gpu}_decode_attention_bf16_ms.csv.gz", "context"),
        )
        reduce = _all_reduce(folder / "vidur_collectives_ms.csv.gz", _CLUSTERS[gpu]) if gpu in _CLUSTERS else None
        for name, model in _MODELS.items():
            for gpus in model.parallel:
                if cache_tokens_of(name, gpu, gpus) and (gpus == 1 or reduce):
                    yield from _engine_rows(name, model, gpu, gpus, kernels, reduce)


def _engine_rows(
    name: str, model: _Model, gpu: str, gpus: int, kernels: _Kernels, reduce: _AllReduce | None
) -> Iterator[tuple[object, ...]]:
    heads = model.heads // gpus, model.kv_heads // gpus

    def step_ms(tokens: int, attention_ms: float, sampled: int) -> float:
        layer_ms = sum(kernels.gemm_ms(n, k, tokens) for n, k in model.gemms(gpus)) + attention_ms
        if reduce and gpus > 1:
            layer_ms += 2 * reduce.at(gpus, tokens * model.hidden * 2)
        return model.layers * layer_ms + kernels.gemm_ms(model.vocabulary // gpus, model.hidden, sampled)

    prefill_ms = [step_ms(tokens, kernels.prefill[heads][1, tokens], 1) for tokens in _PREFILL_TOKENS]
    method = _METHOD if gpus == 1 else f"{_METHOD}; all-reduce of vidur's {_CLUSTERS[gpu]}"
    for context in _CONTEXTS:
        decode_ms = [step_ms(count, kernels.decode_ms(heads, count, context), count) for count in _DECODE_REQUESTS]
        yield (
            _SOURCE, name, gpu, gpus, "256..4096 tokens", *_line(_PREFILL_TOKENS, prefill_ms),
            f"16..1024 seqs at context {context}", *_line(_DECODE_REQUESTS, decode_ms), method,
        )  # fmt: skip


def _line(x: Sequence[int], y: Sequence[float]) -> tuple[str, str]:
    """Overhead and slope."""
    slope, overhead = np.polyfit(x, y, 1)
    return f"{overhead:.6g}", f"{slope:.6g}"


def _attention(path: Path, length: str) -> Times:
    return _read(path, ("num_heads", "num_key_value_heads"), ("batch_size", length))


def _read(path: Path, sizes: tuple[str, str], point: tuple[str, ...]) -> Times:
    times: Times = {}
    for row in _csv(path):
        at = tuple(int(row[name]) for name in point)
        times.setdefault((int(row[sizes[0]]), int(row[sizes[1]])), {})[at] = float(row["latency"])
    return times


def _all_reduce(path: Path, cluster: str) -> _AllReduce:
    """All-reduce times among the GPUs of one machine."""
    times: dict[int, dict[int, float]] = {}
    for row in _csv(path):
        if (row["cluster"], row["collective"], row["devices_per_node"]) == (cluster, "all_reduce", row["num_workers"]):
            times.setdefault(int(row["num_workers"]), {})[int(row["size"])] = float(row["time_ms"])
    sizes = sorted(set.intersection(*(set(each) for each in times.values())))
    by_gpus = {count: np.array([each[size] for size in sizes]) for count, each in times.items()}
    return _AllReduce(bytes=np.array(sizes, dtype=np.float64), ms=by_gpus)


def _csv(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        yield from csv.DictReader(file)


def main() -> None:
    derived = list(rows(Path(sys.argv[1])))
    with _FILE.open(newline="") as file:
        heading, *published = [row for row in csv.reader(file) if not row[0].startswith("derived")]
    with _FILE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heading, *published, *derived])


if __name__ == "__main__":
    main()
