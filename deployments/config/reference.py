"""What keys a configuration has: `sluice config`, docs/reference/configuration.md, the chart's schema and table.

Types, bounds and defaults come from the fields of sections, meanings from the text under each field.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ANY_NAME = "NAME"
CLOSE = 0.7  # of difflib: a letter too many in a short name is above, another word below
_UNITS = (
    (r"seconds_per_token|_s_per_token$", "seconds per token"),
    (r"_s_per_request$", "seconds per request"),
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


class AllBut(frozenset[str]):
    """All names but these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


def is_live(section: type[BaseModel], name: str) -> bool:
    """Whether a field changes while engines serve: `FIXED` of its section names those that do not."""
    return name not in getattr(section, "FIXED", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key, or one section.

    Attributes:
        path: from the top; NAME stands for any name, [] for each item of a list.
        owner: the section whose field it is.
        holds: the section below it; None where it has a value of its own.
        type: in words, with its bounds.
        default: in JSON, as it is in force at this place; "" for a section that is always there.
        is_needed: it has no default.
        unit: "" where it has none.
        is_live: it changes while engines serve; any other change restarts them.
    """

    path: str
    owner: type[BaseModel]
    holds: type[BaseModel] | None
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
    return tuple(_keys(model, model, "", None))


def _keys(root: type[BaseModel], model: type[BaseModel], prefix: str, defaults: BaseModel | None) -> Iterator[Key]:
    """`defaults`: of this section at this place, where they may differ from those of the class."""
    made = schema(model)
    for name, field in model.model_fields.items():
        path, value = f"{prefix}{name}", made["properties"][name]
        default = field.get_default(call_default_factory=True) if defaults is None else getattr(defaults, name)
        held, joint = _section_in(field)
        yield Key(
            path=path,
            owner=model,
            holds=held,
            type=_type(value, made.get("$defs", {})),
            default=""
            if default is PydanticUndefined or isinstance(default, BaseModel)
            else json.dumps(plain(default)),
            is_needed=field.is_required(),
            unit=_unit(name, value),
            meaning=value["description"],
            is_live=is_live(model, name),
        )
        if held is not None and not issubclass(root, held):  # else as at the top
            yield from _keys(root, held, f"{path}{joint}", default if isinstance(default, held) else None)


def _section_in(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """The section that a field holds, and what joins its path to those of the keys below."""
    annotation, joint = field.annotation, "."
    while True:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation, joint
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin is dict:
            annotation, joint = inner[1], f".{ANY_NAME}."
        elif origin in (tuple, list) and inner:
            annotation, joint = inner[0], "[]."
        elif origin in (Union, UnionType):
            annotation = next((part for part in inner if part is not type(None)), None)
        else:
            return None, ""


def plain(value: Any) -> Any:
    """As JSON has it; of a section what differs from its defaults."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _type(value: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    if "$ref" in value:
        return "section" if "properties" in sections[value["$ref"].rpartition("/")[2]] else "anything"
    if "anyOf" in value:
        return " or ".join(_type(part, sections) for part in value["anyOf"])
    if "enum" in value:
        return f"one of {', '.join(f'`{json.dumps(each).strip(chr(34))}`' for each in value['enum'])}"
    kind = value.get("type", "anything")
    if kind == "string":
        return {"path": "path", "ipvanynetwork": "network"}.get(value.get("format", ""), "text")
    if kind == "array":
        return f"list of {_type(value.get('items', {}), sections)}"
    if kind == "object":
        return f"mapping of names to {_type(value.get('additionalProperties', {}), sections)}"
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


def _is(pattern: str, path: str) -> bool:
    """Whether a name, or the number of an item, stands in the place of each NAME and []."""
    parts, wanted = _segments(pattern), _segments(path)
    return len(parts) == len(wanted) and all(p in (ANY_NAME, w) for p, w in zip(parts, wanted, strict=True))


def find(keys: Iterable[Key], path: str) -> Key | None:
    """The key of that path."""
    return next((key for key in keys if _is(key.path, path)), None)


def below(keys: Iterable[Key], path: str) -> list[Key]:
    """The keys that stand directly in the section of that path; "" is the top."""
    return [key for key in keys if _is(key.section, path)]


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
