"""`vllm-router` before plain `vllm serve`, as one server: `python -m bench.peers.vllm_router --help`.

The router that vLLM's own project offers for several engines, a program in Rust. `cache_aware` sends a request to the
engine that was sent most of its text, unless the engines' loads differ too much. It comes from PyPI: `pip install
vllm-router==0.1.17`, which needs no GPU.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.servers import HOST, PEER_READY, Server, ServerFailed, ServerSpec, plain_vllm, vllm_router

START_S = 600.0


def specs(name: str, port: int, model: str, engines: int, engine_arguments: Sequence[str]) -> list[ServerSpec]:
    """The engines, on the ports after the router's, and the router."""
    behind = [plain_vllm(f"{name} {n}", model, port + 1 + n, engine_arguments) for n in range(engines)]
    return [*behind, vllm_router(name, port, [spec.url for spec in behind])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.vllm_router",
        usage="%(prog)s [options] MODEL [engine arguments]",
        description="Starts plain vLLM engines and vllm-router before them, until it is told to end.",
    )
    parser.add_argument("--port", type=int, required=True, help="the router's; its engines take those after")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("model")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options, engine_arguments = _parser().parse_known_args(arguments)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
        try:
            *engines, router = specs("vllm-router", options.port, options.model, options.engines, engine_arguments)
            started = [stack.enter_context(Server(spec, logs)) for spec in engines]
            for engine in started:
                engine.wait_until_ready(START_S)
            started.append(stack.enter_context(Server(router, logs)))
            started[-1].wait_until_ready(START_S)
            print(f"{PEER_READY}http://{HOST}:{options.port}", flush=True)
            while True:
                for each in started:
                    each.check_alive()
                time.sleep(1.0)
        except ServerFailed as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
