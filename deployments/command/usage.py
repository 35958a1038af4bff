"""`sluice usage`: what each API key used in each hour, out of the lines that routers log."""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from policies.errors import ConfigError

_EPILOG = """\
examples:
  sluice usage /tmp/ray/session_latest/logs > usage.jsonl          all routers of this node
  sluice usage LOGS --since 2026-11-29T00 --until 2026-11-30T00    one day: from an hour on, below another
  kubectl logs -l ray.io/node-type=worker --tail=-1 | sluice usage

A line for each hour, key, model and class, sorted. Hours are by the clock and time zone of the routers, and a request
counts in that in which it ended. Requests that no engine took are not counted. A router writes the line of a request as
that ends: one that is killed loses those that ran there, and no others (docs/guides/keys.md)."""

_HOUR = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d")
_FILES = "worker-*.err*"  # with those that Ray has put aside
_MOST_LINE = 1 << 20  # bytes; no line of a request comes near


class UsedBy(NamedTuple):
    hour: str
    key: str
    model: str
    slo_class: str


@dataclass(slots=True)
class Used:
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usage = commands.add_parser(
        "usage",
        help="what each API key used in each hour, out of logs",
        description="Sum up what each API key used in each hour, out of the lines that routers log, as JSON lines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usage.add_argument(
        "logs", nargs="*", type=Path, metavar="LOG", help="files, or folders of Ray's logs (default: standard input)"
    )
    usage.add_argument("--since", type=_hour, metavar="HOUR", help="the first hour, such as 2026-11-29T14")
    usage.add_argument("--until", type=_hour, metavar="HOUR", help="the first hour that does not count any more")
    usage.set_defaults(run=show)


def _hour(text: str) -> str:
    """Raises argparse.ArgumentTypeError."""
    if not _HOUR.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be an hour such as 2026-11-29T14, got {text!r}")
    return text.replace(" ", "T")


def show(options: argparse.Namespace) -> None:
    """Raises ConfigError: a file cannot be read, or a folder has none."""
    used = used_by(_lines(options.logs), options.since, options.until)
    for by, sums in sorted(used.items()):
        line = {**by._asdict(), "key": by.key or None}
        print(json.dumps({**line, **{name: getattr(sums, name) for name in Used.__slots__}}))


def _lines(logs: Sequence[Path]) -> Iterator[str]:
    """Raises ConfigError."""
    if not logs:
        yield from _of(sys.stdin)
    for log in logs:
        files = sorted(log.glob(_FILES)) if log.is_dir() else [log]
        if not files:
            raise ConfigError(f"{log} has no files {_FILES}: name the folder of Ray's logs, or the files")
        for file in files:
            try:
                with file.open(errors="replace") as lines:
                    yield from _of(lines)
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _of(lines: TextIO) -> Iterator[str]:
    """Whole lines; what is longer than any of ours comes in pieces, which are none."""
    while line := lines.readline(_MOST_LINE):
        yield line


def used_by(lines: Iterable[str], since: str | None = None, until: str | None = None) -> dict[UsedBy, Used]:
    """By hour, key, model and class; "" stands for no key.

    Args:
        since, until: hours; the first that counts, and the first that does not any more.
    """
    used: dict[UsedBy, Used] = defaultdict(Used)
    for line in lines:
        told = _request_in(line)
        if told is None or not told.get("replicas"):
            continue
        hour = str(told["asctime"])[:13].replace(" ", "T")
        if (since is not None and hour < since) or (until is not None and hour >= until):
            continue
        sums = used[UsedBy(hour, told.get("tenant") or "", told.get("model") or "", str(told["slo_class"]))]
        sums.requests += 1
        sums.prompt_tokens += round(told.get("prompt_tokens") or 0)
        sums.output_tokens += round(told.get("output_tokens") or 0)
    return used


def _request_in(line: str) -> dict[str, Any] | None:
    """What a router logs of a request, else None. A pod's log may have something before it."""
    at = line.find('{"asctime"')
    if at < 0 or '"deployments.http.exchange"' not in line:
        return None
    try:
        told = json.loads(line[at:])
    except ValueError:  # of a process that ended in the middle of it
        return None
    return told if told.get("message") == "request" and _HOUR.match(str(told["asctime"])) else None
