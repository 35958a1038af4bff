"""What the holders of API keys asked for and got, by the names of their keys, on the page of a router.

The lines of that page are kept as text, all but their values: of a thousand keys prometheus_client would make them anew
at every heartbeat, which takes tens of milliseconds of the loop that sends tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_KEYS = 1000
OTHER_KEYS = "(others)"  # stands for all names that came after those


@dataclass(slots=True)
class _Series:
    """Attributes:
    line: of the page, all of it but the value.
    """

    line: str
    count: int = 0


class _Counter:
    def __init__(self, name: str, meaning: str, common: Mapping[str, str], *names: str) -> None:
        """Args:
        common: labels that all samples have besides those of these names.
        """
        self._name, self._common, self._names = name, common, names
        self._head = f"# HELP {name} {meaning}\n# TYPE {name} counter\n"
        self._series: dict[tuple[str, ...], _Series] = {}

    def inc(self, values: tuple[str, ...], count: int = 1) -> None:
        series = self._series.get(values)
        if series is None:
            labels = {**self._common, **dict(zip(self._names, values, strict=True))}
            text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
            series = self._series[values] = _Series(f"{self._name}{{{text}}}")
        series.count += count

    def page(self) -> str:
        lines = [f"{series.line} {series.count}\n" for series in self._series.values()]
        return self._head + "".join(lines) if lines else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class KeyMetrics:
    """Metrics of one router's API keys. The page is empty where no request had a key."""

    def __init__(self, namespace: str, labels: Mapping[str, str]) -> None:
        self._names: set[str] = set()
        self._requests = _Counter(
            f"{namespace}_key_requests_total",
            f"Requests ended, by outcome and the name of their API key; those beyond {MAX_KEYS} names as {OTHER_KEYS}.",
            labels,
            "key",
            "outcome",
        )
        self._prompt_tokens = _Counter(
            f"{namespace}_key_prompt_tokens_total",
            "Prompt tokens of ended requests that a replica was given, by API key.",
            labels,
            "key",
        )
        self._output_tokens = _Counter(
            f"{namespace}_key_output_tokens_total", "Tokens generated, by API key.", labels, "key"
        )

    def ended(self, name: str, outcome: str) -> None:
        self._requests.inc((self._counted_as(name), outcome))

    def took(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        key = (self._counted_as(name),)
        self._prompt_tokens.inc(key, prompt_tokens)
        self._output_tokens.inc(key, output_tokens)

    def _counted_as(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) == MAX_KEYS:
            return OTHER_KEYS
        self._names.add(name)
        return name

    def page(self) -> bytes:
        return "".join(each.page() for each in (self._requests, self._prompt_tokens, self._output_tokens)).encode()
