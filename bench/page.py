"""What looking at the page costs an idle application: `python -m bench.page --help`.

One application is idle. For some seconds a browser has its page open, for as many it has not, in turn and each
first as often; what each role of the application's processes used of a core is compared. The browser is not counted.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop
from playwright.sync_api import Browser, Error

from bench.browser import chromium, executable
from bench.cpu import Role, cpu_s_by_role, cpu_times
from bench.load import first_model
from bench.load import measure as measure_load
from bench.report import markdown_table
from bench.servers import Server
from bench.session import ENGINE_HELP, EXIT_STATUS, Session, new_parser, positive, run_session, turns
from bench.summary import Spread, differences, spread
from bench.workload import LoadConfig

RECENT_REQUESTS = 50  # as many as the page lists
PATIENCE_MS = 120_000
SETTLES_S = 5.0  # a page that has just been opened, or left
EPILOG = f"""\
examples:
  python -m bench.page                          some ten minutes
  python -m bench.page --pairs 3 --seconds 10   a short look

{ENGINE_HELP}
{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Cores that each role used while the page was closed, and while it was open."""

    alone: Mapping[Role, float]
    watched: Mapping[Role, float]


def measure(session: Session) -> list[Pair]:
    """Raises: ServerFailed, ServerUnusable, OSError, playwright's Error."""
    options, pairs = session.options, list[Pair]()
    executable()  # before anything starts
    batches = {"folder": str(session.folder / "batches")}  # the page has a section of them
    settings = {"router": {"replicas": options.routers}, "engine": {"replicas": options.engines}, "batches": batches}
    server = session.start(session.sluice("Sluice", 0, settings))
    url = server.spec.url
    session.stage("recent requests")
    recent = LoadConfig(url=url, model=first_model(url), concurrency=8, requests=RECENT_REQUESTS, max_tokens=16)
    uvloop.run(measure_load(recent))
    browser = session.stack.enter_context(chromium())
    for number in range(options.pairs):
        session.stage(f"pair {number + 1}/{options.pairs}")
        cores = {
            watched: _cores(server, browser if watched else None, options.seconds)
            for watched in turns((False, True), number)
        }
        pairs.append(Pair(alone=cores[False], watched=cores[True]))
        server.check_alive()
    return pairs


def _cores(server: Server, browser: Browser | None, seconds: float) -> dict[Role, float]:
    """Cores by role over a spell, with the page open in that browser. Raises playwright's Error: it does not come."""
    if browser is None:
        return _used(server, seconds)
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(server.spec.url)
    page.locator("#recent tbody tr").nth(RECENT_REQUESTS - 1).wait_for()
    try:
        return _used(server, seconds)
    finally:
        page.close()


def _used(server: Server, seconds: float) -> dict[Role, float]:
    time.sleep(SETTLES_S)
    began_s, before = time.monotonic(), cpu_times(server.processes())
    time.sleep(seconds)
    used_s = cpu_s_by_role(before, cpu_times(server.processes()))
    passed_s = time.monotonic() - began_s
    return {role: each / passed_s for role, each in used_s.items()}


def as_markdown(pairs: Sequence[Pair]) -> str:
    """Percent of a core: medians with the least and the greatest, and the difference of the two of a pair."""
    roles = sorted({role for pair in pairs for role in (*pair.alone, *pair.watched)})
    rows = [
        _row(str(role), [(pair.alone.get(role, 0.0), pair.watched.get(role, 0.0)) for pair in pairs]) for role in roles
    ]
    rows.append(_row("all", [(sum(pair.alone.values()), sum(pair.watched.values())) for pair in pairs]))
    return markdown_table(["% of a core", "nobody looks", "the page is open", "difference"], rows)


def _row(name: str, cores: Sequence[tuple[float, float]]) -> list[str]:
    alone, watched = ([100.0 * each for each in values] for values in zip(*cores, strict=True))
    return [name, *(f"{Spread.of(each):.2f}" for each in (alone, watched)), spread(differences(watched, alone), "+.2f")]


def _parser() -> argparse.ArgumentParser:
    what = "Measures the CPU that an idle application takes while its page is open."
    parser = new_parser("bench.page", what, EPILOG, first_port=18500)
    add = parser.add_argument
    add("--routers", type=positive, default=1, help="router replicas (default: %(default)s)")
    add("--engines", type=positive, default=1, help="engine replicas (default: %(default)s)")
    add("--pairs", type=positive, default=8, help="of spells without and with the page (default: %(default)s)")
    add("--seconds", type=positive, default=30, help="of a spell (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.page", _parser(), measure, as_markdown, arguments, unusable=(Error,))


if __name__ == "__main__":
    sys.exit(main())
