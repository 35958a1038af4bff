"""python -m bench.transformers [PART ...]: the Transformers engine measured from inside, one command for everything.

  prefill  the same random batches padded, prepacked and ordered by length: time and peak memory (paper 004)
  bins     gang batches against the number of bins, answers known and predicted: steps counted, and really run (000)
  decode   decode steps with a row for each request against packed rows (004, section 4.8)
  memory   the largest batch that --memory-mib hold, by layout (004, section 4.4), and table 1: time and memory

Without a part it is all of them. Of each part OUT holds its runs (CSV), tables (Markdown) and plots. Parts measure in
rounds, every case once, small batches first, until --minutes are over (what runs then is run to its end).
Times are CPU seconds of one thread, device seconds on an accelerator; ratios are of pairs that ran next to each other.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from bench.transformers.bins import Asked, Runs, counted, gang_batches
from bench.transformers.decode import Decodes
from bench.transformers.lengths import PUBLISHED, batches, from_file, published
from bench.transformers.memory import largest_batch
from bench.transformers.prefill import MODES, Prefills
from bench.transformers.report import spread, write_runs, write_table
from deployments.config.model import DEMO_MODEL
from deployments.engines.transformers.model import PACKED_ROOM, GangModel, load
from policies.gang.prefill import PrefillConfig, PrefillMode, decode_layout
from predictor.calibration import DAY_0
from predictor.checkpoint import Ranker
from predictor.samples import Sample, read_samples
from simulator.plots import draw_lines

Run = dict[str, Any]

POOL = 5000
SHARES = {"prefill": 0.5, "bins": 0.2, "decode": 0.2, "memory": 0.1}  # of the time
MEMORY_FROM_BATCH = 32
DECODE_STEPS, ANSWERED_TOKENS = 6, (0, 128)
TOY, TOY_STEPS = [1] * 9 + [1000], 20  # the batch of 004's table 1, and the tokens it makes
BATCH_OF_BINS = 8  # as the papers measure them
RECORDED_LENGTHS = {
    "LMSYS-Chat-1M": "lengths/lmsys_chat_lengths.csv.gz",
    "ShareGPT": "lengths/sharegpt_lengths_nanoflow.csv.gz",
    "Arena-Hard": "prompts/arena_hard_train.jsonl.gz",
}
RECORDED_ANSWERS = {
    "many authors": ("alpaca_eval", "oasst_sampling", "arena_hard", "gsm8k_models", "self_instruct_eval"),
    "one author a set": ("halueval_general", "gsm8k_human", "gpteacher_codegen", "gpteacher_roleplay"),
}
QUICK = {
    "batch_size": [2, 4],
    "bins": [1, 2],
    "max_tokens": 48,
    "requests": 32,
    "run_requests": 8,
    "memory_mib": 16,
    "draws": 1,
    "layers": 1,
    "rounds": 1,
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.transformers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(SHARES)} (default: all)")
    add("--out", type=Path, default=Path("transformers-bench"), metavar="OUT", help="folder (default: %(default)s)")
    add("--data", type=Path, help="folder of recorded prompts and lengths; without it no recorded sets and no bins")
    add("--minutes", type=float, default=15.0, help="for all parts that are asked for (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes, to see that it works: the figures mean nothing")
    add("--model", default=str(DEMO_MODEL), help="folder or hub name (default: the demo model)")
    add("--dtype", default="float32", help="(default: %(default)s)")
    add("--layers", type=int, default=2, help="of the model, as all cost the same; 0 for all (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--batch-size", type=int, nargs="+", default=[8, 16, 32, 64], help="of prefill and decode")
    add("--max-tokens", type=int, default=768, help="longer prompts are cut (default: %(default)s)")
    add("--rounds", type=int, default=5, help="most (default: %(default)s)")
    add("--bins", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--requests", type=int, default=400, help="in each draw whose steps are counted (default: %(default)s)")
    add("--draws", type=int, default=3)
    add("--run-requests", type=int, default=100, help="of a draw, really run (default: %(default)s)")
    add("--memory-mib", type=int, default=512, help="beyond what the model takes (default: %(default)s)")
    return made


def main() -> None:
    options = parser().parse_args()
    parts = options.parts or list(SHARES)
    if unknown := set(parts) - SHARES.keys():
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    if options.quick:
        vars(options).update(QUICK)
    if options.data is None and "bins" in parts:
        parts = [part for part in parts if part != "bins"]
        print("bins need --data: left out")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    model = _model(options)
    minutes = {part: options.minutes * SHARES[part] / sum(SHARES[other] for other in parts) for part in parts}
    print("at most about " + ", ".join(f"{minutes[part]:.1f} min for {part}" for part in parts), flush=True)
    for part in parts:
        RUNS[part](model, options, time.monotonic() + 60.0 * minutes[part])


def _model(options: argparse.Namespace) -> Any:
    model = load(options.model, dtype=options.dtype)
    if options.layers:
        model.model.layers = model.model.layers[: options.layers]
        model.config.num_hidden_layers = options.layers
    return model


def _sets(options: argparse.Namespace) -> dict[str, Any]:
    made: dict[str, Any] = {name: published(name, POOL, options.seed) for name in PUBLISHED}
    if options.quick:
        return {name: made[name] for name in list(made)[:2]}
    if options.data is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        for name, path in RECORDED_LENGTHS.items():
            made[name] = from_file(options.data / path, lambda text: len(tokenizer.encode(text)))
    return made


def _rounds(cases: Sequence[Any], rounds: int, until_s: float, what: str) -> Iterator[tuple[int, Any]]:
    """Every case once a round; says how long it expects to take, and what it left out."""
    order = [(number, case) for number in range(rounds) for case in cases]
    done = 0
    with tqdm(order, desc=what, unit="run", mininterval=5.0) as progress:
        for number, case in progress:
            if time.monotonic() > until_s:
                break
            yield number, case
            done += 1
    if done < len(order):
        print(f"{what}: time is over after {done / len(cases):.1f} rounds of {rounds}", flush=True)


def run_prefill(model: Any, options: argparse.Namespace, until_s: float) -> None:
    prefills, sets, runs = Prefills(model), _sets(options), list[Run]()
    drawn = {
        (size, name): batches(sets[name], size, options.rounds, options.max_tokens, options.seed)
        for size in sorted(options.batch_size)
        for name in sets
    }
    for number, case in _rounds(list(drawn), options.rounds, until_s, "prefill"):
        with_memory = number == 0 and (case[0] >= MEMORY_FROM_BATCH or options.quick)
        measured = prefills.measure(drawn[case][number], options.seed + number, with_memory)
        runs.append({"batch": case[0], "prompts": case[1], "round": number, **measured})
        write_runs(options.out / "prefill.csv", runs)
    others = [mode for mode in MODES if mode != "padded"]
    head = ["prompts", "batch", "padding", *(f"{mode}: {what}" for mode in others for what in ("time", "memory"))]
    by_case = _grouped(runs, "prompts", "batch")
    rows = [_prefill_row(case, by_case[case], others) for case in sorted(by_case)]
    write_table(options.out / "prefill.md", head, rows)
    for what, name, y in (("s", "time", "time"), ("bytes", "memory", "peak memory")):
        lines = {each: _line(by_case, each, f"padded_{what}", f"prepacked_{what}") for each in sets}
        path = options.out / f"004_prefill_{name}.png"
        draw_lines(lines, path, x="batch size", y="ratio", title=f"Prefill: padded / prepacked {y}")


def _grouped(runs: Iterable[Run], *names: str) -> dict[tuple[Any, ...], list[Run]]:
    found: defaultdict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        found[tuple(run[name] for name in names)].append(run)
    return dict(found)


def _ratios(runs: Iterable[Run], above: str, below: str) -> list[float]:
    """Ratios of two layouts over the runs that measured both."""
    return [run[above] / run[below] for run in runs if above in run]


def _line(
    by_case: Mapping[tuple[Any, ...], Sequence[Run]], name: str, above: str, below: str
) -> tuple[list[float], list[float]]:
    ratios = {case[1]: _ratios(runs, above, below) for case, runs in sorted(by_case.items()) if case[0] == name}
    known = {float(size): statistics.median(values) for size, values in ratios.items() if values}
    return list(known), list(known.values())


def _prefill_row(case: tuple[Any, ...], runs: Sequence[Run], modes: Sequence[str]) -> list[str]:
    padding = statistics.median(1.0 - run["tokens"] / run["padded_tokens"] for run in runs)
    ratios = [spread(_ratios(runs, f"padded_{what}", f"{mode}_{what}")) for mode in modes for what in ("s", "bytes")]
    return [*map(str, case), f"{padding:.0%}", *ratios]


def run_bins(model: Any, options: argparse.Namespace, until_s: float) -> None:
    tokenizer, ranker, runs = AutoTokenizer.from_pretrained(options.model), Ranker.load(DAY_0), list[Run]()
    gang = GangModel(model, PrefillConfig())
    pools = [(pool, *_recorded(options.data, names)) for pool, names in RECORDED_ANSWERS.items()]
    asked = {}
    for pool, samples, seen in pools:
        for draw in tqdm(range(options.draws), desc=f"bins, {pool}: steps"):
            chosen = np.random.default_rng(options.seed + draw).choice(len(samples), options.requests, replace=False)
            asked[pool, draw] = _asked([samples[index] for index in chosen], ranker, tokenizer)
            for bins, known in ((bins, known) for bins in options.bins for known in (True, False)):
                batched = gang_batches(_known(asked[pool, draw], known), seen, bins, BATCH_OF_BINS)
                key = {"pool": pool, "answers": "known" if known else "predicted", "kind": "steps"}
                runs.append({**key, "bins": bins, "draw": draw, **counted(list(batched))})
    pool, _, seen = pools[0]
    cases = [(bins, known) for known in (True, False) for bins in options.bins]
    for number, (bins, known) in _rounds(cases, options.rounds, until_s, "bins, run"):
        short = [_shortened(each) for each in asked[pool, number % options.draws][: options.run_requests]]
        batched = gang_batches(_known(short, known), [max(1, length // 10) for length in seen], bins, BATCH_OF_BINS)
        key = {"pool": pool, "answers": "known" if known else "predicted", "kind": "run"}
        measured = Runs(gang, 1 << 20).measure(list(batched), shrink=False)
        runs.append({**key, "bins": bins, "draw": number, **measured})
    write_runs(options.out / "bins.csv", runs)
    _show_bins(runs, options)


def _recorded(folder: Path, names: Iterable[str]) -> tuple[list[Sample], list[int]]:
    """Requests, and lengths of answers to other prompts."""
    samples = read_samples([folder / "prompts" / f"{name}_test.jsonl.gz" for name in names])
    seen = read_samples([folder / "prompts" / f"{name}_train.jsonl.gz" for name in names])
    return samples, [max(1, round(sample.output_tokens)) for sample in seen]


def _asked(samples: Sequence[Sample], ranker: Ranker, tokenizer: Any) -> list[Asked]:
    predicted = ranker.curve.mean_tokens(ranker.scores([sample.prompt for sample in samples]))
    prompts = [tokenizer.encode(sample.prompt) or [0] for sample in samples]
    outputs = [max(1, round(sample.output_tokens)) for sample in samples]
    return [Asked(*each) for each in zip(prompts, outputs, predicted.tolist(), strict=True)]


def _known(asked: Sequence[Asked], known: bool) -> Sequence[Asked]:
    return [replace(each, predicted_output_tokens=each.output_tokens) for each in asked] if known else asked


def _shortened(each: Asked) -> Asked:
    """So that it can be run: answers a tenth as long, prompts of at most 32 tokens."""
    tokens, predicted = max(1, each.output_tokens // 10), each.predicted_output_tokens / 10
    return Asked(each.prompt[:32], tokens, predicted)


def _show_bins(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Throughput over that of the fewest bins in the same draw."""
    rate = {
        (run["pool"], run["answers"], run["kind"], run["bins"], run["draw"]): run["requests"] / run["s"] for run in runs
    }
    series = sorted({key[:3] for key in rate})
    first = min(options.bins)
    gains: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, value in rate.items():
        if (base := rate.get((*key[:3], first, key[4]))) is not None:
            gains[key[:4]].append(value / base)
    rows = [[str(bins), *(spread(gains[*each, bins]) for each in series)] for bins in sorted(options.bins)]
    write_table(options.out / "bins.md", ["bins", *(", ".join(each) for each in series)], rows)
    lines = {
        ", ".join(each): (
            [float(bins) for bins in sorted(options.bins) if gains[*each, bins]],
            [statistics.median(gains[*each, bins]) for bins in sorted(options.bins) if gains[*each, bins]],
        )
        for each in series
    }
    path = options.out / "000_bins_throughput.png"
    draw_lines(lines, path, x="bins", y="throughput / that of the fewest bins", title="Gang batches by bins")


def run_decode(model: Any, options: argparse.Namespace, until_s: float) -> None:
    decodes, sets, runs = Decodes(model, GangModel(model, PrefillConfig())), _sets(options), list[Run]()
    drawn = {
        (size, name, answered): [
            [length + answered for length in lengths]
            for lengths in batches(sets[name], size, options.rounds, options.max_tokens, options.seed)
        ]
        for size in sorted(options.batch_size)
        for name in sets
        for answered in ANSWERED_TOKENS
    }
    drawn[len(TOY), "nine of 1, one of 1000", 0] = [TOY] * options.rounds
    for number, case in _rounds(list(drawn), options.rounds, until_s, "decode"):
        lengths = drawn[case][number]
        packs = decode_layout(lengths, PACKED_ROOM, PrefillConfig()) is not None
        key = {"batch": case[0], "prompts": case[1], "answered": case[2], "round": number, "engine_packs": packs}
        runs.append({**key, **decodes.measure(lengths, DECODE_STEPS, number)})
        write_runs(options.out / "decode.csv", runs)
    head = ["prompts", "batch", "answered", "step time", "places", "tokens", "engine packs"]
    by_case = _grouped(runs, "prompts", "batch", "answered")
    write_table(options.out / "decode.md", head, [_decode_row(case, by_case[case]) for case in sorted(by_case)])
    start = {case[:2]: found for case, found in by_case.items() if case[2] == 0}
    lines = {name: _line(start, name, "padded_s", "packed_s") for name in sets}
    path = options.out / "004_packed_decode.png"
    draw_lines(lines, path, x="batch size", y="ratio", title="Decode step: padded / packed time")


def _decode_row(case: tuple[Any, ...], runs: Sequence[Run]) -> list[str]:
    ratios = [_ratios(runs, "padded_s", "packed_s"), _ratios(runs, "padded_places", "packed_places")]
    tokens = _ratios(runs, "packed_tokens", "requests")
    packs = sum(run["engine_packs"] for run in runs)
    return [*map(str, case), *map(spread, ratios), spread(tokens), f"{packs} of {len(runs)}"]


def run_memory(model: Any, options: argparse.Namespace, until_s: float) -> None:
    prefills, sets, runs = Prefills(model), _sets(options), list[Run]()
    most_bytes = options.memory_mib << 20
    for _, (name, mode) in _rounds([(name, mode) for name in sets for mode in MODES], 1, until_s, "memory"):

        def peak_bytes(size: int, name: str = name, mode: PrefillMode = mode) -> int:
            lengths = batches(sets[name], size, 1, options.max_tokens, options.seed)[0]
            return prefills.peak_bytes(mode, prefills.prompts(lengths, options.seed))

        runs.append({"prompts": name, "layout": mode, "largest_batch": largest_batch(peak_bytes, most_bytes)})
        write_runs(options.out / "memory.csv", runs)
    most = {(run["prompts"], run["layout"]): run["largest_batch"] for run in runs}
    rows = [[name, *(str(most.get((name, mode), "-")) for mode in MODES)] for name in sets]
    write_table(options.out / "memory.md", ["prompts", *MODES], rows)
    _show_toy(model, options)


def _show_toy(model: Any, options: argparse.Namespace) -> None:
    """004's table 1: what packed rows save, of generation alone and with the model's weights."""
    decodes = Decodes(model, GangModel(model, PrefillConfig()))
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    times = [decodes.measure(TOY, TOY_STEPS, number) for number in range(options.rounds)]
    held = decodes.memory(TOY, TOY_STEPS)
    rows = [
        [name, f"{held[f'{name}_bytes'] / 2**20:.1f}", f"{(held[f'{name}_bytes'] + weights) / 2**20:.1f}"]
        + [f"{1e3 * TOY_STEPS * statistics.median(run[f'{name}_s'] for run in times):.1f}"]
        for name in ("padded", "packed")
    ]
    head = ["rows", "peak, MiB", "with the weights, MiB", f"{TOY_STEPS} tokens, ms"]
    write_table(options.out / "table_1.md", head, rows)


RUNS = {"prefill": run_prefill, "bins": run_bins, "decode": run_decode, "memory": run_memory}


if __name__ == "__main__":
    main()
