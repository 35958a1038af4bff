"""`sluice explain`: why requests were refused or late, and what would have kept their promises."""

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from deployments.command.client import add_options
from deployments.command.status import asked_json, console, look_at_status
from deployments.command.status_tables import NONE, Row, number, percent, plain, seconds, short, table
from policies.errors import SluiceError
from policies.router.explanation import Cause, Served, remedies
from policies.router.promise import Promise
from router.recent import UNKEPT

_EPILOG = f"""\
examples:
  sluice explain                                  how many promises were not kept lately, and why
  sluice explain --last 15m --url https://llm.example.org
  sluice explain chatcmpl-0f6d2c1e                one request, by the id that its answer or its log line has
  sluice explain --json | jq '.[].cause'

Each router keeps the last {UNKEPT} requests whose promise was not kept. Of older ones sluice_unkept_requests_total says
how many there were, and `unkept_because` in the router's log why (docs/guides/explain.md).
An API key is read from OPENAI_API_KEY."""

PATH = "/sluice/unkept"
SHOWN = 20  # requests, the latest
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
WORDS: Mapping[Cause, str] = {
    Cause.LATE: "refused: its first token was predicted to come too late",
    Cause.FULL: "refused: as many of its class waited as may (max_waiting)",
    Cause.KEY_SHARE: "refused: as many of its API key waited as may (max_key_share)",
    Cause.QUOTA: "refused: its API key had spent a quota",
    Cause.FAILED: "it was not answered to its end",
    Cause.MOVED: "its replica was lost, and it went on elsewhere",
    Cause.RECALLED: "its slot was taken back for a more urgent request",
    Cause.FORESEEN: "as it came its first token was predicted to be late, and its class does not refuse that",
    Cause.PREPARING: "its prompt took long to be made ready for the queue: a long prompt, or a busy router",
    Cause.QUEUE: "it waited longer than predicted: more urgent requests came, or answers were longer",
    Cause.READING: "its prompt was read more slowly than predicted, or less of it was cached",
    Cause.PACE: "its tokens came too far apart: the engine's steps took long",
    Cause.LENGTH: "its answer was longer than predicted",
}
CAUSES = ("class", "cause", "requests", "of these with one more replica", "why")
REQUESTS = ("ended", "request", "class", "cause", "first token: promised", "predicted", "came", "a token", "replica")
PARTS = ("", "promised", "predicted", "came")


class Unkept(msgspec.Struct, frozen=True):
    """A request as a router tells it. Unix time; what it was promised and what came are in `served`."""

    at: float
    request_id: str
    slo_class: str
    cause: Cause
    served: Served
    replica: str | None = None


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    explain = commands.add_parser(
        "explain",
        help="say why requests were refused or late",
        description="Say why requests were refused or late, and what would have kept their promises.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("request_id", nargs="?", metavar="REQUEST_ID", help="one request (default: all lately)")
    add_options(explain)
    explain.add_argument(
        "--last", type=_span_s, default=3600.0, metavar="TIME", help="all that ended in it: 90s, 15m, 2h (default: 1h)"
    )
    explain.add_argument("--json", action="store_true", help=f"what {PATH} says of them")
    explain.set_defaults(run=show)


def _span_s(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 15m or 2h, got {text!r}")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def show(options: argparse.Namespace) -> None:
    """Raises SluiceError: nothing answers there, a key is needed, it is not Sluice, or the request is not known."""
    found = _unkept(options)
    if options.request_id is None:
        found = [each for each in found if each.at >= time.time() - options.last]
    else:
        found = [each for each in found if options.request_id in each.request_id]
        if not found:
            raise SluiceError(_unknown(options))
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    classes = _promises(look_at_status(options))
    out = console()
    if options.request_id is not None:
        for each in found:
            out.print(explained(each, classes))
            out.print(table("", PARTS, part_rows(each), ""))
        return
    out.print(table("Promises not kept", CAUSES, cause_rows(found, classes), "all were kept"))
    if found:
        out.print(table("The latest", REQUESTS, request_rows(found), ""))
        out.print("\nOne of them: sluice explain REQUEST_ID")


def _unkept(options: argparse.Namespace) -> list[Unkept]:
    """Those of all routers. Raises SluiceError."""
    told = asked_json(options, PATH, {"unkept"})["unkept"]
    try:
        by_router = msgspec.convert(told, dict[str, list[Unkept]], strict=False)
    except msgspec.ValidationError as error:
        why = f"what answers at {options.url} is of another version of Sluice ({error})"
        raise SluiceError(f"{why}: ask with the `sluice` of that version") from error
    return [each for requests in by_router.values() for each in requests]


def _unknown(options: argparse.Namespace) -> str:
    recent = look_at_status(options).get("recent_requests", ())
    if any(options.request_id in each["request_id"] for each in recent):
        return f"request {options.request_id} was served as promised, or its client left"
    return (
        f"no request {options.request_id} is among the last {UNKEPT} of each router whose promise was not kept: it was "
        "kept, or it is older; the log of the routers has a line for each request, with unkept_because"
    )


def _promises(status: Mapping[str, Any]) -> dict[str, Promise]:
    models = (status, *status.get("more_models", ()))
    return {name: Promise(**each) for model in models for name, each in model["classes"].items()}


def cause_rows(found: Sequence[Unkept], classes: Mapping[str, Promise]) -> Iterator[Row]:
    """The most frequent first."""
    counts = Counter((each.slo_class, each.cause) for each in found)
    for (slo_class, cause), count in sorted(counts.items(), key=lambda each: (-each[1], each[0])):
        alike = [each for each in found if (each.slo_class, each.cause) == (slo_class, cause)]
        asked = [remedies(each.served, slo_class, classes).one_more_replica for each in alike]
        kept = sum(each is True for each in asked)
        helped = NONE if all(each is None for each in asked) else f"{percent(kept / len(alike))} kept"
        yield (slo_class, cause, number(count), helped, WORDS[cause])


def request_rows(found: Sequence[Unkept]) -> Iterator[Row]:
    for each in sorted(found, key=lambda each: -each.at)[:SHOWN]:
        served, foreseen = each.served, each.served.foreseen
        yield (
            f"{datetime.fromtimestamp(each.at):%H:%M:%S}",
            short(each.request_id),
            each.slo_class,
            each.cause,
            seconds(served.promise.ttft_s),
            seconds(None if foreseen is None else served.preparing_s + foreseen.first_token_s),
            seconds(None if served.reading_s is None else served.first_token_s),
            seconds(served.gap_s),
            each.replica or NONE,
        )


def explained(each: Unkept, classes: Mapping[str, Promise]) -> str:
    """In sentences."""
    told = remedies(each.served, each.slo_class, classes)
    lines = [
        f"{plain(each.request_id)}, class {each.slo_class}, ended {datetime.fromtimestamp(each.at):%Y-%m-%d %H:%M:%S}",
        f"why: {WORDS[each.cause]}",
    ]
    replicas = each.served.foreseen.replicas if each.served.foreseen else 0
    if told.one_more_replica is not None:
        would = "would have kept" if told.one_more_replica else "would not have kept"
        lines.append(f"one more replica, beside {replicas}, {would} its first token")
    if told.another_replica is not None:
        would = "would have kept" if told.another_replica else "would not have kept"
        lines.append(f"the best other replica that had a slot {would} its first token")
    if told.another_class is not None:
        verb = "would have been kept" if each.served.refused is None else "was predicted to be kept"
        lines.append(f"the promise of class {told.another_class} {verb}")
    return "\n".join(lines)


def part_rows(each: Unkept) -> Iterator[Row]:
    served = each.served
    promise, foreseen = served.promise, served.foreseen
    wait_s, reading_s = (None, None) if foreseen is None else (foreseen.wait_s, foreseen.reading_s)
    first_s = None if foreseen is None else served.preparing_s + foreseen.first_token_s
    came_s = served.first_token_s if served.reading_s is not None else None
    yield ("ready for the queue", NONE, NONE, seconds(served.preparing_s))
    yield ("its turn", NONE, seconds(wait_s), seconds(served.wait_s))
    yield ("its prompt read", NONE, seconds(reading_s), seconds(served.reading_s))
    yield ("first token", seconds(promise.ttft_s), seconds(first_s), seconds(came_s))
    yield ("a token after it", seconds(promise.tpot_s), NONE, seconds(served.gap_s))
    yield ("last token", seconds(promise.e2e_s), NONE, seconds(served.whole_s))
    yield ("tokens of the answer", NONE, number(served.predicted_tokens), number(served.output_tokens))
