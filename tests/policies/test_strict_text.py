"""What Python's readers of CSV and JSON drop or merge without a word is an error here."""

import pytest

from policies.errors import InputError
from policies.strict_text import csv_rows, json_lines, json_value


def test_rows_have_the_numbers_of_their_lines_and_blank_lines_are_passed_over() -> None:
    text = '\ufeffa, b\n1,2\n\n3,"4\n5"\n \n6,7\n'
    rows = list(csv_rows(text.splitlines(keepends=True), "t.csv"))
    assert rows == [(2, {"a": "1", "b": "2"}), (5, {"a": "3", "b": "4\n5"}), (7, {"a": "6", "b": "7"})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1\n", "line 2: 1 fields, and there are 2 columns"),
        ("a,b\n1,2,3\n", "line 2: 3 fields"),
        ("a,b,a\n", "line 1: there is more than one column 'a'"),
        ('a\n"1\n', "line 2: unexpected end of data"),
    ],
)
def test_a_row_that_is_not_like_its_columns_is_an_error_with_its_line(text: str, why: str) -> None:
    with pytest.raises(InputError, match=f"t.csv, {why}"):
        list(csv_rows(text.splitlines(keepends=True), "t.csv"))


def test_columns_without_a_name_may_be_several() -> None:
    assert list(csv_rows(["a,,\n", "1,2,3\n"], "t.csv")) == [(2, {"a": "1", "": "3"})]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "'a' stands there more than once"),
        ('[{"b": {"a": 1, "a": 1}}]', "'a' stands there more than once"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a": "\\ud83d alone"}', "half of a surrogate pair, .ud83d"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_what_json_would_merge_or_turn_into_something_else_is_an_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        json_value(text)
    with pytest.raises(InputError, match=f"t.jsonl, line 3: .*{why}"):
        list(json_lines(["{}\n", "\n", text], "t.jsonl"))


def test_a_whole_pair_is_a_text_and_halves_are_where_texts_do_not_matter() -> None:
    assert json_value('"\\ud83d\\ude00"') == "\U0001f600"
    assert json_value('"\\ud83d"', texts=False) == "\ud83d"
