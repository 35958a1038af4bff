"""Writes docs/reference/command-line.md: what `sluice` and each of its commands print with `--help`.

    python -m tests.command_line_page

tests/test_documents.py holds that the page is up to date.
"""

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.command import cli

PAGE = Path(__file__).parents[1] / "docs/reference/command-line.md"
WIDTH = 100  # of a line, whatever the terminal of the person who writes the page
HEAD = """\
# Command line

<!-- Written by `python -m tests.command_line_page` from the command's own help. -->

`sluice COMMAND --help` prints the same.
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
    return HEAD + "".join(f"\n## {parser.prog}\n\n```text\n{_help(parser)}\n```\n" for parser in commands())


if __name__ == "__main__":
    PAGE.write_text(page())
