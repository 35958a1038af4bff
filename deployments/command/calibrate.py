"""`sluice calibrate`: step times of a model on this machine, as a profile, a picture and a few words.

The engine runs in this process, one step at a time, under the scheduler plug-in, whose own measurement of each step is
what is fitted; `deployments.command.calibration` says which steps. The profile is the CSV that `policies.profile`
reads, and written again after every batch; the engine's scheduler, the router and the simulator load the same file.
"""

import argparse
import csv
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.command.calibration import Calibration, Measured, Progress, fitted_s
from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.process.vllm_env import cpu_dtype, cpu_env, set_up_gpu_engine
from policies.engine.exclusive import ExclusiveMixedConfig
from policies.engine.phases import (
    PhaseLength,
    RefillLimits,
    WorkloadMeans,
    best_phase_of_survival,
    exclusive_throughput,
    mixed_steps_throughput,
)
from policies.errors import ConfigError, InputError
from policies.lengths.statistics import geometric_law
from policies.profile import COLUMNS, MIXED_COLUMNS
from policies.types import StepTimes

# Set in the environment of the process that measures, once it is what cpu_env() asks for.
_READY_ENV = "SLUICE_CALIBRATE_READY"
# Steps of each load: enough for a median behind stalls, the same in a short time, and the fewest that have a median.
_STEPS, _FEW_STEPS, _LEAST_STEPS = 12, 5, 4

_ERROR_HELP = (
    "finish once steps not measured yet are predicted within this fraction of what they take; "
    "0 measures everything (default: %(default)s)"
)
_EPILOG = """\
examples:
  sluice calibrate                                             the demo model on the CPU
  sluice calibrate --model Qwen/Qwen3-8B --gpu -o qwen3-8b.csv
  sluice calibrate --model ./my-model --gpu --seconds 10         less exact
  sluice calibrate --model ./my-model --gpu --steps 30 --error 0 -- --max-model-len 16384

It takes the whole GPU, and some minutes unless --seconds says less; the engine's start comes on top. The file is there
once a first fit is, and gets better with every batch. Then name the file in the application's configuration:

  work: { profile: qwen3-8b.csv }
"""


def register(commands: Any) -> None:
    """Add the command to the parser of `sluice`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure step times of a model on this machine",
        description="Measure what steps cost here, and say whether exclusive batching can pay.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- VLLM_ARGS ...]",
    )
    parser.add_argument("--model", default="demo", help="local folder or hub name (default: the demo model)")
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU instead of the CPU build")
    parser.add_argument("--seconds", type=float, help="measure for this long at most (default: until all is measured)")
    parser.add_argument("--error", type=float, default=0.05, help=_ERROR_HELP)
    parser.add_argument("--steps", type=int, help="steps of each measurement (default: 12, or 5 with --seconds)")
    parser.add_argument("--most-batch", type=int, help="largest batch measured (default: the engine's slots)")
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.csv"), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="draw the fit there, as PNG or SVG (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises ConfigError when arguments are wrong or too little could be measured."""
    _check(options)
    if options.gpu:
        set_up_gpu_engine(os.environ)
    else:
        _restart_with(cpu_env())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = _VllmEngine(options.model, options.vllm_args, gpu=options.gpu)
    calibration = Calibration(
        engine,
        steps=options.steps or (_FEW_STEPS if options.seconds else _STEPS),
        seconds=options.seconds or math.inf,
        most_batch=options.most_batch,
    )

    def write(times: StepTimes) -> None:
        model = Path(options.model).name
        write_profile(options.output, times, calibration.contexts, model=model, gpu=engine.hardware)

    for progress in calibration.run(options.error):
        if progress.times is not None:
            write(progress.times)
        print(in_a_line(progress), file=sys.stderr, flush=True)
    measured, times = calibration.measured, _last_fit(calibration, options.seconds)
    write(times)
    if options.plot:
        draw(options.plot, measured, times)
    print("\n".join(in_words(times, measured.explained_fraction(times), slots=engine.slots)))
    print(f"profile: {options.output}")


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if options.steps is not None and options.steps < _LEAST_STEPS:
        raise ConfigError(f"--steps must be at least {_LEAST_STEPS}, got {options.steps}")
    if options.seconds is not None and not options.seconds > 0.0:
        raise ConfigError(f"--seconds must be positive, got {options.seconds}")
    if not options.error >= 0.0:
        raise ConfigError(f"--error must not be negative, got {options.error}")
    for path in filter(None, (options.output, options.plot)):
        if not path.parent.is_dir():
            raise ConfigError(f"no folder {path.parent} for {path.name}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'sluice-serve[plan]'")


def _last_fit(calibration: Calibration, seconds: float | None) -> StepTimes:
    """Raises ConfigError."""
    try:
        return calibration.measured.times()
    except InputError as error:
        why = "contexts and prompts" if seconds is None else f"{seconds:g} s"
        raise ConfigError(f"{why} too short: {error}, {len(calibration.batches)} batches were measured") from error


def in_a_line(progress: Progress) -> str:
    """The progress in one line, for the terminal."""
    batch = progress.batch
    what = f"batch of {batch.size} at context {batch.context}" if batch.size else "prompts alone"
    error = progress.error_fraction
    fit = "" if error is None else f"; steps were predicted within {100 * error:.1f} %"
    done = f"{progress.done} of at most {progress.total} batches measured"
    return f"[{progress.took_s:4.0f} s] {done}: {what}{fit}; at most {progress.left_s:.0f} s left"


def _restart_with(env: dict[str, str]) -> None:
    """The OpenMP library of the CPU build takes effect at the start of a process alone."""
    if _READY_ENV not in os.environ:
        command = [sys.executable, "-m", "deployments.command.cli", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **env, _READY_ENV: "1", "VLLM_LOGGING_LEVEL": "ERROR"})


def _of_vllm(model: str, vllm_args: Sequence[str], *, gpu: bool) -> tuple[str, Sequence[str]]:
    """The model and the arguments that an engine of `sluice serve` would have."""
    from deployments.config.model import DEMO, DEMO_ARGS, DEMO_MODEL, ModelSection

    if model == DEMO:
        return str(DEMO_MODEL), [*DEMO_ARGS, "--dtype", cpu_dtype(), *vllm_args]
    if gpu:
        return model, vllm_args
    return model, ModelSection.model_construct(model=model, vllm_args=tuple(vllm_args)).sharing_memory(1).vllm_args


class _VllmEngine:
    """An engine in this process, as `Calibration` drives it."""

    def __init__(self, model: str, vllm_args: Sequence[str], *, gpu: bool) -> None:
        from deployments.engines.vllm.calibration_engine import calibration_engine

        self._engine = calibration_engine(*_of_vllm(model, vllm_args, gpu=gpu), SCHEDULER_CLASS)
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        config = self._engine.vllm_config
        self.slots = config.scheduler_config.max_num_seqs
        self.max_batch_tokens = config.scheduler_config.max_num_batched_tokens
        self.max_request_tokens = config.model_config.max_model_len
        pool = self.scheduler.kv_cache_manager.block_pool
        self.cache_tokens = pool.num_gpu_blocks * config.cache_config.block_size
        self.hardware = _hardware()
        self._added = 0

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        from vllm import SamplingParams

        self._added += 1
        prompt = [10 + (self._added * 7919 + at * 31) % 1000 for at in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        return str(self._engine.add_request(f"c{self._added}", {"prompt_token_ids": prompt}, params))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids), internal=True)

    def step(self) -> None:
        self._engine.step()

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def _hardware() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu-{platform.machine()}"


def write_profile(path: Path, times: StepTimes, contexts: Sequence[int], *, model: str, gpu: str) -> None:
    """A row for each context, with the mixed form in every row. The file is replaced in one step: readers never see a
    part of it."""
    mixed = times.mixed
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *MIXED_COLUMNS))
        for context in contexts:
            decode_s = times.decode.decode_s + times.decode.kv_s * context
            measured = (times.prefill.overhead_s, times.prefill.prefill_s, times.decode.overhead_s, decode_s)
            alpha_p, beta_p, alpha_d, beta_d = (f"{1e3 * seconds:.6g}" for seconds in measured)
            together = (mixed.overhead_s, mixed.prefill_s, mixed.decode_s, mixed.kv_s, mixed.interference_s)
            row = ("sluice calibrate", model, gpu, 1, alpha_p, beta_p, f"context {context}", alpha_d, beta_d)
            writer.writerow((*row, *(f"{1e3 * seconds:.6g}" for seconds in together)))
    unfinished.replace(path)


def in_words(times: StepTimes, explained: float, *, slots: int) -> list[str]:
    """The fit, and whether exclusive batching can pay, for prompts of 512 and answers of 256 tokens."""
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
    prompt, output = 512.0, 256
    means = WorkloadMeans(prompt_tokens=prompt, output_tokens=output, context_tokens=prompt + output)
    phase = _phase(times, slots, prompt, output)
    exclusive = exclusive_throughput(
        times, means, refill=max(1.0, phase.slots_fraction * slots), phase_steps=phase.steps
    )
    return exclusive / mixed_steps_throughput(times, means, slots=slots) - 1.0


def _phase(times: StepTimes, slots: int, prompt: float, output: int) -> PhaseLength:
    survival = geometric_law(output).unit_survival(8 * output)
    limits = RefillLimits(slots=slots, mean_prompt_tokens=prompt, max_batch_tokens=8192)
    least = 1e-6
    return best_phase_of_survival(
        survival, max(least, times.prefill.overhead_s), max(least, times.decode.overhead_s), limits, thinned=True
    )


def draw(path: Path, measured: Measured, times: StepTimes) -> None:
    """Measured against fitted seconds, by kind of step."""
    from matplotlib.figure import Figure

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
