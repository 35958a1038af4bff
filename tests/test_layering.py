"""Imports run downward only, and only the adapter touches vLLM's private interface."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "policies": {"policies"},
    "simulator": {"simulator", "policies"},
    "predictor": {"predictor", "policies"},
    "router": {"router", "predictor", "policies"},
    "deployments": {"deployments", "router", "predictor", "simulator", "policies"},
    "bench": {"bench"},
}
# The benchmarks of hot calls measure policies themselves; the rest of bench/ is a client and speaks HTTP.
MEASURES_POLICIES = ("bench/policies", "bench/policies_router")
POLICIES_MUST_NOT = {"asyncio", "datetime", "logging", "os", "pathlib", "random", "socket", "sys", "threading", "time"}
MAY_TOUCH_VLLM_V1 = {"deployments/vllm_adapter.py", "deployments/vllm_scheduler.py"}
FILES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(path: Path) -> None:
    relative = path.relative_to(ROOT)
    allowed = MAY_IMPORT[relative.parts[0]] | ({"policies"} if str(relative.parent) in MEASURES_POLICIES else set())
    modules = set(imported(path))
    ours = {module.split(".")[0] for module in modules} & set(MAY_IMPORT)
    assert ours <= allowed
    if str(relative) not in MAY_TOUCH_VLLM_V1:
        assert not any(module == "vllm.v1" or module.startswith("vllm.v1.") for module in modules)
    if relative.parts[0] == "policies":
        assert not {module.split(".")[0] for module in modules} & POLICIES_MUST_NOT


def test_the_walk_sees_the_files() -> None:
    seen = {str(path.relative_to(ROOT)) for path in FILES}
    assert {"policies/multi_bin.py", "router/wire.py", "deployments/vllm_adapter.py", "bench/compare.py"} <= seen
