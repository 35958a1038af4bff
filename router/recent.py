"""The requests that ended last, for people: what they took and where they ran, never what they said."""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

SHOWN = 50


class RecentRequests:
    """The last requests of one router; each router publishes its own, so that any can show those of all."""

    def __init__(self) -> None:
        self._ended: deque[Mapping[str, Any]] = deque(maxlen=SHOWN)
        self._page = b"[]"
        self._changed = False

    def note(self, ended: Mapping[str, Any]) -> None:
        self._ended.append(ended)
        self._changed = True

    def page(self) -> bytes:
        """As JSON, the oldest first."""
        if self._changed:
            self._page, self._changed = json.dumps(list(self._ended)).encode(), False
        return self._page


def latest(pages: Iterable[bytes]) -> list[dict[str, Any]]:
    """The last requests of several routers together, the latest first."""
    ended = [each for page in pages for each in json.loads(page)]
    return sorted(ended, key=lambda each: -float(each["at"]))[:SHOWN]
