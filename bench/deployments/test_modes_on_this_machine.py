"""The scheduler's modes side by side in one real engine, on this machine's CPU or GPU.

Not collected by default; run with `pytest bench/deployments/test_modes_on_this_machine.py -s`. Settings by environment:

    SLUICE_BENCH_MODEL     a model's folder or name; without, a random Qwen3 of 34 million parameters
    SLUICE_BENCH_ARGS      further vLLM arguments as JSON, such as {"load_format": "dummy"}
    SLUICE_BENCH_REPEATS   rounds over all modes (default 3)
    SLUICE_BENCH_SLOTS     batch sizes, by default "16 48"
    SLUICE_BENCH_REQUESTS  requests of a run for each slot (default 6)
    SLUICE_BENCH_SCALE     factor on prompts and answers (default 1)
    SLUICE_BENCH_CLOCK     "cpu" counts this process's CPU seconds, steadier where cores are shared; "wall" otherwise

Modes take turns in one engine, in an order that rotates, each with the same requests; ratios are to stock in the same
round. Every round of `auto` starts from what the modes before it taught it.
"""

import json
import os
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments.environment import cpu_env
from deployments.scheduler_settings import SCHEDULER_CLASS

CLOCK = os.environ.get("SLUICE_BENCH_CLOCK", "cpu")
if CLOCK == "cpu":
    os.environ.update({name: value for name, value in cpu_env().items() if name != "LD_PRELOAD"})
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
now = time.process_time if CLOCK == "cpu" else time.perf_counter

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

REPEATS = int(os.environ.get("SLUICE_BENCH_REPEATS", "3"))
SLOTS = tuple(map(int, os.environ.get("SLUICE_BENCH_SLOTS", "16 48").split()))
REQUESTS = float(os.environ.get("SLUICE_BENCH_REQUESTS", "6"))
SCALE = float(os.environ.get("SLUICE_BENCH_SCALE", "1"))
MODES: dict[str, dict[str, Any]] = {
    "stock": {"mode": "stock"},
    "mixed": {"mode": "mixed", "refill": None, "max_batch_size": None},
    "exclusive k=1": {"mode": "exclusive", "refill": 1},
    "exclusive k*": {"mode": "exclusive", "refill": None},
    "auto": {"mode": "auto", "refill": None},
}
TIGHT: dict[str, dict[str, Any]] = {
    **{name: MODES[name] for name in ("stock", "mixed", "auto")},
    "static cap 12": {"mode": "mixed", "admission": "slots", "max_batch_size": 12},
    "eq. 12": {"mode": "mixed", "admission": "memory_aware", "max_batch_size": None},
}
HEADER = "mode, tokens/s to stock, tokens/s, mean TTFT s, ITL p99 s, TPOT p99 s, preempted"
_FRESH = {"admission": "forecast", "max_batch_size": None, "refill": None}


@dataclass(frozen=True, slots=True)
class Run:
    """One mode over the whole workload; seconds on the chosen clock."""

    tokens_per_s: float
    ttft_mean_s: float
    itl_p99_s: float
    tpot_p99_s: float
    preempted: int


def random_model(folder: Path) -> str:
    """A Qwen3 configuration of 34 million parameters; its weights are random."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "rope_theta": 10000.0, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine(folder: Path, **more: Any) -> LLMEngine:
    model = os.environ.get("SLUICE_BENCH_MODEL")
    own = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 2048} if model is None else {}
    given = json.loads(os.environ.get("SLUICE_BENCH_ARGS", "{}"))
    args = EngineArgs(
        model=model or random_model(folder),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        scheduler_cls=SCHEDULER_CLASS,
        additional_config={"sluice": {"mode": "stock"}},
        **own | {"block_size": 32, "kv_cache_memory_bytes": 512 << 20} | more | given
        if model is None
        else more | given,
    )
    return LLMEngine.from_engine_args(args)


def workload(count: int) -> list[tuple[list[int], int]]:
    rng = random.Random(17)
    sizes = [
        (int(SCALE * rng.randint(64, 512)), 1 + min(int(SCALE * 400), int(rng.expovariate(1 / (64 * SCALE)))))
        for _ in range(count)
    ]
    return [([rng.randint(10, 4000) for _ in range(prompt)], output) for prompt, output in sizes]


def measure(llm: LLMEngine, requests: list[tuple[list[int], int]], clients: int) -> Run:
    """A closed loop: as many requests in the engine as there are clients."""
    queue = deque(enumerate(requests))
    asked: dict[str, float] = {}
    seen: dict[str, tuple[list[float], bool]] = {}
    scheduler = llm.engine_core.engine_core.scheduler
    began, preempted = now(), 0
    while queue or llm.has_unfinished_requests():
        while queue and len(asked) - sum(done for _, done in seen.values()) < clients:
            number, (prompt, output) = queue.popleft()
            asked[str(number)] = now()
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output, detokenize=False)
            llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for out in llm.step():
            times, _ = seen.get(out.request_id, ([], False))
            times += [now()] * (len(out.outputs[0].token_ids) - len(times))
            seen[out.request_id] = (times, out.finished)
        preempted += len(scheduler.reset_preempted_req_ids)
    took_s = now() - began
    gaps = sorted(b - a for times, _ in seen.values() for a, b in zip(times, times[1:], strict=False))
    means = sorted((t[-1] - t[0]) / (len(t) - 1) for t, _ in seen.values() if len(t) > 8)
    waits = [times[0] - asked[request_id] for request_id, (times, _) in seen.items()]
    return Run(
        tokens_per_s=sum(len(times) for times, _ in seen.values()) / took_s,
        ttft_mean_s=statistics.mean(waits),
        itl_p99_s=gaps[int(0.99 * len(gaps))],
        tpot_p99_s=means[int(0.99 * len(means))],
        preempted=preempted,
    )


def compared(
    llm: LLMEngine, modes: dict[str, dict[str, Any]], requests: list[tuple[list[int], int]], clients: int
) -> None:
    scheduler = llm.engine_core.engine_core.scheduler
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    names = list(modes)
    measure(llm, requests[: 2 * clients], clients)
    scheduler.control({"mode": "exclusive", "refill": None})
    measure(llm, requests[: 2 * clients], clients)
    for repeat in range(REPEATS):
        for name in names[repeat:] + names[:repeat]:
            scheduler.control(_FRESH | modes[name])
            runs[name].append(measure(llm, requests, clients))
    for name, found in runs.items():
        ratios = sorted(a.tokens_per_s / b.tokens_per_s for a, b in zip(found, runs["stock"], strict=True))
        figures = [
            f"{statistics.median(getattr(run, field) for run in found):.3g}"
            for field in ("tokens_per_s", "ttft_mean_s", "itl_p99_s", "tpot_p99_s", "preempted")
        ]
        spread = f"{statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        print(f"| {name} | {spread} | {' | '.join(figures)} |", flush=True)
    llm.engine_core.shutdown()


@pytest.mark.parametrize("slots", SLOTS)
def test_modes_with_room(slots: int, tmp_path: Path) -> None:
    llm = engine(tmp_path, max_num_seqs=slots, max_num_batched_tokens=2048)
    print(f"\n{slots} slots, {2 * slots} clients; {HEADER}")
    compared(llm, MODES, workload(round(REQUESTS * slots)), clients=2 * slots)


def test_modes_in_a_tight_cache(tmp_path: Path) -> None:
    blocks = round(150 * SCALE) if "SLUICE_BENCH_MODEL" not in os.environ else 600  # there of 16 tokens, not 32
    llm = engine(tmp_path, max_num_seqs=48, max_num_batched_tokens=2048, num_gpu_blocks_override=blocks)
    print(f"\n48 slots, 64 clients, a cache for a third of them; {HEADER}")
    compared(llm, TIGHT, workload(round(48 * REQUESTS)), clients=64)
