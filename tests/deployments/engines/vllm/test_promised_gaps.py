"""Times between tokens on a real engine on the CPU, in this process: what it says of them, and what its client saw."""

import time
from collections import defaultdict

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.engines.vllm.request_metadata import RequestMetadata
from tests.virtual_engine import MODEL

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

REQUESTS, PROMISED_S = 60, 10.0


def engine_of(classes: tuple[str, ...]) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=12,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            scheduler_cls=SCHEDULER_CLASS,
            additional_config={"sluice": {"mode": "auto", "classes": classes}},
        )
    )


def run(engine: LLMEngine) -> dict[str, list[float]]:
    """Returns when each token came, by request."""
    came_s = defaultdict[str, list[float]](list)
    while engine.has_unfinished_requests():
        outputs, now_s = engine.step(), time.monotonic()
        for output in outputs:
            came_s[output.request_id] += [now_s] * len(output.outputs[0].token_ids)
    return came_s


def test_what_an_engine_says_of_times_between_tokens_is_what_its_client_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engine = engine_of(("chat", "code"))
    for number in range(REQUESTS):
        told = RequestMetadata(slo_class=("chat", "code")[number % 2], tpot_s=(PROMISED_S, 1e-6)[number % 2])
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=10 + number,
            extra_args=told.as_extra_args(),
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(number), {"prompt_token_ids": [11 + number] * (40 + number)}, params)
    came_s = run(engine)
    status = engine.engine_core.engine_core.scheduler.status()
    engine.engine_core.shutdown()
    assert {name: (of["requests"], of["missed"]) for name, of in status["promised_gaps"].items()} == {
        "chat": (REQUESTS // 2, 0),
        "code": (REQUESTS // 2, REQUESTS // 2),
    }
    for place, name in enumerate(("chat", "code")):
        of = status["promised_gaps"][name]
        own = (times_s for number, times_s in came_s.items() if int(number) % 2 == place)
        client_s = sum((times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in own)
        assert of["came_s"] == pytest.approx(client_s, rel=0.1)
        assert 0.5 * of["in_steps_s"] < of["believed_s"] < 2.0 * of["came_s"]
        assert of["in_steps_s"] < of["came_s"], "time passes between steps"
    assert 0.0 < status["between_seconds"] < 0.5 * status["busy_seconds"]
    assert status["step_margin"] == max(0.0, status["step_errors"]["p75"])
