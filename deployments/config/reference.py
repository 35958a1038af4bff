"""What keys a configuration has: `sluice config`, docs/reference/configuration.md, the chart's schema and table.

Types, bounds and defaults come from the fields of sections, meanings from the text under each field.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

ANY_NAME = "NAME"
CLOSE = 0.7  # of difflib: a letter too many in a short name is above, another word below
_UNITS = (
    (r"seconds_per_token|_s_per_token$", "seconds per token"),
    (r"_per_minute$", "per minute"),
    (r"_s$", "seconds"),
    (r"_bytes$", "bytes"),
    (r"_tokens$", "tokens"),
    (r"^num_gpus$", "GPUs"),
    (r"^num_cpus$", "cores"),
)
_BOUNDS = {
    "minimum": "of at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
_TYPES = {"boolean": "true or false", "null": "null", "array": "list", "object": "mapping"}
LIVE = "x-live"
"""In the schema of what changes while engines serve; see ``section.LiveKey``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key, or one section.

    Attributes:
        path: from the top; NAME stands for any name, [] for each item of a list.
        owner: name of the section whose field it is.
        holds: what the section below it is for; "" where it has a value of its own.
        type: in words, with its bounds.
        default: in JSON; "" for a section that is always there.
        is_needed: it has no default.
        unit: "" where it has none.
        is_live: it changes while engines serve; any other change restarts them.
    """

    path: str
    owner: str
    holds: str
    type: str
    default: str
    is_needed: bool
    unit: str
    meaning: str
    is_live: bool

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2].removesuffix("[]")

    @property
    def in_unit(self) -> str:
        """To be put behind its type, or its name."""
        return f", {'' if self.unit.startswith('per ') else 'in '}{self.unit}" if self.unit else ""

    @property
    def section(self) -> str:
        """Path of the section that it stands in; "" at the top."""
        return self.path.rpartition(".")[0]


def schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema, with a description at every property: that of its section where it has none of its own."""
    made = model.model_json_schema()
    sections = made.get("$defs", {})
    for section in (made, *sections.values()):
        section["description"] = _one_line(section.get("description", ""))
        for value in section.get("properties", {}).values():
            held = sections.get(value.get("$ref", "").rpartition("/")[2], {})
            value["description"] = _one_line(value.get("description") or held.get("description", ""))
    return made


@cache
def all_keys(model: type[BaseModel]) -> tuple[Key, ...]:
    """Depth first, in the order of the fields."""
    made = schema(model)
    return tuple(_keys(model.__name__, made, made.get("$defs", {}), ""))


def _keys(owner: str, section: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[Key]:
    for name, value in section["properties"].items():
        path = f"{prefix}{name}"
        held, joint = _section_in(value, sections)
        yield Key(
            path=path,
            owner=owner,
            holds=sections[held]["description"] if held else "",
            type=_type(value, sections),
            default="" if "$ref" in value else json.dumps(_short(value.get("default"), sections.get(held))),
            is_needed=name in section.get("required", ()),
            unit=_unit(name, value),
            meaning=value["description"],
            is_live=LIVE in value,
        )
        if held:
            below = sections[held]
            if name == "more_models":  # most of whose keys are those at the top
                below = {**below, "properties": _besides(below["properties"], section["properties"])}
            yield from _keys(held, below, sections, f"{path}{joint}")


def _besides(properties: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in known}


def _section_in(value: Mapping[str, Any], sections: Mapping[str, Any]) -> tuple[str, str]:
    """Name of the section that a field holds, and what joins its path to those of the keys below; "" for none."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return (name, ".") if "properties" in sections[name] else ("", "")
    held = [(f".{ANY_NAME}.", _values_of(value)), ("[].", value.get("items", {}))]
    found = [(_section_in(inner, sections)[0], joint) for joint, inner in held if inner]
    found += [_section_in(part, sections) for part in value.get("anyOf", ())]
    return next((each for each in found if each[0]), ("", ""))


def _short(default: Any, held: Mapping[str, Any] | None) -> Any:
    """A mapping of sections without what each of them has by default."""
    if held is None or not isinstance(default, dict):
        return default
    usual = {name: value.get("default") for name, value in held["properties"].items()}
    return {name: {key: each[key] for key in usual if each[key] != usual[key]} for name, each in default.items()}


def _values_of(value: Mapping[str, Any]) -> Any:
    """Schema of what a mapping holds by any name; {} where that is anything."""
    named: Any = value.get("additionalProperties") or next(iter(value.get("patternProperties", {}).values()), {})
    return {} if named is True else named


def _type(value: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    if "$ref" in value:
        return "section" if "properties" in sections[value["$ref"].rpartition("/")[2]] else "anything"
    if "anyOf" in value:
        return " or ".join(_type(part, sections) for part in value["anyOf"])
    if "enum" in value:
        return f"one of {', '.join(f'`{json.dumps(each).strip(chr(34))}`' for each in value['enum'])}"
    if "const" in value:
        return f"`{value['const']}`"
    kind = value.get("type", "anything")
    if kind == "string":
        return {"path": "path", "ipvanynetwork": "network"}.get(value.get("format", ""), "text")
    if kind == "array":
        return f"list of {_type(value.get('items', {}), sections)}"
    if kind == "object":
        return f"mapping of names to {_type(_values_of(value), sections)}"
    bounds = [text.format(f"{value[name]:.12g}") for name, text in _BOUNDS.items() if name in value]
    return " ".join([_TYPES.get(kind, kind), " and ".join(bounds)]).rstrip()


def _unit(name: str, value: Mapping[str, Any]) -> str:
    if not re.search(r'"(number|integer)"', json.dumps(value)):
        return ""
    return next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _segments(path: str) -> list[str]:
    """Without numbers and brackets of items; a further model's keys are those at the top."""
    parts = [part for part in re.sub(r"\[\d*\]", "", path).split(".") if part and not part.isdecimal()]
    return parts[1:] if parts[:1] == ["more_models"] and len(parts) > 1 else parts


def matches(pattern: str, path: str) -> bool:
    """Whether a name, or the number of an item, stands in the place of each NAME and []."""
    parts, wanted = _segments(pattern), _segments(path)
    return len(parts) == len(wanted) and all(p in (ANY_NAME, w) for p, w in zip(parts, wanted, strict=True))


def find(keys: Iterable[Key], path: str) -> Key | None:
    """The key of that path."""
    return next((key for key in keys if matches(key.path, path)), None)


def below(keys: Iterable[Key], path: str) -> list[Key]:
    """The keys that stand directly in the section of that path; "" is the top."""
    return [key for key in keys if matches(key.section, path)]


def nearest(keys: Sequence[Key], path: str) -> tuple[str, Key] | None:
    """The path that was most likely meant, in the same section first, and its key; None where nothing is like it."""
    section, _, name = path.rpartition(".")
    beside = {key.name: key for key in below(keys, section)}
    if meant := difflib.get_close_matches(name, beside, n=1, cutoff=CLOSE):
        return f"{section}.{meant[0]}".removeprefix("."), beside[meant[0]]
    # The shortest path of each name, and each path as who does not think of sections writes it.
    elsewhere = {key.name: key for key in sorted(keys, key=lambda key: -len(key.path))}
    elsewhere |= {key.path.replace(".", "_"): key for key in keys}
    if meant := difflib.get_close_matches(name, elsewhere, n=1, cutoff=CLOSE):
        return elsewhere[meant[0]].path, elsewhere[meant[0]]
    return None
