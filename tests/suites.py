"""The long suites: what `make test-all` runs after `make test`, and CI after a change of what they are about.

    python -m tests.suites                        all of them but those that take too long
    python -m tests.suites deaths chart           these
    python -m tests.suites --touched "2 days ago" whose folders commits since then have touched
    python -m tests.suites --minutes 20           as many as end within that, another one first after each commit
    python -m tests.suites --list                 what there is

A suite is the tests below its paths that are marked `long`; one with a profile runs all of its properties again, on
more examples than `make test` does.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = ("sh", "tests/stage.sh")
UNITS_MINUTES = 6.0  # of that stage of `make test` on two idle cores
# Whatever these hold can break every suite.
EVERYWHERE = ("requirements/", "pyproject.toml", "tests/conftest.py", "tests/fakes.py", "tests/waiting.py")


@dataclass(frozen=True)
class Suite:
    """
    touched_by: beginnings of paths; beside these the suite's own paths and EVERYWHERE.
    minutes: on two idle cores.
    options: of pytest, in the place of `-m long`.
    module: what runs them, as pytest does.
    beside: runs while the one before it runs, for both are mostly waited for.
    by_name_alone: neither `make test-all` nor CI has the time for it.
    in_ci: whether a change of what it is about runs it there too.
    """

    name: str
    what: str
    paths: tuple[str, ...]
    touched_by: tuple[str, ...]
    minutes: float
    options: tuple[str, ...] = ("-m", "long")
    beside: bool = False
    by_name_alone: bool = False
    in_ci: bool = True
    module: str = "pytest"

    @property
    def command(self) -> list[str]:
        pytest = [sys.executable, "-m", self.module, "--durations=15", "--tb=short", *self.options, *self.paths]
        return [*STAGE, self.name, self.what, *pytest]

    def is_touched(self, files: Collection[str]) -> bool:
        return any(file.startswith((*EVERYWHERE, *self.paths, *self.touched_by)) for file in files)


SERVING = ("deployments/", "router/", "tests/integration/application.py", "tests/integration/conftest.py")
SUITES = (
    Suite(
        "properties",
        "properties and histories on a hundred examples",
        ("tests/contracts", "tests/policies", "tests/router"),
        ("policies/", "router/"),
        1.5,
        options=("-m", "not slow and not long and not soak", "--hypothesis-profile=thorough", "-n", "2"),
    ),
    Suite(
        "simulations",
        "statistics of policies, the papers' figures, reports",
        ("tests/policies", "tests/simulator", "tests/contracts", "tests/test_write_a_policy.py"),
        ("policies/", "simulator/", "predictor/histogram.py"),
        3.0,
        options=("-m", "long", "-n", "2", "--dist", "worksteal"),
    ),
    Suite(
        "engines",
        "every mode against stock vLLM, the Transformers engine, calibration",
        ("tests/deployments", "tests/integration/test_scheduler_equality.py"),
        ("deployments/engines/", "policies/engine/", "policies/gang/", "deployments/command/"),
        5.0,
        options=("-m", "long", "-n", "2", "--dist", "loadfile"),
    ),
    Suite(
        "release",
        "the release of vLLM before the pinned one",
        (
            "tests/deployments/engines",
            "tests/deployments/serving",
            "tests/integration/test_scheduler_equality.py",
            "tests/integration/test_prefill_decode.py",
        ),
        ("deployments/engines/", "requirements/"),
        7.5,
        # Its build for CPUs runs no layers with states in float32.
        options=("-m", "not soak", "-n", "2", "--dist", "loadfile", "-k", "not with_states"),
        in_ci=False,
        module="tests.another_release",
    ),
    Suite(
        "predictor",
        "training and evaluation",
        ("tests/predictor",),
        ("predictor/", "deployments/demo_model/", "tools/"),
        0.5,
    ),
    Suite(
        "chaos",
        "routers, replicas and Redis die, hang and are cut off, without a model",
        ("tests/chaos", "tests/router"),
        ("router/", "policies/router/", "deployments/engines/relay.py"),
        1.0,
    ),
    Suite(
        "benches",
        "benchmarks on a load of seconds, and the commands of documents",
        ("tests/bench", "tests/test_documented_commands.py"),
        ("bench/", "docs/", "README.md"),
        3.0,
    ),
    Suite(
        "deaths",
        "one application whose routers, engines, relays and Redis die",
        ("tests/integration/one_model",),
        SERVING,
        6.0,
    ),
    Suite(
        "models",
        "several models in one application: keys, credit, autoscaling, gangs, candidates; one from zero",
        (
            "tests/integration/several_models",
            "tests/integration/test_candidates.py",
            "tests/integration/test_from_zero.py",
        ),
        (*SERVING, "policies/router/", "policies/gang/"),
        9.0,
    ),
    Suite(
        "servers",
        "cores at their places, servers of others, a Redis far away",
        (
            "tests/integration/test_cores.py",
            "tests/integration/test_any_server.py",
            "tests/integration/test_far_redis.py",
        ),
        SERVING,
        7.0,
    ),
    Suite(
        "bins",
        "bins, the papers' preset, prefill and decode, kinds of models, sessions",
        (
            "tests/integration/test_bins.py",
            "tests/integration/test_papers.py",
            "tests/integration/test_prefill_decode.py",
            "tests/integration/test_kinds_of_models.py",
            "tests/integration/test_sessions.py",
        ),
        (*SERVING, "predictor/", "policies/router/", "policies/gang/"),
        9.0,
    ),
    Suite(
        "deployed",
        "serve deploy on Ray clusters",
        ("tests/integration/deployed",),
        (*SERVING, "tests/integration/ray_head.py"),
        6.5,
    ),
    Suite(
        "hosts",
        "a cluster of hosts in namespaces: power, cables, the head and Redis are lost; as root",
        ("tests/hosts",),
        (*SERVING, "docs/guides/several-hosts.md"),
        30.0,
        in_ci=False,
    ),
    Suite(
        "chart",
        "any values, other versions of KubeRay, and the rendered chart on a real Ray",
        ("tests/k8s",),
        ("k8s/", "deployments/app.py", "deployments/config/", "deployments/process/"),
        3.0,
        beside=True,
    ),
    Suite(
        "fresh",
        "make serve and make test on a new Debian 12 and 13: ten minutes each, as root",
        ("tests/fresh",),
        ("requirements/", "Makefile"),
        20.0,
        by_name_alone=True,
    ),
)


def touched_files(since: str) -> list[str]:
    """Files of all commits since then, and those that are not committed."""
    asked = (["git", "log", f"--since={since}", "--name-only", "--format="], ["git", "diff", "--name-only", "HEAD"])
    found = (subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in asked)
    return sorted({line for lines in found for line in lines.splitlines() if line})


def commits() -> int:
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return int(counted.stdout)


def in_turn(suites: Sequence[Suite]) -> Iterator[list[Suite]]:
    """Those that run at the same time."""
    group: list[Suite] = []
    for suite in suites:
        if group and not suite.beside:
            yield group
            group = []
        group.append(suite)
    if group:
        yield group


def turned(suites: Sequence[Suite], by: int) -> list[Suite]:
    """The same ones, with another one first for each number."""
    at = by % max(1, len(suites))
    return [*suites[at:], *suites[:at]]


def pace(stages: Path = ROOT / ".pytest_cache" / "stages") -> float:
    """How much longer than on two idle cores the stage of units took here; at least 1."""
    try:
        took = float((stages / "units").read_text().split()[0])
    except FileNotFoundError:
        return 1.0
    return max(1.0, took / UNITS_MINUTES)


def run(suites: Sequence[Suite], minutes: float = math.inf) -> list[str]:
    """Returns the names of those that failed. One that fails stops no other; none begins that would end too late."""
    end_s, failed = time.monotonic() + 60.0 * minutes, []
    for group in in_turn(suites):
        needed_s = 60.0 * pace() * max(suite.minutes for suite in group)
        if time.monotonic() + needed_s > end_s:
            names = " ".join(suite.name for suite in group)
            print(f"== no time left for: python -m tests.suites {names}", flush=True)
            continue
        begun = [(suite, subprocess.Popen(suite.command, cwd=ROOT)) for suite in group]
        failed += [suite.name for suite, process in begun if process.wait() != 0]
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.suites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [suite.name for suite in SUITES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--touched", metavar="SINCE", help="only those that commits since then touch, as git reads it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none that would end later than this")
    parser.add_argument("--list", action="store_true", help="say which would run, and run none")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such suite: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = [suite for suite in SUITES if suite.name in options.names or not (options.names or suite.by_name_alone)]
    if options.touched:
        files = touched_files(options.touched)
        chosen = [suite for suite in chosen if suite.in_ci and suite.is_touched(files)]
    if options.minutes < math.inf:
        chosen = turned(chosen, commits())
    if options.list:
        for suite in chosen:
            print(f"{suite.name:16}{suite.what}")
        return 0
    failed = run(chosen, options.minutes)
    if failed:
        print(f"long suites that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
