"""The frame of every benchmark of servers: its options, a bar, servers that end with it, results, and how it ends.

A benchmark is a parser and a function of a `Session` that returns what was measured; `run_session` does the rest.
Variants are compared in `turns`, repeat by repeat.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from bench import random_model
from bench.chat_client import RequestFailed
from bench.load import ServerUnusable
from bench.servers import (
    ENGINE_ARGUMENTS,
    GPU_ARGUMENTS,
    Server,
    ServerFailed,
    ServerSpec,
    gpus_of_an_engine,
    plain_vllm,
    shared_arguments,
    sluice,
    split_at_dashes,
    vllm_router_and_engines,
)

MEASURED, FAILED, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
DEMO_MODEL = "deployments/demo_model"
EXIT_STATUS = "exit status: 0 measured, 2 a server or the arguments are unusable, 130 interrupted."
ENGINE_HELP = f"""\
All engines get these arguments, and after them whatever follows `--`:
  {" ".join(ENGINE_ARGUMENTS)}
Unless the vLLM installed here is its CPU build, also these, for servers share the first GPU:
  {" ".join(GPU_ARGUMENTS)}
"""
_UNUSABLE = (ServerFailed, ServerUnusable, RequestFailed, OSError, ValueError)

T = TypeVar("T")
Result = TypeVar("Result")


def turns(variants: Sequence[T], repeat: int) -> Sequence[T]:
    """The variants in the order of a repeat: A B C, B C A, C A B, and for two A B, B A, A B.

    What slows a shared machine down for minutes then hits all variants of a repeat, and none by its place.
    """
    first = repeat % len(variants)
    return *variants[first:], *variants[:first]


def file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no file {text}")
    return Path(text)


def folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {text}")
    return Path(text)


def writable_file(text: str) -> Path:
    folder(str(Path(text).parent))
    return Path(text)


def positive_number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def new_parser(
    name: str, description: str, epilog: str, *, first_port: int, model: str | None = DEMO_MODEL
) -> argparse.ArgumentParser:
    """With the options that all benchmarks of servers have.

    Args:
        model: its default; None is one of random weights.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        usage="%(prog)s [options] [-- engine arguments of all]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, "random weights, nothing to download" if model is None else model
    add("--model", default=model, help=f"folder or name of the model (default: {default})")
    add(
        "--num-gpus",
        type=float,
        metavar="N",
        help="GPUs of each Sluice engine (default: 0 on vLLM's CPU build, else 1)",
    )
    add(
        "--first-port",
        type=int,
        default=first_port,
        help="servers take this port and those after (default: %(default)s)",
    )
    add("--startup-timeout", type=float, default=300.0, help="seconds until a start counts as failed (default: 300)")
    add("--logs", type=folder, metavar="FOLDER", help="keep the servers' logs there")
    add("--json", type=writable_file, metavar="FILE", help="write every run, in seconds")
    add("--markdown", type=writable_file, metavar="FILE", help="write what is printed")
    return parser


class Session:
    """One run of a benchmark: what it started ends with it.

    Attributes:
        bar: over requests; its description says what happens now.
        folder: for files that nobody needs afterwards.
        engine_arguments: of all engines.
    """

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str], stack: ExitStack) -> None:
        self.options, self.stack = options, stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        self.bar = stack.enter_context(tqdm(unit="request", mininterval=0.5, disable=None))
        self.model = str(options.model or self.folder / "random")
        if options.model is None:
            random_model.write_model(self.folder / "random")
            arguments = (*random_model.engine_arguments(), *arguments)
        self.engine_arguments = shared_arguments(arguments)

    def stage(self, text: str) -> None:
        self.bar.set_description(text)

    def say(self, text: str) -> None:
        self.bar.write(text, file=sys.stderr)

    def start(self, spec: ServerSpec) -> Server:
        """Runs until the session ends. Raises ServerFailed."""
        return self.stack.enter_context(self.running(spec))

    @contextmanager
    def running(self, spec: ServerSpec) -> Iterator[Server]:
        """Runs until the end of the with block. Raises ServerFailed."""
        self.stage(f"starting {spec.name}")
        with Server(spec, self.options.logs or self.folder) as server:
            took_s = server.wait_until_ready(self.options.startup_timeout)
            self.say(f"{spec.name} is ready after {took_s:.0f} s at {spec.url}")
            yield server
            self.stage(f"stopping {spec.name}")

    def plain(self, name: str, place: int, *more: str) -> ServerSpec:
        """`vllm serve` on the place-th port."""
        return plain_vllm(name, self.model, self.options.first_port + place, (*self.engine_arguments, *more))

    def vllm_router(self, name: str, place: int, engines: int) -> ServerSpec:
        """vllm-router before so many `vllm serve`, on this port and those after."""
        port = self.options.first_port + place
        return vllm_router_and_engines(name, self.model, port, engines, self.engine_arguments)

    def sluice(self, name: str, place: int, settings: Mapping[str, Any], *more: str) -> ServerSpec:
        """Sluice on the place-th port, with these settings and defaults for the rest; `more` options of its own."""
        engine = {"num_gpus": gpus_of_an_engine(self.options.num_gpus), **settings.get("engine", {})}
        path = self.folder / f"sluice-{place}.json"
        path.write_text(json.dumps({**settings, "engine": engine}))  # JSON is YAML
        return self.sluice_from(path, name, place, *more)

    def sluice_from(self, config: Path, name: str, place: int, *more: str) -> ServerSpec:
        """Sluice on the place-th port with the settings of a file."""
        given = (f"--config={config}", *more, f"--model={self.model}", "--", *self.engine_arguments)
        return sluice(name, self.options.first_port + place, *given)

    def write(self, result: object, markdown: str) -> None:
        print(markdown)
        if self.options.markdown is not None:
            self.options.markdown.write_text(markdown)
        if self.options.json is not None:
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))


def run_session(
    program: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[Session], Result],
    as_markdown: Callable[[Result], str],
    arguments: Sequence[str] | None = None,
    *,
    engine_arguments: Callable[[argparse.Namespace], Sequence[str]] = lambda options: (),
    unusable: tuple[type[Exception], ...] = (),
    has_failed: Callable[[Result], bool] = lambda result: False,
) -> int:
    """Parses, measures, and prints and writes what was measured. Returns the exit status.

    Args:
        engine_arguments: of this benchmark, before what follows `--`.
        unusable: further exceptions that say that a server or the arguments are unusable.
        has_failed: whether the result has to be told as a failure.
    """
    own, more = split_at_dashes(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(own)

    def measured(stack: ExitStack) -> int:
        session = Session(options, (*engine_arguments(options), *more), stack)
        result = measure(session)
        session.write(result, as_markdown(result))
        return FAILED if has_failed(result) else MEASURED

    return exit_status(program, measured, unusable)


def exit_status(program: str, measure: Callable[[ExitStack], int], unusable: tuple[type[Exception], ...] = ()) -> int:
    """The status that `measure` returns, or that of its failure; what it put on the stack ends in any case."""
    expected: tuple[type[Exception], ...] = (*_UNUSABLE, *unusable)
    try:
        with ExitStack() as stack:
            # As Ctrl-C: the servers are stopped in either case.
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
            return measure(stack)
    except expected as error:
        print(f"{program}: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print(f"{program}: interrupted; every server that it started has been stopped", file=sys.stderr)
        return INTERRUPTED
