"""Prompts and the lengths of their answers, as JSON Lines: what a predictor is trained and judged on.

One object a line, in a file or a .gz of one:

    prompt          the text                                                            needed
    output_tokens   the answer's tokens; or output_chars, its characters                 one of them needed
    model           that answered: lengths of several models are never mixed unawares     default ""
    max_tokens      the limit it ran under (also max_new_tokens)
    finish_reason   "length" when the limit cut it

Answers cut at their limit say only that they would have been longer. Without tokens, four characters count as one:
safer on code and mathematics than a multiple of words.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from policies.errors import InputError
from policies.strict_text import json_lines

CHARS_PER_TOKEN = 4.0
CUT_FRACTION = 0.97  # tokens counted by characters miss a limit by a little


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer; output_tokens > 0. source names the set it came from."""

    prompt: str
    output_tokens: float
    model: str
    source: str
    is_cut: bool


def read_samples(paths: Iterable[Path]) -> list[Sample]:
    """All samples of the files, in order.

    Raises:
        InputError: a file cannot be read or a line is no sample; names file and line.
    """
    samples = [sample for path in paths for sample in _read(path)]
    if not samples:
        raise InputError("the files hold no samples")
    return samples


def _read(path: Path) -> Iterator[Sample]:
    try:
        with open_text(path) as lines:
            for number, row in json_lines(lines, str(path)):
                yield _sample(row, source_name(path), f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def source_name(path: Path) -> str:
    """`gsm8k_human_test.jsonl.gz` is gsm8k_human: train and test parts of a set share its name."""
    name = path.name.split(".")[0]
    return name.removesuffix("_train").removesuffix("_test")


def _sample(row: dict[str, Any], source: str, place: str) -> Sample:
    try:
        prompt, tokens = row["prompt"], _tokens(row)
        is_cut = _is_cut(row, tokens)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place} is no sample with prompt and output_tokens or output_chars: {error!r}") from error
    if not isinstance(prompt, str) or not 0.0 <= tokens < float("inf"):
        raise InputError(f"{place}: prompt must be a text and output_tokens at least 0, got {tokens}")
    return Sample(
        prompt=prompt,
        output_tokens=max(tokens, 1.0),
        model=str(row.get("model") or ""),
        source=source,
        is_cut=is_cut,
    )


def _tokens(row: dict[str, Any]) -> float:
    if row.get("output_tokens") is not None:
        return _number(row["output_tokens"])
    return _number(row["output_chars"]) / CHARS_PER_TOKEN


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(f"{value} is no number")
    return float(value)


def _is_cut(row: dict[str, Any], tokens: float) -> bool:
    if row.get("finish_reason") is not None:
        return bool(row["finish_reason"] == "length")
    given = [row[name] for name in ("max_tokens", "max_new_tokens") if row.get(name) is not None]
    if not given:
        return False
    if not (limit := _number(given[0])) > 0.0:
        raise ValueError(f"{limit:g} is no limit: leave it out where there was none")
    return tokens >= CUT_FRACTION * limit


def split_by_prompt(
    samples: Sequence[Sample], held_out_fraction: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Parts to learn from and to check on; a prompt lies wholly in one of them, the same for every run with a seed."""
    kept: list[Sample] = []
    held: list[Sample] = []
    for sample in samples:
        digest = hashlib.blake2b(f"{seed}:{sample.prompt}".encode(), digest_size=8).digest()
        is_held = int.from_bytes(digest) < held_out_fraction * 2**64
        (held if is_held else kept).append(sample)
    return kept, held
