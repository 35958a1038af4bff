"""Draws the house as it is: folders with their lines of code, and the imports between them.

    python -m tests.house              a list: folder, lines, folders that it imports
    python -m tests.house --of PATH    the same of another checkout
    python -m tests.house --draw       write the picture into docs/concepts/architecture.md

tests/test_layering.py holds that the picture is up to date.
"""

import argparse
import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/concepts/architecture.md"
PACKAGES = ("policies", "predictor", "router", "deployments", "simulator", "bench")
RE_EXPORTS = "deployments"  # files beside the rooms of `deployments`, but for its app
BLOCK = re.compile(r"<!-- python -m tests.house --draw -->\n```mermaid\n.*?```\n", re.DOTALL)
Imports = Mapping[str, set[str]]


def room_of(parts: tuple[str, ...], split: Collection[str]) -> str:
    """The room of a file, by the parts of its path: its package, or its folder in a package that is split."""
    if parts[:2] == ("deployments", "app.py"):
        return "deployments/app"
    if parts[0] not in split:
        return parts[0]
    return "/".join(parts[:-1][: 3 if parts[1] == "engines" else 2])


@cache
def files(root: Path, split: frozenset[str]) -> dict[Path, str]:
    """Every file of code, without tests, and its room."""
    found = (path for package in PACKAGES for path in sorted((root / package).rglob("*.*")))
    code = (path for path in found if path.suffix in (".py", ".lua") and not path.name.startswith("test_"))
    return {path: room_of(path.relative_to(root).parts, split) for path in code}


def imports(root: Path, split: frozenset[str]) -> Imports:
    """The rooms that each room imports."""
    by_file = files(root, split)
    found: dict[str, set[str]] = {room: set() for room in by_file.values()}
    for path, room in by_file.items():
        if path.suffix == ".py":
            for name in imported(path):
                module = root.joinpath(*name.split("."))
                file = module.with_suffix(".py") if module.with_suffix(".py") in by_file else module / "__init__.py"
                found[room] |= {by_file[file]} - {room} if file in by_file else set()
    return found


def imported(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reduced(found: Imports) -> Imports:
    """Without an arrow where a longer way leads to the same room."""

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(found[room]).union(*(below(each) for each in found[room]))

    return {room: own - set[str]().union(*(below(each) for each in own)) for room, own in found.items()}


def picture(root: Path) -> str:
    """Mermaid, with an arrow from each room to those that it imports; `policies` is one room."""
    found = imports(root, frozenset({"deployments"}))
    inside = {room: below - {RE_EXPORTS} for room, below in found.items() if room != RE_EXPORTS}
    arrows = (
        f"  {_node(room)} --> {_node(to)}\n" for room, own in sorted(reduced(inside).items()) for to in sorted(own)
    )
    return f"<!-- python -m tests.house --draw -->\n```mermaid\nflowchart TB\n{''.join(arrows)}```\n"


def _node(room: str) -> str:
    return f"{room.replace('/', '_')}[{room}]"


def listing(root: Path) -> str:
    split = frozenset({"deployments", "policies"})
    found, counted = imports(root, split), dict.fromkeys(files(root, split).values(), 0)
    for path, room in files(root, split).items():
        counted[room] += len(path.read_text().splitlines())
    rows = [f"{room:<33}{counted[room]:>6}  {', '.join(sorted(found[room]))}" for room in sorted(counted)]
    return "\n".join([*rows, f"{'all':<33}{sum(counted.values()):>6}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--of", type=Path, default=ROOT, metavar="PATH", help="another checkout (default: this one)")
    parser.add_argument("--draw", action="store_true", help="write the picture of this checkout into its page")
    options = parser.parse_args()
    if options.draw:
        PAGE.write_text(BLOCK.sub(lambda _: picture(ROOT), PAGE.read_text()))
    else:
        print(listing(options.of.resolve()))


if __name__ == "__main__":
    main()
