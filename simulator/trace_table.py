"""Rows of a file as columns, whose values are looked at when they are used, and named with their place where they are
not what they should be."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.errors import InputError
from policies.types import FloatArray

_MOST = 1e9  # of a length: a thousand times the longest contexts that models have


@dataclass(slots=True)
class Table:
    """Rows of a file as columns, each value as it stands there, with the row's place in the file.

    Attributes:
        entry: what a row is called: line, or entry of a document.
        used: columns that have been read.
        theirs: by our names of columns, those that the file has in their place.
    """

    name: str
    entry: str
    places: list[int]
    columns: dict[str, list[Any]]
    used: set[str] = field(default_factory=set)
    theirs: dict[str, str] = field(default_factory=dict)

    def take(self, name: str) -> list[Any] | None:
        self.used.add(name)
        return self.columns.get(name)

    def numbers(self, name: str, what: str, is_one: Callable[[float], bool], missing: float | None) -> FloatArray:
        """A column of numbers, which must be there.

        Args:
            what: such a number is called.
            missing: stands where a row has nothing; None is an error there.

        Raises:
            InputError: a value is no such number; it names the row.
        """
        self.used.add(name)
        return np.array([self._number(at, name, what, is_one, missing) for at in range(len(self.places))])

    def _number(self, at: int, name: str, what: str, is_one: Callable[[float], bool], missing: float | None) -> float:
        value = self.columns[name][at]
        if value is None or value == "":
            if missing is not None:
                return missing
            raise self.wrong(at, f"there is no {self.called(name)}")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and is_one(number)):
            raise self.wrong(at, f"{self.called(name)} is {value!r}"[:100] + f", which is no {what}")
        return number

    def called(self, name: str) -> str:
        """A column as the file calls it."""
        return self.theirs.get(name, name)

    def wrong(self, at: int, why: str) -> InputError:
        return InputError(f"{self.name}, {self.entry} {self.places[at]}: {why}")

    def without(self, rows: Iterable[int]) -> None:
        gone = set(rows)
        kept = [at for at in range(len(self.places)) if at not in gone]
        self.places = [self.places[at] for at in kept]
        self.columns = {name: [values[at] for at in kept] for name, values in self.columns.items()}


def is_count(number: float) -> bool:
    return 0.0 <= number <= _MOST and number == int(number)
