"""Requests in time beyond capacity, Sluice beside `vllm serve` on real engines: `python -m bench.goodput --help`.

Targets and capacity are those of `bench.capacity`, by plain vLLM; runs are those of `bench.in_time`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.capacity import OpenLoop, add_options, classes_of, engine_arguments, lengths_of, targets_in_words
from bench.in_time import (
    CAPPED,
    PLAIN,
    Run,
    add_run_options,
    best_cap,
    cap_argument,
    failures,
    paired_runs,
    table,
    warm_up,
    write_figure,
)
from bench.open_loop import LOOSE, Lengths, Targets
from bench.session import EXIT_STATUS, Session, new_parser, run_session

SLUICE = "Sluice"

EPILOG = f"""\
examples:
  python -m bench.goodput                         a random model of 27 million parameters, some 40 minutes on two cores
  python -m bench.goodput --rounds 1 --requests 100   a first look
  python -m bench.goodput --model Qwen/Qwen3-8B --slots 256 --answer 250 --tight-prompt 400 --loose-prompt 4000
  python -m bench.goodput --also 'Ray Serve LLM=http://127.0.0.1:8001'   a running server of the same model beside them

All get the same engine arguments, and after them whatever follows `--`. A request is in time if it keeps both its
targets; refused and failed ones are not. Sluice is told the targets as those of its classes; nothing else is set.

{EXIT_STATUS}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything; this is what `--json` writes. `capacity` is in requests a second, `cap` in prompt tokens."""

    model: str
    engine_arguments: tuple[str, ...]
    lengths: Lengths
    requests: int
    targets: Mapping[str, Targets]
    capacity: float
    cap: int
    runs: tuple[Run, ...]


def measure(session: Session) -> Measured:
    """Raises: ServerFailed, ServerUnusable, RequestFailed, ValueError."""
    options = session.options
    loop = OpenLoop(session, lengths_of(options))
    plain = session.start(session.plain(PLAIN, 0)).spec.url
    loop.measure_targets(plain)
    capacity = loop.capacity(plain, lambda rate: options.requests)
    cap = best_cap(loop, capacity)
    settings = {"classes": classes_of(loop.targets), "default_class": LOOSE, "engine": {"replicas": 1}}
    servers = {
        PLAIN: plain,
        CAPPED: session.start(session.plain(CAPPED, 1, cap_argument(cap))).spec.url,
        SLUICE: session.start(session.sluice(SLUICE, 2, settings)).spec.url,
        **dict(options.also),
    }
    for url in servers.values():
        warm_up(loop, url, capacity)
    return Measured(
        model=options.model or "random Qwen3, 27 million parameters",
        engine_arguments=session.engine_arguments,
        lengths=loop.lengths,
        requests=options.requests,
        targets=loop.targets,
        capacity=capacity,
        cap=cap,
        runs=tuple(paired_runs(loop, servers, capacity)),
    )


def as_markdown(measured: Measured) -> str:
    return "\n\n".join([_heading(measured), table(measured.runs), *failures(measured.runs)]) + "\n"


def _heading(measured: Measured) -> str:
    lengths = measured.lengths
    return (
        f"Model: {measured.model}. All: `{' '.join(measured.engine_arguments)}`.\n"
        f"Half of the requests are tight (prompts of {lengths.tight_prompt} tokens in the mean), half loose "
        f"({lengths.loose_prompt}); answers of {lengths.answer}. Open loop, gaps with a coefficient of variation of 2, "
        f"{measured.requests} requests a run.\n"
        f"Targets: {targets_in_words(measured.targets)}. "
        f"Capacity of `{PLAIN}`: {measured.capacity:.2f} requests a second. Best cap: {measured.cap} tokens.\n"
        "Shares of all requests: medians over the rounds, in brackets the least and the greatest; differences are "
        "paired."
    )


def _parser() -> argparse.ArgumentParser:
    what = "Measures requests in time below and beyond capacity, Sluice beside plain `vllm serve`."
    parser = new_parser("bench.goodput", what, EPILOG, first_port=18300, model=None)
    add_options(parser, Lengths(), "each system")
    add_run_options(parser, loads=(0.7, 1.0, 1.3), requests=400)
    return parser


def _measured(session: Session) -> Measured:
    found = measure(session)
    if session.options.figure is not None:
        write_figure(found.runs, session.options.figure)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return run_session("bench.goodput", _parser(), _measured, as_markdown, arguments, engine_arguments=engine_arguments)


if __name__ == "__main__":
    sys.exit(main())
