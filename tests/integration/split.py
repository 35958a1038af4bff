"""Settings of the application in which one replica reads prompts and one decodes."""

from tests.integration.application import EXACT

KEEP_S = 6
BUDGET_TOKENS = 96
SPLIT_SETTINGS = {
    "vllm_args": ["--max-num-seqs", "48", "--max-num-batched-tokens", str(BUDGET_TOKENS), *EXACT],
    "router": {"heartbeat_s": 0.5, "silence_s": 15},
    "engine": {
        "replicas": 1,
        "prefill": {"connector": "nixl", "split": "always", "min_prompt_tokens": 8, "keep_s": KEEP_S, "max_wait_s": 60},
    },
}
