"""Traces out of files: Sluice's own columns, and those of others as they publish them."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.errors import InputError
from simulator.traces import read_workload
from simulator.workload import Workload


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def test_a_trace_is_read_with_all_its_columns(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "trace.csv.gz"
    text = "arrival_s,prompt_tokens,output_tokens,reusable_prefix_tokens,client\n5.0,10,20,0,a\n3.0,30,40,16,b\n"
    path.write_bytes(gzip.compress(text.encode()))
    read = read_workload(path, rng=rng)
    assert read.arrival_s.tolist() == [0.0, 2.0]
    assert read.prompt_tokens.tolist() == [30, 10]
    assert read.cached_tokens.tolist() == [16, 0]
    assert read.slo_class == ("b", "a")


@pytest.mark.parametrize(
    ("name", "text", "prompt_tokens", "output_tokens"),
    [
        ("words.csv", "prompt_words,output_words,output_tokens\n100,100,7\n", [133], [7]),
        ("chars.jsonl", '{"prompt": "aaaaaaaa", "output_chars": 80, "output_words": 9}\n', [2], [20]),
        ("said.jsonl", '{"prompt_chars": 400, "output_tokens": 5}\n', [100], [5]),
        (
            "of_unequal_keys.jsonl",
            '{"prompt": "aaaa", "output_chars": 40, "output_tokens": 7}\n{"prompt": "b", "output_chars": 80}\n',
            [1, 1],
            [10, 20],
        ),
    ],
    ids=["words", "characters", "told", "rows of unequal keys"],
)
def test_words_and_characters_become_tokens_where_not_all_rows_have_tokens(
    name: str, text: str, prompt_tokens: list[int], output_tokens: list[int], tmp_path: Path, rng: np.random.Generator
) -> None:
    (tmp_path / name).write_text(text)
    read = read_workload(tmp_path / name, rng=rng)
    assert (read.prompt_tokens.tolist(), read.output_tokens.tolist()) == (prompt_tokens, output_tokens)


def test_sessions_start_within_an_hour_and_keep_their_own_times(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "sessions.csv"
    rows = "".join(f"s{n},{t},10,5\n" for n in range(20) for t in (0.0, 7.5))
    path.write_text("session,t_in_session_s,prompt_tokens,output_tokens\n" + rows)
    told = list[str]()
    read = read_workload(path, rng=rng, tell=told.append)
    assert len(read) == 40 and 1800 < read.arrival_s[-1] < 3608
    assert told == ["it does not say when sessions begin: evenly over an hour, drawn"]


def test_published_probabilities_are_drawn_from(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "pmf.csv"
    path.write_text("kind,tokens_upto,probability\nprompt,10,1.0\noutput,1,0.25\noutput,101,0.75\n")
    read = read_workload(path, rng=rng)
    assert read.output_tokens.mean() == pytest.approx(0.25 * 1 + 0.75 * 51.5, rel=0.02)
    assert read.prompt_tokens.min() == 1 and read.prompt_tokens.max() == 10


@pytest.mark.parametrize(
    ("name", "text"),
    [("bare.csv", "output_tokens\n5\n"), ("bare.jsonl", '{"output_tokens": 5}\n')],
    ids=["csv", "jsonl"],
)
def test_a_file_without_prompts_takes_the_prompt_tokens_given(
    name: str, text: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match="--prompt-tokens"):
        read_workload(path, rng=rng)
    assert read_workload(path, rng=rng, prompt_tokens=64).prompt_tokens.tolist() == [64]


def test_a_file_without_outputs_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("prompt_tokens\n5\n")
    with pytest.raises(InputError, match="needs output_tokens"):
        read_workload(path, rng=rng)
    path.write_text("prompt_tokens,output_tokens\n5,many\n")
    with pytest.raises(InputError, match="many"):
        read_workload(path, rng=rng)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "trace.csv",
            "prompt_tokens,output_tokens,predicted_output_tokens,reusable_prefix_tokens\n5,10,,\n5,10,12.5,4\n",
        ),
        (
            "trace.jsonl",
            '{"prompt": "abcd", "output_tokens": 10, "predicted_output_tokens": null}\n'
            '{"prompt": "abcd", "output_tokens": 10, "predicted_output_tokens": 12.5, "reusable_prefix_tokens": 4}\n',
        ),
    ],
)
def test_where_a_prediction_or_a_prefix_is_missing_there_is_none(
    tmp_path: Path, rng: np.random.Generator, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    read = read_workload(tmp_path / name, rng=rng)
    assert [request.predicted_output_tokens for request in read.requests()] == [None, 12.5]
    assert read.cached_tokens.tolist() == [0, 4]


def test_a_missing_file_is_named(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(InputError, match="nowhere.csv"):
        read_workload(tmp_path / "nowhere.csv", rng=rng)


class Reading:
    """Reads files with these contents, and keeps what is told of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[str]()

    def __call__(self, name: str, content: Any) -> Workload:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / name).write_text(text)
        return read_workload(self.folder / name, rng=np.random.default_rng(0), tell=self.told.append)


@pytest.fixture
def read(tmp_path: Path) -> Reading:
    return Reading(tmp_path)


def columns(workload: Workload) -> tuple[list[float], list[int], list[int]]:
    return workload.arrival_s.tolist(), workload.prompt_tokens.tolist(), workload.output_tokens.tolist()


MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 490, "hash_ids": [0, 14]}
"""
BAILIAN = """\
{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 7, "hash_ids": [1, 2]}
{"chat_id": 2, "parent_chat_id": 1, "timestamp": 3.5, "input_length": 60, "output_length": 8, "hash_ids": [1, 2, 3]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00+00:00,2162,5
2024-05-10 00:00:01.250000+00:00,2399,6
"""
BURST_GPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
SERVE_GEN = "request_id,timestamp,input_tokens,output_tokens\n0,0.25,100,7\n1,2.25,200,8\n"


@pytest.mark.parametrize(
    ("name", "text", "expected", "cached"),
    [
        ("azure.csv", AZURE_2023, ([0.0, 4.314579], [374, 396], [44, 109]), [0, 0]),
        ("azure_week.csv", AZURE_2024, ([0.0, 1.25], [2162, 2399], [5, 6]), [0, 0]),
        ("BurstGPT_1.csv", BURST_GPT, ([0.0, 113.0], [472, 417], [18, 276]), [0, 0]),
        ("mooncake.jsonl", MOONCAKE, ([0.0, 3.0], [6758, 700], [500, 490]), [0, 512]),
        ("bailian.jsonl", BAILIAN, ([0.0, 3.0], [40, 60], [7, 8]), [0, 32]),
        ("servegen.csv", SERVE_GEN, ([0.0, 2.0], [100, 200], [7, 8]), [0, 0]),
    ],
)
def test_public_traces_are_read_by_their_own_columns_and_units(
    name: str, text: str, expected: tuple[list[float], list[int], list[int]], cached: list[int], read: Reading
) -> None:
    workload = read(name, text)
    assert columns(workload)[0] == pytest.approx(expected[0], abs=1e-6)
    assert columns(workload)[1:] == expected[1:]
    assert workload.cached_tokens.tolist() == cached
    assert read.told[0].startswith("read as ")


@pytest.mark.parametrize("none", ["0", "0.0"])
def test_requests_of_burst_gpt_that_failed_are_left_out_and_counted(none: str, read: Reading) -> None:
    read("BurstGPT_1.csv", BURST_GPT.replace("1087,0,", f"1087,{none},"))
    assert "left out 1 requests that failed, the first in line 3" in read.told
    assert "passed over: Model, Total tokens, Log Type" in read.told[-1]


def test_a_batch_of_servegen_has_lengths_without_times(read: Reading) -> None:
    rows = [{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370, "duration": 14000}]
    assert columns(read("trace_d.jsonl", json.dumps(rows[0]) + "\n")) == ([0.0], [61], [2370])


def test_the_first_exchange_of_each_conversation_of_sharegpt_is_read(read: Reading) -> None:
    asked, answered = {"from": "human", "value": "a" * 400}, {"from": "gpt", "value": "b" * 80}
    document = [{"id": "1", "conversations": [asked, answered, asked]}, {"id": "2", "conversations": [answered]}]
    assert columns(read("sharegpt.json", document)) == ([0.0], [100], [20])
    assert any("left out 1 conversations" in text and "entry 2" in text for text in read.told)


def test_what_vllm_bench_writes_is_read_as_a_trace(read: Reading) -> None:
    written = {
        "duration": 9.0,
        "input_lens": [10, 20, 30],
        "output_lens": [5, 0, 7],
        "start_times": [100.0, 100.5, 102.0],
        "errors": ["", "Bad Gateway", ""],
    }
    assert columns(read("run.json", written)) == ([0.0, 2.0], [10, 30], [5, 7])
    assert "left out 1 requests that failed, the first of them entry 2" in read.told


def test_what_inference_perf_writes_of_each_request_is_read_as_a_trace(read: Reading) -> None:
    def line(start_s: float, info: dict[str, Any] | None, error: Any = None) -> dict[str, Any]:
        return {"start_time": start_s, "end_time": start_s + 1, "request": "{}", "info": info, "error": error}

    older = line(5.0, {"input_tokens": 10, "output_tokens": 4, "output_token_times": [5.1]})
    asked = {"text": {"input_tokens": 20}}
    newer = line(7.5, {"request_metrics": asked, "response_metrics": {"output_tokens": 6}})
    failed = line(6.0, None, {"error_type": "Timeout", "error_msg": ""})
    assert columns(read("per_request.json", [older, failed, newer])) == ([0.0, 2.5], [10, 20], [4, 6])


def test_what_guidellm_writes_of_each_request_is_read_as_a_trace(read: Reading) -> None:
    def done(name: str, start_s: float) -> dict[str, Any]:
        return {name: start_s, "prompt_tokens": 256, "output_tokens": 128}

    requests = {"successful": [done("request_start_time", 50.0), done("start_time", 51.5)], "errored": [{}]}
    assert columns(read("benchmarks.json", {"benchmarks": [{"requests": requests}]}))[0] == [0.0, 1.5]
    assert any("left out 1 requests" in text for text in read.told)
    with pytest.raises(InputError, match="without single requests"):
        read("benchmarks.json", {"benchmarks": [{"metrics": {}}]})


@pytest.mark.parametrize(
    "document",
    [
        {"benchmarks": [{"requests": {"successful": [7]}}]},
        {"input_lens": [1], "output_lens": 7},
        [{"start_time": 1.0, "info": {"response_metrics": 7}}],
        [{"conversations": [7]}],
        {"prompts": []},
        [],
        7,
    ],
)
def test_a_document_of_another_make_is_refused_in_words(document: Any, read: Reading) -> None:
    with pytest.raises(InputError, match="own.json"):
        read("own.json", document)


def test_a_mark_of_the_byte_order_and_blanks_around_names_hide_no_column(read: Reading) -> None:
    text = "\ufeffarrival_s, prompt_tokens,output_tokens\n1,10,5\n3,20,6\n\n"
    assert columns(read("excel.csv", text)) == ([0.0, 2.0], [10, 20], [5, 6])
    assert columns(read("lines.jsonl", '\ufeff{"prompt_tokens": 1, "output_tokens": 2}\n\n'))[1:] == ([1], [2])


@pytest.mark.parametrize("column", ["timestamp", "Timestamp", "arrival_time", "start_time"])
def test_times_whose_unit_nobody_knows_are_refused(column: str, read: Reading) -> None:
    with pytest.raises(InputError, match=f"line 2: {column} is '1700000000', which is no date .* arrival_ms"):
        read("own.csv", f"{column},prompt_tokens,output_tokens\n1700000000,10,5\n")
    dates = f"{column},prompt_tokens,output_tokens\n2024-01-01T00:00:00Z,10,5\n2024-01-01T00:00:02.5Z,10,5\n"
    assert read("own.csv", dates).arrival_s.tolist() == [0.0, 2.5]


@pytest.mark.parametrize(
    ("header", "moments"),
    [
        ("arrival_s,prompt_tokens,output_tokens", ("1700000000000", "1700000001000")),
        ("arrival_ms,prompt_tokens,output_tokens", ("1700000000000000", "1700000001000000")),
        ("timestamp,input_tokens,output_tokens", ("1700000000000", "1700000001000")),
    ],
    ids=["milliseconds as seconds", "microseconds as milliseconds", "in the columns of another's trace"],
)
def test_times_since_1970_in_another_unit_are_refused(header: str, moments: tuple[str, str], read: Reading) -> None:
    unit = "milliseconds" if "_ms" in header else "seconds"
    with pytest.raises(InputError, match=f"line 2: {header.split(',')[0]} is .* no time in {unit}"):
        read("own.csv", f"{header}\n{moments[0]},1,1\n{moments[1]},1,1\n")
    right = [moment.removesuffix("000") for moment in moments]
    assert read("own.csv", f"{header}\n{right[0]},1,1\n{right[1]},1,1\n").arrival_s.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\nnan,1,1\n", "line 3: arrival_s is 'nan', which is no time"),
        ("prompt_tokens,output_tokens\n1,1\n\n1,-5\n", "line 4: output_tokens is '-5', which is no length"),
        ("prompt_tokens,output_tokens\n1,inf\n", "line 2: output_tokens is 'inf'"),
        ("prompt_tokens,output_tokens\n1,7.5\n", "line 2: output_tokens is '7.5'"),
        ("prompt_tokens,output_tokens\n1,1\n,7\n", "line 3: there is no prompt_tokens"),
        ("prompt_tokens,output_tokens\n1,1,\n", "line 2: 3 fields, and there are 2 columns"),
        ("prompt_tokens,output_tokens\n1\n", "line 2: 1 fields, and there are 2 columns"),
        ("output_tokens,prompt_tokens,output_tokens\n1,2,3\n", "line 1: there is more than one column 'output_tokens'"),
        ('prompt_tokens,output_tokens\n1,"2\n', "line 2"),
        ("prompt_tokens;output_tokens\n1;2\n", "line 1: commas .* has 'prompt_tokens;output_tokens'"),
        ("0,1.3,8.6,Weibull,0.4,0.4\n600,0,0,,0,0\n", "line 1: the names of the columns must stand there"),
        ("0,0,0,,0,0\n", "line 1: the names of the columns must stand there, and the first is '0'"),
        ("prompt_tokens,output_tokens\n1,1e19\n", "line 2: output_tokens is '1e19', which is no length"),
        (AZURE_2023 + "2023-11-16 18:15:51,x,1\n", "line 4: ContextTokens is 'x', which is no length"),
        (AZURE_2023 + ",1,1\n", "line 4: TIMESTAMP is '', which is no date"),
    ],
)
def test_what_is_not_understood_of_a_row_is_said_with_its_line(text: str, why: str, read: Reading) -> None:
    with pytest.raises(InputError, match=why):
        read("own.csv", text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt_tokens": NaN, "output_tokens": 1}', "NaN is no number"),
        ('{"prompt_tokens": true, "output_tokens": 1}', "prompt_tokens is True"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "output_tokens": 2}', "'output_tokens' stands there more than once"),
        ('{"prompt": 7, "output_tokens": 1}', "'7' is no prompt"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "output_tokens": 1}', "not a text"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "class": "\\ud800"}', "class is .* half of a surrogate pair"),
        ("[1]", "is no object"),
        ("{", "Expecting"),
    ],
)
def test_what_is_not_understood_of_a_json_line_is_said_with_its_line(line: str, why: str, read: Reading) -> None:
    whole = (
        '{"prompt": "aaaa", "output_tokens": 1}' if '"prompt"' in line else '{"prompt_tokens": 1, "output_tokens": 1}'
    )
    with pytest.raises(InputError, match=f"own.jsonl, line 3: .*{why}"):
        read("own.jsonl", f"{whole}\n\n{line}\n")


def test_a_prompt_that_is_a_list_of_messages_or_of_ids_counts_whole(read: Reading) -> None:
    parts = [{"type": "text", "text": "b" * 8}]
    messages = [{"role": "system", "content": "a" * 32}, {"role": "user", "content": parts}]
    for name in ("prompt", "messages"):
        assert read("own.jsonl", json.dumps({name: messages, "output_tokens": 1})).prompt_tokens.tolist() == [10]
    assert read("own.jsonl", json.dumps({"prompt": [5, 6, 7], "output_tokens": 1})).prompt_tokens.tolist() == [3]


def test_a_document_over_several_lines_is_not_taken_for_lines(read: Reading) -> None:
    whole = {"prompt_tokens": 1, "output_tokens": 7}
    with pytest.raises(InputError, match="own.json: NaN is no number"):
        read("own.json", json.dumps([whole, whole | {"output_tokens": float("nan")}], indent=2))
    with pytest.raises(InputError, match="own.json, line 2: NaN is no number"):
        read("own.json", json.dumps(whole) + '\n{"output_tokens": NaN}\n')


def test_only_the_end_of_a_line_ends_a_line_of_a_json_file(read: Reading) -> None:
    line = json.dumps({"prompt": "a\u2028b\x85c d", "output_tokens": 7}, ensure_ascii=False)
    assert columns(read("own.json", f"{line}\n{line}\n"))[1:] == ([2, 2], [7, 7])


def test_a_name_that_cannot_be_written_is_refused(read: Reading) -> None:
    with pytest.raises(InputError, match="half of a surrogate pair"):
        read("own.jsonl", '{"prompt_tokens": 1, "output_tokens": 1, "\\ud800": 1}\n')


def test_lengths_of_0_count_as_one_token_and_that_is_told(read: Reading) -> None:
    workload = read("own.csv", "prompt_tokens,output_tokens\n8,5\n8,0\n9,0\n")
    assert workload.output_tokens.tolist() == [5, 1, 1]
    assert read.told == ["2 times output_tokens is 0, first in line 3: that counts as one token"]


def test_what_is_guessed_or_passed_over_is_told(read: Reading) -> None:
    read("own.csv", "prompt_words,output_words,colour\n100,10,red\n")
    assert read.told == [
        "output_words counts as 1.33 tokens for each: a guess",
        "prompt_words counts as 1.33 tokens for each: a guess",
        "columns that mean nothing here are passed over: colour",
    ]


def test_a_compressed_file_that_was_cut_off_is_said_in_a_line(tmp_path: Path, rng: np.random.Generator) -> None:
    whole = gzip.compress(b"prompt_tokens,output_tokens\n" + b"1,2\n" * 1000)
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(InputError, match="cannot read .*cut.csv.gz"):
        read_workload(tmp_path / "cut.csv.gz", rng=rng)
