"""The lines of a batch's input that have no result yet, read window by window."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from deployments.batches.lines import Line, WrongLineError, numbered, parsed
from policies.errors import SluiceError

WINDOW_LINES = 1024  # read ahead, and sent in the order of their bodies, so that equal prefixes come together
WINDOW_BYTES = 4 << 20  # of those lines in memory


class InputLostError(SluiceError):
    """The input has gone, or is another, since it was validated."""


class Input:
    """Its calls block. One that has failed may be made again, and goes on where it was."""

    def __init__(
        self, lines: Callable[[], Iterable[bytes]], endpoint: str, last: int, has_result: Callable[[int], bool]
    ) -> None:
        """Args:
        lines: all of them, from the first one on.
        last: the number of the last one.
        """
        self._lines, self._endpoint, self._last, self._has_result = lines, endpoint, last, has_result
        self._left: Iterator[Line] | None = None
        self._taken = 0  # the number of the last line of a window

    def window(self) -> list[Line]:
        """The next lines, sorted by their bodies; none at the end. Raises InputLostError."""
        if self._left is None:
            self._left = self._behind(self._taken)
        try:
            lines = _bounded(self._left, WINDOW_LINES, WINDOW_BYTES)
        except BaseException:
            self._left = None  # it has ended with its error
            raise
        self._taken = lines[-1].number if lines else self._taken
        return sorted(lines, key=lambda line: line.body)

    def _behind(self, taken: int) -> Iterator[Line]:
        try:
            for number, raw in numbered(self._lines()):
                if number > self._last:
                    return
                if number > taken and not self._has_result(number):
                    yield parsed(number, raw, self._endpoint)
        except (FileNotFoundError, WrongLineError) as error:  # it was there, and right
            raise InputLostError("the input file is lost") from error


def _bounded(lines: Iterator[Line], most: int, most_bytes: int) -> list[Line]:
    """The next lines: at least one if any is left."""
    taken: list[Line] = []
    size = 0
    for line in islice(lines, most):
        taken.append(line)
        size += len(line.body)
        if size > most_bytes:
            break
    return taken
