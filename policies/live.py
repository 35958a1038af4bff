"""Values that change while they are in use.

One holder has the value in force. What goes by it keeps the holder, and reads `now` each time that it decides:

    config = Live(parsed)
    patience_s = config.view(lambda config: config.router.late_patience_s)
    config.replace(changed)
    patience_s.now  # as in `changed`
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Live(Generic[T]):
    """Holds one immutable value, which is replaced as a whole.

    Attributes:
        now: the value in force. Only `replace` sets it.
    """

    __slots__ = ("_views", "now")

    def __init__(self, now: T) -> None:
        self.now = now
        self._views: list[tuple[Callable[[T], Any], Live[Any]]] = []

    def view(self, of: Callable[[T], U]) -> "Live[U]":
        """A holder of `of(now)`, worked out here and at every replacement, not at every look."""
        view = Live(of(self.now))
        self._views.append((of, view))
        return view

    def replace(self, now: T) -> None:
        """Put another value in force, here and in all views.

        Raises:
            Exception: a view cannot be worked out from it; nothing has changed then.
        """
        for holder, value in list(self._followed(now)):
            holder.now = value

    def _followed(self, now: T) -> "Iterator[tuple[Live[Any], Any]]":
        yield self, now
        for of, view in self._views:
            yield from view._followed(of(now))
