"""What is wrong with a configuration, in words that name the key, what was given, and the way out.

A value is shown only where the key takes a number, a switch or one of some words: any other may be a secret.
"""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from deployments.config.gone import GONE
from deployments.config.reference import Key, all_keys, below, find, matches, nearest

ARGUMENTS = 'one item for each word, as in [--max-model-len, "8192"]'
_IN_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_IN_BYTES = {
    f"{letter}{i}{b}": float((1024 if i else 1000) ** power)
    for power, letter in enumerate("kMGT", 1)
    for i in ("", "i")
    for b in ("", "B")
}
_ARTICLES = {"integer": "an ", **dict.fromkeys(("number", "list", "mapping", "path"), "a ")}
_SHOWN_CHARS = 60


def what_is_wrong(error: ValidationError, model: type[BaseModel], *, shows_values: bool = True) -> list[str]:
    """A line for each fault, beginning with the path of its key; "settings" stands for all of them together."""
    faults = error.errors(include_url=False)
    return [f"{_path(each['loc']) or 'settings'}: {_why(each, all_keys(model), shows_values)}" for each in faults]


def _path(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _why(fault: Any, keys: Sequence[Key], shows_values: bool) -> str:
    kind, given = fault["type"], fault["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):  # of a section, of a policy's own settings
        return _no_such_key(_path(fault["loc"]), keys)
    if kind == "missing":
        return "is needed"
    if "error" in fault.get("ctx", {}):  # of a check of our own
        return str(fault["ctx"]["error"])
    key = find(keys, _path(fault["loc"]))
    if key is None or kind.startswith("string_") and kind != "string_type":  # of its form
        return re.sub("^(Input|String) should", "must", str(fault["msg"]))
    if kind == "too_short":
        return f"needs at least {fault['ctx']['min_length']}"
    if key.name == "vllm_args":
        return f"must be a list of text, {ARGUMENTS}{_quoted(given)}"
    got = f", got {_shown(given)}{_converted(given, key)}" if shows_values and _takes_no_secret(key) else ""
    kind = key.type.replace("section", "mapping of settings")
    return f"must be {_ARTICLES.get(kind.split()[0], '')}{kind}{key.in_unit}{got}"


def _no_such_key(path: str, keys: Sequence[Key]) -> str:
    """What has become of it, or the key that is most like it, or all that may stand there."""
    if (why := next((why for old, why in GONE.items() if matches(old, path)), None)) is not None:
        return f"is gone: {why}"
    if (found := nearest(keys, path)) is not None:
        return f"there is no such key; did you mean {found[0]}{found[1].in_unit}?"
    beside = below(keys, path.rpartition(".")[0])
    return f"there is no such key; these may stand there: {', '.join(key.name for key in beside)}"


def _takes_no_secret(key: Key) -> bool:
    return bool(re.match("integer|number|true or false|one of", key.type))


def _shown(value: Any) -> str:
    """No longer than a line, and of a mapping or list nothing but what it is."""
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _converted(value: Any, key: Key) -> str:
    """What to write in place of `10m` or `64Mi`; "" where that is not known."""
    scales = {"seconds": _IN_SECONDS, "bytes": _IN_BYTES}.get(key.unit, {})
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip()) if isinstance(value, str) else None
    scale = scales.get(found[2]) if found else None
    return "" if found is None or scale is None else f": write {float(found[1]) * scale:.12g}"


def _quoted(value: Any) -> str:
    """A number that YAML has made of a word."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f": put {value} in quotes" if is_number else f"; got {_shown(value)}" if isinstance(value, dict) else ""
