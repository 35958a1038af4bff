"""What vLLM's application does with a body that it refuses, so that refusing costs no more than serving.

Pydantic (as vLLM 0.32 uses it) tells of every wrong entry of a list, once for each member of a union, and holds the
interpreter meanwhile, so that no thread and no deadline helps.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_core import SchemaValidator
from vllm.entrypoints.serve.exception_handling import utils
from vllm.exceptions import VLLMError, VLLMValidationError

MAX_MESSAGE_CHARS = 8192  # of an error, which may repeat what its client sent
_MANY = frozenset({"list", "tuple", "set", "frozenset", "generator", "dict"})  # kinds of schemas that know `fail_fast`
_WITHOUT_CALL: Mapping[str, Callable[..., Any]] = {  # what stands in for a model's own functions
    "function-before": lambda value: value,
    "function-after": lambda value: value,
    "function-wrap": lambda value, inner: inner(value),
}
_UNREAD = frozenset({"serialization", "metadata"})  # what a validator has no use for
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_TRACEBACK = re.compile(r'File "[^"\n]+", line \d+, in \S+(?:\n\s+.*)?')
_PATH = re.compile(r"(?:/[\w.\-]+)+")
_ROOTS = frozenset({"home", "usr", "opt", "var", "tmp", "root", "lib", "mnt", "srv"})


def refuse_soon(app: FastAPI) -> None:
    """Let every route of vLLM's application refuse a body at the first wrong entry of a list, and by the field's name
    where vLLM's own checks break at it."""
    for field in _body_fields(app):
        field._type_adapter.validator = _Validator(field._type_adapter.core_schema)
    theirs = utils.sanitize_message
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.entrypoints.") and vars(module).get("sanitize_message") is theirs:
            vars(module)["sanitize_message"] = shown


def _body_fields(app: FastAPI) -> Iterator[Any]:
    for route in app.routes:
        if (dependant := getattr(route, "dependant", None)) is not None:
            yield from dependant.body_params


class _Validator:
    """In the place of the validator that a schema makes."""

    def __init__(self, schema: Any) -> None:
        self._whole = SchemaValidator(_rewritten(schema, with_calls=True), _use_prebuilt=False)
        self._fields = SchemaValidator(_rewritten(schema, with_calls=False), _use_prebuilt=False)

    def validate_python(self, value: Any, **settings: Any) -> Any:
        """A field that is null counts as left out, also where vLLM has a default for it.

        Raises:
            ValidationError, VLLMError: the body is refused.
        """
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if each is not None}
        try:
            return self._whole.validate_python(value, **settings)
        except (ValidationError, VLLMError):
            raise
        except Exception as error:  # one of vLLM's checks has taken a value for one of another type
            self._fields.validate_python(value, **settings)
            raise VLLMValidationError(f"a field of the body is malformed: {error}") from error


def _rewritten(schema: Any, *, with_calls: bool) -> Any:
    """The same schema, which ends at the first wrong entry of each list and object.

    Args:
        with_calls: without, it has types alone and calls no function on what comes.
    """
    if type(schema) in (list, tuple):
        return type(schema)(_rewritten(each, with_calls=with_calls) for each in schema)
    if type(schema) is not dict:
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # a field may be called so
        kind = ""
    made = {
        name: _rewritten(value, with_calls=with_calls)
        for name, value in schema.items()
        if not kind or name not in _UNREAD
    }
    if kind in _WITHOUT_CALL and not with_calls:
        made["function"] = {"type": "no-info", "function": _WITHOUT_CALL[kind]}
    return made | {"fail_fast": True} if kind in _MANY else made


def shown(message: str) -> str:
    """In the place of vLLM's `sanitize_message` (0.32), whose time is not linear in what an error repeats."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]}..."
    message = _TRACEBACK.sub("", _ADDRESS.sub(">", message))
    return _PATH.sub(_hidden, message).strip()


def _hidden(path: re.Match[str]) -> str:
    """Of a file; paths of URLs are shown."""
    _, first, *others = path[0].split("/")
    is_file = first in _ROOTS or any("." in each for each in others)
    return "<path>" if others and is_file else path[0]
