from hypothesis import given
from hypothesis import strategies as st

from bench.sse import EventDecoder

STREAM = (
    b'data: {"a": 1}\n\n: a comment\nevent: message\ndata:two\r\ndata:  lines\r\n\r\n\n\n'
    b"data: [DONE]\n\ndata: unfinished\n"
)
EVENTS = [b'{"a": 1}', b"two\n lines", b"[DONE]"]


def feed_in_pieces(cuts: list[int]) -> list[bytes]:
    decoder = EventDecoder()
    edges = [0, *sorted(cuts), len(STREAM)]
    return [event for start, end in zip(edges, edges[1:], strict=False) for event in decoder.feed(STREAM[start:end])]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    assert feed_in_pieces(cuts) == EVENTS
