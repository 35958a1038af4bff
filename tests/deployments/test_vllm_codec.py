"""What the codec for vLLM does to vLLM's own structures."""

from typing import Any

import numpy as np
import pytest

from router.state_store import Ticket

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


def test_the_logprobs_of_repeated_tokens_leave_with_them() -> None:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from deployments.vllm_adapter import VllmCodec

    rows = np.arange(6).reshape(3, 2)
    output = EngineCoreOutput("a", [7, 8, 9], new_logprobs=LogprobsLists(rows, rows / 10, rows[:, 0], None))
    VllmCodec().drop_first(output, 2)
    assert output.new_token_ids == [9]
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[4, 5]]
    assert output.new_logprobs.sampled_token_ranks.tolist() == [4]


def test_a_ticket_travels_with_its_request_and_does_not_keep_it_from_being_resumed() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from deployments.request_metadata import metadata_of
    from deployments.vllm_adapter import VllmCodec

    def request(**extra: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id="a",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=9, temperature=0.0, extra_args=extra or None),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    ticket = Ticket(
        request_id="a", bin_index=2, deadline_key=7.5, work_s=1.0, router_id="r", predicted_output_tokens=33.0
    )
    codec, plain = VllmCodec(), request()
    sent = codec.decode_request([bytes(part) for part in codec.encode_request(codec.with_ticket(plain, ticket))])
    told = metadata_of(sent.sampling_params.extra_args)
    assert (told.slo_class, told.bin_index, told.deadline_s) == ("standard", 2, 7.5)
    assert told.predicted_output_tokens == 33.0
    assert plain.sampling_params.extra_args is None
    assert codec.recover(sent, [5]).repeats == ()
    assert codec.recover(codec.with_ticket(request(mine=1), ticket), [5]).repeats == (5,)
