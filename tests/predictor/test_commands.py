import gzip
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.command import cli
from predictor.calibration import DAY_0
from predictor.commands import training_config

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds


def parted(file: Path) -> tuple[list[str], list[str]]:
    """Lines to learn from, and those of every tenth prompt, to judge."""
    lines = gzip.decompress(file.read_bytes()).decode().strip().split("\n")
    prompts = [json.loads(line)["prompt"] for line in lines]
    judged = set(list(dict.fromkeys(prompts))[::10])
    found: tuple[list[str], list[str]] = ([], [])
    for line, prompt in zip(lines, prompts, strict=True):
        found[prompt in judged].append(line)
    return found


def test_a_predictor_is_trained_and_judged_from_the_command_line(
    real_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test, figure = tmp_path / "train.jsonl", tmp_path / "test.jsonl", tmp_path / "confusion.png"
    for path, lines in zip((train, test), parted(real_file), strict=True):
        path.write_text("\n".join(lines))
    out = tmp_path / "predictor"
    cli.main(["predictor", "train", "--data", str(train), "--layers", "1", "--adapter-rank", "0", "--epochs", "2",
              "--out", str(out)])  # fmt: skip
    assert "held out by epoch" in capsys.readouterr().out
    cli.main(["predictor", "eval", "--checkpoint", str(out), "--data", str(test), "--learn-from", str(train),
              "--figure", str(figure), "--json"])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert set(report["sets"]) == {"mixed", "test"}
    assert set(report["sets"]["mixed"]) == {"checkpoint", "prompt_length", "histogram", "one_histogram"}
    assert figure.read_bytes().startswith(b"\x89PNG")
    cli.main(["predictor", "eval", "--checkpoint", str(out), "--data", str(test)])
    assert capsys.readouterr().out.count("checkpoint") == 2


def eval_examples(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The commands that its help shows, as words after `sluice`."""
    with pytest.raises(SystemExit):
        cli.main(["predictor", "eval", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("sluice ")]


def lay_out(example: list[str], learnt: list[str], judged: list[str]) -> None:
    """Every file that an example names."""
    for option, lines in (("--data", judged), ("--learn-from", learnt)):
        if option in example:
            path, text = Path(example[example.index(option) + 1]), "\n".join(lines).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    if "--checkpoint" in example:
        shutil.copytree(DAY_0, example[example.index("--checkpoint") + 1])


def judged_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    assert "learn from" not in err
    return json.loads(out)["sets"]["mixed"]


@pytest.mark.long
def test_the_examples_of_eval_work_and_learn_from_what_they_name(
    real_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = eval_examples(capsys)
    found = []
    for example in examples:
        lay_out(example, *parted(real_file))
        found.append(judged_by(example, capsys))
    unlearnt, *learnt = found  # the first example learns from nothing
    assert len(learnt) == sum("--learn-from" in example for example in examples) > 0
    for each in learnt:
        for source in ("checkpoint", "histogram"):
            assert each[source]["mean_absolute_log_error"] < unlearnt[source]["mean_absolute_log_error"] - 0.05


def test_what_was_not_learnt_is_said_and_nothing_at_all_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test, train = tmp_path / "test.jsonl", tmp_path / "train.jsonl"
    test.write_text(
        '{"prompt": "Hi", "output_tokens": 9, "model": "a"}\n{"prompt": "Bye", "output_tokens": 9, "model": "b"}'
    )
    train.write_text('{"prompt": "Write an essay", "output_tokens": 900, "model": "a"}')
    words = ["predictor", "eval", "--data", str(test), "--learn-from", str(train)]
    cli.main(words)
    assert "nothing to learn from for model 'b'" in capsys.readouterr().err
    train.write_text('{"prompt": "Write an essay", "output_tokens": 900}')
    with pytest.raises(SystemExit, match="nothing can be learnt: judged are answers of model 'a', 'b', to learn from"):
        cli.main(words)


def test_the_request_log_and_kept_prompts_make_training_data(tmp_path: Path) -> None:
    log, prompts, out = tmp_path / "router.log", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"message": "request", "request_id": "a", "status": 200, "output_tokens": 12, "outcomes": ["length"]},
        {"message": "request", "request_id": "b", "status": 429, "output_tokens": 0, "outcomes": ["refused"]},
        {"message": "request", "request_id": "c", "status": 200, "output_tokens": 7, "outcomes": ["stop"]},
        {"message": "request", "request_id": "left", "status": 200, "output_tokens": 3, "outcomes": ["cancelled"]},
        {"message": "request", "request_id": "two", "status": 200, "output_tokens": 9, "outcomes": ["stop", "stop"]},
        {"message": "something else"},
    ]
    log.write_text("starting ...\n" + "[" * 9000 + "\n" + "\n".join(json.dumps(row) for row in rows))
    kept = [
        {"request_id": "a", "prompt": "Hello", "model": "m", "max_tokens": 12, "user": "u"},
        *({"request_id": name, "prompt": "?"} for name in ("b", "left", "two")),
        {"request_id": "zz", "prompt": "?"},
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in kept))
    cli.main(["predictor", "export", "--log", str(log), "--prompts", str(prompts), "--out", str(out)])
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"prompt": "Hello", "model": "m", "max_tokens": 12, "output_tokens": 12, "finish_reason": "length"}
    ]


def test_a_log_and_prompts_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    log, prompts = tmp_path / "router.log", tmp_path / "prompts.jsonl"
    log.write_text("")
    prompts.write_text('{"request_id": "a", "prompt": "p"}\n')
    with pytest.raises(SystemExit, match="kept under X-Request-Id"):
        cli.main(["predictor", "export", "--log", str(log), "--prompts", str(prompts), "--out", str(tmp_path / "o")])
    with pytest.raises(SystemExit, match="no folder .*nowhere"):
        cli.main(
            [
                "predictor",
                "export",
                "--log",
                str(log),
                "--prompts",
                str(prompts),
                "--out",
                str(tmp_path / "nowhere" / "o"),
            ]
        )
    prompts.write_text('{"request_id": "a"}\n')
    with pytest.raises(SystemExit, match="prompts.jsonl, line 1 has no request_id and prompt"):
        cli.main(["predictor", "export", "--log", str(log), "--prompts", str(prompts), "--out", str(tmp_path / "o")])


def test_an_id_that_stands_for_two_answers_is_left_out_and_one_for_two_prompts_refused(tmp_path: Path) -> None:
    log, prompts, out = tmp_path / "router.log", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"request_id": name, "output_tokens": at + 5, "outcomes": ["stop"]} for at, name in enumerate("aba")]
    log.write_text("\n".join(json.dumps(row) for row in rows))
    kept = [json.dumps({"request_id": name, "prompt": name}) for name in "ab"]
    words = ["predictor", "export", "--log", str(log), "--prompts", str(prompts), "--out", str(out)]
    prompts.write_text("\n".join(kept))
    cli.main(words)
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["b"]
    prompts.write_text("\n".join([*kept, "", kept[1]]))
    with pytest.raises(SystemExit, match="line 4: the request_id of line 2 again"):
        cli.main(words)


def test_what_is_not_named_stays_as_it_is() -> None:
    options = cli.parser().parse_args(["predictor", "train", "--data", "x", "--out", "y", "--layers", "3"])
    config = training_config(options)
    assert (config.layers, config.max_tokens, config.loss) == (3, 128, "log_l1")


def test_a_router_without_it_loads_no_torch() -> None:
    code = "import sys, router.classifier, predictor.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
