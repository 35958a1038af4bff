"""Training data from one's own traffic: Sluice's request log joined with the prompts that one has kept oneself.

Routers log one JSON line a request, with its id, output tokens and how its answers ended; prompts are not logged, for
they are the users'. A gateway or an application that keeps prompts keeps them under the X-Request-Id that Sluice
answers with. A request of several answers, or one that broke off, says nothing of how long an answer is.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from policies.errors import InputError
from policies.strict_text import json_lines
from predictor.samples import open_text

WHOLE = (["stop"], ["length"], ["repetition"])


def export(logs: Iterable[Path], prompts: Path, out: Path) -> int:
    """Write a sample for each request that is in both; returns their number.

    Which of several answers under one id a prompt had, nobody knows: such ids are left out.

    Raises:
        InputError: a file cannot be read, or `prompts` has a line without request_id and prompt, or an id twice.
    """
    answers: dict[str, dict[str, Any] | None] = {}
    for row in (row for log in logs for row in _requests(log)):
        answers[row["request_id"]] = None if row["request_id"] in answers else row
    count, lines = 0, dict[str, int]()
    with out.open("w", encoding="utf-8") as written:
        for number, prompt in _prompts(prompts):
            request_id = prompt["request_id"]
            if (before := lines.setdefault(request_id, number)) != number:
                raise InputError(f"{prompts}, line {number}: the request_id of line {before} again")
            if (answer := answers.get(request_id)) is not None:
                written.write(json.dumps(_sample(prompt, answer)) + "\n")
                count += 1
    return count


def _sample(prompt: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: prompt[name] for name in ("prompt", "model", "max_tokens") if name in prompt}
    return kept | {"output_tokens": answer["output_tokens"], "finish_reason": answer["outcomes"][0]}


def _requests(log: Path) -> Iterator[dict[str, Any]]:
    """Those with one whole answer; a log holds other lines as well, also such as are no JSON."""
    for line in _lines(log):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        is_one = isinstance(row, dict) and row.get("outcomes") in WHOLE and row.get("output_tokens")
        if is_one and isinstance(row.get("request_id"), str):
            yield row


def _prompts(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in json_lines(_lines(path), str(path)):
        if not isinstance(row.get("request_id"), str) or not isinstance(row.get("prompt"), str):
            raise InputError(f"{path}, line {number} has no request_id and prompt, both of them texts")
        yield number, row


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_text(path) as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
