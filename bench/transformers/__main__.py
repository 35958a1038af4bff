"""python -m bench.transformers: the Transformers engine's prefill and batches, measured.

  prefill  the same random batches padded, prepacked and ordered by length: time, peak memory, ratios in pairs
  bins     throughput of gang batches against the number of bins, with known lengths and with the predictor's
  decode   attention of a decode step, padded against packed (paper 004, section 4.8)

Times are CPU seconds on one thread, device seconds on an accelerator. Results are appended to FOLDER/NAME.jsonl as they
come, and what stands there already is not measured again; tables are printed, plots are written to FOLDER.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from bench.transformers.bins import Asked, Runs, counted, gang_batches
from bench.transformers.decode import decode_cost
from bench.transformers.lengths import PUBLISHED, batches, from_file, published
from bench.transformers.prefill import MODES, Prefills
from deployments.config import DEMO_MODEL
from deployments.gang_model import GangModel, load
from policies.prefill import PrefillConfig
from predictor.checkpoint import Ranker
from predictor.samples import Sample, read_samples
from simulator.plots import draw_lines

DAY_0 = Path(__file__).parents[2] / "predictor" / "day_0"
POOL = 5000
# Name, whether lengths are known, whether rows leave as they end.
SERIES = (("known", True, False), ("predicted", False, False), ("known, shrinking", True, True))


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = root.add_subparsers(required=True)
    for name, run, text in (
        ("prefill", run_prefill, "prefill by layout"),
        ("bins", run_bins, "throughput by number of bins"),
        ("decode", run_decode, "packed decode"),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="(default: here)")
        command.add_argument("--seed", type=int, default=0)
        if name != "decode":
            command.add_argument(
                "--model", default=str(DEMO_MODEL), help="folder or hub name (default: the demo model)"
            )
        if name != "bins":
            command.add_argument(
                "--lengths", type=Path, nargs="*", default=[], help="CSV with prompt_tokens, or JSON Lines with prompt"
            )
            command.add_argument("--max-tokens", type=int, default=768, help="longer prompts are cut")
            command.add_argument("--batch-size", type=int, nargs="*", default=[8, 16, 32, 64])
            command.add_argument("--repeats", type=int, default=5)
    bins = commands.choices["bins"]
    bins.add_argument("--samples", type=Path, nargs="+", required=True, help="JSON Lines as `sluice predictor` reads")
    bins.add_argument("--seen", type=Path, nargs="+", required=True, help="the same, from which the edges are cut")
    bins.add_argument("--requests", type=int, default=256)
    bins.add_argument("--bins", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    bins.add_argument("--batch-size", type=int, default=8)
    bins.add_argument("--count", action="store_true", help="count steps, without running the model")
    bins.add_argument(
        "--series", nargs="*", choices=[name for name, _, _ in SERIES], default=[SERIES[0][0], SERIES[1][0]]
    )
    bins.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are cut")
    bins.add_argument("--shorten", type=float, default=4.0, help="answers are this many times shorter than recorded")
    bins.add_argument("--repeats", type=int, default=3)
    return root


def _sets(options: argparse.Namespace, count_tokens: Any) -> dict[str, Any]:
    made: dict[str, Any] = {name: published(name, POOL, options.seed) for name in PUBLISHED}
    return made | {path.name.split(".")[0]: from_file(path, count_tokens) for path in options.lengths}


def _append(path: Path, fields: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def _earlier(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spread(values: Iterable[float]) -> str:
    """Median [least, most]."""
    found = list(values)
    if len(found) < 2:
        return f"{found[0]:.2f}" if found else "-"
    return f"{statistics.median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def run_prefill(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prefills = Prefills(load(options.model))
    found: defaultdict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    sets = _sets(options, lambda text: len(tokenizer.encode(text)))
    for run in _earlier(options.out / "prefill.jsonl"):
        found[run["set"], run["batch_size"]].append(run)
    cases = [(name, size) for size in options.batch_size for name in sets]
    cases = [case for case in cases if len(found[case]) < options.repeats]
    for name, size in tqdm(cases, desc="prefill", unit="case"):
        drawn = batches(sets[name], size, options.repeats, options.max_tokens, options.seed)
        for measured in prefills.measure(drawn[len(found[name, size]) :], options.seed):
            found[name, size].append(measured)
            _append(options.out / "prefill.jsonl", {"set": name, "batch_size": size, **measured})
    others = [mode for mode in MODES if mode != "padded"]
    head = ["prompts", "batch", "padding"] + [f"{mode}: {what}" for mode in others for what in ("time", "memory")]
    _table(head, [_prefill_row(key, runs, others) for key, runs in sorted(found.items())])
    for what, name, y in (("s", "time", "time"), ("bytes", "memory", "peak memory")):
        lines = {each: _line(found, each, options.batch_size, what) for each in sets}
        title, path = f"Prefill: padded / prepacked {y}", options.out / f"004_prefill_{name}.png"
        draw_lines(lines, path, x="batch size", y="ratio", title=title)


def _line(
    found: Mapping[tuple[str, int], Sequence[Mapping[str, float]]], name: str, sizes: Iterable[int], what: str
) -> tuple[list[float], list[float]]:
    ratios = {float(size): _ratios(found[name, size], "prepacked", what) for size in sorted(sizes)}
    known = {size: statistics.median(values) for size, values in ratios.items() if values}
    return list(known), list(known.values())


def _ratios(runs: Iterable[Mapping[str, float]], mode: str, what: str) -> list[float]:
    """Of the runs in which it was measured."""
    return [run[f"padded_{what}"] / run[f"{mode}_{what}"] for run in runs if f"padded_{what}" in run]


def _prefill_row(key: tuple[str, int], runs: Sequence[Mapping[str, float]], modes: Sequence[str]) -> list[str]:
    padding = statistics.median(1.0 - run["tokens"] / run["padded_tokens"] for run in runs)
    ratios = [spread(_ratios(runs, mode, what)) for mode in modes for what in ("s", "bytes")]
    return [key[0], str(key[1]), f"{padding:.0%}", *ratios]


def run_bins(options: argparse.Namespace) -> None:
    found: dict[tuple[str, int, int], float] = {
        (run["lengths"], run["bins"], run["repeat"]): run["requests"] / run["s"]
        for run in _earlier(options.out / "bins.jsonl")
    }
    seen = [max(1, round(sample.output_tokens / options.shorten)) for sample in read_samples(options.seen)]
    samples = read_samples(options.samples)
    model = None if options.count else GangModel(load(options.model), PrefillConfig())
    tokenizer, ranker = AutoTokenizer.from_pretrained(options.model), Ranker.load(DAY_0)
    for repeat in range(options.repeats):
        drawn = np.random.default_rng(options.seed + repeat).choice(len(samples), options.requests, replace=False)
        asked = _asked([samples[index] for index in drawn], ranker, tokenizer, options)
        exact = [replace(each, predicted_output_tokens=each.output_tokens) for each in asked]
        for bins in tqdm(options.bins, desc=f"bins, repeat {repeat}"):
            for name, known, shrink in SERIES:
                if (name, bins, repeat) in found or name not in options.series:
                    continue
                batched = list(gang_batches(exact if known else asked, seen, bins, options.batch_size))
                measured = Runs(model, 1 << 20).measure(batched, shrink) if model else counted(batched)
                found[name, bins, repeat] = measured["requests"] / measured["s"]
                _append(options.out / "bins.jsonl", {"lengths": name, "bins": bins, "repeat": repeat, **measured})
    _show_bins(found, options)


def _show_bins(found: Mapping[tuple[str, int, int], float], options: argparse.Namespace) -> None:
    """Throughputs, and what they are to that of the fewest bins of the same repeat."""
    names = [name for name, _, _ in SERIES if (name, options.bins[0], 0) in found]
    repeats, first = range(options.repeats), options.bins[0]
    gains = {
        (name, bins): [found[name, bins, repeat] / found[name, first, repeat] for repeat in repeats]
        for name in names
        for bins in options.bins
    }
    rates = {key: statistics.median(found[*key, repeat] for repeat in repeats) for key in gains}
    cell = {key: f"{rates[key]:.2f} (×{spread(gain)})" for key, gain in gains.items()}
    _table(["bins", *names], [[str(bins), *(cell[name, bins] for name in names)] for bins in options.bins])
    xs = list(map(float, options.bins))
    lines = {name: (xs, [statistics.median(gains[name, bins]) for bins in options.bins]) for name in names}
    path = options.out / "000_bins_throughput.png"
    draw_lines(lines, path, x="bins", y="throughput / that of the fewest bins", title="Gang batches by bins")


def _asked(samples: Sequence[Sample], ranker: Ranker, tokenizer: Any, options: argparse.Namespace) -> list[Asked]:
    longest, shorten = options.max_prompt_tokens, options.shorten
    prompts = [tokenizer.encode(sample.prompt)[:longest] or [0] for sample in samples]
    outputs = [max(1, round(sample.output_tokens / shorten)) for sample in samples]
    predicted = ranker.curve.mean_tokens(ranker.scores([sample.prompt for sample in samples])) / shorten
    return [Asked(*each) for each in zip(prompts, outputs, predicted.tolist(), strict=True)]


def run_decode(options: argparse.Namespace) -> None:
    sets = _sets(options, len)
    rows = []
    for size in options.batch_size:
        for name in tqdm(sets, desc=f"decode, batch {size}"):
            drawn = batches(sets[name], size, options.repeats, options.max_tokens, options.seed)
            rows.append(_decode_row(name, size, drawn))
    rows.append(_decode_row("nine of 1, one of 1000", 10, [[1] * 9 + [1000]] * options.repeats))
    _table(["prompts", "batch", "padded / packed time", "padded / packed cache"], rows)


def _decode_row(name: str, size: int, drawn: Iterable[Sequence[int]]) -> list[str]:
    costs = [decode_cost(lengths, new_tokens=20) for lengths in drawn]
    times, places = [c.padded_s / c.packed_s for c in costs], [c.padded_places / c.packed_places for c in costs]
    return [name, str(size), spread(times), spread(places)]


def main() -> None:
    torch.set_num_threads(1)
    options = parser().parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
