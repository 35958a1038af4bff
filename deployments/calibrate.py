"""`sluice calibrate`: step times of a model on this machine, as a profile, a picture and a few words.

The engine runs in this process, one step at a time, under the scheduler plug-in, whose own measurement of each step is
what is fitted: prefills of several sizes, decodes over batch and context, and mixed steps of both. The profile is the
CSV that `simulator.profiles` reads; the engine's scheduler, the router and the simulator load the same file.
"""

import argparse
import csv
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deployments.environment import cpu_dtype, cpu_env, set_up_gpu_engine
from deployments.scheduler_settings import SCHEDULER_CLASS
from policies.errors import ConfigError
from policies.exclusive import ExclusiveMixedConfig
from policies.lengths import geometric_law
from policies.phases import (
    PhaseLength,
    RefillLimits,
    WorkloadMeans,
    best_phase_of_survival,
    exclusive_throughput,
    mixed_steps_throughput,
)
from policies.step_time import fit_step_times
from policies.types import StepResult, StepTimes
from simulator.profiles import COLUMNS, MIXED_COLUMNS

# Set in the environment of the process that measures, once it is what cpu_env() asks for.
_READY_ENV = "SLUICE_CALIBRATE_READY"
_MEAN_OUTPUT_TOKENS = 256

_EPILOG = """\
examples:
  sluice calibrate                                             the demo model on the CPU
  sluice calibrate --model Qwen/Qwen3-8B --gpu -o qwen3-8b.csv
  sluice calibrate --model ./my-model --gpu --steps 30 -- --max-model-len 16384 --gpu-memory-utilization 0.85

It takes a few minutes and the whole GPU. Then name the file in the application's configuration:

  engine: { scheduler: { mode: auto, profile: qwen3-8b.csv } }
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement: `batch` requests that decode at `context` tokens, and `prompt` tokens prefilled in each step."""

    batch: int
    context: int
    prompt: int


@dataclass(slots=True)
class Measured:
    """The median step of every load, and the model fitted to them."""

    steps: list[StepResult] = field(default_factory=list)

    def add(self, steps: Sequence[StepResult]) -> None:
        """The median by duration stands for all: what else the machine does must not bend the fit."""
        if steps:
            self.steps.append(sorted(steps, key=lambda step: step.step_s)[len(steps) // 2])

    def times(self) -> StepTimes:
        """Raises InputError when a kind of step was not measured often enough."""
        return fit_step_times(self.steps)

    def explained_fraction(self, times: StepTimes) -> float:
        """R squared of the fit over all steps."""
        seconds = np.array([step.step_s for step in self.steps])
        left = seconds - np.array([fitted_s(times, step) for step in self.steps])
        return 1.0 - float((left**2).sum() / max(((seconds - seconds.mean()) ** 2).sum(), 1e-18))


def fitted_s(times: StepTimes, step: StepResult) -> float:
    return times.step_s(
        prefill_tokens=step.prefill_tokens, decode_requests=step.decode_requests, kv_tokens=step.kv_tokens
    )


def register(commands: Any) -> None:
    """Add the command to the parser of `sluice`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure step times of a model on this machine",
        description="Measure what steps cost here, and say whether exclusive batching can pay.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="local folder or hub name (default: the demo model)")
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU instead of the CPU build")
    parser.add_argument("--steps", type=int, default=12, help="steps of each measurement (default: %(default)s)")
    parser.add_argument("--most-batch", type=int, help="largest batch measured (default: the engine's slots)")
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.csv"), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="draw the fit there, as PNG or SVG (needs matplotlib)")
    parser.add_argument("vllm_args", nargs="*", metavar="-- VLLM_ARGS", help="further arguments for vLLM")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises ConfigError when arguments are wrong or too little could be measured."""
    if options.steps < 4:
        raise ConfigError(f"--steps must be at least 4, got {options.steps}")
    if options.gpu:
        set_up_gpu_engine(os.environ)
    else:
        _restart_with(cpu_env())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    bench = _Bench(options.model, options.vllm_args, gpu=options.gpu)
    measured = bench.measure(options.steps, options.most_batch)
    times = measured.times()
    contexts = sorted({load.context for load in bench.loads(options.most_batch) if load.batch and not load.prompt})
    write_profile(options.output, times, contexts, model=Path(options.model).name, gpu=bench.hardware)
    if options.plot:
        draw(options.plot, measured, times)
    print("\n".join(in_words(times, measured.explained_fraction(times), slots=bench.slots)))
    print(f"profile: {options.output}")


def _restart_with(env: dict[str, str]) -> None:
    """The OpenMP library of the CPU build takes effect at the start of a process alone."""
    if _READY_ENV not in os.environ:
        command = [sys.executable, "-m", "deployments.cli", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **env, _READY_ENV: "1", "VLLM_LOGGING_LEVEL": "ERROR"})


def _of_vllm(model: str, vllm_args: Sequence[str], *, gpu: bool) -> tuple[str, Sequence[str]]:
    """The model and the arguments that an engine of `sluice serve` would have."""
    from deployments.config import DEMO, DEMO_ARGS, DEMO_MODEL, ModelSection

    if model == DEMO:
        return str(DEMO_MODEL), [*DEMO_ARGS, "--dtype", cpu_dtype(), *vllm_args]
    if gpu:
        return model, vllm_args
    return model, ModelSection.model_construct(model=model, vllm_args=tuple(vllm_args)).sharing_memory(1).vllm_args


class _Bench:
    """An engine in this process whose batches are made to order."""

    def __init__(self, model: str, vllm_args: Sequence[str], *, gpu: bool) -> None:
        from deployments.vllm_adapter import calibration_engine

        self._engine = calibration_engine(*_of_vllm(model, vllm_args, gpu=gpu), SCHEDULER_CLASS)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        config = self._engine.vllm_config
        self.slots = config.scheduler_config.max_num_seqs
        self._budget = config.scheduler_config.max_num_batched_tokens
        self._longest = config.model_config.max_model_len
        pool = self._scheduler.kv_cache_manager.block_pool
        self._cache_tokens = pool.num_gpu_blocks * config.cache_config.block_size
        self.hardware = _hardware()
        self._added = 0

    def loads(self, most_batch: int | None) -> list[Load]:
        """A grid over batch and context, as far as cache and model go."""
        most = min(self.slots - 1, most_batch or self.slots)
        batches = [batch for batch in (1, 4, 16, 64, 128, 256) if batch <= most]
        contexts = [context for context in (64, 256, 1024, 4096) if context <= self._longest // 2]
        prompts = [prompt for prompt in (32, 128, 512, 2048) if prompt < min(self._budget, self._longest) - 256]
        alone = [Load(0, 0, prompt) for prompt in prompts]
        decodes = [Load(b, c, 0) for b in batches for c in contexts if b * (c + 64) < 0.8 * self._cache_tokens]
        # At several contexts, or what a request costs and what its context costs cannot be told apart.
        mixed = [
            Load(load.batch, load.context, prompt)
            for load in decodes
            for prompt in prompts
            if load.context in (contexts[0], contexts[-1]) and load.batch + prompt <= self._budget
        ]
        return alone + decodes + mixed

    def measure(self, steps: int, most_batch: int | None) -> Measured:
        from tqdm import tqdm

        measured, loads = Measured(), self.loads(most_batch)
        with tqdm(loads, unit="load", desc="measuring", disable=None) as bar:
            for load in bar:
                bar.set_postfix_str(f"batch {load.batch}, context {load.context}, prompt {load.prompt}")
                measured.add(self._steps_of(load, steps))
        return measured

    def _steps_of(self, load: Load, steps: int) -> list[StepResult]:
        """Steps with exactly this load; the first two of each only warm up."""
        seen: list[StepResult] = []
        ids = [self._add(load.context, 4 * steps + 64) for _ in range(load.batch)]
        while self._scheduler.waiting or self._scheduler._inflight_prefills:
            self._engine.step()
        self._scheduler.report()
        self._scheduler.on_step = seen.append
        for _ in range(steps + 2):
            if load.prompt:
                self._add(load.prompt, 1)
            self._engine.step()
        self._scheduler.report()
        self._scheduler.on_step = None
        self._engine.abort_request(ids, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return [s for s in seen[2:] if s.decode_requests == load.batch and (s.prefill_tokens > 0) == (load.prompt > 0)]

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        from vllm import SamplingParams

        self._added += 1
        prompt = [10 + (self._added * 7919 + at * 31) % 1000 for at in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        return str(self._engine.add_request(f"c{self._added}", {"prompt_token_ids": prompt}, params))


def _hardware() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu-{platform.machine()}"


def write_profile(path: Path, times: StepTimes, contexts: Sequence[int], *, model: str, gpu: str) -> None:
    """A row for each context; the mixed form stands in every row."""
    mixed = times.mixed
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *MIXED_COLUMNS))
        for context in contexts:
            decode_s = times.decode.decode_s + times.decode.kv_s * context
            measured = (times.prefill.overhead_s, times.prefill.prefill_s, times.decode.overhead_s, decode_s)
            alpha_p, beta_p, alpha_d, beta_d = (f"{1e3 * seconds:.6g}" for seconds in measured)
            together = (mixed.overhead_s, mixed.prefill_s, mixed.decode_s, mixed.kv_s, mixed.interference_s)
            row = ("sluice calibrate", model, gpu, 1, alpha_p, beta_p, f"context {context}", alpha_d, beta_d)
            writer.writerow((*row, *(f"{1e3 * seconds:.6g}" for seconds in together)))


def in_words(times: StepTimes, explained: float, *, slots: int) -> list[str]:
    """What was found, and whether exclusive batching can pay, for prompts of 512 and answers of 256 tokens."""
    p, d, m = times.prefill, times.decode, times.mixed
    lines = [
        f"prefill: {1e3 * p.overhead_s:.2f} ms + {1e6 * p.prefill_s:.1f} us per token",
        f"decode:  {1e3 * d.overhead_s:.2f} ms + {1e6 * d.decode_s:.1f} us per request + {1e9 * d.kv_s:.1f} ns per "
        "token of context",
        f"mixed:   {1e3 * m.overhead_s:.2f} ms + {1e6 * m.prefill_s:.1f} us per prompt token + "
        f"{1e6 * m.decode_s:.1f} us per request + {1e9 * m.kv_s:.1f} ns per token of context",
        f"the fit explains {100 * explained:.1f} % of the spread of the steps measured",
    ]
    gains = {n: exclusive_gain(times, n) for n in (16, 64, 256) if n <= slots} or {slots: exclusive_gain(times, slots)}
    best = max(gains, key=lambda n: gains[n])
    needed = ExclusiveMixedConfig().hysteresis_fraction
    listed = ", ".join(f"{100 * gain:+.1f} % at {n}" for n, gain in gains.items())
    lines.append(f"exclusive against mixed batching, full batches: {listed} requests")
    if gains[best] > needed:
        lines.append(f"exclusive batching can pay here, most at {best} requests: leave the mode at auto")
    else:
        lines.append("exclusive batching cannot pay here: mixing costs too little extra; auto will stay mixed")
    return lines


def exclusive_gain(times: StepTimes, slots: int) -> float:
    """Throughput of exclusive over mixed batching, less 1, with a full batch and an endless queue."""
    prompt, output = 512.0, float(_MEAN_OUTPUT_TOKENS)
    means = WorkloadMeans(prompt_tokens=prompt, output_tokens=output, context_tokens=prompt + output)
    phase = _phase(times, slots, prompt)
    exclusive = exclusive_throughput(
        times, means, refill=max(1.0, phase.slots_fraction * slots), phase_steps=phase.steps
    )
    return exclusive / mixed_steps_throughput(times, means, slots=slots) - 1.0


def _phase(times: StepTimes, slots: int, prompt: float) -> PhaseLength:
    survival = geometric_law(_MEAN_OUTPUT_TOKENS).unit_survival(8 * _MEAN_OUTPUT_TOKENS)
    limits = RefillLimits(slots=slots, mean_prompt_tokens=prompt, max_batch_tokens=8192)
    least = 1e-6
    return best_phase_of_survival(
        survival, max(least, times.prefill.overhead_s), max(least, times.decode.overhead_s), limits, thinned=True
    )


def draw(path: Path, measured: Measured, times: StepTimes) -> None:
    """Measured against fitted seconds, by kind of step. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'sluice-serve[plan]'") from None
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    kinds = {"prefill": (True, False), "decode": (False, True), "mixed": (True, True)}
    for kind, holds in kinds.items():
        steps = [s for s in measured.steps if (s.prefill_tokens > 0, s.decode_requests > 0) == holds]
        fitted = [1e3 * fitted_s(times, step) for step in steps]
        axes.loglog(fitted, [1e3 * step.step_s for step in steps], ".", label=kind)
    longest = 1e3 * max(step.step_s for step in measured.steps)
    least = 1e3 * min(step.step_s for step in measured.steps)
    axes.loglog([least, longest], [least, longest], "k-", linewidth=0.8, label="as fitted")
    axes.set(xlabel="fitted, ms", ylabel="measured, ms", title=f"R² {measured.explained_fraction(times):.3f}")
    axes.legend()
    figure.savefig(path, dpi=150)
