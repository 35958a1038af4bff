"""`sluice status`: in the terminal what the page at / shows."""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Set
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.command.client import add_options, api_client, root
from deployments.command.status_tables import Looked, plain, tables
from policies.errors import SluiceError

if TYPE_CHECKING:
    from rich.console import Console, Group

_EPILOG = """\
examples:
  sluice status
  sluice status --watch --url https://llm.example.org
  sluice status --json | jq '.replicas | length'

An API key is read from OPENAI_API_KEY."""

PATH = "/sluice/status"
TIMEOUT_S = 10.0  # a status is asked for by a person who waits


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser(
        "status",
        help="show what runs, as tables",
        description="Models, replicas, classes, the requests that ended last and batches of an application that runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(status)
    status.add_argument("--json", action="store_true", help=f"what {PATH} says, as it is")
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="S",
        help="again every S seconds (default: %(const)s), until Ctrl-C",
    )
    status.set_defaults(run=show)


def _seconds(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0.1 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0.1, got {text!r}")


def show(options: argparse.Namespace) -> None:
    """Raises SluiceError: nothing answers there, a key is needed, or it is not Sluice."""
    if options.watch is None:
        _print(options)
        return
    with contextlib.suppress(KeyboardInterrupt):  # how it ends
        _watch(options)


def _print(options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(look_at_status(options), indent=None if options.watch else 2), flush=True)
    else:
        console().print(tables(look(options)))


def _watch(options: argparse.Namespace) -> None:
    """The first look must succeed; afterwards an application that is away may come back."""
    if options.json or not sys.stdout.isatty():
        _print(options)
        while True:
            time.sleep(options.watch)
            try:
                _print(options)
            except SluiceError as error:
                print(_trying_again(error), file=sys.stderr, flush=True)
    from rich.live import Live

    shown = tables(look(options))
    with Live(shown, console=console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            time.sleep(options.watch)
            live.update(_shown_again(options), refresh=True)


def _shown_again(options: argparse.Namespace) -> "Group | str":
    try:
        return tables(look(options))
    except SluiceError as error:
        return _trying_again(error)


def _trying_again(error: SluiceError) -> str:
    return f"{datetime.now():%H:%M:%S} {plain(error)}. Trying again."


def console() -> "Console":
    from rich.console import Console  # only here, as openai

    width = None if sys.stdout.isatty() else 200  # columns
    return Console(width=width, markup=False, highlight=False, emoji=False)


def look(options: argparse.Namespace) -> Looked:
    """Raises SluiceError."""
    status = look_at_status(options)
    with api_client(options, TIMEOUT_S) as client:
        page = client.get(f"{root(options.url)}/metrics", cast_to=str)
        return Looked(status=status, metrics=list(_samples(page)))


def look_at_status(options: argparse.Namespace) -> dict[str, Any]:
    """Raises SluiceError."""
    return asked_json(options, PATH, {"model", "replicas", "classes"})


def asked_json(options: argparse.Namespace, path: str, has: Set[str]) -> dict[str, Any]:
    """What the application says at one of Sluice's own paths.

    Args:
        has: keys without which it is not Sluice that answers.

    Raises:
        SluiceError: it does not answer, or so.
    """
    import openai

    with api_client(options, TIMEOUT_S) as client:
        try:
            answer = client.get(f"{root(options.url)}{path}", cast_to=str)
        except openai.NotFoundError as error:
            raise SluiceError(_other(options.url, path)) from error
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise SluiceError(_other(options.url, path)) from error
    if not isinstance(found, dict) or not has <= found.keys():
        raise SluiceError(_other(options.url, path))
    return found


def _other(url: str, path: str) -> str:
    return f"what answers at {url} is not Sluice: it has no {path}. Is --url right?"


def _samples(page: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(page):
        if family.name.startswith("sluice_"):
            yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)
