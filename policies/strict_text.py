"""CSV and JSON as Python reads them, but for what it drops, merges or turns into something else without a word."""

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from policies.errors import InputError

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_OTHERS = re.compile(r"[;\t|]")  # what separates columns elsewhere
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def csv_rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows with the numbers of their lines, by columns; lines without anything are passed over.

    Args:
        name: what errors call the file.

    Raises:
        InputError: the first line holds no names, or not between commas, two columns have one name, a row has more or
            fewer fields than there are columns, or a field ends nowhere; it names the line.
    """
    reader = csv.reader(lines, strict=True)
    columns: Sequence[str] | None = None
    try:
        for fields in reader:
            if not any(field.strip() for field in fields) and len(fields) <= 1:
                continue
            if columns is None:
                columns = _columns(fields, f"{name}, line {reader.line_num}")
            elif len(fields) != len(columns):
                raise InputError(
                    f"{name}, line {reader.line_num}: {len(fields)} fields, and there are {len(columns)} columns"
                )
            else:
                yield reader.line_num, dict(zip(columns, fields, strict=True))
    except csv.Error as error:
        raise InputError(f"{name}, line {reader.line_num}: {error}") from error


def _columns(fields: Sequence[str], place: str) -> list[str]:
    """Columns without a name may be several: nobody asks for them."""
    columns = [field.removeprefix("\ufeff").strip() for field in fields]
    if len(columns) == 1 and _OTHERS.search(columns[0]):
        raise InputError(f"{place}: commas separate columns, and this line has {columns[0]!r}")
    if _NUMBER.fullmatch(columns[0]):
        raise InputError(f"{place}: the names of the columns must stand there, and the first is {columns[0]!r}")
    if twice := [column for column, count in Counter(columns).items() if count > 1 and column]:
        raise InputError(f"{place}: there is more than one column {twice[0]!r}")
    return columns


def json_value(text: str, *, texts: bool = True) -> Any:
    """What it says.

    Args:
        texts: are worked with, so that each must be one that can be written; half of a surrogate pair can not.

    Raises:
        ValueError: it is no JSON, an object has a name twice, a number is none (NaN, Infinity), a text is none, or it
            is nested too deeply.
    """
    try:
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if texts and _HALF_OF_A_PAIR.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"a text holds half of a surrogate pair, \\u{ord(half):04x}") from None
    return value


def is_writable(text: str) -> bool:
    """It holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice[:64]!r} stands there more than once")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def json_lines(lines: Iterable[str], name: str, *, texts: bool = True) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects with the numbers of their lines; lines without anything are passed over.

    Raises:
        InputError: a line is no object, or as `json_value`; it names the line.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip().removeprefix("\ufeff"):
            continue
        try:
            value = json_value(line, texts=texts)
        except ValueError as error:
            raise InputError(f"{name}, line {number}: {error}") from error
        if not isinstance(value, dict):
            raise InputError(f"{name}, line {number}: {line.strip()[:64]!r} is no object")
        yield number, value
