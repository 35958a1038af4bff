"""Traces and sets of lengths out of files, by the names of their columns.

CSV (gzipped or not) with a row per request, CSV of length probabilities (`kind,tokens_upto,probability`), JSON Lines,
and the JSON documents of `simulator.documents`. Columns of others' traces are read by their own names and units
(`simulator.forms`). Lengths in words or characters become tokens by plain factors, which are guesses: columns of tokens
go before. What a file says that cannot be understood is an error that names the line; nothing is put in its place.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from policies.errors import InputError
from policies.strict_text import csv_rows, is_writable, json_lines, json_value
from policies.types import FloatArray, IntArray
from simulator.documents import requests_of
from simulator.forms import DATE, UNITS, Tell, rename
from simulator.profiles import opened
from simulator.trace_table import Table, is_count
from simulator.workload import Workload

MAX_ROWS = 5_000_000
MAX_DOCUMENT_CHARS = 1 << 30
_LABELS = ("slo_class", "class", "client", "agent_kind", "source")
# Suffix of a column and tokens per unit, the surest first: 1.33 per word holds for plain English only.
_UNITS = tuple(zip(UNITS, (1.0, 0.25, 1.33), strict=True))
# Columns of arrivals, their unit in seconds and in words.
_SECONDS = {"arrival_s": (1.0, "seconds"), "arrival_ms": (1e-3, "milliseconds")}
_MOST_S = 1e11  # of a time: beyond the year 5000, so that one since 1970 is in another unit
# Columns that others call so hold seconds, milliseconds or dates: only the file's author knows which.
_TIMES = (
    "timestamp",
    "time",
    "ts",
    "arrival",
    "arrival_time",
    "arrived",
    "start_time",
    "created",
    "created_at",
    "date",
)
Numbered = Iterable[tuple[int, Mapping[str, Any]]]


def read_workload(
    path: Path, *, rng: Generator, prompt_tokens: int | None = None, tell: Tell | None = None
) -> Workload:
    """Any file of requests or of lengths. Without arrival times in it, all arrive at once.

    Sessions of unknown start begin evenly over the first hour, drawn by rng.

    Args:
        prompt_tokens: for files without prompts.
        tell: takes what was left out, passed over or guessed.

    Raises:
        InputError: the file cannot be read, lacks a column that is needed, or says something that is not understood;
            the message says what and where.
    """
    name, said = path.name.split(".")[0], tell or _untold
    try:
        with opened(path) as file:
            if ".json" in path.suffixes:
                text = file.read(MAX_DOCUMENT_CHARS + 1)
                if len(text) > MAX_DOCUMENT_CHARS:
                    raise InputError(
                        f"{path} has more than {MAX_DOCUMENT_CHARS} characters: write it as lines (.jsonl)"
                    )
                return _of_document(name, path, text, rng, prompt_tokens, said)
            is_json = ".jsonl" in path.suffixes
            rows = json_lines(file, str(path), texts=False) if is_json else csv_rows(file, str(path))
            first = list(islice(rows, 1))
            if first and "probability" in first[0][1]:
                return _of_probabilities(name, _table(str(path), "line", chain(first, rows)), rng)
            return _of_table(name, _table(str(path), "line", chain(first, rows)), rng, prompt_tokens, said)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _untold(text: str) -> None:
    """Nobody asked."""


def _of_document(name: str, path: Path, text: str, rng: Generator, prompt_tokens: int | None, tell: Tell) -> Workload:
    """A whole JSON document; lines of objects, which some write under that name as well, are read as such."""
    try:
        value = json_value(text, texts=False)
    except ValueError as error:
        if not _has_lines(text):
            raise InputError(f"{path}: {error}") from error
        lines = json_lines(text.split("\n"), str(path), texts=False)
        return _of_table(name, _table(str(path), "line", lines), rng, prompt_tokens, tell)
    rows = requests_of(value, str(path), tell)
    return _of_table(name, _table(str(path), "entry", rows), rng, prompt_tokens, tell)


def _has_lines(text: str) -> bool:
    """Its first line is an object, as that of a document over several lines is not."""
    try:
        return isinstance(json.loads(text.strip().partition("\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def _table(name: str, entry: str, rows: Numbered) -> Table:
    listed = list(islice(rows, MAX_ROWS + 1))
    if len(listed) > MAX_ROWS:
        raise InputError(f"{name} has more than {MAX_ROWS} rows: take a part of it")
    # JSON rows need not all have the same keys.
    columns = dict.fromkeys(column for _, row in listed for column in row)
    if broken := [column for column in columns if not is_writable(column)]:
        raise InputError(f"{name}: the name {broken[0]!r} holds half of a surrogate pair")
    table = {column: [row.get(column) for _, row in listed] for column in columns}
    return Table(name, entry, [place for place, _ in listed], table)


def _of_table(name: str, table: Table, rng: Generator, prompt_tokens: int | None, tell: Tell) -> Workload:
    rename(table, tell)
    _count_prompts(table)
    outputs = _lengths(table, "output", tell)
    if outputs is None:
        has = ", ".join(map(repr, table.columns)) or "no rows"
        raise InputError(f"{table.name} needs output_tokens (or _chars, _words), has {has[:300]}")
    prompts = _lengths(table, "prompt", tell)
    prompts = _lengths(table, "context", tell) if prompts is None else prompts
    if prompts is None:
        if prompt_tokens is None:
            raise InputError(f"{table.name} has no prompt lengths: name one with prompt_tokens (--prompt-tokens)")
        prompts = np.full(len(outputs), prompt_tokens)
    label = next((column for column in _LABELS if column in table.columns), None)
    workload = Workload.of(
        name,
        _arrivals(table, rng, tell),
        prompts,
        outputs,
        cached_tokens=_optional(table, "reusable_prefix_tokens", "number of tokens", is_count, missing=0.0),
        predicted_output_tokens=_optional(
            table, "predicted_output_tokens", "length", lambda x: x > 0.0, missing=math.nan
        ),
        slo_class=_texts(table, label) if label else None,
        session=_sessions(table),
        api_key=_texts(table, "api_key"),
    )
    if passed_over := [column for column in table.columns if column not in table.used and column]:
        tell(f"columns that mean nothing here are passed over: {', '.join(passed_over)}"[:300])
    return workload


def _count_prompts(table: Table) -> None:
    """Prompts that stand there as texts, as messages or as ids of tokens, as their lengths."""
    column = next((each for each in ("prompt", "messages") if each in table.columns), None)
    if column is None:
        return
    if "prompt_tokens" in table.columns or "prompt_chars" in table.columns:
        table.used.add(column)
        return
    counted = [_prompt_length(table, at, value) for at, value in enumerate(table.take(column) or ())]
    units = {unit for unit, _ in counted}
    if len(units) > 1:
        raise InputError(f"{table.name}: some of {column} are texts and some ids of tokens")
    for unit in units:
        table.columns[f"prompt_{unit}"] = [length for _, length in counted]


def _prompt_length(table: Table, at: int, value: Any) -> tuple[str, int]:
    if isinstance(value, str):
        return "chars", len(value)
    if isinstance(value, list) and value:
        if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            return "tokens", len(value)
        return "chars", sum(_message_chars(table, at, each) for each in value)
    raise table.wrong(at, f"{str(value)[:60]!r} is no prompt: a text, messages, or ids of tokens")


def _message_chars(table: Table, at: int, message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise table.wrong(at, "the prompt has a message that is not a text: how many tokens that is, nobody knows here")
    return sum(map(len, map(str, texts)))


def _optional(
    table: Table, name: str, what: str, is_one: Callable[[float], bool], *, missing: float
) -> FloatArray | None:
    return table.numbers(name, what, is_one, missing) if name in table.columns else None


def _texts(table: Table, name: str) -> list[str] | None:
    """Of a column whose values stand in what is written."""
    values = table.take(name)
    if values is None:
        return None
    texts = ["" if value is None else str(value) for value in values]
    if (broken := next((at for at, text in enumerate(texts) if not is_writable(text)), None)) is not None:
        raise table.wrong(broken, f"{name} is {texts[broken]!r}"[:100] + ", which holds half of a surrogate pair")
    return texts


def _sessions(table: Table) -> list[str] | None:
    """By what they share: the agents of a session have prompts of their own."""
    if "session" not in table.columns or "reusable_prefix_tokens" not in table.columns:
        return None
    sessions, agents = _texts(table, "session") or [], _texts(table, "agent")
    return [f"{session}/{agent}" for session, agent in zip(sessions, agents or [""] * len(sessions), strict=True)]


def _lengths(table: Table, what: str, tell: Tell) -> IntArray | None:
    """By the surest unit of which every row has some; by the surest of all where no unit has. An empty text counts as
    one token, for something has to be read and made."""
    there = [(f"{what}_{suffix}", factor) for suffix, factor in _UNITS if f"{what}_{suffix}" in table.columns]
    if not there:
        return None
    table.used.update(name for name, _ in there)
    whole = [each for each in there if all(value not in (None, "") for value in table.columns[each[0]])]
    name, factor = (whole or there)[0]
    numbers = table.numbers(name, "length", is_count, None)
    if empty := np.flatnonzero(numbers == 0.0).tolist():
        place = f"{table.entry} {table.places[empty[0]]}"
        tell(f"{len(empty)} times {table.called(name)} is 0, first in {place}: that counts as one token")
    if factor != 1.0:
        tell(f"{name} counts as {factor:g} tokens for each: a guess")
    return np.rint(numbers * factor).astype(np.int64)


def _arrivals(table: Table, rng: Generator, tell: Tell) -> FloatArray:
    """Seconds from anywhere; zeros where the file says nothing of arrivals."""
    columns = table.columns
    if (name := next((each for each in _SECONDS if each in columns), None)) is not None:
        unit_s, unit = _SECONDS[name]
        return table.numbers(name, f"time in {unit}", lambda x: abs(x) * unit_s < _MOST_S, None) * unit_s
    if "t_in_session_s" in columns:
        tell("it does not say when sessions begin: evenly over an hour, drawn")
        return _of_sessions(table, rng)
    name = next((each for each in columns if each == DATE or each.lower() in _TIMES), None)
    return np.zeros(len(table.places)) if name is None else _dates(table, name)


def _of_sessions(table: Table, rng: Generator) -> FloatArray:
    times = table.numbers("t_in_session_s", "time", lambda x: True, None)
    if (sessions := _texts(table, "session")) is None:
        raise InputError(f"{table.name} has t_in_session_s, and no column session")
    _, session = np.unique(np.array(sessions), return_inverse=True)
    starts = rng.uniform(0.0, 3600.0, int(session.max()) + 1)
    return np.asarray(times + starts[session])


def _dates(table: Table, name: str) -> FloatArray:
    """Dates with times of day; without a zone they are taken to be of one."""
    moments = list[float]()
    for at, value in enumerate(table.take(name) or ()):
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            raise table.wrong(at, f"{table.called(name)} is {value!r}"[:100] + _NO_DATE) from None
        if str(value).isdigit():  # would be read as a day without a time
            raise table.wrong(at, f"{table.called(name)} is {value!r}"[:100] + _NO_DATE)
        moments.append((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    return np.array(moments)


_NO_DATE = ", which is no date with a time: a column of seconds is called arrival_s, one of milliseconds arrival_ms"


def _of_probabilities(name: str, table: Table, rng: Generator, count: int = 100_000) -> Workload:
    """Prompts and outputs drawn independently of each other from published probabilities."""
    kinds, drawn = _texts(table, "kind"), {}
    if kinds is None or "tokens_upto" not in table.columns:
        raise InputError(f"{table.name} needs kind, tokens_upto and probability, has {', '.join(table.columns)}")
    uptos = table.numbers("tokens_upto", "length", is_count, None).astype(np.int64)
    weights = table.numbers("probability", "probability", lambda x: x >= 0.0, None)
    for kind in ("prompt", "output"):
        mine = np.array([each == kind for each in kinds])
        upto, weight = uptos[mine], weights[mine]
        if not weight.sum() > 0.0 or not np.all(np.diff(upto) > 0):
            raise InputError(f"{table.name}: the lengths of kind {kind} must rise, with probabilities above 0")
        cell = rng.choice(len(upto), size=count, p=weight / weight.sum())
        low = np.concatenate(([0], upto[:-1]))
        drawn[kind] = low[cell] + 1 + (rng.random(count) * (upto - low)[cell]).astype(np.int64)
    return Workload.of(name, np.zeros(count), drawn["prompt"], drawn["output"])
