"""Recorded runs beside what is simulated of the same requests."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from policies.errors import InputError
from policies.types import StepCoefficients, StepTimes
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.recorded import COLUMNS, read_run
from simulator.requests import Request
from simulator.validate import cache_blocks, main
from simulator.workload import length_law, poisson, synthetic

FORM = {"overhead_s": 0.01, "prefill_s": 1e-4, "decode_s": 1e-4}
ENGINE = json.dumps({"prefill": FORM, "decode": FORM, "mixed": FORM, "cache_tokens": 32_000})


def served() -> list[Request]:
    """By an engine with the step times of ENGINE."""
    rng = np.random.default_rng(0)
    work = synthetic("run", length_law("uniform:50:500"), length_law("uniform:1:80"), 80, rng)
    form = StepCoefficients(**FORM)
    times = StepTimes(prefill=form, decode=form, mixed=form)
    engine = EngineConfig(total_blocks=2000)
    return run(ClusterConfig(times=times, engine=engine), work.arriving(poisson(8.0, 80, rng))).requests


def as_csv(requests: list[Request], path: Path) -> Path:
    rows = [
        f"{r.arrival_s + 100},{r.prompt_tokens},{r.output_tokens},{_first_s(r) + 100},{(r.finished_s or 0) + 100},Qwen"
        for r in requests
    ]
    path.write_bytes(gzip.compress("\n".join([",".join((*COLUMNS, "model")), *rows]).encode()))
    return path


def as_bench(requests: list[Request], path: Path, failed: int = 0) -> Path:
    """A file as `vllm bench serve` writes it, with `failed` further requests that failed."""
    gaps_s = [(r.finished_s or 0.0) - _first_s(r) for r in requests]
    written = {
        "start_times": [r.arrival_s + 5000.0 for r in requests] + [5000.0] * failed,
        "input_lens": [r.prompt_tokens for r in requests] + [10] * failed,
        "output_lens": [r.output_tokens for r in requests] + [0] * failed,
        "ttfts": [_first_s(r) - r.arrival_s for r in requests] + [0.0] * failed,
        "itls": [[gap_s / 2, gap_s / 2] for gap_s in gaps_s] + [[]] * failed,
    }
    path.write_text(json.dumps(written))
    return path


def _first_s(request: Request) -> float:
    return request.arrival_s + (request.ttft_s or 0.0)


@pytest.fixture
def engine(tmp_path: Path) -> str:
    path = tmp_path / "engine.json"
    path.write_text(ENGINE)
    return str(path)


def errors_of(printed: str) -> dict[str, float]:
    lines = [line for line in printed.splitlines() if line.endswith("%")]
    return {line[:18].strip(): float(line.split()[-1].rstrip("%")) for line in lines}


@pytest.mark.parametrize("write", [as_csv, as_bench])
def test_a_run_of_the_engine_that_is_simulated_is_predicted_without_error(
    write: Callable[[list[Request], Path], Path], tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suffix = "csv.gz" if write is as_csv else "json"
    main(["--run", str(write(served(), tmp_path / f"run.{suffix}")), "--engine", engine])
    errors = errors_of(capsys.readouterr().out)
    assert set(errors) == {
        "output tokens/s", "requests/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms"
    }  # fmt: skip
    assert max(map(abs, errors.values())) < 1.0


def test_an_engine_that_is_slower_than_the_real_one_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(ENGINE.replace("0.01", "0.015"))
    main(["--run", str(as_bench(served(), tmp_path / "run.json")), "--engine", str(slow)])
    errors = errors_of(capsys.readouterr().out)
    assert errors["TPOT p50, ms"] > 20 and errors["TTFT p50, ms"] > 10


def test_requests_that_failed_are_left_out(tmp_path: Path) -> None:
    requests = served()
    record = read_run(as_bench(requests, tmp_path / "run.json", failed=3))
    assert len(record["queued_s"]) == len(requests)
    with pytest.raises(InputError, match="no request that was answered"):
        read_run(as_bench([], tmp_path / "none.json", failed=3))


def test_a_file_that_is_no_run_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    for name, text, lacks in (
        ("a.csv", "queued_s,prompt_tokens\n0,1\n", "output_tokens"),
        ("b.json", '{"duration": 3}', "--save-detailed"),
        ("c.csv", "", "no request"),
        ("d.csv", "queued_s\nsoon\n", "soon"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(InputError, match=lacks):
            read_run(path)
    with pytest.raises(InputError, match="absent"):
        read_run(tmp_path / "absent.csv")
    whole = gzip.compress(b"queued_s,prompt_tokens\n" + b"0,1\n" * 1000)
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-12])
    with pytest.raises(InputError, match="cut.csv.gz"):
        read_run(tmp_path / "cut.csv.gz")


def test_a_run_needs_an_engine_that_could_have_served_it(tmp_path: Path, engine: str) -> None:
    path = str(as_bench(served(), tmp_path / "run.json"))
    with pytest.raises(SystemExit, match="--list-engines"):
        main(["--run", path])
    with pytest.raises(SystemExit, match="longer than the whole KV cache"):
        main(["--run", path, "--engine", engine, "--cache-tokens", "64"])


def test_the_cache_of_a_recorded_run_follows_from_its_use() -> None:
    record = {
        "first_token_s": np.array([0.0, 0.0]),
        "last_token_s": np.array([10.0, 20.0]),
        "output_tokens": np.array([101.0, 201.0]),
        "prompt_tokens": np.array([500.0, 700.0]),
    }
    series = {"t": np.array([2.0, 15.0]), "kv_cache_pct": np.array([10.0, 90.0]), "waiting": np.array([0.0, 0.0])}
    assert cache_blocks(record, series) == (500 + 700 + 20 + 20) * 10 // 16
