"""An answer that another server says again from its start, and of which a client has a part already.

Texts are compared, and not events: where its reader falls behind, a server puts several tokens into one event (vLLM's
`RequestOutputCollector` does), so that two streams of one answer are cut at different places.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from deployments.engines.openai.messages import piece_id, piece_of
from policies.errors import ReplicaLostError

SAID = ("reasoning", "reasoning_content", "content", "refusal", "text")
_OF_EACH_TOKEN = ("logprobs", "token_ids", "prompt_token_ids")

Place = tuple[dict[str, Any], str]


def places(choice: dict[str, Any]) -> Iterator[Place]:
    """Where a choice of an event has text, in the order in which models say it; one of chats has it inside `delta`."""
    said = choice.get("delta") or choice
    if not isinstance(said, dict):
        return
    found = [(said, name) for name in SAID]
    functions = [*(call.get("function", call) for call in _calls(said)), said.get("function_call")]
    for function in functions:
        if isinstance(function, dict):
            found += [(function, "name"), (function, "arguments")]
    yield from ((holder, name) for holder, name in found if isinstance(holder.get(name), str))


def _calls(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Of tools."""
    calls = said.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def text_of(choice: dict[str, Any]) -> str:
    return "".join(holder[name] for holder, name in places(choice))


def index_of(choice: dict[str, Any]) -> int:
    index = choice.get("index", 0)
    return index if isinstance(index, int) else 0


class Replay:
    """Takes out of a repeated stream what its client has.

    Args:
        said: the `piece_id` of each piece.
    """

    def __init__(self, said: Sequence[int]) -> None:
        self._left: dict[int, deque[int]] = {}
        self._unchecked: dict[int, str] = {}
        for number in said:
            if piece_of(number)[1]:
                self._left.setdefault(piece_of(number)[0], deque()).append(number)

    def new_in(self, choice: dict[str, Any]) -> bool:
        """Whether a choice of an event says anything that its client has not; what it has is taken out of it.

        Raises:
            ReplicaLostError: this is another answer.
        """
        index = index_of(choice) & 0xFF
        if index not in self._left:
            return True
        text = text_of(choice)
        repeated = self._repeated(index, text)
        if repeated < len(text) and repeated and any(choice.get(name) for name in _OF_EACH_TOKEN):
            raise ReplicaLostError("its replay is cut elsewhere than what was sent already, amid what is told by token")
        if choice.get("finish_reason") is not None and index in self._left:
            raise ReplicaLostError("its replay ends before what was sent already")
        if repeated:
            _cut(choice, repeated)
        return repeated < len(text) or choice.get("finish_reason") is not None

    def _repeated(self, index: int, text: str) -> int:
        """How many characters of this text its client has."""
        left, unchecked = self._left[index], self._unchecked.pop(index, "") + text
        while left and (length := piece_of(left[0])[1]) <= len(unchecked):
            if piece_id(index, unchecked[:length]) != left.popleft():
                raise ReplicaLostError("its replay differs from what was sent already")
            unchecked = unchecked[length:]
        if not left:
            del self._left[index]
            return len(text) - len(unchecked)
        self._unchecked[index] = unchecked
        return len(text)


def _cut(choice: dict[str, Any], characters: int) -> None:
    """Off its beginning. A call of a tool that has begun keeps the name and id that its client has."""
    for holder, name in places(choice):
        text = holder[name]
        holder[name], characters = text[characters:], max(characters - len(text), 0)
        if name == "name" and text and not holder[name]:
            del holder[name]
    said = choice.get("delta") or choice
    calls = _calls(said)
    for call in calls:
        if "name" not in _function(call):
            call.pop("id", None)
    if calls:
        said["tool_calls"] = [call for call in calls if any(_function(call).values())]
