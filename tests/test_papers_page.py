"""docs/concepts/papers.md: what its rows name is there."""

import re
from collections import defaultdict
from pathlib import Path

from simulator.reproduce.__main__ import EXPERIMENTS

REPOSITORY = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (REPOSITORY / "docs/concepts/papers.md").read_text().splitlines()
    if line.startswith("| ") and "| item |" not in line
]


def test_every_row_of_an_item_has_its_four_cells() -> None:
    assert len(ROWS) > 100
    assert {len(row) for row in ROWS} == {4}
    assert [row[0] for row in ROWS if not (row[1] or row[2])] == []


def test_tests_and_experiments_are_there() -> None:
    here: defaultdict[str, str] = defaultdict(str)  # of files of one name together
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        here[path.name] += path.read_text()
    named = {found for row in ROWS for cell in row[3:4] for found in re.findall(r"(test_\w+\.py)(?:::(\w+))?", cell)}
    assert named
    assert [name for name, _ in named if name not in here] == []
    assert [(name, of) for name, of in named if name in here and of.rstrip("_.") not in here[name]] == []
    experiments = {found for row in ROWS for found in re.findall(r"`(00\d-[\w-]+?)(?: --data)?`", " ".join(row))}
    assert experiments and experiments <= EXPERIMENTS.keys()
