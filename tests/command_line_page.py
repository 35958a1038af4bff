"""Writes docs/reference/command-line.md: what `sluice` and each of its commands print with `--help`, each option once.

    python -m tests.command_line_page

tests/test_documents.py holds that the page is up to date.
"""

import argparse
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.command import cli

PAGE = Path(__file__).parents[1] / "docs/reference/command-line.md"
_LONG_USAGE = re.compile(r"^usage: ([\w ]+?) \[-h\].*?\n\n", re.DOTALL)
_NO_HELP = re.compile(r"^ +-h, --help .*\n", re.MULTILINE)
_NO_OPTIONS = re.compile(r"^options:\n(?=\n|\Z)", re.MULTILINE)
WIDTH = 100  # of a line, whatever the terminal of the person who writes the page
HEAD = """\
# Command line

<!-- Written by `python -m tests.command_line_page` from the command's own help. -->

What `sluice COMMAND --help` prints. Options of a group that an earlier command has too are shown there alone.
"""


def commands() -> Iterator[argparse.ArgumentParser]:
    """`sluice` itself and every command below it, in the order of their help."""
    yield from _with_those_below(cli.parser())


def _with_those_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _with_those_below(below)


def _help(parser: argparse.ArgumentParser) -> str:
    formatter: Any = functools.partial(parser.formatter_class, width=WIDTH)
    parser.formatter_class = formatter
    return "\n".join(line.rstrip() for line in parser.format_help().splitlines())


def page() -> str:
    owners: dict[str, str] = {}  # the text of a group of options: the command that has shown it
    return HEAD + "".join(f"\n## {parser.prog}\n\n```text\n{_shown(parser, owners)}\n```\n" for parser in commands())


def _shown(parser: argparse.ArgumentParser, owners: dict[str, str]) -> str:
    """The help, without what each command has: a usage of several lines, `--help`, groups of an earlier command."""
    text = _help(parser) + "\n"
    if (usage := _LONG_USAGE.match(text)) and usage[0].count("\n") > 2:
        text = f"usage: {usage[1]} [options]\n\n" + text[usage.end() :]
    text = _NO_OPTIONS.sub("", _NO_HELP.sub("", text))
    parts = [_once(part, parser.prog, owners) for part in re.split(r"\n{2,}", text.strip())]
    return "\n\n".join(parts)


def _once(part: str, command: str, owners: dict[str, str]) -> str:
    title, _, options = part.partition("\n")
    owner = owners.setdefault(part, command)
    return part if owner == command or not options else f"{title} as of `{owner}`"


if __name__ == "__main__":
    PAGE.write_text(page())
