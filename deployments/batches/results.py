"""Lines of output and of errors, as OpenAI writes them, and the tokens that they tell of."""

import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deployments.batches.state import Result, Status, Tokens

# Beyond any batch; as a segment's JSON and a counter of metrics take it. A server that is not ours may say anything.
_Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_UNANSWERED = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed, because its batch was cancelled.",
    "failed": "This request was not executed, because its batch failed: its errors say why.",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A router's answer to one request; `retry_after_s` is None if it names none."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """The usage of chat, completions and embeddings, or that of responses."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def tokens(self) -> Tokens:
        of_input = self.prompt_tokens_details or self.input_tokens_details or _Details()
        of_output = self.completion_tokens_details or self.output_tokens_details or _Details()
        return Tokens(
            input=self.prompt_tokens or self.input_tokens or 0,
            cached=of_input.cached_tokens or 0,
            output=self.completion_tokens or self.output_tokens or 0,
            reasoning=of_output.reasoning_tokens or 0,
        )


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def answered(number: int, custom_id: str, reply: Reply) -> tuple[Result, Tokens]:
    """The line for a router's answer; one that is not a model's answer goes to the errors, with its status and body."""
    is_error = reply.status != HTTPStatus.OK
    tokens = Tokens() if is_error else _tokens(reply.body)
    identity = _identity()
    response = {"status_code": reply.status, "request_id": identity, "body": _on_one_line(reply.body)}
    return _result(identity, number, custom_id, response, None, is_error=is_error), tokens


def _on_one_line(body: bytes) -> Any:
    """JSON as it is but for its line ends; the text of anything else."""
    try:
        body.decode()  # which msgspec does not check
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except _NOT_JSON:
        return body.decode(errors="replace")


def _tokens(body: bytes) -> Tokens:
    """None where they are not told as numbers that can be."""
    try:
        return (_answer.decode(body).usage or _Usage()).tokens()
    except _NOT_JSON:
        return Tokens()


def unanswered(number: int, custom_id: str, ending: Status) -> Result:
    """The line for a request that was not sent, because its batch expired or was cancelled."""
    error = {"code": f"batch_{ending}", "message": _UNANSWERED[ending]}
    return _result(_identity(), number, custom_id, None, error, is_error=True)


def _identity() -> str:
    return f"batch_req_{secrets.token_hex(16)}"


def _result(identity: str, number: int, custom_id: str, response: Any, error: Any, *, is_error: bool) -> Result:
    line = {"id": identity, "custom_id": custom_id, "response": response, "error": error}
    return Result(number, is_error, msgspec.json.encode(line))
