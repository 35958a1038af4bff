"""Imports flow downward: what each package may import, read off its syntax trees."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "policies": set[str](),
    "simulator": {"policies"},
    "predictor": {"policies"},
    "router": {"policies", "predictor"},
    "deployments": {"policies", "simulator", "predictor", "router"},
    "bench": set[str](),
}
# Python's own modules that read a clock, chance or the environment, or write.
NOT_IN_POLICIES = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "os",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
    "uuid",
}
VLLM_PRIVATE = {
    "deployments/engines/vllm/grammar_child.py",
    "deployments/engines/vllm/scheduler/blocks.py",
    "deployments/engines/vllm/scheduler/queue.py",
    "deployments/engines/vllm/scheduler/snapshot.py",
    "deployments/engines/vllm/scheduler/steps.py",
    "deployments/engines/vllm/adapter.py",
    "deployments/engines/vllm/scheduler/plug_in.py",
}


def files(package: str) -> list[Path]:
    """Without what measures packages of ours from inside: in bench speed tests with what they share, rigs, engine and
    predictor."""
    paths = sorted((ROOT / package).rglob("*.py"))
    inside = {ROOT / "bench" / name for name in ("deployments", "one_client", "rig", "transformers", "predictor")}
    return [path for path in paths if not path.name.startswith("test_") and path.parent not in inside]


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Dotted names that a file imports anywhere in it; for `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name, _ in imports(path)}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    paths = files(package)
    assert paths
    for path in paths:
        above = roots(path) & (ALLOWED.keys() | {"tests"}) - ALLOWED[package] - {package}
        assert not above, f"{path.relative_to(ROOT)} imports {above}"


def test_policies_need_nothing_but_the_standard_library_and_numpy() -> None:
    known = sys.stdlib_module_names | {"policies", "numpy"}
    for path in files("policies"):
        assert roots(path) <= known, f"{path.name} imports {roots(path) - known}"


def test_policies_neither_read_a_clock_nor_chance_nor_write() -> None:
    for path in files("policies"):
        assert not roots(path) & NOT_IN_POLICIES, f"{path.name} imports {roots(path) & NOT_IN_POLICIES}"


def test_the_private_interfaces_of_vllm_are_touched_in_one_place() -> None:
    for package in ALLOWED:
        for path in files(package):
            private = {name for name, _ in imports(path) if name == "vllm.v1" or name.startswith("vllm.v1.")}
            assert not private or str(path.relative_to(ROOT)) in VLLM_PRIVATE, f"{path} imports {private}"


def test_the_benchmark_needs_no_engine() -> None:
    for path in files("bench"):
        assert not roots(path) & {"vllm", "ray", "torch", "redis"}, f"{path.name}"


def test_there_are_no_relative_imports() -> None:
    for package in ALLOWED:
        for path in files(package):
            relative = [node.lineno for _, node in imports(path) if isinstance(node, ast.ImportFrom) and node.level]
            assert not relative, f"{path.relative_to(ROOT)}: lines {relative}"


def test_dynamic_imports_do_not_get_around_this() -> None:
    for package in ALLOWED:
        for path in files(package):
            for node in ast.walk(ast.parse(path.read_text())):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                assert called not in {"__import__", "importlib.import_module"}, f"{path}: {called}"
