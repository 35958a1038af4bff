"""Training data from one's own traffic: Sluice's request log joined with the prompts that one has kept oneself.

Routers log one JSON line a request, with its id, output tokens and how its answers ended; prompts are not logged, for
they are the users'. A gateway or an application that keeps prompts keeps them under the X-Request-Id that Sluice
answers with. A request of several answers, or one that broke off, says nothing of how long an answer is.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from policies.errors import InputError
from predictor.samples import open_text

WHOLE = (["stop"], ["length"], ["repetition"])


def export(logs: Iterable[Path], prompts: Path, out: Path) -> int:
    """Write a sample for each request that is in both; returns their number.

    Raises:
        InputError: a file cannot be read or `prompts` has a line without request_id and prompt.
    """
    answers = {row["request_id"]: row for log in logs for row in _requests(log)}
    count = 0
    with out.open("w", encoding="utf-8") as written:
        for prompt in _prompts(prompts):
            answer = answers.pop(prompt["request_id"], None)
            if answer is not None:
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
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("outcomes") in WHOLE and row.get("output_tokens") and "request_id" in row:
            yield row


def _prompts(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            row["request_id"], row["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number} is no object with request_id and prompt: {error!r}") from error
        yield row


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_text(path) as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
