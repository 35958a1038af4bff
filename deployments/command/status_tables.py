"""The tables of `sluice status`. Titles, heads and words are those of the page."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

SHOWN = 10  # requests, and batches
NONE = "–"

Row = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The state of an application at one time.

    Attributes:
        status: the first model's, with those of the others under `more_models`.
        metrics: (name, labels, value) of each of Sluice's samples.
    """

    status: Mapping[str, Any]
    metrics: Sequence[tuple[str, Mapping[str, str], float]] = ()


def tables(looked: Looked) -> "Group":
    """To be printed by rich."""
    from rich.console import Group

    status = looked.status
    shown: list[Any] = [
        _head(looked),
        table("Classes", CLASSES, class_rows(looked), "no classes"),
        table("Promises", PROMISES, promise_rows(looked), "none yet"),
        *_predictor(looked),
        *_candidates(status),
        table("Replicas", REPLICAS, replica_rows(status), "no replica is there"),
        table("Parts", PARTS, part_rows(status), "none"),
        *_bins(status),
        *_switched_off(status),
        table("Recent requests", RECENT, recent_rows(status), "none yet"),
    ]
    if "open_batches" in status:
        found = status["open_batches"]
        empty = "what runs batches does not answer now" if found is None else "none"
        shown.append(table("Batches in progress", BATCHES, batch_rows(found), empty))
    return Group(*shown)


CLASSES = (
    *("class", "first token within", "a token within", "whole answer within"),
    *("waiting", "requests", "in time", "called late", "refused"),
)
PROMISES = (
    *("class", "first token missed", "its prediction off by", "time per token missed", "whole answer missed"),
    *("a token: promised", "planned", "in steps", "at the engine", "at the client"),
)
CANDIDATES = (
    *("candidate", "of", "share", "in force", "verdict", "version", "requests", "promises missed", "failed"),
    *("tokens of an answer", "whole answer", "copies left out"),
)
PREDICTOR = ("class", "model", "used", "nats better than the histogram", "right bin", "histogram's right bin")
REPLICAS = (
    *("replica", "model", "slots", "KV cache", "phase", "unread tokens", "slowness", "step margin", "prefix hits"),
    "now",
)
PARTS = ("part", "acts", "how, or why not", "of")
BINS = ("model", "bin", "answer's tokens", "waiting", "ended lately", "of these in it")
OFF = ("off", "with", "replicas")
RECENT = (
    *("ended", "request", "class", "bin", "prompt", "predicted", "answer"),
    *("waited", "first token", "replica", "", "outcome"),
)
BATCHES = ("batch", "model", "endpoint", "now", "done", "failed", "expected end", "window ends")


def table(title: str, heads: Row, rows: Iterable[Row], empty: str) -> Any:
    from rich import box
    from rich.table import Table

    looks: Any = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    made = Table(title=f"\n{title}" if title else None, pad_edge=False, show_edge=False, **looks)
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
    versions = ", ".join(f"{name} {built[key]}" for name, key in _BUILT if built.get(key))
    names = ", ".join(plain(each["model"]) for each in models)
    counts = f"{_several(replicas, 'replica')} · {_several(status['routers'], 'router')}{_sessions(models)}"
    return f"{names} · {counts} · {versions}"


def _sessions(models: Iterable[Mapping[str, Any]]) -> str:
    """Nothing where none is known; the pause is that of the model with most of them."""
    found = [each["sessions"] for each in models if each.get("sessions", {}).get("known")]
    if not found:
        return ""
    pause_s = max(found, key=lambda each: each["known"])["median_pause_s"]
    known = _several(sum(each["known"] for each in found), "session")
    return f" · {known}" + ("" if pause_s is None else f", which pause {seconds(pause_s)} in the median")


_BUILT = (("Sluice", "version"), ("vLLM", "vllm"), ("Ray", "ray"))


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _models(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [status, *status.get("more_models", ())]


def class_rows(looked: Looked) -> Iterator[Row]:
    for name, promised in sorted(looked.status["classes"].items()):
        waiting = sum(count for lane, count in looked.status["waiting"].items() if lane.rpartition(":")[0] == name)
        ended = _total(looked, "sluice_slo_requests_total", name)
        met = _total(looked, "sluice_slo_requests_total", name, ttft="met", tpot="met", e2e="met")
        late, refused = (_total(looked, f"sluice_{what}_requests_total", name) for what in ("late", "refused"))
        targets = (seconds(promised[key]) if promised[key] else "none" for key in ("ttft_s", "tpot_s", "e2e_s"))
        counts = (number(waiting), number(ended), percent(met / ended if ended else None), number(late))
        yield (name, *targets, *counts, number(refused))


def _total(looked: Looked, metric: str, slo_class: str, **labels: str) -> float:
    wanted = {"slo_class": slo_class, **labels}.items()
    return sum(value for name, found, value in looked.metrics if name == metric and wanted <= found.items())


def _candidates(status: Mapping[str, Any]) -> list[Any]:
    """Its table, where there is one."""
    rows = list(candidate_rows(status))
    return [table("Candidates", CANDIDATES, rows, "")] if rows else []


def candidate_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    """What is compared of each candidate and its incumbent, and what follows."""
    for each in status.get("candidates", ()):
        copies = " in copies" if each["mirror"] else ""
        words = [each[name].replace("_", " ") for name in ("in_force", "verdict")]
        head = (each["model"], each["of"], f"{percent(each['share'])}{copies}", *words)
        yield (*head, "candidate", *_of_version(each["candidate"]), number(each["copies_left_out"]))
        yield ("", "", "", "", "", "incumbent", *_of_version(each["incumbent"]), "")


def _of_version(told: Mapping[str, Any]) -> Row:
    missed = _mean(told["missed"], told["kept"] + told["missed"])
    means = (number(told["mean_output_tokens"], 1), seconds(told["mean_whole_s"]))
    return (number(told["requests"]), percent(missed), number(told["failed"]), *means)


def _predictor(looked: Looked) -> list[Any]:
    """Its table, where there is one."""
    rows = list(predictor_rows(looked))
    return [table("Predicted lengths", PREDICTOR, rows, "")] if rows else []


def predictor_rows(looked: Looked) -> Iterator[Row]:
    """By model and class: whether the learned predictor is believed, and what it does better than the histogram."""
    told = {
        (name, labels.get("model", ""), labels.get("slo_class", "")): value for name, labels, value in looked.metrics
    }
    for name, model, slo_class in sorted(key for key in told if key[0] == "sluice_predictor_believed"):
        found = (told.get((f"sluice_predictor_{key}", model, slo_class)) for key in _PREDICTED)
        better, *right = (None if each is None or math.isnan(each) else each for each in found)
        used = "yes" if told[name, model, slo_class] else "no, it has not proved better"
        yield (slo_class, model, used, number(better, 2), *map(percent, right))


_PREDICTED = ("advantage", "hit_ratio", "reference_hit_ratio")


def replica_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    for each in _models(status):
        for group, pool in (("", each), ("prefill ", each.get("prefill") or {"replicas": {}})):
            for replica_id, load in pool["replicas"].items():
                yield (replica_id, f"{group}{each['model']}", *_of_replica(load))
        if why := each.get("without_replicas"):
            yield (NONE, each["model"], *[NONE] * 7, why)


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
        percent(engine.get("step_margin")),
        percent(hits),
        load["now"],
    )


def part_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    """Which parts of the policy act, how or why not, and of which models or replicas; and what steps held."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for each in _models(status):
        owners = [(each["model"], each)]
        for pool in (each, each.get("prefill") or {"replicas": {}}):
            owners += pool["replicas"].items()
        for name, owner in owners:
            for part, told in owner.get("parts", {}).items():
                found.setdefault((part.replace("_", " "), "yes" if told["acts"] else "no", told["why"]), []).append(
                    name
                )
            if steps := owner.get("steps_in_words"):
                found.setdefault(("steps", NONE, steps), []).append(name)
    for (part, acts, why), names in found.items():
        yield (part, acts, why, ", ".join(names))


def _bins(status: Mapping[str, Any]) -> list[Any]:
    """Its table, where bins act."""
    rows = list(bin_rows(status))
    return [table("Bins", BINS, rows, "")] if rows else []


def bin_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    """Where bins act: what each holds, and how many of the answers that were predicted to be in it were."""
    for each in _models(status):
        if not each.get("parts", {}).get("bins", {}).get("acts"):
            continue
        ended = [one for one in each.get("recent_requests", ()) if one["outcome"] == "stop"]
        for index, (least, below) in enumerate(itertools.pairwise([None, *each["bin_edges_tokens"][1:-1], None])):
            answers = [one["output_tokens"] for one in ended if one["bin"] == index]
            right = sum((least or 0) <= tokens < (below or math.inf) for tokens in answers)
            yield (
                each["model"],
                number(index),
                _between(least, below),
                number(sum(count for lane, count in each["waiting"].items() if lane.endswith(f":{index}"))),
                number(len(answers)),
                percent(right / len(answers) if answers else None),
            )


def _between(least: float | None, below: float | None) -> str:
    return " ".join(f"{word} {number(edge)}" for word, edge in (("from", least), ("below", below)) if edge) or "any"


def _switched_off(status: Mapping[str, Any]) -> list[Any]:
    """Its table, where anything is off."""
    rows = list(off_rows(status))
    return [table("Switched off", OFF, rows, "")] if rows else []


def off_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    """What replicas cannot do, why, and which replicas."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in _models(status):
        for pool in (each, each.get("prefill") or {"replicas": {}}):
            for replica_id, load in pool["replicas"].items():
                for feature, why in load["engine"].get("off", {}).items():
                    found.setdefault((feature.replace("_", " "), ", ".join(why.values())), []).append(replica_id)
    for (feature, why), replicas in found.items():
        yield (feature, why, ", ".join(replicas))


def promise_rows(looked: Looked) -> Iterator[Row]:
    """By class, of all requests so far: which target was missed, and the mean of the mean times per token of whole
    answers that were promised one."""
    for name in sorted(looked.status["classes"]):
        if not (ended := _total(looked, "sluice_slo_requests_total", name)):
            continue
        missed = (_total(looked, "sluice_slo_requests_total", name, **{target: "missed"}) for target in _TARGETS)
        whole = _total(looked, "sluice_engine_promised_requests_total", name)
        sums = [_total(looked, "sluice_engine_promise_gap_seconds_total", name, of=of) for of in _GAPS]
        client = (_total(looked, f"sluice_promise_gap_seconds_{what}", name) for what in ("sum", "count"))
        means = [_mean(total_s, whole) for total_s in sums] + [_mean(*client)]
        off_s, first_s = (
            _total(looked, f"sluice_{what}_seconds_total", name) for what in ("ttft_error", "foreseen_ttft")
        )
        first, *others = (percent(each / ended) for each in missed)
        yield (name, first, percent(_mean(off_s, first_s)), *others, *map(seconds, means))


_TARGETS = ("ttft", "tpot", "e2e")
_GAPS = ("promised", "believed", "in_steps", "came")


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def recent_rows(status: Mapping[str, Any]) -> Iterator[Row]:
    for each in status.get("recent_requests", ())[:SHOWN]:
        moved = f"moved {each['moves']}×" if each["moves"] else ""
        recalled = f"recalled {each['recalls']}×" if each["recalls"] else ""
        yield (
            f"{datetime.fromtimestamp(each['at']):%H:%M:%S}",
            short(each["request_id"]),
            each["slo_class"],
            number(each["bin"]),
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
