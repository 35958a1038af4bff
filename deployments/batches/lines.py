"""Lines of a batch's input: what each must be, and whether all of them together are a batch."""

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from policies.errors import SluiceError

MAX_LINE_BYTES = 16 << 20  # more than the body of any request may have
MAX_ERRORS = 100  # told of a batch: a user with that many corrects the program that made the file
MAX_BLANK_LINES = 100_000  # each is read, and has its bit in the memory of what runs the batch, as any other
MAX_CUSTOM_ID_CHARS = 512  # each stands in a line of output
_SHOWN_CHARS = 64  # of a refused value, in the message


class LineError(msgspec.Struct, frozen=True):
    """An entry of OpenAI's `Batch.errors`; lines are counted from 1, None stands for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class WrongLineError(SluiceError):
    """A line that is no request of its batch."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None


_line, _body = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` is its line's, from 1; `body` is JSON as it stands in the file."""

    number: int
    custom_id: str
    model: str
    body: bytes


def parsed(number: int, raw: bytes, endpoint: str) -> Line:
    """Raises WrongLineError, which says what is wrong with it."""

    def wrong(code: str, message: str, param: str | None = None) -> WrongLineError:
        return WrongLineError(LineError(code, message, number, param))

    if len(raw) > MAX_LINE_BYTES:
        raise wrong("line_too_long", f"the line exceeds {MAX_LINE_BYTES} bytes")
    try:
        line = _line.decode(raw)
        body = bytes(line.body)
        asked = _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong("invalid_json_line", f"not a line of a batch: {error}") from error
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters, got {len(line.custom_id)}"
        raise wrong("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        raise wrong("invalid_method", f"method must be POST, got {line.method[:_SHOWN_CHARS]!r}", "method")
    if line.url != endpoint:
        raise wrong(
            "invalid_url", f"url must be the batch's endpoint, {endpoint}, got {line.url[:_SHOWN_CHARS]!r}", "url"
        )
    if asked.stream:
        raise wrong("invalid_request", "stream: nobody reads a stream here, leave it out", "body.stream")
    return Line(number, line.custom_id, asked.model, body)


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """From 1, without those that are blank."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


@dataclass(slots=True)
class Validation:
    """The result of validating a whole input.

    Attributes:
        total: its requests.
        last: the number of its last line.
        model: the one model that all of them name.
        errors: at most MAX_ERRORS; none in a batch that may run.
    """

    total: int = 0
    last: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


def validated(lines: Iterable[bytes], endpoint: str, models: Collection[str], max_lines: int) -> Validation:
    """Reads until the end or until enough is wrong, with 16 bytes of memory for each line.

    Args:
        models: names of all models that the application serves.
    """
    found, digests, numbers = Validation(), array("Q"), array("Q")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            if number - found.total > MAX_BLANK_LINES:
                found.errors.append(LineError("too_many_blank_lines", f"more than {MAX_BLANK_LINES} blank lines"))
                return found
            continue
        found.total, found.last = found.total + 1, number
        if found.total > max_lines:
            found.errors.append(LineError("too_many_lines", f"more than {max_lines} requests (batches.max_lines)"))
            return found
        try:
            line = parsed(number, raw, endpoint)
            _check_model(line, found.model, models)
            found.model = line.model
        except WrongLineError as wrong:
            found.errors.append(wrong.error)
            if len(found.errors) == MAX_ERRORS:
                return found
        else:
            digests.append(_digest(line.custom_id))
            numbers.append(number)
    if not found.total:
        found.errors.append(LineError("empty_file", "the input file has no lines"))
    found.errors += _repeated(digests, numbers)[: MAX_ERRORS - len(found.errors)]
    return found


def _check_model(line: Line, others: str | None, models: Collection[str]) -> None:
    """Raises WrongLineError: it is not served, or not that of the lines before."""
    named = repr(line.model[:_SHOWN_CHARS])
    if line.model not in models:
        message = f"no model {named}; there are {', '.join(sorted(models))}"
        raise WrongLineError(LineError("model_not_found", message, line.number, "body.model"))
    if others not in (None, line.model):
        message = f"one batch asks one model: this line names {named}, others {others!r}"
        raise WrongLineError(LineError("mismatched_model", message, line.number, "body.model"))


def _digest(custom_id: str) -> int:
    """In one of 10^9 batches of 100 000 lines two are alike by chance."""
    return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest())


def _repeated(digests: "array[int]", numbers: "array[int]") -> list[LineError]:
    order = np.argsort(np.asarray(digests), kind="stable")
    pairs = ((numbers[a], numbers[b]) for a, b in pairwise(order.tolist()) if digests[a] == digests[b])
    return [
        LineError("duplicate_custom_id", f"custom_id is that of line {before} already", number, "custom_id")
        for before, number in sorted(pairs, key=lambda pair: pair[1])
    ]
