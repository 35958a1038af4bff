"""Pages of the documents, and the commands that they show."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "k8s/sluice/README.md"])
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CONTINUED = re.compile(r"\\\n\s*")
_SHELL = ("|", ">", ">>", "&", "&&", ";", "...")  # what begins there is not of the command


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Without fenced blocks, in which `#` begins a comment."""
    return _FENCED.sub("", page.read_text())


def commands(program: str) -> list[tuple[str, ...]]:
    """Arguments of every such command in the blocks and lines of code of all pages, each once."""
    found = (argv for page in PAGES for argv in _commands(page.read_text(), program))
    return sorted(set(found))


def mentions(program: str) -> list[tuple[str, ...]]:
    """As `commands`, of those in the middle of a sentence, which may be parts of a command."""
    spans = (span for page in PAGES for span in re.findall(rf"`{program} ([^`]+)`", prose(page)))
    return sorted({_until_shell(shlex.split(span)) for span in spans})


def _until_shell(words: list[str]) -> tuple[str, ...]:
    return tuple(itertools.takewhile(lambda word: word not in _SHELL, words))


def _commands(text: str, program: str) -> Iterator[tuple[str, ...]]:
    text = _CONTINUED.sub(" ", text)
    block = rf"^(?: {{4}})?((?:\w+=\S+ )*(?:\S*/)?{program} \S.*)$"
    for line in re.findall(block, text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        yield tuple(
            itertools.takewhile(lambda word: word not in _SHELL, words[words.index(_last(program, words)) + 1 :])
        )


def _last(program: str, words: list[str]) -> str:
    return next(word for word in words if word.rpartition("/")[2] == program.split()[-1])
