"""What looking at the page costs an idle application: `python -m bench.page --help`.

One application is idle. For some seconds a browser has its page open, for as many it has not, in turn and each
first as often; what each role of the application's processes used of a core is compared. The browser is not counted.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from playwright.sync_api import Browser, Error
from tqdm import tqdm

from bench.arguments import folder, positive
from bench.browser import chromium, executable
from bench.cpu import Role, cpu_s_by_role, cpu_times
from bench.ending import exit_status
from bench.load import first_model, measure
from bench.report import markdown_table
from bench.servers import (
    ENGINE_ARGUMENTS,
    Server,
    ServerSpec,
    gpus_of_an_engine,
    shared_arguments,
    sluice_with_config,
    split_at_dashes,
)
from bench.summary import Spread, differences, median_interval
from bench.workload import LoadConfig

RECENT_REQUESTS = 50  # as many as the page lists
PATIENCE_MS = 120_000
SETTLES_S = 5.0  # a page that has just been opened, or left
EPILOG = f"""\
examples:
  python -m bench.page                          some ten minutes
  python -m bench.page --pairs 3 --seconds 10   a short look

Engines get these arguments, and after them whatever follows `--`:
  {" ".join(ENGINE_ARGUMENTS)}

exit status: 0 measured, 2 the server, the browser or the arguments failed, 130 interrupted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Cores that each role used while nobody looked, and while somebody did."""

    alone: Mapping[Role, float]
    watched: Mapping[Role, float]


class Bench:
    def __init__(self, options: argparse.Namespace, server: Server, browser: Browser) -> None:
        self._options, self._server, self._browser = options, server, browser

    def pair(self, number: int) -> Pair:
        """Raises playwright's Error: the page does not come."""
        if number % 2 == 0:
            alone = self._used()
            return Pair(alone=alone, watched=self._watched())
        watched = self._watched()
        return Pair(alone=self._used(), watched=watched)

    def _watched(self) -> dict[Role, float]:
        page = self._browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(self._server.spec.url)
        page.locator("#recent tbody tr").nth(RECENT_REQUESTS - 1).wait_for()
        try:
            return self._used()
        finally:
            page.close()

    def _used(self) -> dict[Role, float]:
        """Cores, by role, over the seconds that were asked for."""
        time.sleep(SETTLES_S)
        began_s, before = time.monotonic(), cpu_times(self._server.processes())
        time.sleep(self._options.seconds)
        used_s = cpu_s_by_role(before, cpu_times(self._server.processes()))
        passed_s = time.monotonic() - began_s
        return {role: each / passed_s for role, each in used_s.items()}


def as_markdown(pairs: Sequence[Pair]) -> str:
    """Percent of a core: medians with the least and the greatest, and the difference of the two of a pair."""
    roles = sorted({role for pair in pairs for role in (*pair.alone, *pair.watched)})
    sums = [("all", [sum(pair.alone.values()) for pair in pairs], [sum(pair.watched.values()) for pair in pairs])]
    of_roles = [
        (role, [pair.alone.get(role, 0.0) for pair in pairs], [pair.watched.get(role, 0.0) for pair in pairs])
        for role in roles
    ]
    rows = [_row(*each) for each in (*of_roles, *sums)]
    return markdown_table(["% of a core", "nobody looks", "the page is open", "difference"], rows)


def _row(name: str, alone: Sequence[float], watched: Sequence[float]) -> list[str]:
    percent = [[100.0 * each for each in values] for values in (alone, watched)]
    apart = differences(percent[1], percent[0])
    interval = median_interval(apart, least_coverage=0.9)
    sure = "" if interval is None else f" ({interval.low:+.2f}, {interval.high:+.2f})"
    return [name, *(f"{Spread.of(values):.2f}" for values in percent), f"{Spread.of(apart):+.2f}{sure}"]


def main(arguments: Sequence[str] | None = None) -> int:
    own, more = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(own)
    engine_arguments = shared_arguments(more)
    return exit_status(
        "bench.page", lambda stack: print(as_markdown(_measured(options, engine_arguments, stack))), (Error,)
    )


def _measured(options: argparse.Namespace, engine_arguments: Sequence[str], stack: ExitStack) -> list[Pair]:
    """Raises: ServerFailed, ServerUnusable, OSError, playwright's Error."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
    executable()  # before anything starts
    bar = stack.enter_context(tqdm(total=options.pairs, unit="pair", disable=None))
    server = stack.enter_context(Server(_spec(options, scratch, engine_arguments), options.logs or scratch))
    bar.set_description("starting Sluice")
    server.wait_until_ready(options.startup_timeout)
    bar.set_description("recent requests")
    uvloop.run(measure(_requests(server.spec.url)))
    bench, pairs = Bench(options, server, stack.enter_context(chromium())), list[Pair]()
    bar.set_description("measuring")
    for number in range(options.pairs):
        pairs.append(bench.pair(number))
        server.check_alive()
        bar.update()
    return pairs


def _spec(options: argparse.Namespace, scratch: Path, engine_arguments: Sequence[str]) -> ServerSpec:
    """With a Batch API, of which the page has a section."""
    config = scratch / "sluice.json"
    engine = {"replicas": options.engines, "num_gpus": gpus_of_an_engine(options.num_gpus)}
    config.write_text(json.dumps({"engine": engine, "batches": {"folder": str(scratch / "batches")}}))
    given = (f"--router-replicas={options.routers}", f"--model={options.model}", "--", *engine_arguments)
    return sluice_with_config("Sluice", config, options.port, *given)


def _requests(url: str) -> LoadConfig:
    return LoadConfig(url=url, model=first_model(url), concurrency=8, requests=RECENT_REQUESTS, max_tokens=16)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.page",
        usage="%(prog)s [options] [-- engine arguments]",
        description="Measures the CPU that an idle application takes while its page is open.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="deployments/demo_model", help="folder or name of the model (default: %(default)s)")
    add("--routers", type=positive, default=1, help="router replicas (default: %(default)s)")
    add("--engines", type=positive, default=1, help="engine replicas (default: %(default)s)")
    add("--num-gpus", type=float, metavar="N", help="of each engine (default: none on vLLM's CPU build, else 1)")
    add("--pairs", type=positive, default=8, help="of spells without and with the page (default: %(default)s)")
    add("--seconds", type=positive, default=30, help="of a spell (default: %(default)s)")
    add("--port", type=int, default=18500, help="of the application (default: %(default)s)")
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    add("--logs", type=folder, metavar="FOLDER", help="keep the server's log there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
