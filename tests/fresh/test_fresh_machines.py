"""`make serve` and `make test` on a new Debian 12 and a new Debian 13, with nothing but git and make before.

Ten minutes each. Of the tests those run there that need what the system has to have, and the fast ones: all of them
run where CI does.
"""

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.process.ports import free_port
from tests.fresh.machine import DEBIANS, Machine, has_torch, new_machine

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3 * 3600)]
ROOT = Path(__file__).parents[2]
READY_S = 3000.0
# One that needs chromium, one that needs ip, and those that need npm.
OF_THE_SYSTEM = (
    "tests/integration/one_model/test_page.py "
    "tests/chaos/test_chaos.py::test_a_network_that_is_cut_and_joined_again "
    "tests/k8s/test_values.py"
)
# Without torch: no engine, and nothing that imports vLLM.
WITHOUT_TORCH = (
    "tests/policies tests/contracts tests/router tests/simulator tests/deployments/serving/test_embedded_redis.py"
)


@pytest.fixture(params=DEBIANS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with new_machine(request.param) as made:
        made.run("apt-get update -q >/dev/null && apt-get install -qy --no-install-recommends git make >/dev/null")
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(made.root / "sluice")]
        subprocess.run(clone, check=True)
        yield made


def test_two_commands_and_nothing_else(machine: Machine, tmp_path: Path) -> None:
    _a_user_is_told_what_to_install(machine)
    if _has_torch(machine):
        _make_serve_answers(machine, tmp_path)
        machine.run("cd /sluice && make test-system check test-unit", timeout_s=7200)
        machine.run(f"cd /sluice && .venv/bin/python -m pytest -q {OF_THE_SYSTEM}", timeout_s=7200)
    else:
        _all_but_torch_is_there(machine)


def _has_torch(machine: Machine) -> bool:
    (torch,) = re.findall(r"^(torch==\S+)", (ROOT / _lock_of(machine)).read_text(), re.MULTILINE)
    return has_torch(DEBIANS[machine.suite], torch)


def _lock_of(machine: Machine) -> str:
    return f"requirements/cpu-{DEBIANS[machine.suite]}.lock"


def _a_user_is_told_what_to_install(machine: Machine) -> None:
    told = machine.attempt("cd /sluice && sh requirements/system.sh test", user="nobody")
    assert told.returncode != 0
    packages = "python3-venv libnuma1 libatomic1 chromium iproute2 npm"
    assert re.search(rf"^    sudo apt-get install .*{packages}$", told.stdout, re.MULTILINE)


def _make_serve_answers(machine: Machine, folder: Path) -> None:
    port, log = free_port(), folder / "serve.log"
    with machine.running(f"cd /sluice && make serve PORT={port}", log) as serving:
        give_up_s = time.monotonic() + READY_S
        while "Sluice is ready" not in log.read_text():
            assert serving.poll() is None and time.monotonic() < give_up_s, log.read_text()[-5000:]
            time.sleep(1.0)
        assert "installing what is missing here: apt-get install" in log.read_text()
        question = {"model": "sluice-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0


def _all_but_torch_is_there(machine: Machine) -> None:
    """As far as it goes where no torch can be had for this Python: it says so, and all else installs and works."""
    refused = machine.attempt("cd /sluice && make serve")
    assert refused.returncode != 0 and "PIP_FIND_LINKS=" in refused.stdout, refused.stdout[-5000:]
    machine.run(f"cd /sluice && grep -v ^torch== {_lock_of(machine)} >/tmp/others.lock")
    machine.run("cd /sluice && .venv/bin/pip install -q --no-deps -r /tmp/others.lock")
    machine.run("cd /sluice && .venv/bin/pip install -q --no-deps --no-build-isolation -e .")
    machine.run(f'cd /sluice && .venv/bin/python -m pytest -q -m "not slow" {WITHOUT_TORCH}')
