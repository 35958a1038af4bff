"""Does what a Dockerfile's build stage does, in a clean folder and environment, where no container engine is at hand.

    python k8s/docker/check.py k8s/docker/Dockerfile.cpu                  everything, some minutes and 3 GB
    python k8s/docker/check.py k8s/docker/Dockerfile.gpu --without-lock   the wheel alone, seconds

Paths of the image stand below a temporary folder, the environment holds nothing but PATH, HOME and pip's settings. It
ends with an error if a step fails, if `sluice` does not start, or if something is left that installs packages.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
IMAGE_PATHS = re.compile(r"(?<![\w/.])/(?=(?:src|build|opt)(?:/|\s|$))")
BUILD_TOOLS = ("pip", "hatch", "hatchling", "uv", "wheel")
Instruction = tuple[str, str]


class CheckError(Exception):
    """A step failed, or the result is not what the image should hold."""


def instructions(dockerfile: str) -> list[list[Instruction]]:
    """Verb and arguments, by stage."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[Instruction]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        verb, _, arguments = line.partition(" ")
        if verb == "FROM":
            stages.append([])
        stages[-1].append((verb, " ".join(arguments.split())))
    return stages


def build(stage: list[Instruction], root: Path, without_lock: bool) -> None:
    """Raises CheckError."""
    environment = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}
    environment |= {"PATH": f"{_python(root)}:/usr/bin:/bin", "HOME": str(root)}
    for verb, arguments in stage:
        if verb == "ENV":
            pairs = (pair.partition("=") for pair in shlex.split(arguments))
            environment |= {key: value for key, _, value in pairs if key not in os.environ}
        elif verb == "COPY":
            *sources, target = arguments.split()
            _copy(sources, root / target.lstrip("/"), to_folder=target.endswith("/"))
        elif verb == "RUN":
            _empty_locks(root) if without_lock else None
            _run(["sh", "-c", IMAGE_PATHS.sub(f"{root}/", arguments)], environment, root)
        elif verb != "FROM":
            raise CheckError(f"this check does not know {verb}")


def _python(root: Path) -> Path:
    """A folder in which `python` is this one, as the base image has it."""
    folder = root / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(Path(sys.executable).resolve())
    return folder


def _copy(sources: list[str], target: Path, *, to_folder: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for source in (REPOSITORY / name for name in sources):
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif not to_folder:
            raise CheckError(f"COPY {source.name} to a name without / at its end")
        else:
            shutil.copy(source, target)


def _empty_locks(root: Path) -> None:
    for lock in (root / "build").glob("*.lock"):
        lock.write_text("")


def _run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise CheckError(f"{shlex.join(command)}\n{(result.stdout + result.stderr)[-3000:]}")
    return result.stdout


def inspect(prefix: Path, without_lock: bool) -> str:
    """What is in the image. Raises CheckError."""
    left = [tool for tool in BUILD_TOOLS if (prefix / "bin" / tool).exists()]
    if left:
        raise CheckError(f"left in the image: {', '.join(left)}")
    packages = (prefix / "packages.txt").read_text()
    if "sluice-serve" not in packages:
        raise CheckError(f"sluice-serve is not in {packages}")
    environment = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "HOME": str(prefix)}
    statement = (
        "import importlib.metadata as m; print(m.version('sluice-serve'))" if without_lock else "import vllm, ray"
    )
    _run(["python", "-c", statement], environment, prefix)
    if not without_lock:
        _run(["sluice", "serve", "--help"], environment, prefix)
    return packages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--without-lock", action="store_true", help="install the wheel alone, not what the lock names")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        root = Path(folder)
        build(instructions(options.dockerfile.read_text())[0], root, options.without_lock)
        packages = inspect(root / "opt/sluice", options.without_lock)
    print(f"{options.dockerfile}: {len(packages.splitlines())} packages, nothing is left that installs")


if __name__ == "__main__":
    try:
        main()
    except CheckError as error:
        sys.exit(str(error))
