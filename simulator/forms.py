"""Public traces, by the names and units of their columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.trace_table import Table, is_count

UNITS = ("tokens", "chars", "words")
"""What our columns of lengths end in, the surest first."""
DATE = "arrived_at"
Tell = Callable[[str], None]
"""Takes a sentence on what was made of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A public trace, by the names of its columns.

    Attributes:
        columns: theirs, each with ours or with "". A file that has all of them is one.
        block_tokens: tokens of a block in `hash_ids`.
        zero_failed: requests that failed have answers of 0 tokens.
    """

    name: str
    columns: Mapping[str, str]
    block_tokens: int | None = None
    zero_failed: bool = False


_LENGTHS = {"input_length": "prompt_tokens", "output_length": "output_tokens"}
FORMS = (
    Form(
        name="Azure",  # 2023 and 2024
        columns={"TIMESTAMP": DATE, "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_tokens"},
    ),
    Form(
        name="BurstGPT",
        columns={"Timestamp": "arrival_s", "Request tokens": "prompt_tokens", "Response tokens": "output_tokens"},
        zero_failed=True,
    ),
    Form(name="Qwen-Bailian", columns={"chat_id": "", "timestamp": "arrival_s", **_LENGTHS}, block_tokens=16),
    Form(name="Mooncake", columns={"timestamp": "arrival_ms", **_LENGTHS}, block_tokens=512),
    Form(name="ServeGen's batches", columns={"request_id": "", **_LENGTHS}, block_tokens=16),
    Form(
        name="ServeGen",
        columns={"timestamp": "arrival_s", "input_tokens": "prompt_tokens", "output_tokens": "output_tokens"},
    ),
)


def rename(table: Table, tell: Tell) -> None:
    """Give the columns of a public trace our names, if it is one."""
    ours = any(f"output_{suffix}" in table.columns and f"prompt_{suffix}" in table.columns for suffix in UNITS)
    has = table.columns.keys()
    form = None if ours else next((each for each in FORMS if each.columns.keys() <= has), None)
    if form is None:
        return
    tell(f"read as {form.name}'s")
    renamed = {theirs: name for theirs, name in form.columns.items() if name}
    table.used |= form.columns.keys() - renamed.keys()
    table.theirs = {ours: theirs for theirs, ours in renamed.items()}
    table.columns = {renamed.get(column, column): values for column, values in table.columns.items()}
    if form.zero_failed:
        failed = [at for at, value in enumerate(table.columns["output_tokens"]) if _is_zero(value)]
        if failed:
            place = table.places[failed[0]]
            tell(f"left out {len(failed)} requests that failed, the first in {table.entry} {place}")
            table.without(failed)
    if form.block_tokens is not None and "hash_ids" in table.columns:
        _reuse(table, form.block_tokens)


def _is_zero(value: Any) -> bool:
    try:
        return float(value) == 0.0
    except (TypeError, ValueError):
        return False


def _reuse(table: Table, block_tokens: int) -> None:
    """From the hashes of prompts' blocks, leading tokens that some request before had."""
    seen, reusable = set[Any](), list[int]()
    prompts = table.numbers("prompt_tokens", "length", is_count, None)
    for at, ids in enumerate(table.take("hash_ids") or ()):
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise table.wrong(at, "hash_ids is no list of numbers")
        known = next((index for index, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
        reusable.append(min(known * block_tokens, int(prompts[at])))
    table.columns["reusable_prefix_tokens"] = reusable
