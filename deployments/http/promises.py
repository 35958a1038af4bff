"""The promise of an HTTP request: by its headers, its service tier, its key or the application.

    x-slo-ttft-ms: 800      milliseconds to the first token
    x-slo-tpot-ms: 60       and for each one after it, on average
    x-slo-e2e-ms: 8000      and to the last one
    x-slo-task-ms: 600000   for all turns of a task of the request's session

The first three come before the targets of the class. The class is that of the header `X-Sluice-Class`, else of the
`service_tier` in the body, else of the key, else the application's.

A client that says after which time it gives up wants the whole answer by then, unless `x-slo-e2e-ms` says something
else. It asks for nothing: what it may not have is left out without an error.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers

from deployments.http.errors import HttpError, bad_request
from deployments.http.headers import TIMEOUT_HEADER
from deployments.http.sessions import SESSION_HEADER
from policies.router.promise import Promise
from router.admission import Tenant

CLASS_HEADER = "X-Sluice-Class"
TTFT_HEADER = "x-slo-ttft-ms"
TPOT_HEADER = "x-slo-tpot-ms"
E2E_HEADER = "x-slo-e2e-ms"
TASK_HEADER = "x-slo-task-ms"
_HEADER_OF = {"ttft_s": TTFT_HEADER, "tpot_s": TPOT_HEADER, "e2e_s": E2E_HEADER}
_MILLISECONDS = re.compile(r"\d{1,8}(\.\d{1,6})?", re.ASCII)
_MAX_MS = 86_400_000.0  # a day: a target beyond it is none
# Seconds after which clients give up: OpenAI's and Anthropic's SDKs say so by the first two, which are times without a
# byte, and so those of whole answers only in one piece.
_TIMEOUT_HEADERS = ("x-stainless-timeout", "x-stainless-read-timeout", "x-request-timeout")
_TIMEOUT = re.compile(r"\d{1,8}(\.\d{1,9})?", re.ASCII)
_SDK_TIMEOUT_S = 600.0  # the default of both: whoever sends it has asked for nothing
_SHOWN_CHARS = 64  # of a refused value, in the message


@dataclass(frozen=True, slots=True)
class Promised:
    """`service_tier` is what the answer says, None where the request asked for none."""

    slo_class: str
    promise: Promise
    service_tier: str | None = None


class Promises:
    """The promises that an application makes to its requests."""

    def __init__(
        self, classes: Mapping[str, Promise], default_class: str, class_of_tier: Mapping[str, str] | None = None
    ) -> None:
        self._classes, self._default_class, self._class_of_tier = classes, default_class, class_of_tier or {}

    def of(
        self,
        headers: Headers,
        tenant: Tenant | None,
        tier: object = None,
        *,
        may_tighten: bool,
        in_one_piece: bool = False,
    ) -> Promised:
        """Args:
        tier: as it stands in the body, of any type.
        may_tighten: whether targets may be closer than those of the class.
        in_one_piece: the client waits for the whole answer, and no stream.

        Raises:
            HttpError: a header or the tier is malformed (400), or not for this key (403).
        """
        slo_class, source = self._class_of(headers, tenant, tier)
        if slo_class not in self._classes:
            known = ", ".join(sorted(self._classes))
            raise bad_request(f"{CLASS_HEADER}: no class {slo_class[:_SHOWN_CHARS]!r}; there are {known}")
        if tenant is not None and not tenant.may_use(slo_class):
            raise HttpError(HTTPStatus.FORBIDDEN, f"this key may not use class {slo_class!r}{source}")
        own = self._classes[slo_class]
        asked = asked_for(headers)
        promise = Promise(
            ttft_s=own.ttft_s if asked.ttft_s is None else asked.ttft_s,
            tpot_s=own.tpot_s if asked.tpot_s is None else asked.tpot_s,
            e2e_s=own.e2e_s if asked.e2e_s is None else asked.e2e_s,
        )
        if not may_tighten and (closer := promise.tighter_than(own)):
            raise HttpError(HTTPStatus.FORBIDDEN, _why_too_close(closer[0], slo_class, own))
        if may_tighten and asked.e2e_s is None:
            promise = _before_it_gives_up(promise, headers, in_one_piece=in_one_piece)
        return Promised(slo_class, promise, None if tier is None else self._served_tier(str(tier), slo_class))

    def _class_of(self, headers: Headers, tenant: Tenant | None, tier: object) -> tuple[str, str]:
        """The class, and for the refusal of a key that may not use it, where it came from."""
        if tier is not None and not isinstance(tier, str):
            raise bad_request("service_tier must be a string, such as 'priority'")
        if (named := headers.get(CLASS_HEADER)) is not None:
            return named, ""
        if (named := self._class_of_tier.get(tier or "")) is not None:
            return named, f", which is that of service_tier {tier!r}"
        return (tenant and tenant.default_class) or self._default_class, ""

    def _served_tier(self, asked: str, slo_class: str) -> str:
        """The tier whose class it is served under; a header or the key may have said another class than the tier."""
        if self._class_of_tier.get(asked) == slo_class:
            return asked
        return next((tier for tier, name in self._class_of_tier.items() if name == slo_class), "default")


def asked_for(headers: Headers) -> Promise:
    """The targets that the headers name. Raises HttpError: one is malformed."""
    return Promise(**{target: _seconds(headers, name) for target, name in _HEADER_OF.items()})


def task_s(headers: Headers, session: str | None, *, may_tighten: bool) -> float | None:
    """Seconds that the client gives to the task of its session; None where it says nothing of that.

    Raises:
        HttpError: it is malformed, or the request has no session (400), or its key may ask for no deadline (403).
    """
    if (seconds := _seconds(headers, TASK_HEADER)) is None:
        return None
    if session is None:
        raise bad_request(f"{TASK_HEADER} needs a session: name it in {SESSION_HEADER}, the same for all its turns")
    if not may_tighten:
        why = "this key may not ask for closer targets than its class has: set may_tighten for the key"
        raise HttpError(HTTPStatus.FORBIDDEN, f"{TASK_HEADER}: {why}")
    return seconds


def _before_it_gives_up(promise: Promise, headers: Headers, *, in_one_piece: bool) -> Promise:
    """With the whole answer before its client's timeout, where that is closer."""
    names = (TIMEOUT_HEADER, *(_TIMEOUT_HEADERS if in_one_piece else ()))
    given = (headers.get(name, "") for name in names)
    timeouts_s = (float(text) for text in given if _TIMEOUT.fullmatch(text))
    least_s = min((each for each in timeouts_s if 0.0 < each < _SDK_TIMEOUT_S), default=math.inf)
    if least_s >= (math.inf if promise.e2e_s is None else promise.e2e_s):
        return promise
    return replace(promise, e2e_s=least_s)


def _seconds(headers: Headers, name: str) -> float | None:
    """The header's value; None without the header."""
    if (text := headers.get(name)) is None:
        return None
    milliseconds = float(text) if _MILLISECONDS.fullmatch(text) else 0.0
    if not 0.0 < milliseconds <= _MAX_MS:
        raise bad_request(
            f"{name} must be milliseconds, above 0 and at most {_MAX_MS:.0f}, got {text[:_SHOWN_CHARS]!r}"
        )
    return milliseconds / 1e3


def _why_too_close(target: str, slo_class: str, own: Promise) -> str:
    theirs = getattr(own, target)
    has = "has no such target" if theirs is None else f"has {1e3 * theirs:g}"
    return (
        f"{_HEADER_OF[target]}: class {slo_class!r} {has}, and this key may only ask for more time than its class has: "
        f"leave the header out, name a class with a closer target in {CLASS_HEADER}, or set may_tighten for the key"
    )
