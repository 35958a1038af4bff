"""Run by the tests as a process: plain vLLM, no part of Sluice. Reads chat prompts as JSON, writes greedy token ids."""

import json
import sys

from vllm import LLM, SamplingParams


def main(model: str, source: str, target: str) -> None:
    with open(source) as file:
        request = json.load(file)
    llm = LLM(
        model=model,
        max_model_len=2048,
        max_num_seqs=64,
        dtype=request["dtype"],
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
    )
    conversations = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=request["max_tokens"]), use_tqdm=False)
    answers = [{"token_ids": list(o.outputs[0].token_ids), "text": o.outputs[0].text} for o in outputs]
    with open(target, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
