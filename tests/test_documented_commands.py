"""Commands that the documents show, other than those of `sluice`: their programs take these arguments."""

import argparse
import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.documented import ROOT, commands

pytestmark = pytest.mark.slow  # some of the programs import torch

MODULES = [argv for argv in commands("python -m") if (ROOT / argv[0].partition(".")[0]).is_dir()]


class _ParsedError(Exception):
    """In the place of what the program would do."""


@pytest.mark.parametrize("argv", MODULES, ids=" ".join)
def test_a_module_takes_the_arguments_that_a_page_shows(argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec(argv[0])
    main = importlib.util.find_spec(f"{argv[0]}.__main__") if spec and spec.submodule_search_locations else spec
    assert main is not None and main.origin is not None
    if not re.search(r"\bparse_args\b|_parser\(", Path(main.origin).read_text()):
        assert not [word for word in argv if word.startswith("-")], "it has no options"
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: object) -> None:
        parse(parser, *args)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", list(argv))
    with pytest.raises(_ParsedError):
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("argv", commands("pytest"), ids=" ".join)
def test_tests_that_a_page_names_are_there(argv: tuple[str, ...]) -> None:
    paths = [word for word in argv if re.match(r"(tests|bench)/", word)]
    assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths)
