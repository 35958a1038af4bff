"""The requests that ended last, and those whose promise was not kept, for people: what they took and where they ran,
never what they said."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

SHOWN = 50
UNKEPT = 100  # of each router


class RecentRequests:
    """The last requests of one router; each router publishes its own, so that any can show those of all."""

    def __init__(self, most: int = SHOWN) -> None:
        self._ended: deque[Mapping[str, Any]] = deque(maxlen=most)
        self._page = b"[]"
        self._changed = False

    def note(self, ended: Mapping[str, Any]) -> None:
        self._ended.append(ended)
        self._changed = True

    def page(self) -> bytes:
        """As JSON, the oldest first."""
        if self._changed:
            self._page, self._changed = msgspec.json.encode(list(self._ended)), False
        return self._page


def latest(pages: Iterable[bytes], most: int | None = SHOWN) -> list[dict[str, Any]]:
    """The last requests of several routers together, the latest first; None gives all."""
    ended = [each for page in pages for each in msgspec.json.decode(page)]
    return sorted(ended, key=lambda each: -float(each["at"]))[:most]
