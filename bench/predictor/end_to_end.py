"""python -m bench.predictor.end_to_end: what a prediction of lengths is worth to waiting requests, by predictor.

  gang        throughput of gang batches of 8, everything there at once, with bins against without
  continuous  two replicas with continuous batching, a cache that binds and forecast admission: waits and preemptions

The simulator runs the policies that serve, over the answers that the predictor is judged on (`sluice predictor eval`),
with their real lengths. Sources of the prediction are those of `predictor.evaluation`, each after 300 answers of every
model and set, and the lengths themselves. Runs are paired: a seed draws the same requests and arrivals for all sources.
Predictions are kept in FOLDER/predictions.csv and not made again; tables are printed, the plot is written to FOLDER.
"""

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from policies.gang.batches import GangConfig
from policies.router.bin_edges import optimal_edges
from policies.router.multi_bin import MultiBinConfig
from policies.types import FloatArray
from predictor.calibration import DAY_0
from predictor.checkpoint import Ranker
from predictor.evaluation import predictions
from predictor.samples import CHARS_PER_TOKEN, read_samples
from simulator.cluster import ClusterConfig, Run, run, run_gang
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile, engine_profile
from simulator.gang import PaddedTimes
from simulator.plots import figure, save
from simulator.presets import system
from simulator.reproduce.common import Setting, fixed_bins, saturated, spread, steady_rate, table
from simulator.router import RouterConfig
from simulator.workload import Workload, gamma_bursts

# What the predictor that comes along is judged on: its sets' test parts.
SETS = (
    "arena_hard", "gpteacher_codegen", "gpteacher_roleplay", "gsm8k_human", "gsm8k_models", "halueval_general",
    "hh_rlhf_harmless", "oasst_sampling", "self_instruct_eval",
)  # fmt: skip
TRAFFIC = ("all together", "gsm8k_human", "oasst_sampling")
SOURCES = {
    "one_histogram": "one histogram",
    "histogram": "histogram of model and set",
    "prompt_length": "prompt length",
    "checkpoint": "checkpoint",
    "known": "known lengths",
}
BINS, LOADS, GANG, BURSTS_CV = (2, 4, 8), (0.7, 0.85, 0.95), 8, 3.0
GANG_REQUESTS, REQUESTS, PROBED = 4000, 1000, 500
# How waiting requests are ordered: as routers do by default, and as much by prediction as can be.
ORDERS: dict[str, str | None] = {
    "by promises": None,
    "least work first": "simulator.comparisons:LeastWork",
}
MEASURES = ("mean wait, s", "p99 wait, s", "mean TTFT, s", "p99 TTFT, s", "preemptions")
Traffic = Mapping[str, Workload]


@cache
def _profile() -> EngineProfile:
    return engine_profile("kernels_rtxpro6000_llama-3.1-8b")


def _config(order: str) -> ClusterConfig:
    """As it serves: the engines' survival curves know no bins, the router's queue and placement know predictions.

    Slots are about what the forecast admits into these caches, as replicas offer it: so requests wait in the router.
    """
    sizes = EngineConfig(slots=24, total_blocks=500, max_batch_tokens=2048)
    queue: dict[str, Any] = {"order": ORDERS[order], "router": RouterConfig()}
    return system("sluice", _profile(), sizes, 2, batch="forecast_admission", batch_settings={}, **queue)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Judged answers in one order: the set of each, and the same requests with each source's predictions."""

    sets: NDArray[np.str_]
    by_source: Traffic

    def traffic(self, name: str) -> Traffic:
        rows = np.flatnonzero((self.sets == name) | (name == TRAFFIC[0]))
        return {source: whole.rows(rows) for source, whole in self.by_source.items()}


def write_predictions(data: Path, path: Path) -> None:
    """Mean tokens that each source predicts of every judged answer; prompts of four characters a token."""
    judged, learn = (read_samples([data / f"{name}_{part}.jsonl.gz" for name in SETS]) for part in ("test", "train"))
    ranker = Ranker.load(DAY_0, dtype="auto")
    found = predictions(judged, learn, ranker.scores, ranker.curve)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["set", "prompt_tokens", "output_tokens", *found])
        for row, sample in enumerate(judged):
            means = [f"{said[row].mean_tokens:.2f}" for said in found.values()]
            prompt = round(len(sample.prompt) / CHARS_PER_TOKEN)
            writer.writerow([sample.source, max(1, prompt), round(sample.output_tokens), *means])


def read_answers(path: Path) -> Answers:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    prompts, outputs = (column[name].astype(np.int64) for name in ("prompt_tokens", "output_tokens"))
    said = {name: column["output_tokens" if name == "known" else name].astype(np.float64) for name in SOURCES}
    return Answers(
        column["set"],
        {
            name: Workload.of(name, np.zeros(len(rows)), prompts, outputs, predicted_output_tokens=predicted)
            for name, predicted in said.items()
        },
    )


def _gang(answers: Answers, job: tuple[str, int, int]) -> list[float]:
    """Throughput with k bins to that without, by source; edges cut on the other half of the answers."""
    name, k, seed = job
    traffic, rng = answers.traffic(name), np.random.default_rng(seed)
    past, served = np.array_split(rng.permutation(len(traffic["known"])), 2)
    chosen = rng.choice(served, GANG_REQUESTS)
    lengths = traffic["known"].output_tokens[past]
    edges = optimal_edges(lengths, k, GANG, resolution=512)
    binned = fixed_bins(edges)
    plain = _gang_rate(traffic["known"].rows(chosen), MultiBinConfig(bins=1))
    return [_gang_rate(traffic[source].rows(chosen), binned) / plain for source in SOURCES]


def _gang_rate(work: Workload, bins: MultiBinConfig) -> float:
    full = GangConfig(batch_size=GANG, max_wait_s=math.inf)
    return run_gang(full, bins, PaddedTimes(times=_profile().times), work).throughput


def gang(setting: Setting, answers: Answers) -> FloatArray:
    """Ratios of shape (traffic, bins, runs, sources)."""
    return setting.grid(partial(_gang, answers), TRAFFIC, BINS)


def gang_table(found: FloatArray) -> list[str]:
    rows = [
        (name, k, *(f"×{spread(found[i, j, :, s])}" for s in range(len(SOURCES))))
        for (i, name), (j, k) in product(enumerate(TRAFFIC), enumerate(BINS))
    ]
    return table(("traffic", "bins", *SOURCES.values()), rows)


def _continuous(answers: Answers, job: tuple[float, int]) -> list[list[list[float]]]:
    """Every measure by order and source, all traffic together."""
    load, seed = job
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(answers.sets), REQUESTS)
    drawn = {source: whole.rows(chosen) for source, whole in answers.by_source.items()}
    probe = saturated(_config("by promises"), drawn["one_histogram"].head(PROBED))
    arrival_s = gamma_bursts(load * steady_rate(probe), BURSTS_CV, REQUESTS, rng)
    arriving = {source: work.arriving(arrival_s) for source, work in drawn.items()}
    return [[_measured(run(_config(order), arriving[source])) for source in SOURCES] for order in ORDERS]


def _measured(finished: Run) -> list[float]:
    waits = np.array([r.started_s - r.arrival_s for r in finished.requests if r.started_s is not None])
    firsts = np.array([r.ttft_s for r in finished.requests])
    preemptions = sum(engine.totals.preemptions for engine in finished.engines)
    return [*(float(f(x)) for x in (waits, firsts) for f in (np.mean, partial(np.percentile, q=99))), preemptions]


def continuous(setting: Setting, answers: Answers) -> FloatArray:
    """Measures of shape (loads, runs, orders, sources, measures)."""
    return setting.grid(partial(_continuous, answers), LOADS)


def continuous_table(found: FloatArray) -> list[str]:
    """The first source's value, and the others' changes against it in pairs."""
    rows = [
        (order, f"{load:.0%}", measure, *_against_first(found[j, :, i, :, m]))
        for (i, order), (j, load), (m, measure) in product(enumerate(ORDERS), enumerate(LOADS), enumerate(MEASURES))
    ]
    return table(("order", "load", "measure", *SOURCES.values()), rows)


def _against_first(values: FloatArray) -> list[str]:
    """Cells of values of shape (runs, sources). A count of which the first may be 0 is given as it is."""
    first = values[:, 0]
    if not first.all():
        return [spread(source) for source in values.T]
    changes = 100.0 * (values[:, 1:] / first[:, None] - 1.0)
    return [spread(first), *(_change(source.tolist()) for source in changes.T)]


def _change(percents: Sequence[float]) -> str:
    return f"{np.median(percents):+.0f} % [{min(percents):+.0f}, {max(percents):+.0f}]"


def draw(gangs: FloatArray, waits: FloatArray, path: Path) -> None:
    """All traffic together: throughput by bins, mean wait by load with the default order."""
    made = figure(1, 2)
    for s, label in enumerate(SOURCES.values()):
        made.axes[0].plot(BINS, np.median(gangs[0, :, :, s], axis=1), ".-", label=label)
        made.axes[1].plot([100 * load for load in LOADS], np.median(waits[:, :, 0, s, 0], axis=1), ".-", label=label)
    made.axes[0].set(xlabel="bins", ylabel="throughput / without bins", title="Gang batches", xticks=BINS)
    made.axes[1].set(xlabel="load, %", ylabel="mean wait, s", title="Continuous batching")
    made.axes[0].legend(fontsize=7)
    save(made, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with NAME_train.jsonl.gz and NAME_test.jsonl.gz"
    )
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="(default: here)")
    parser.add_argument("--runs", type=int, default=3, help="repetitions (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="at once (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.out / "predictions.csv"
    if not path.exists():
        write_predictions(options.data, path)
    answers, setting = read_answers(path), Setting(runs=options.runs, processes=options.processes)
    gangs = gang(setting, answers)
    print("\n".join(gang_table(gangs)), end="\n\n", flush=True)
    waits = continuous(setting, answers)
    print("\n".join(continuous_table(waits)))
    draw(gangs, waits, options.out / "predictor_end_to_end.png")


if __name__ == "__main__":
    main()
