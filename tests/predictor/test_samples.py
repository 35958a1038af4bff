import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from policies.errors import InputError
from predictor.samples import Sample, read_samples, split_by_prompt


def file_of(tmp_path: Path, *rows: dict[str, Any], name: str = "set_train.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def read_one(tmp_path: Path, **row: Any) -> Sample:
    (sample,) = read_samples([file_of(tmp_path, {"prompt": "p", **row})])
    return sample


def test_a_row_gives_its_prompt_length_model_and_set(tmp_path: Path) -> None:
    sample = read_one(tmp_path, output_tokens=12, model="m")
    assert sample == Sample(prompt="p", output_tokens=12.0, model="m", source="set", is_cut=False)


def test_four_characters_count_as_a_token_where_tokens_are_not_known(tmp_path: Path) -> None:
    assert read_one(tmp_path, output_chars=100).output_tokens == 25.0


def test_an_empty_answer_has_one_token_its_end(tmp_path: Path) -> None:
    assert read_one(tmp_path, output_tokens=0).output_tokens == 1.0


@pytest.mark.parametrize(
    ("row", "is_cut"),
    [
        ({"max_tokens": 100}, True),
        ({"max_new_tokens": 100}, True),
        ({"max_tokens": 200}, False),
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "stop", "max_tokens": 100}, False),
    ],
)
def test_an_answer_at_its_limit_is_cut_unless_it_says_why_it_ended(
    tmp_path: Path, row: dict[str, Any], is_cut: bool
) -> None:
    assert read_one(tmp_path, output_tokens=100, **row).is_cut is is_cut


def test_compressed_files_are_read_and_parts_of_a_set_share_its_name(tmp_path: Path) -> None:
    path = tmp_path / "set_test.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "p", "output_tokens": 3}\n\n'))
    assert [sample.source for sample in read_samples([path])] == ["set"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        '{"prompt": "p"}',
        '{"output_tokens": 3}',
        '{"prompt": 1, "output_tokens": 3}',
        '{"prompt": "p", "output_tokens": NaN}',
        '{"prompt": "p", "output_tokens": true}',
        '{"prompt": "p", "output_tokens": 3, "max_tokens": "many"}',
        '{"prompt": "p", "output_tokens": 3, "max_tokens": -1}',
        '{"prompt": "p", "output_tokens": 3, "output_tokens": 4}',
        '{"prompt": "half of a pair: \\ud800", "output_tokens": 3}',
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "p", "output_tokens": 3}}\n{line}\n')
    with pytest.raises(InputError, match="bad.jsonl, line 2"):
        read_samples([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere.jsonl"):
        read_samples([tmp_path / "nowhere.jsonl"])
    with pytest.raises(InputError, match="hold no samples"):
        read_samples([file_of(tmp_path)])


def test_a_prompt_lies_wholly_on_one_side_of_a_split() -> None:
    samples = [
        Sample(prompt=str(number % 200), output_tokens=1.0, model="", source="", is_cut=False) for number in range(1000)
    ]
    kept, held = split_by_prompt(samples, 0.2, seed=1)
    assert not {s.prompt for s in kept} & {s.prompt for s in held}
    assert len(kept) + len(held) == 1000
    assert 100 < len(held) < 300
    assert split_by_prompt(samples, 0.2, seed=1) == (kept, held)
    assert split_by_prompt(samples, 0.2, seed=2)[1] != held
