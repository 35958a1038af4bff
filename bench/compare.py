"""Plain `vllm serve` and Sluice side by side on this machine: `python -m bench.compare --help`."""

import argparse
import re
import sys
from collections.abc import Sequence

from bench.machine import machine, versions
from bench.pairing import Plan, measure_pairing
from bench.report import Comparison, as_markdown
from bench.servers import ServerSpec
from bench.session import ENGINE_HELP, Session, file, new_parser, positive, run_session

BASELINE = "vllm serve"

SLUICE_HELP = "Sluice with R routers and E engine replicas; several are measured in turn (default: 1x1)"

VLLM_ROUTER_HELP = "also vllm-router (cache_aware) before E plain `vllm serve`"

REPEATS_HELP = "pairs at each concurrency; an even number gives both the first turn as often (default: %(default)s)"

SLUICE_CONFIG_HELP = (
    "also Sluice with the settings of a file of `sluice serve --config`, which names the replicas and their GPUs too"
)

# The kernel counts a process's CPU in hundredths of a second: over 20 s that is 0.05 % of a core.
IDLE_HELP = "time over which idle CPU is measured (default: %(default)s)"

EPILOG = f"""\
examples:
  python -m bench.compare                                    Sluice with 1 router and 1 engine replica
  python -m bench.compare --sluice 1x1 2x2 --markdown out.md also with 2 routers and 2 engine replicas
  python -m bench.compare --sluice-config stock.yaml         also with other settings, such as the engine's scheduler
  python -m bench.compare --sluice 1x2 --vllm-router 2       beside vllm-router and two plain engines
  python -m bench.compare --control --sluice                 plain vLLM against itself: the noise of the method
  python -m bench.compare --model Qwen/Qwen3-8B -- --kv-cache-memory-bytes=20000000000 --no-enforce-eager   on a GPU

Every contender is paired with the same plain vLLM; both are up, one at a time is loaded, and the order alternates.
{ENGINE_HELP}
exit status: 0 measured, 1 measured but some requests failed, 2 a server or the arguments are unusable, 130 interrupted.
"""


def measure(session: Session) -> Comparison:
    """Raises: ServerFailed, ServerUnusable, ValueError."""
    plan = _plan(session.options)
    baseline, *contenders = specs(session)
    session.bar.total = plan.requests_per_pairing * len(contenders)
    plain, pairings = session.start(baseline), []
    for number, spec in enumerate(contenders):
        with session.running(spec) as contender:
            pairings.append(measure_pairing(plain, contender, plan, session.stage, session.bar.update, number))
    return Comparison(
        machine=machine(),
        versions=versions(),
        model=session.model,
        engine_arguments=session.engine_arguments,
        plan=plan,
        pairings=tuple(pairings),
    )


def specs(session: Session) -> list[ServerSpec]:
    """Plain vLLM first, then its contenders, on consecutive ports."""
    options = session.options
    found = [session.plain(BASELINE, 0)]
    if options.control:
        found.append(session.plain(f"{BASELINE} again", 1))
    if options.vllm_router is not None:
        found.append(session.vllm_router(f"vllm-router 1x{options.vllm_router}", 20, options.vllm_router))
    for routers, engines in options.sluice:
        settings = {"router": {"replicas": routers}, "engine": {"replicas": engines}}
        found.append(session.sluice(f"Sluice {routers}x{engines}", len(found) + 1, settings))
    for path in options.sluice_config:
        found.append(session.sluice_from(path, f"Sluice with {path.name}", len(found) + 1))
    return found


def _plan(options: argparse.Namespace) -> Plan:
    if not (options.sluice or options.sluice_config or options.control or options.vllm_router):
        raise ValueError("nothing to compare with: give --sluice, --sluice-config, --vllm-router or --control")
    return Plan(
        concurrency=tuple(options.concurrency),
        repeats=options.repeats,
        requests_per_client=options.requests_per_client,
        max_tokens=options.max_tokens,
        idle_s=options.idle_seconds,
    )


def _replica_counts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must look like 2x2 (routers x engine replicas), got {text!r}")
    return int(found[1]), int(found[2])


def parser() -> argparse.ArgumentParser:
    what = "Measures Sluice against plain `vllm serve` on this machine, paired and interleaved."
    made = new_parser("bench.compare", what, EPILOG, first_port=18100)
    add = made.add_argument
    add("--sluice", type=_replica_counts, nargs="*", default=[(1, 1)], metavar="RxE", help=SLUICE_HELP)
    add("--sluice-config", type=file, nargs="+", default=[], metavar="FILE", help=SLUICE_CONFIG_HELP)
    add("--control", action="store_true", help="also pair plain vLLM with a second plain vLLM")
    add("--vllm-router", type=positive, metavar="E", help=VLLM_ROUTER_HELP)
    add("--concurrency", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="default: 1 16 64")
    add("--repeats", type=int, default=4, help=REPEATS_HELP)
    add("--requests-per-client", type=int, default=8, help="length of a run (default: %(default)s, at least 24 in all)")
    add("--max-tokens", type=int, default=128, help="length of every answer in tokens (default: %(default)s)")
    add("--idle-seconds", type=float, default=20.0, help=IDLE_HELP)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session(
        "bench.compare", parser(), measure, as_markdown, arguments, has_failed=lambda found: found.failed_requests > 0
    )


if __name__ == "__main__":
    sys.exit(main())
