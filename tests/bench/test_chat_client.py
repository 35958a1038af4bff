from bench.chat_client import StreamRecording

ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
WORD = b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n'
HALF_A_CHARACTER = b'data: {"choices": [{"delta": {"content": ""}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_times_run_from_the_request_over_each_chunk_with_tokens_to_the_end() -> None:
    recording = StreamRecording(started_s=100.0)
    for body, now_s in ((ROLE, 101.0), (WORD, 102.0), (HALF_A_CHARACTER, 105.0), (WORD, 109.0), (USAGE + DONE, 109.5)):
        recording.receive(body, now_s)
    answer = recording.finish()
    assert answer.ttft_s == 2.0
    assert answer.itl_s == (3.0, 4.0)
    assert answer.output_tokens == 3


def test_a_first_chunk_with_role_and_text_is_the_first_token() -> None:
    recording = StreamRecording(started_s=0.0)
    recording.receive(ROLE.replace(b'""', b'"Hello"') + USAGE + DONE, 1.5)
    assert recording.finish().ttft_s == 1.5


def test_chunks_that_arrive_together_have_no_gap_between_them() -> None:
    recording = StreamRecording(started_s=0.0)
    recording.receive(WORD + WORD + USAGE + DONE, 1.0)
    assert recording.finish().itl_s == (0.0,)
