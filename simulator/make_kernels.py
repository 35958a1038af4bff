"""python -m simulator.make_kernels FOLDER: the compact kernel tables in simulator/data, from measured kernel times.

Source, and what FOLDER holds: casys-kaist/LLMServingSim, profiler/perf (MIT): vLLM 0.19, bf16, per layer, RTX PRO 6000
and RTX 4090. Departures: prompts are taken for new ones (kv_prefill 0), all chunks of a step for one, and of a mixture
of experts the expected number of distinct ones out of a pool of E are active, E * (1 - (1 - 8/E)^tokens).

A pool of all 128 experts, each as likely as the other, would make a decode step of many requests wait for 42 ms of
experts alone. A router trained on text is not uniform: EB+ (weifang231/eb-vllm) measured 22.4 ms of overhead for a
decode step of the same model on the same GPU, all kernels included, which is what this table gives with E = 63. Its
engine ran without CUDA graphs, so part of that may be the processor's: 63 is an upper bound.
"""

import csv
import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulator.kernels import DATA, Row

_LAYERS = {"meta-llama/Llama-3.1-8B": 32, "Qwen/Qwen3-32B": 64, "Qwen/Qwen3-30B-A3B-Instruct-2507": 48}
# Operations that a step runs once, and those that a layer runs twice.
_ONCE = {"embedding", "final_layernorm", "lm_head", "sampler"}
_TWICE = {"layernorm", "qk_norm"}
_EXPERTS, _EXPERTS_PER_TOKEN = 63, 8


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
