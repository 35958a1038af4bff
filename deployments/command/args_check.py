"""vLLM's arguments, checked by its own parser before anything starts: a replica would say the same a minute later.

In a process of its own, for reading them takes all of vLLM: seconds of a processor, and half a gigabyte that
`sluice serve` would hold for as long as it runs.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable

from deployments.config.application import AppConfig
from deployments.process.heavy_imports import heavy_imports
from policies.errors import ConfigError

TIMEOUT_S = 300.0  # vLLM's imports on a machine that is busy
AS_A_ROUTER = {"VLLM_TARGET_DEVICE": "cpu"}  # a build for GPUs reads them on a machine without one too


def check_args(models: Iterable[AppConfig]) -> None:
    """Raises ConfigError where vLLM or Sluice refuses the arguments of one of them."""
    asked = json.dumps([[each.public_name, each.vllm_argv()] for each in models])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "deployments.command.args_check"],
            input=asked,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            env=os.environ | AS_A_ROUTER,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"vllm_args: not checked within {TIMEOUT_S:g} s") from error
    if done.returncode:
        raise ConfigError(done.stdout.strip() or "vllm_args: could not be checked, for the reason above")


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr), heavy_imports():  # where vLLM logs: the answer alone goes to stdout
        from deployments.engines.vllm.args import parse_vllm_args
    for name, argv in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                parse_vllm_args(argv)
        except ConfigError as error:
            print(f"{error} (of model {name})")
            sys.exit(1)


if __name__ == "__main__":
    main()
