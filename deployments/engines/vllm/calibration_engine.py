"""The engine of `sluice calibrate`, in this process."""

import json
from collections.abc import Sequence

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from deployments.config.scheduler import KEY
from deployments.engines.vllm.args import engine_config, parse_vllm_args


def calibration_engine(model: str, vllm_args: Sequence[str], scheduler_cls: str) -> LLMEngine:
    """One step at a time, under the scheduler plug-in. Raises ConfigError."""
    argv = ["--model", model, *vllm_args, "--disable-log-stats", "--no-async-scheduling", "--no-enable-prefix-caching"]
    settings = json.dumps({KEY: {"mode": "mixed", "admission": "slots"}})
    args = parse_vllm_args([*argv, "--scheduler-cls", scheduler_cls, "--additional-config", settings])
    return LLMEngine.from_vllm_config(engine_config(AsyncEngineArgs.from_cli_args(args)))
