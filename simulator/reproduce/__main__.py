"""`python -m simulator.reproduce NAME`: one experiment, its table on the screen, its plots in a folder."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from policies.errors import SluiceError
from simulator.reproduce import (
    account,
    batches,
    beyond,
    completion,
    first_tokens,
    goodput,
    kept,
    paper_000,
    paper_001,
    paper_002,
    paper_003,
    paper_004,
    prefixes,
    scaling,
    tasks,
    what_pays,
)
from simulator.reproduce.common import SOURCES, Setting

EXPERIMENTS: dict[str, Callable[[Setting], list[str]]] = {
    "000-figure-1a": paper_000.figure_1a,
    "000-figure-3": paper_000.figure_3,
    "000-figure-4": paper_000.figure_4,
    "000-figure-5": paper_000.figure_5,
    "000-figure-6": paper_000.figure_6,
    "000-figure-8": paper_000.figure_8,
    "000-figure-9": paper_000.figure_9,
    "000-dispatch": paper_000.dispatch,
    "001-figure-3": paper_001.figure_3,
    "001-figure-4": paper_001.figure_4,
    "001-table-1": paper_001.table_1,
    "001-table-2": paper_001.table_2,
    "001-utilization": paper_001.utilization,
    "001-swapping": paper_001.swapping,
    "002-figure-3": paper_002.figure_3,
    "002-offline": paper_002.offline,
    "002-system": goodput.papers_pools,
    "002-baselines": paper_002.baselines,
    "002-figure-5": paper_002.figure_5,
    "003-balance": paper_003.balance,
    "003-clients": paper_003.clients,
    "003-drift": paper_003.drift,
    "003-drift-of-sets": paper_003.drift_of_sets,
    "003-shares": paper_003.shares,
    "003-workloads": paper_003.workloads,
    "004-figure-2": paper_004.figure_2,
    "004-packing": paper_004.packing,
    "004-figure-7": paper_004.figure_7,
    "004-figure-8": paper_004.figure_8,
    "004-figure-13": paper_004.figure_13,
    "gang-bins": what_pays.gang_bins,
    "rolling": what_pays.rolling,
    "gang-low-load": what_pays.gang_low_load,
    "continuous-bins": what_pays.continuous_bins,
    "dedicated-replicas": what_pays.dedicated_replicas,
    "class-replicas": what_pays.class_replicas,
    "admission": what_pays.admission,
    "known-prompts": what_pays.known_prompts,
    "queue-order": what_pays.queue_order,
    "idle-order": what_pays.idle_order,
    "placement": what_pays.placement,
    "phases": what_pays.phases,
    "equal-lengths": what_pays.equal_lengths,
    "goodput": goodput.goodput,
    "goodput-measured": goodput.on_measured,
    "goodput-cpu": goodput.on_cpu,
    "completion": completion.completion,
    "completion-lengths": completion.by_length,
    "account": account.account,
    "goodput-features": goodput.leave_out,
    "papers-system": goodput.as_published,
    "goodput-long-prompts": goodput.long_prompts,
    "prefixes": prefixes.prefixes,
    "prefixes-beyond": beyond.beyond,
    "kept": kept.kept,
    "tasks": tasks.tasks,
    "tiers": prefixes.tiers,
    "batches": batches.batches,
    "first-tokens": first_tokens.first_tokens,
    "scaling": scaling.scaling,
}


def main(arguments: Sequence[str] | None = None) -> None:
    described = "\n".join(f"  {name:<20} {(run.__doc__ or '').splitlines()[0]}" for name, run in EXPERIMENTS.items())
    sources = "\n".join(f"  {file:<40} {source}" for file, source in SOURCES.values())
    parser = argparse.ArgumentParser(
        prog="python -m simulator.reproduce",
        description="The papers' figures and tables again, and where each policy pays.",
        epilog=f"experiments:\n{described}\n\nfiles of --data, and where they come from:\n{sources}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="+", choices=[*EXPERIMENTS, "all"], metavar="NAME", help="experiment, or all")
    parser.add_argument("--data", type=Path, help="folder with traces; many experiments need none")
    parser.add_argument("--figures", type=Path, help="folder for plots, made if it is not there")
    parser.add_argument("--runs", "--seeds", type=int, default=3, help="repetitions (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.figures is not None:  # before what takes minutes
        try:
            options.figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--figures: {error}")
    setting = Setting(data=options.data, figures=options.figures, runs=options.runs, processes=options.processes)
    try:
        for name in EXPERIMENTS if "all" in options.name else options.name:
            print(f"## {name}: {(EXPERIMENTS[name].__doc__ or '').splitlines()[0]}\n", flush=True)
            print("\n".join(EXPERIMENTS[name](setting)), flush=True)
            print()
    except SluiceError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
