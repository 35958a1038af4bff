"""A run on record, request by request: what was sent when, and when its tokens came.

Two formats are read. JSON is what `vllm bench serve --save-result --save-detailed` writes, against vLLM or against
Sluice, for both are servers of OpenAI's API. CSV, gzipped or not, has the columns of COLUMNS; others are passed over.
Times are seconds on one clock.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policies.errors import InputError
from policies.strict_text import csv_rows, json_value
from policies.types import FloatArray
from simulator.profiles import opened

Record = dict[str, FloatArray]
COLUMNS = ("queued_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")
_BENCH = ("start_times", "input_lens", "output_lens", "ttfts", "itls")


def read_run(path: Path) -> Record:
    """COLUMNS of the requests that were answered, each of shape (n,); queued_s begins at 0.

    Raises:
        InputError: the file cannot be read, lacks a column, or holds no request that was answered.
    """
    try:
        is_bench = path.suffix == ".json"
        record = _bench(json_value(path.read_text(), texts=False)) if is_bench else columns(path, COLUMNS)
    except InputError:  # a ValueError too
        raise
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"cannot read the run {path}: {error!r}; it needs {_needs(path)}") from error
    answered = record["output_tokens"] >= 1
    if not answered.any():
        raise InputError(f"{path} holds no request that was answered; it needs {_needs(path)}")
    record = {name: column[answered] for name, column in record.items()}
    start_s = record["queued_s"].min()
    return {name: column - start_s if name.endswith("_s") else column for name, column in record.items()}


def columns(path: Path, names: Sequence[str]) -> Record:
    """Columns of numbers of a CSV file.

    Raises:
        OSError, KeyError, ValueError: the file or a column is not there, or holds something else.
        InputError: a row has more or fewer fields than there are columns, or a field that is no number; with the line.
    """
    with opened(path) as file:
        rows = list(csv_rows(file, str(path)))
    return {name: np.array([_number(path, line, name, row[name]) for line, row in rows]) for name in names}


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{path}, line {line}: {name} is {text!r}, which is no number")
    return number


def _bench(found: dict[str, Any]) -> Record:
    start_s, prompts, outputs, ttft_s = (np.array(found[name], dtype=np.float64) for name in _BENCH[:-1])
    first_s = start_s + ttft_s
    last_s = first_s + np.array([sum(gaps_s) for gaps_s in found["itls"]])
    return dict(zip(COLUMNS, (start_s, prompts, outputs, first_s, last_s), strict=True))


def _needs(path: Path) -> str:
    if path.suffix == ".json":
        return f"{', '.join(_BENCH)}, as `vllm bench serve --save-result --save-detailed` writes them"
    return f"the columns {', '.join(COLUMNS)}"
