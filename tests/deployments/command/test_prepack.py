"""`sluice prepack`: from a file of prompts to rows that another program can run."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deployments.command import cli
from deployments.config.model import DEMO_MODEL
from policies.errors import ConfigError, InputError
from tests.deployments import tiny_models

pytestmark = pytest.mark.slow

TEXTS = [
    "One.",
    "A longer prompt, of some words more than others have.",
    "Two words",
    "And a third one here",
    "x y z",
]


def prepack(*argv: object) -> None:
    options = cli.parse(["prepack", *map(str, argv)])
    options.run(options)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*TEXTS[:2], "", *TEXTS[2:]]) + "\n")
    return path


def spans(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Token ids of every prompt, as a program reads them off the rows."""
    found = {}
    for row in rows:
        ends = [*row["starts"][1:], len(row["token_ids"])]
        for prompt, start, end in zip(row["prompts"], row["starts"], ends, strict=True):
            found[prompt] = row["token_ids"][start:end]
    return found


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_rows_hold_every_prompt_of_the_file_as_the_tokenizer_has_it(tmp_path: Path, lines: Path, packing: str) -> None:
    out = tmp_path / "rows.jsonl"
    prepack(lines, "-o", out, "--packing", packing)
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    asked = AutoTokenizer.from_pretrained(DEMO_MODEL)(TEXTS)["input_ids"]
    assert spans(rows) == dict(enumerate(asked))
    assert (head["prompts"], head["rows"], head["tokenizer"]) == (len(TEXTS), len(rows), "demo")
    assert head["row_tokens"] == max(len(row["token_ids"]) for row in rows) == max(map(len, asked))
    assert len(rows) < len(TEXTS)
    assert [row["pass"] for row in rows] == sorted(row["pass"] for row in rows)


def test_what_packing_spares_is_told_by_tokens_computed(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepack(lines)
    said = capsys.readouterr().out
    lengths = [len(ids) for ids in AutoTokenizer.from_pretrained(DEMO_MODEL)(TEXTS)["input_ids"]]
    assert f"5 prompts, {sum(lengths)} tokens: {min(lengths)} to {max(lengths)}" in said
    assert re.search(rf"padded, as they come +1 +5 +{5 * max(lengths)} ", said)
    packed = re.search(r"\npacked +1 +(\d+) +(\d+) ", said)
    assert packed is not None
    assert int(packed[2]) == int(packed[1]) * max(lengths)
    assert f"{1 - int(packed[2]) / (5 * max(lengths)):.1%} of the tokens" in said


def test_passes_keep_to_their_tokens_and_long_prompts_are_cut(tmp_path: Path, lines: Path) -> None:
    out = tmp_path / "rows.jsonl"
    prepack(lines, "-o", out, "--max-tokens", 4, "--pass-tokens", 8)
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert max(map(len, spans(rows).values())) == 4 == head["row_tokens"]
    assert head["passes"] == rows[-1]["pass"] + 1 == -(-len(rows) // 2)


def test_prompts_come_from_json_lines_by_their_key(tmp_path: Path, lines: Path) -> None:
    path, outs = tmp_path / "prompts.jsonl.gz", [tmp_path / "a", tmp_path / "b"]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS)
    prepack(path, "--key", "text", "-o", outs[0])
    prepack(lines, "-o", outs[1])
    assert outs[0].read_text() == outs[1].read_text()


def test_a_model_reads_all_prompts_three_ways_and_the_seconds_are_told(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepack(lines, "--run", "demo", "--pass-tokens", 16)
    said = capsys.readouterr().out
    assert len(re.findall(r"\d+\.\d\d\n", said)) == 3
    assert said.count("of the seconds") == 2
    with pytest.raises(ConfigError, match=r"positions: cut the prompts with --max-tokens"):
        lines.write_text("word " * 5000)
        prepack(lines, "--run", "demo")


def test_a_model_of_another_vocabulary_than_the_tokenizer_s_is_refused(lines: Path, tmp_path: Path) -> None:
    tiny_models.tiny_llama().save_pretrained(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=f"knows {tiny_models.VOCABULARY} tokens, and the tokenizer has more"):
        prepack(lines, "--run", tmp_path / "tiny", "--tokenizer", DEMO_MODEL)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", '{"prompt": "x"}\nno json\n', "a.jsonl:2 is no JSON"),
        ("a.jsonl", '{"text": "x"}\n', "a.jsonl:1 holds no text under 'prompt', it has text: name its key with --key"),
        ("a.jsonl", "[1]\n", "a.jsonl:1 holds no text under 'prompt', it has list"),
        ("a.txt", "\n\n", "a.txt holds no prompts"),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_line(tmp_path: Path, name: str, content: str, why: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(why)):
        prepack(tmp_path / name)


def test_what_cannot_be_read_or_written_is_named_before_anything_is_done(tmp_path: Path, lines: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        prepack(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="there is no folder"):
        prepack(lines, "-o", tmp_path / "none" / "rows.jsonl")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        prepack(lines, "--tokenizer", tmp_path)
