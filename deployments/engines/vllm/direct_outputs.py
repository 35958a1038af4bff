"""vLLM's output loop with streams whose text goes past the generators of its routes.

For each output vLLM detokenizes, looks for stop strings, notes its statistics, and asks the request's state to make an
output of it for the request's task. Here that call may write the text instead, and answer that there is nothing for the
task, as vLLM's own does between two outputs of a `stream_interval`. The last output tells the task of all of it.
"""

from typing import Any

from starlette.datastructures import State
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from router.timing import TextStream, current

# What answers a route in the state of vLLM's application.
_SERVINGS = {
    "/v1/chat/completions": "openai_serving_chat",
    "/v1/completions": "openai_serving_completion",
    "/v1/messages": "anthropic_serving_messages",
    "/v1/responses": "openai_serving_responses",
}


def write_past_generators(outputs: OutputProcessor, app_state: State) -> None:
    """Where the exchange of a request has a stream for that, on routes whose text nothing else has to see.

    Args:
        app_state: of vLLM's application, once it is made.
    """
    add = outputs.add_request
    paths = {path for path, name in _SERVINGS.items() if not _sees_text(getattr(app_state, name))}

    def added(request: EngineCoreRequest, prompt: str | None, *others: Any, **more: Any) -> None:
        add(request, prompt, *others, **more)
        context = current.get()
        if context is None or (stream := context.text_stream) is None or stream.path not in paths:
            return
        state = outputs.request_states[request.request_id]
        if _is_plain(request.sampling_params, state):
            stream.claim()
            state.make_request_output = _Writing(state, stream)

    outputs.add_request = added


def _sees_text(serving: Any) -> bool:
    """It parses or logs each piece, or tells how much was used so far with each."""
    of_serving = ("parser_cls", "parser", "use_harmony", "enable_log_outputs", "enable_force_include_usage")
    return any(getattr(serving, name, None) for name in of_serving)


def _is_plain(params: SamplingParams | None, state: RequestState) -> bool:
    """Each output brings tokens and their text alone, and makes an event."""
    return (
        params is not None
        and params.output_kind is RequestOutputKind.DELTA
        and (params.logprobs, params.prompt_logprobs) == (None, None)
        and bool(params.detokenize)
        and state.parent_req is None
        and state.stream_interval == 1
        and not state.streaming_input
    )


class _Writing:
    """In the place of `make_request_output` of one request's state."""

    def __init__(self, state: RequestState, stream: TextStream) -> None:
        self._state, self._stream = state, stream
        self._tokens, self._texts = list[int](), list[str]()

    def __call__(
        self,
        new_token_ids: list[int],
        pooling_output: None,
        finish_reason: FinishReason | None,
        *others: Any,
        **more: Any,
    ) -> RequestOutput | None:
        state = self._state
        if finish_reason is None and self._stream.is_open:
            assert state.detokenizer is not None, "it makes text"
            text = state.detokenizer.get_next_output_text(False, True)
            self._tokens += new_token_ids
            self._texts.append(text)
            self._stream.write(text)
            return None
        if finish_reason is not None:  # the last call: the state refers to itself no more
            del state.__dict__["make_request_output"]
        tokens = [*self._tokens, *new_token_ids]
        output = RequestState.make_request_output(state, tokens, pooling_output, finish_reason, *others, **more)
        assert isinstance(output, RequestOutput), "it makes text, and an output each time"
        (only,) = output.outputs
        only.text = "".join([*self._texts, only.text])
        self._tokens, self._texts = [], []
        self._stream.gave(only.text)
        return output
