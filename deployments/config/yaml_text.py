"""YAML as it is written, without what PyYAML makes of it in silence: of a name that stands in a mapping twice it takes
the last, `1:30` is 90 to it, and `012` is 10. Here the first is an error, and the others are texts."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from policies.errors import ConfigError

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times as fast; not in every build of PyYAML
_INT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "merge"))
_NUMBERS = {
    _INT: r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    _FLOAT: r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
_NOT_AS_TAGGED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class _Loader(_BASE):  # type: ignore[misc]
    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag not in _NUMBERS]
        for first, resolvers in _BASE.yaml_implicit_resolvers.items()
    }


for _tag, _form in _NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_form})$"), list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """One document.

    Raises:
        ConfigError: it is no YAML, or a mapping has a name twice; it names the line, and after a colon what stands
            there.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_names(node)
        return _made(loader, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"line {mark.line + 1 if mark else 1} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"it is not YAML: {type(error).__name__}") from None
    finally:
        loader.dispose()


def _made(loader: Any, node: Any) -> Any:
    """Raises yaml.YAMLError, also for what looks like a date, or has a tag, and is none: PyYAML itself fails with
    whatever its constructor met."""
    try:
        return loader.construct_document(node)
    except _NOT_AS_TAGGED:
        loader.recursive_objects.clear()  # where it has stopped
        for scalar in _scalars(node):
            try:
                loader.construct_object(scalar)
            except _NOT_AS_TAGGED:
                kind = scalar.tag.rpartition(":")[2]
                why = f"what looks like {kind} is none, put it in quotes"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=scalar.start_mark) from None
        raise yaml.YAMLError from None


def _scalars(node: Any) -> Iterator[Any]:
    """Each once."""
    left, seen = [node], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, yaml.ScalarNode):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            left += one.value if isinstance(one, yaml.SequenceNode) else [each for pair in one.value for each in pair]


def _check_names(node: Any) -> None:
    """Raises ConfigError. A name that also comes by `<<` from elsewhere is one that is meant to be replaced."""
    left, seen = [node], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, yaml.ScalarNode):
            continue
        seen.add(id(one))
        if isinstance(one, yaml.SequenceNode):
            left += one.value
            continue
        lines: dict[str, int] = {}
        for key, value in one.value:
            left += (key, value)
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(f"line {line} repeats a name of line {lines[key.value]}: {key.value[:64]!r}")
                lines[key.value] = line
