"""What all benchmarks of servers have in common, tried on each of them."""

import argparse
import importlib
import json
import signal
import socket
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import session
from bench.servers import ENGINE_ARGUMENTS, ServerSpec
from bench.session import Session, exit_status, new_parser, run_session, turns
from deployments.command import cli
from deployments.process.ports import free_port
from tests.bench.toy_server import toy_spec
from tests.builds import install_build

PROGRAMS = ("batches", "compare", "completion", "first_token", "goodput", "prefill_decode", "prefixes")
READY = "import signal; print('ready', flush=True); signal.pause()"


def program(name: str) -> Any:
    return importlib.import_module(f"bench.{name}")


def test_each_variant_is_first_as_often_and_two_alternate() -> None:
    assert [turns("AB", repeat) for repeat in range(3)] == [("A", "B"), ("B", "A"), ("A", "B")]
    assert [turns("ABC", repeat)[0] for repeat in range(6)] == list("ABCABC")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_teaches_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        program(name).main(["--help"])
    assert f"  python -m bench.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["compare", "first_token"])
def test_help_shows_the_shared_engine_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        program(name).main(["--help"])
    assert "--max-num-seqs=64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("compare", ["--sluice", "two"], "must look like 2x2"),
        ("compare", ["--json", "/no/such/folder/out.json"], "no folder /no/such/folder"),
        ("compare", ["--logs", "/no/such/folder"], "no folder /no/such/folder"),
        ("compare", ["--sluice-config", "/no/such/file.yaml"], "no file /no/such/file.yaml"),
        ("goodput", ["--also", "nothing"], "must look like NAME=http"),
        ("goodput", ["--rounds", "0"], "at least 1"),
        ("goodput", ["--loads", "0"], "above 0"),
        ("completion", ["--learn", "0"], "at least 1"),
        ("goodput", ["--figure", "/nowhere/runs.png"], "no folder /nowhere"),
        ("batches", ["--loads", "0"], "--loads"),
        ("batches", ["--loads", "nan"], "--loads"),
        ("batches", ["--loads", "wave"], "--loads"),
        ("prefixes", ["--systems", "sluice,nobody"], "no system 'nobody'"),
        ("prefixes", ["--systems", "ray,ray"], "named twice"),
    ],
)
def test_unusable_options_are_named_before_anything_starts(
    name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        program(name).main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("compare", ["--sluice"], "give --sluice, --sluice-config, --vllm-router or --control"),
        ("compare", ["--repeats", "0", "--", "--max-model-len=512"], "repeats must be positive, got 0"),
        ("first_token", ["--requests", "0"], "requests must be positive, got 0"),
        ("goodput", ["--answer", "1"], "answer must be at least 2 tokens"),
    ],
)
def test_numbers_that_make_no_measurement_are_told_before_anything_starts(
    name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(name).main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_port_that_is_taken_is_said_and_nothing_is_left(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert program(name).main(["--first-port", str(taken.getsockname()[1]), "--logs", str(tmp_path)]) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("compare", "--concurrency 1 2 --repeats 2 --requests-per-client 2 --idle-seconds 0.1", "| 2 "),
        ("first_token", "--requests 9 --max-tokens 3", "Sluice 1x1 beside vllm serve, 9 pairs"),
        (
            "goodput",
            "--capacity 50 --requests 20 --rounds 2 --slots 2 --loads 1 --answer 4",
            "| vllm serve, best cap |",
        ),
        (
            "completion",
            "--capacity 50 --requests 10 --rounds 1 --slots 2 --loads 1 --learn 4",
            "| Sluice without predictor |",
        ),
        (
            "prefixes",
            "--sessions 2 --turns 2 --rounds 2 --think 0.01 --systems sluice,vllm,vllm-router",
            "| vllm serve, vllm-router ",
        ),
        ("prefill_decode", "--repeats 2 --seconds 1 --every 0.5 --streams 2", "| gap_p99_ms "),
    ],
)
def test_each_program_measures_from_its_arguments_to_its_table(
    name: str, options: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spec(self: Session, name: str, place: int, *_: object) -> ServerSpec:
        return toy_spec(name, port=ports[place])

    ports: defaultdict[int, int] = defaultdict(free_port)
    monkeypatch.setattr(Session, "plain", spec)
    monkeypatch.setattr(Session, "sluice", spec)
    assert program(name).main(["--model", "toy", *options.split()]) == 0
    assert shown in capsys.readouterr().out


def new_session(stack: ExitStack, *arguments: str, engine: tuple[str, ...] = ()) -> Session:
    return Session(new_parser("bench.x", "", "", first_port=18900).parse_args(arguments), engine, stack)


@pytest.mark.parametrize(
    ("build", "options", "gpus"),
    [
        ("0.32.0+cpu", (), 0.0),
        ("0.32.0", (), 1.0),
        ("0.32.0", ("--num-gpus", "0.5"), 0.5),
        ("0.32.0+cpu", ("--num-gpus", "2"), 2.0),
    ],
)
def test_engines_of_sluice_get_the_gpus_that_their_build_needs_or_that_were_asked_for(
    build: str, options: tuple[str, ...], gpus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(tmp_path, build)
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        made = new_session(stack, *options, engine=("--tensor-parallel-size=2",) if gpus == 2 else ())
        plain, ours = made.plain("plain", 0), made.sluice("ours", 3, {"mode": "stock", "engine": {"replicas": 1}})
        config = cli.app_config(cli.parse(ours.command[1:]))
    assert plain.command[1:3] == ("-m", "deployments.plain_vllm")
    assert (config.engine.num_gpus, config.engine.replicas, ours.port) == (gpus, 1, plain.port + 3)


def test_a_file_of_settings_says_its_gpus_itself_and_has_the_shared_engine_arguments(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("engine: {replicas: 1, num_gpus: 0.25, scheduler: {mode: stock}}")
    with ExitStack() as stack:
        made = new_session(stack, "--num-gpus", "1", engine=("--seed=1",))
        config = cli.app_config(cli.parse(made.sluice_from(path, "from a file", 1).command[1:]))
    assert (config.engine.num_gpus, config.engine.scheduler.mode, config.model) == (0.25, "stock", session.DEMO_MODEL)
    assert config.vllm_args == (*ENGINE_ARGUMENTS, "--seed=1")


def test_without_a_model_one_of_random_weights_is_made(tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = new_parser("bench.x", "", "", first_port=18900, model=None).parse_args([])
        made = Session(options, ("--dtype=float16",), stack)
        assert (Path(made.model) / "config.json").is_file()
        assert {"--dtype=float16", "--load-format=dummy"} <= set(made.engine_arguments)
    assert not Path(made.model).exists()


def test_of_what_is_given_twice_the_later_counts_for_all_and_sluice_takes_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        options = new_parser("bench.x", "", "", first_port=18900, model=None).parse_args([])
        made = Session(options, ("--max-num-seqs=16", "--seed", "1", "--dtype=float16", "--seed", "2"), stack)
        config = cli.app_config(cli.parse(made.sluice("ours", 1, {"engine": {"replicas": 1}}).command[1:]))
    assert config.vllm_args == made.engine_arguments == made.plain("plain", 0).command[-len(config.vllm_args) :]
    assert [word for word in config.vllm_args if "seqs" in word or "dtype" in word] == [
        "--max-num-seqs=16",
        "--dtype=float16",
    ]
    assert config.vllm_args[-2:] == ("--seed", "2")


def test_what_was_measured_is_printed_and_written_and_servers_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def measure(session: Session) -> list[int]:
        port = session.options.first_port
        spec = ServerSpec(name="toy", command=(sys.executable, "-c", READY), port=port, ready_line="ready")
        started.append(session.start(spec))
        return [1, 2]

    parser = new_parser("bench.x", "", "", first_port=18901)
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    status = run_session("bench.x", parser, measure, str, files, has_failed=lambda found: sum(found) == 3)
    assert status == session.FAILED
    assert json.loads((tmp_path / "a.json").read_text()) == [1, 2]
    assert (tmp_path / "a.md").read_text() == "[1, 2]" and "[1, 2]\n" in capsys.readouterr().out
    assert not started[0].processes()


def test_an_end_that_is_asked_for_is_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(stack: ExitStack) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    assert exit_status("bench.x", measure) == session.INTERRUPTED
    assert "every server that it started has been stopped" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["/nowhere/a.json", "/nowhere"])
def test_a_folder_that_is_not_there_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no folder /nowhere"):
        session.writable_file(text) if text.endswith("json") else session.folder(text)
