"""A model that is told how long its answers are: `--logits-processors bench.deployments.told_lengths:ToldLengths`.

The number stands in `vllm_xargs` of a request, which no scheduler and no predictor reads: it ends where the model says
so, as any answer does, and nobody knows before. (`min_tokens` and `ignore_eos` say it to everybody.)
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import RequestLogitsProcessor

ANSWER_TOKENS = "answer_tokens"


class ToldLengths(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM's packages have no types
    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._end: int = vllm_config.model_config.hf_text_config.eos_token_id

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: "SamplingParams") -> "RequestLogitsProcessor | None":
        told = (params.extra_args or {}).get(ANSWER_TOKENS)
        return None if told is None else partial(self._with_end, int(told))

    def _with_end(self, told: int, output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Args:
        told: tokens of the answer, the one that ends it included.
        """
        if len(output_token_ids) + 1 < told:
            logits[self._end] = -torch.inf
        else:
            logits.fill_(-torch.inf)
            logits[self._end] = 0.0
        return logits
