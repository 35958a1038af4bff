"""Imports flow downward: what each package may import, read off its syntax trees."""

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests import house

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
    *("asyncio", "datetime", "io", "logging", "os", "random"),
    *("secrets", "socket", "threading", "time", "uuid"),
}
# Rooms of `deployments/`: each may import itself and those before it.
ROOMS = (
    *(
        "process",
        "config",
        "http",
        "batches",
        "responses",
        "engines",
        "engines/openai",
        "engines/vllm",
        "engines/transformers",
    ),
    *("serving", "app", "command"),
)
OUTSIDE_ROOMS = {"vllm_scheduler", "plain_vllm"}  # paths that people write down
# Imports what a user names, which is none of ours.
OF_THE_USERS_OWN = ROOT / "policies" / "plug_ins.py"
# Besides the room of vLLM: what of it is public, or fixed by the version that is pinned.
VLLM_OUTSIDE_ITS_ROOM = {
    "deployments/command/calibrate.py": {"vllm"},
    "deployments/engines/transformers/sampling.py": {"vllm"},
    "deployments/engines/transformers/step.py": {"vllm"},
    "deployments/serving/front_end_kinds.py": {
        "vllm.entrypoints.launchers.api_server.app_state",
        "vllm.entrypoints.launchers.app",
    },
}


def files(package: str) -> list[Path]:
    """Without what measures packages of ours from inside: in bench speed tests with what they share, rigs, engine and
    predictor; and without the servers of others that run there."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = ("deployments", "one_client", "peers", "rig", "transformers", "predictor")
    inside = {ROOT / "bench" / name for name in names}
    return [path for path in paths if not path.name.startswith("test_") and path.parent not in inside]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in modules(path)}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    paths = files(package)
    assert paths
    for path in paths:
        above = roots(path) & (ALLOWED.keys() | {"tests"}) - ALLOWED[package] - {package}
        assert not above, f"{path.relative_to(ROOT)} imports {above}"


def test_policies_need_numpy_and_a_standard_library_without_clock_chance_and_files() -> None:
    known = (sys.stdlib_module_names - NOT_IN_POLICIES) | {"policies", "numpy"}
    for path in files("policies"):
        assert roots(path) <= known, f"{path.name} imports {roots(path) - known}"


def modules(path: Path) -> set[str]:
    """What a file imports, without the names that it takes out of them."""
    nodes = list(ast.walk(tree_of(path)))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_vllm_is_imported_in_its_room_alone() -> None:
    for package in ALLOWED:
        for path in files(package):
            name = str(path.relative_to(ROOT))
            if not name.startswith("deployments/engines/vllm/"):
                found = {module for module in modules(path) if module.split(".")[0] == "vllm"}
                assert found == VLLM_OUTSIDE_ITS_ROOM.get(name, set()), name


def room(parts: Sequence[str]) -> str:
    """The room of a module below `deployments`."""
    two = "/".join(parts[:2])
    return two if two in ROOMS else parts[0]


def test_a_room_imports_only_those_below_it() -> None:
    for path in files("deployments"):
        inside = path.relative_to(ROOT / "deployments").with_suffix("").parts
        if inside[-1] == "__init__" or inside[0] in OUTSIDE_ROOMS:
            continue
        level = ROOMS.index(room(inside))
        for module in modules(path):
            if module.startswith("deployments."):
                below = ROOMS.index(room(module.split(".")[1:])) <= level
                assert below, f"{path.relative_to(ROOT)} imports {module}"


def test_the_picture_of_the_house_is_up_to_date() -> None:
    """After a new folder or import: python -m tests.house --draw"""
    assert house.picture(ROOT) in house.PAGE.read_text()


NAMEDTUPLES_OWN = {"_asdict", "_fields", "_replace"}  # public in spite of their names


def private_names(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            yield node


def own_names(tree: ast.ClassDef) -> set[str]:
    """Private ones that a class defines itself, and those that it sets."""
    methods = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return methods | {node.attr for node in private_names(tree) if isinstance(node.ctx, ast.Store)}


def own_private_names(tree: ast.ClassDef) -> Iterator[ast.Attribute]:
    names = own_names(tree)
    return (node for node in private_names(tree) if node.attr in names)


@pytest.mark.parametrize("package", ["policies", "router"])
def test_no_class_reaches_into_another_or_into_the_one_that_it_inherits_from(package: str) -> None:
    for path in files(package):
        tree = tree_of(path)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        own = {id(node) for each in classes for node in own_private_names(each)}
        others = [node for node in private_names(tree) if id(node) not in own and node.attr not in NAMEDTUPLES_OWN]
        assert not others, [f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}" for node in others]


def test_nothing_that_serves_imports_the_simulator() -> None:
    for path in files("deployments"):
        assert path.parent.name == "command" or "simulator" not in roots(path), path.relative_to(ROOT)


def test_the_benchmark_needs_no_engine() -> None:
    for path in files("bench"):
        assert not roots(path) & {"vllm", "ray", "torch", "redis"}, f"{path.name}"


def test_dynamic_imports_do_not_get_around_this() -> None:
    for package in ALLOWED:
        for path in files(package):
            for node in ast.walk(tree_of(path)):
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                by_name = called.split(".")[-1] in {"__import__", "import_module", "resolve_name"}
                assert not by_name or path == OF_THE_USERS_OWN, f"{path}: {called}"
