"""Server-sent events out of a byte stream that is cut anywhere.

Source: the HTML Living Standard, section 9.2.6 "Interpreting an event stream". Only the `data` field is kept, and lines
may end in LF or CRLF; a lone CR, which the standard also allows, is not used by any OpenAI-compatible server.
"""


class EventDecoder:
    """Holds the unfinished line and the unfinished event between two reads."""

    def __init__(self) -> None:
        self._rest = b""
        self._data_lines: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """The data of every event that `received` completes, in order."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._read(line.removesuffix(b"\r"), events)
        return events

    def _read(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data_lines.append(line[5:].removeprefix(b" "))
        elif not line and self._data_lines:
            events.append(b"\n".join(self._data_lines))
            self._data_lines.clear()
