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

from bench.servers import HOST, PEER_READY, Server, ServerFailed, plain_vllm, vllm_router

START_S = 600.0


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
            ports = range(options.port + 1, options.port + 1 + options.engines)
            specs = [plain_vllm(f"engine {port}", options.model, port, engine_arguments) for port in ports]
            started = [stack.enter_context(Server(spec, logs)) for spec in specs]
            for engine in started:
                engine.wait_until_ready(START_S)
            router = vllm_router("vllm-router", options.port, [spec.url for spec in specs])
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
