"""vLLM's arguments, checked beside the start of everything else: a replica would say the same a minute later.

In a process of its own, for reading them takes all of vLLM: ten seconds of a processor, and half a gigabyte that
`sluice serve` would hold for as long as it runs.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from deployments.process.heavy_imports import heavy_imports
from policies.errors import ConfigError

TIMEOUT_S = 300.0


@contextlib.contextmanager
def checking(vllm_argv: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Yields what waits for the outcome; that raises ConfigError where vLLM or Sluice refuses the arguments."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deployments.command.args_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for `sluice serve`
    )

    def outcome() -> None:
        try:
            said, _ = process.communicate(json.dumps(list(vllm_argv)), TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"vllm_args: not checked within {TIMEOUT_S:g} s") from error
        if process.returncode:
            raise ConfigError(said.strip() or "vllm_args: could not be checked, for the reason above")

    try:
        yield outcome
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where vLLM logs: the answer alone goes to the other end
            with heavy_imports():
                from deployments.engines.vllm.args import parse_vllm_args
            parse_vllm_args(json.load(sys.stdin))
    except ConfigError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
