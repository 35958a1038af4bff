"""What the codec for vLLM does to vLLM's own structures."""

import numpy as np
import pytest

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
