"""What the experiments share: where data and figures are, traces by name, repetition over cores, tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from policies.errors import InputError
from policies.router.multi_bin import MultiBinConfig
from policies.types import FloatArray
from simulator import plots
from simulator.cluster import ClusterConfig, Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.predictors import predicted
from simulator.traces import read_workload
from simulator.workload import Workload

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# Where the files of `--data` come from: name, file, source and licence.
SOURCES = {
    "azure_conv": ("azure2023_conv.csv.gz", "Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv (CC BY 4.0)"),
    "azure_code": ("azure2023_code.csv.gz", "Azure/AzurePublicDataset, AzureLLMInferenceTrace_code (CC BY 4.0)"),
    "lmsys": ("lmsys_chat_lengths.csv.gz", "efeslab/Nanoflow, LMSYS-Chat-1M token counts (Apache-2.0)"),
    "sharegpt": ("sharegpt_8k_lengths_llama2tok.csv.gz", "project-etalon/etalon, ShareGPT lengths (Apache-2.0)"),
    "sharegpt_turns": ("sharegpt_lengths_nanoflow.csv.gz", "efeslab/Nanoflow, ShareGPT token counts (Apache-2.0)"),
    "arxiv": ("arxiv_summarization_lengths.csv.gz", "microsoft/vidur, arXiv summarization lengths (MIT)"),
    "alpaca": ("halueval_general_train.jsonl.gz", "RUCAIBox/HaluEval, general_data (MIT)"),
    "gsm8k": ("gsm8k_models_train.jsonl.gz", "openai/grade-school-math (MIT), lm-sys/RouteLLM (Apache-2.0)"),
    "agents": ("agentic_coding_sessions.csv.gz", "callanjfox/kv-cache-tester, agent sessions (Apache-2.0)"),
    "mooncake": ("mooncake_conversation.csv.gz", "kvcache-ai/Mooncake, conversation trace (Apache-2.0)"),
    "servegen_rates": ("servegen_rates_10min.csv.gz", "alibaba/ServeGen, rates by ten minutes (Apache-2.0)"),
    "deepseek_r1": ("servegen_deepseek_r1_1h.csv.gz", "alibaba/ServeGen, deepseek-r1 (Apache-2.0)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How an experiment is run.

    Attributes:
        data: folder that holds the files of SOURCES, at any depth; None for experiments that need none.
        figures: folder for plots, or None for none.
        runs: repetitions with seeds 0, 1, ...
        processes: at once.
    """

    data: Path | None = None
    figures: Path | None = None
    runs: int = 3
    processes: int = 1

    def file(self, name: str) -> Path:
        """Raises InputError where the data are not at hand, naming their source."""
        file, source = SOURCES[name]
        found = sorted(self.data.rglob(file)) if self.data else []
        if not found:
            raise InputError(f"needs {file} in the folder of --data; it is from {source}")
        return found[0]

    def workload(self, name: str) -> Workload:
        """Raises InputError as `file`."""
        return read_workload(self.file(name), rng=np.random.default_rng(0))

    def figure(self, name: str) -> Path | None:
        return None if self.figures is None else self.figures / f"{name}.png"

    def draw(
        self, name: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str, title: str
    ) -> None:
        """Named lines as a figure, where figures are asked for."""
        if (path := self.figure(name)) is not None:
            plots.draw_lines(lines, path, x=x, y=y, title=title)

    def each(self, task: Callable[[Argument], Result], arguments: Iterable[Argument]) -> list[Result]:
        """The task for every argument, in order, with a progress bar."""
        listed = list(arguments)
        bar = partial(tqdm, total=len(listed), unit="run", disable=None)
        if self.processes == 1:
            return [task(argument) for argument in bar(listed)]
        with ProcessPoolExecutor(max_workers=self.processes) as pool:
            return list(bar(pool.map(task, listed)))

    def grid(self, task: Callable[[Any], Any], *axes: Sequence[Any]) -> FloatArray:
        """What the task finds at every point of the axes in every run, shape (length of each axis, ..., runs, ...).

        Args:
            task: takes a tuple of a value of each axis and the seed, and returns a number or as many each time.
        """
        found = np.array(self.each(task, product(*axes, range(self.runs))), dtype=np.float64)
        return found.reshape(*map(len, axes), self.runs, *found.shape[1:])


def walk_forward(source: Workload, parts: int) -> list[tuple[Workload, Workload]]:
    """Every part of a set but the first, behind all that came before it, in the order of arrival, or of its file where
    it has no times: what is learned from the one is tried on the other, as when it serves."""
    cuts = np.linspace(0, len(source), parts + 1).astype(np.int64)
    return [(source.rows(np.arange(low)), source.rows(np.arange(low, high))) for low, high in pairwise(cuts[1:])]


def fixed_bins(edges: FloatArray) -> MultiBinConfig:
    """Bins between these edges, shape (bins + 1,), which do not follow the lengths."""
    return MultiBinConfig(bins=len(edges) - 1, rule="fixed", initial_edges=tuple(edges.tolist()))


def mean(values: Sequence[float] | FloatArray) -> float:
    return float(np.mean(values))


def spread(values: Sequence[float] | FloatArray) -> str:
    """Median and range."""
    return f"{np.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return lines + ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]


def _cell(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def steady_rate(run: Run) -> float:
    """Requests per second while the middle 60 % of them end: without filling up and running empty."""
    ends = np.sort([request.finished_s for request in run.requests if request.finished_s is not None])
    low, high = int(0.2 * len(ends)), int(0.8 * len(ends))
    return float((high - low) / (ends[high] - ends[low]))


def output_rate(run: Run) -> float:
    """Output tokens per second, from the first arrival to the end."""
    return sum(request.output_tokens for request in run.requests) / run.makespan_s


def mean_ttft_s(run: Run) -> float:
    return mean([request.ttft_s for request in run.requests if request.ttft_s is not None])


def cluster(
    engine: str, *, slots: int, cache_tokens: int | None = None, max_batch_tokens: int = 2048, **changes: Any
) -> ClusterConfig:
    """Engines by name, with their own step times.

    Args:
        cache_tokens: None is what the GPU's memory leaves.
        changes: further fields of ClusterConfig.
    """
    profile = engine_profile(engine)
    blocks = profile.cache(cache_tokens) // EngineConfig().block_size
    sizes = EngineConfig(slots=slots, total_blocks=blocks, max_batch_tokens=max_batch_tokens)
    return ClusterConfig(**{"times": profile.times, "clock": profile.clock, "engine": sizes, **changes})


def saturated(config: ClusterConfig, workload: Workload) -> Run:
    """Served with twice as many clients as there are slots."""
    clients = 2 * config.engine.slots * config.replicas
    return run(replace(config, clients=clients), workload)


def drawn(source: Workload, count: int, seed: int, predictor: str = "noise:0.44", max_tokens: int = 32_768) -> Workload:
    """Requests out of a set, without the few that are longer than max_tokens, with predictions; all at once."""
    rng = np.random.default_rng(seed)
    return predicted(source.shorter_than(max_tokens).sample(count, rng).without_prefixes(), predictor, rng)
