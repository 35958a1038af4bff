"""vLLM's arguments, checked by its own parser before anything starts: a replica would say the same a minute later.
And what of Sluice they switch off.

In a process of its own, for reading them takes all of vLLM: seconds of a processor, and half a gigabyte that
`sluice serve` would hold for as long as it runs.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from deployments.config.application import AppConfig
from deployments.engines.features import Cause, off_in_words
from deployments.process.heavy_imports import heavy_imports
from policies.errors import ConfigError

TIMEOUT_S = 300.0  # vLLM's imports on a machine that is busy
AS_A_ROUTER = {"VLLM_TARGET_DEVICE": "cpu"}  # a build for GPUs reads them on a machine without one too


def check_args(models: Sequence[AppConfig]) -> list[str]:
    """Returns what is off with these settings, and why: a line for each.

    Raises ConfigError where vLLM or Sluice refuses the arguments of one of them.
    """
    here = [each for each in models if each.engine.kind != "openai"]  # others' servers have arguments of their own
    asked = json.dumps([[each.public_name, each.vllm_argv()] for each in here])
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
    of_args = zip(here, json.loads(done.stdout), strict=True)
    found = {each.public_name: frozenset(map(Cause, causes)) for each, causes in of_args}
    return [
        f"{each.public_name}: {line}"
        for each in models
        for line in off_in_words(found.get(each.public_name, frozenset()) | _causes_of(each))
    ]


def _causes_of(config: AppConfig) -> frozenset[Cause]:
    """By Sluice's own settings."""
    if config.engine.kind != "vllm":
        return frozenset({Cause(config.engine.kind)})
    return frozenset({Cause.STOCK} if config.engine.scheduler.mode == "stock" else ())


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr), heavy_imports():  # where vLLM logs: the answer alone goes to stdout
        from deployments.engines.vllm.args import parse_vllm_args
        from deployments.engines.vllm.causes import causes_of_args
    found = []
    for name, argv in json.load(sys.stdin):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found.append(sorted(causes_of_args(parse_vllm_args(argv))))
        except ConfigError as error:
            print(f"{error} (of model {name})")
            sys.exit(1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
