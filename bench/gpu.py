"""Everything that needs a GPU, as one command of bounded time: `python -m bench.gpu --help`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from bench.random_model import write_config

# Qwen3's published sizes; weights are random, so nothing is downloaded.
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
ALL_SIZES = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "eos_token_id": 151645,
}
PLANNED_FRACTION = 0.9
MODES = "bench/deployments/test_modes_on_this_machine.py"
EPILOG = """\
examples:
  python -m bench.gpu                                  the 0.6 and 8 billion parameter models, at most 30 minutes
  python -m bench.gpu --sizes 8b --minutes 20 --out results

For each size: `sluice calibrate`, whose profile and picture are kept, and the scheduler's modes side by side (stock,
mixed, exclusive, auto; with room and in a tight cache), paired over --repeats rounds, with asynchronous scheduling as
vLLM has it on a GPU. Each part writes its log as it goes; what runs past the time is ended and named.

exit status: 0 all parts ran, 1 a part failed or ran out of time.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A command whose output is kept under a name."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str]


def model_folder(folder: Path, size: str) -> Path:
    """A folder with nothing but the configuration of a Qwen3 of that size."""
    model = folder / f"qwen3-{size}-random"
    model.mkdir()
    write_config(model, **ALL_SIZES, tie_word_embeddings=size != "8b", **SIZES[size])
    return model


def parts(options: argparse.Namespace, folder: Path) -> list[Part]:
    """Calibration first, size by size: it is the shortest and worth most."""
    found = []
    for size in options.sizes:
        model = model_folder(folder, size)
        profile = options.out / f"qwen3-{size}"
        calibrate = (
            "-m",
            "deployments.command.cli",
            "calibrate",
            "--model",
            str(model),
            "--gpu",
            "--most-batch",
            "256",
        )
        written = ("-o", f"{profile}.csv", "--plot", f"{profile}.png")
        engine = ("--", "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "8192")
        found.append(Part(f"calibrate-{size}", (sys.executable, *calibrate, *written, *engine), {}))
    for size in options.sizes:
        args = {"load_format": "dummy", "max_model_len": 8192, "gpu_memory_utilization": 0.85}
        env = {
            "SLUICE_BENCH_MODEL": str(folder / f"qwen3-{size}-random"),
            "SLUICE_BENCH_ARGS": json.dumps(args),
            "SLUICE_BENCH_CLOCK": "wall",
            "SLUICE_BENCH_REPEATS": str(options.repeats),
            "SLUICE_BENCH_SCALE": "2",
            "SLUICE_BENCH_SLOTS": "32 256",
        }
        found.append(Part(f"modes-{size}", (sys.executable, "-m", "pytest", MODES, "-s", "-q"), env))
    return found


def with_its_share(part: Part, left_s: float, parts_left: int) -> tuple[Part, float]:
    """The part, which is told what it may plan with, and its limit in seconds.

    left_s: for this part and all later ones. One that plans its own time gets nine tenths of its share, for no plan
    holds to the second; one that does not may take twice its share.
    """
    share_s = left_s / parts_left
    told = {"SLUICE_BENCH_SECONDS": f"{PLANNED_FRACTION * share_s:.0f}"}
    return replace(part, env=told | part.env), min(left_s, 2.0 * share_s)


def run(part: Part, out: Path, limit_s: float) -> str:
    """How it went, in a word or two."""
    results = {"SLUICE_BENCH_OUT": str(out / part.name)}
    with (out / f"{part.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                part.command,
                env={**os.environ, **results, **part.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
    return "ran" if done.returncode == 0 else f"failed with status {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end_s, outcomes = time.monotonic() + 60.0 * options.minutes, {}
    with tempfile.TemporaryDirectory(prefix="sluice-gpu-") as folder:
        todo = parts(options, Path(folder))
        for number, part in enumerate(tqdm(todo, unit="part", disable=None)):
            left_s = max(1.0, end_s - time.monotonic())
            told, limit_s = with_its_share(part, left_s, len(todo) - number)
            outcomes[part.name] = run(told, options.out, limit_s)
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}, see {options.out / name}.log")
    return 0 if set(outcomes.values()) == {"ran"} else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Calibrates and compares the scheduler's modes on this machine's GPU, in bounded time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "8b"], help="default: 0.6b 8b")
    parser.add_argument("--minutes", type=float, default=30.0, help="longest time in all (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all modes (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder of results (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
