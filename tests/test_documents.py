"""What the documents name is there: pages, headings, files, configuration keys, metrics and commands."""

import re
from functools import cache
from pathlib import Path

import pytest

from deployments.command import cli
from deployments.config.application import AppConfig
from deployments.config.gone import GONE
from deployments.config.reference import all_keys
from deployments.http.keys import KeyEntry
from tests import command_line_page, metrics_page
from tests.documented import GUIDES, PAGES, ROOT, commands, mentions, name_of, prose

MOST_WORDS = {ROOT / "README.md": 800, **dict.fromkeys(GUIDES, 1500)}
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_DOTTED = re.compile(r"`([a-z]\w*(?:\.[\w<>*\[\]-]+)+)(?:: [^`]*)?`")
_METRIC = re.compile(r"(?<![.\w/])sluice_[a-z_]+[a-z]\b")
NO_KEYS = {
    "metadata.sluice_expected_end",
    "metadata.sluice_trouble",
    "state.now_s",
    "state.waiting",
}  # of a batch, and of a policy's snapshot
UPGRADE = ROOT / "docs/guides/upgrade.md"
OF_SPANS = ("sluice.", "gen_ai.")
NAMES_OF_CODE = {ROOT / "docs/concepts/papers.md", ROOT / "docs/reference/workarounds.md"}  # which have no folder there
_NO_METRICS = {"sluice_engine", "sluice_prefill", "sluice_control"}  # Ray's resources, and a utility call of engines


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them: a second one of a name ends in -1."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{at}" if at else anchor for anchor, last in found.items() for at in range(last + 1)}


def _links(page: Path) -> list[tuple[Path, str]]:
    """File and heading of each link that leads to this repository."""
    links = [link.partition("#") for link in _LINK.findall(prose(page)) if not re.match(r"\w+:", link)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in links]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = _links(page)
    assert [name_of(file) for file, _ in links if not file.exists()] == []
    assert [(name_of(file), anchor) for file, anchor in links if anchor and anchor not in _anchors(file)] == []


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs/README.md"
    named = {file for file, _ in _links(index)}
    assert [name_of(page) for page in (ROOT / "docs").rglob("*.md") if page not in named | {index}] == []


@pytest.mark.parametrize("page", MOST_WORDS, ids=name_of)
def test_a_guide_is_short_enough_to_be_read(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS[page]


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    """After a change of an option: python -m tests.command_line_page"""
    assert command_line_page.PAGE.read_text() == command_line_page.page()


def _of_any_name(path: str) -> str:
    """`classes.chat.ttft_s` as `classes.NAME.ttft_s`, and the like."""
    path = re.sub(r"<\w+>|\*", "NAME", path.removeprefix("app.").removesuffix(".*").replace("[]", ""))
    return re.sub(r"^(classes|engine\.lora\.adapters)\.[^.]+", r"\1.NAME", path)


@cache
def _configuration_keys() -> set[str]:
    """The keys of the application, of an API key's entry and of the chart, with the sections in which they stand."""
    table = (ROOT / "k8s/sluice/README.md").read_text()
    of_chart = [path for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for path in cell.split(", ")]
    paths = [*(key.path for model in (AppConfig, KeyEntry) for key in all_keys(model)), *of_chart]
    parts = [path.replace("[]", "").split(".") for path in paths]
    return {".".join(each[:size]) for each in parts for size in range(1, len(each) + 1)}


def _is_code(path: str) -> bool:
    """A file, a module of ours, or a name in one."""
    if path.endswith((".py", ".yaml", ".toml", ".crt")):
        return True
    parts = path.split(".")
    candidates = (ROOT.joinpath(*parts[:size]) for size in range(2, len(parts) + 1))
    return any(each.with_suffix(".py").exists() or each.is_dir() for each in candidates)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_configuration_key_that_a_page_names_is_there(page: Path) -> None:
    sections = {path.partition(".")[0] for path in _configuration_keys()}
    named = {path for path in _DOTTED.findall(prose(page)) if not path.startswith(OF_SPANS) and not _is_code(path)}
    named -= NO_KEYS
    if page in NAMES_OF_CODE:
        named = {path for path in named if path.partition(".")[0] in sections}
    gone = GONE if page == UPGRADE else {}
    assert [path for path in named if _of_any_name(path) not in _configuration_keys() | gone.keys()] == []


def test_the_page_of_upgrades_names_every_key_that_is_gone() -> None:
    text = UPGRADE.read_text()
    assert [path for path in GONE if f"`{path}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_that_a_page_names_is_there(page: Path) -> None:
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in _METRIC.findall(prose(page))}
    assert named <= metrics_page.names() | _NO_METRICS


@pytest.mark.parametrize("argv", commands("sluice"), ids=" ".join)
def test_a_command_that_a_page_shows_is_one_that_sluice_takes(argv: tuple[str, ...]) -> None:
    assert cli.parse(argv).command == argv[0]


@pytest.mark.parametrize("argv", mentions("sluice"), ids=" ".join)
def test_a_sentence_names_only_commands_and_options_that_there_are(argv: tuple[str, ...]) -> None:
    if argv[0] in ("COMMAND", "--version"):
        return
    ours = argv[: argv.index("--")] if "--" in argv else argv
    parsers = {parser.prog.removeprefix("sluice").strip(): parser for parser in command_line_page.commands()}
    parser = parsers.get(" ".join(ours[:2])) or parsers[ours[0]]
    assert {word for word in ours if word.startswith("-")} <= parser._option_string_actions.keys()


QUICK = ("keys new --name", "config explain", "config check deployments", "simulate --list-engines", "env")


@pytest.mark.parametrize(
    "argv", [argv for argv in mentions("sluice") + commands("sluice") if " ".join(argv).startswith(QUICK)], ids=" ".join
)
def test_a_command_that_takes_no_time_does_what_a_page_says(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    argv = tuple("engine.scheduler.mode" if word == "KEY" else word for word in argv)
    cli.main(argv)
    assert capsys.readouterr().out
