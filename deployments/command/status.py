"""`sluice status`: in the terminal what the page at / shows."""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.command.client import add_options, api_client, root
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
SHOWN = 10  # requests, and batches
_WIDTH = 200  # columns of lines that do not go to a terminal
NONE = "–"

Row = Sequence[str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The state of an application at one time.

    Attributes:
        status: the first model's, with those of the others under `more_models`.
        metrics: (name, labels, value) of each of Sluice's samples.
    """

    status: Mapping[str, Any]
    metrics: Sequence[tuple[str, Mapping[str, str], float]] = ()


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
        _console().print(tables(look(options)))


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
    console = _console()
    with Live(shown, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
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


def _console() -> "Console":
    from rich.console import Console  # only here, as openai

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


# What is asked


def look(options: argparse.Namespace) -> Looked:
    """Raises SluiceError."""
    status = look_at_status(options)
    with api_client(options, TIMEOUT_S) as client:
        page = client.get(f"{root(options.url)}/metrics", cast_to=str)
        return Looked(status=status, metrics=list(_samples(page)))


def look_at_status(options: argparse.Namespace) -> dict[str, Any]:
    """Raises SluiceError."""
    import openai

    with api_client(options, TIMEOUT_S) as client:
        try:
            answer = client.get(f"{root(options.url)}{PATH}", cast_to=str)
        except openai.NotFoundError as error:
            raise SluiceError(_other(options.url)) from error
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise SluiceError(_other(options.url)) from error
    if not isinstance(found, dict) or not {"model", "replicas", "classes"} <= found.keys():
        raise SluiceError(_other(options.url))
    return found


def _other(url: str) -> str:
    return f"what answers at {url} is not Sluice: it has no {PATH}. Is --url right?"


def _samples(page: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(page):
        if family.name.startswith("sluice_"):
            yield from ((sample.name, sample.labels, sample.value) for sample in family.samples)


# What is shown


def tables(looked: Looked) -> "Group":
    """To be printed. Titles, heads and words are those of the page."""
    from rich.console import Group

    status = looked.status
    shown: list[Any] = [
        _head(looked),
        _table("Classes", CLASSES, class_rows(looked), "no classes"),
        _table("Replicas", REPLICAS, replica_rows(status), "no replica is there"),
        _table("Recent requests", RECENT, recent_rows(status), "none yet"),
    ]
    if "open_batches" in status:
        found = status["open_batches"]
        empty = "what runs batches does not answer now" if found is None else "none"
        shown.append(_table("Batches in progress", BATCHES, batch_rows(found), empty))
    return Group(*shown)


CLASSES = ("class", "first token within", "a token within", "waiting", "requests", "in time", "called late", "refused")
REPLICAS = ("replica", "model", "slots", "KV cache", "phase", "unread tokens", "slowness", "prefix hits", "now")
RECENT = (
    *("ended", "request", "class", "prompt", "predicted", "answer", "waited", "first token", "replica", "", "outcome"),
)  # fmt: skip
BATCHES = ("batch", "model", "endpoint", "now", "done", "failed", "expected end", "window ends")


def _table(title: str, heads: Row, rows: Iterable[Row], empty: str) -> Any:
    from rich import box
    from rich.table import Table

    looks: Any = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    made = Table(title=f"\n{title}", pad_edge=False, show_edge=False, **looks)
    for head in heads:
        made.add_column(head)
    for row in rows:
        made.add_row(*map(plain, row))
    if not made.row_count:
        made.add_row(empty)
    return made


def _head(looked: Looked) -> str:
    status, models = looked.status, _models(looked.status)
    replicas = sum(len(each["replicas"]) for each in models)
    built = next((labels for name, labels, _ in looked.metrics if name == "sluice_build_info"), {})
    versions = ", ".join(f"{name} {built.get(key, '')}" for name, key in _BUILT)
    names = ", ".join(plain(each["model"]) for each in models)
    return f"{names} · {_several(replicas, 'replica')} · {_several(status['routers'], 'router')} · {versions}"


_BUILT = (("Sluice", "version"), ("vLLM", "vllm"), ("Ray", "ray"))


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _models(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [status, *status.get("more_models", ())]


def class_rows(looked: Looked) -> Iterator[Row]:
    for name, promised in sorted(looked.status["classes"].items()):
        waiting = sum(count for lane, count in looked.status["waiting"].items() if lane.rpartition(":")[0] == name)
        ended = _total(looked, "sluice_slo_requests_total", name)
        met = _total(looked, "sluice_slo_requests_total", name, ttft="met", tpot="met")
        late, refused = (_total(looked, f"sluice_{what}_requests_total", name) for what in ("late", "refused"))
        targets = (seconds(promised[key]) if promised[key] else "none" for key in ("ttft_s", "tpot_s"))
        counts = (number(waiting), number(ended), percent(met / ended if ended else None), number(late))
        yield (name, *targets, *counts, number(refused))


def _total(looked: Looked, metric: str, slo_class: str, **labels: str) -> float:
    wanted = {"slo_class": slo_class, **labels}.items()
    return sum(value for name, found, value in looked.metrics if name == metric and wanted <= found.items())


def replica_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    for each in _models(status):
        for group, pool in (("", each), ("prefill ", each.get("prefill") or {"replicas": {}})):
            for replica_id, load in pool["replicas"].items():
                yield (replica_id, f"{group}{each['model']}", *_of_replica(load))


def _of_replica(load: Mapping[str, Any]) -> Row:
    engine = load["engine"]
    blocks, asked = engine.get("total_blocks"), engine.get("prefix_cache_query_tokens")
    used = 1 - engine["free_blocks"] / blocks if blocks else None
    hits = engine["prefix_cache_hit_tokens"] / asked if asked else None
    return (
        f"{load['running']} of {load['slots']}",
        percent(used),
        engine.get("phase") or NONE,
        number(load["unread_tokens"]),
        f"×{number(load['slowness'], 2)}",
        percent(hits),
        load["now"],
    )


def recent_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    for each in status.get("recent_requests", ())[:SHOWN]:
        moved = f"moved {each['moves']}×" if each["moves"] else ""
        recalled = f"recalled {each['recalls']}×" if each["recalls"] else ""
        yield (
            f"{datetime.fromtimestamp(each['at']):%H:%M:%S}",
            short(each["request_id"]),
            each["slo_class"],
            number(each["prompt_tokens"]),
            number(each["predicted_tokens"]),
            number(each["output_tokens"]),
            seconds(each["wait_s"]),
            seconds(each["ttft_s"]),
            each["replica"] or NONE,
            moved or recalled,
            each["outcome"],
        )


def batch_rows(found: Mapping[str, Any] | None) -> Iterator[Row]:
    """Batches of the asking key; None while the runner of batches does not answer."""
    if found is None:
        return
    shown = found["oldest"][:SHOWN]
    for each in shown:
        yield (
            each["id"],
            each["model"] or NONE,
            each["endpoint"],
            each["status"].replace("_", " "),
            f"{number(each['completed'] + each['failed'])} of {number(each['total'])}",
            number(each["failed"]),
            moment(each["expected_end"]),
            f"{moment(each['expires_at'])} ({each['completion_window']})",
        )
    if found["count"] > len(shown):
        yield (f"and {number(found['count'] - len(shown))} more",)


def moment(unix_s: float | None) -> str:
    return NONE if unix_s is None else datetime.fromtimestamp(unix_s).isoformat(" ", "minutes")


def number(value: float | None, digits: int = 0) -> str:
    return NONE if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    if value < 1:
        return f"{number(1000 * value, 1 if value < 0.01 else 0)} ms"
    return f"{number(value, 2)} s"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{number(100 * value, 1)} %"


def short(request_id: str) -> str:
    return f"{request_id[:16]}…{request_id[-7:]}" if len(request_id) > 24 else request_id


def plain(text: object) -> str:
    """Without control characters: clients choose ids of requests, which must not steer the terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(text))
