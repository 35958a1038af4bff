import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.command.calibrate import _of_vllm, exclusive_gain, in_words, write_profile
from deployments.command.calibration import Measured
from deployments.command.cli import parser
from deployments.config.lengths import WorkSection
from deployments.config.model import DEMO_ARGS
from deployments.config.scheduler import SchedulerSettings
from deployments.process.vllm_env import cpu_dtype
from policies.errors import ConfigError
from policies.types import Phase, StepCoefficients, StepResult, StepTimes
from simulator.profiles import calibrated

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=2e-5),
    decode=StepCoefficients(overhead_s=0.006, decode_s=4e-5, kv_s=2e-8),
    mixed=StepCoefficients(overhead_s=0.006, prefill_s=3e-5, decode_s=6e-5, kv_s=3e-8, interference_s=1e-6),
)


def step(prefill: int, decodes: int, context: int, noise: float = 1.0) -> StepResult:
    seconds = TIMES.step_s(prefill_tokens=prefill, decode_requests=decodes, kv_tokens=decodes * context)
    return StepResult(
        now_s=0.0,
        step_s=noise * seconds,
        phase=Phase.MIXED,
        prefill_tokens=prefill,
        prefill_requests=int(prefill > 0),
        decode_requests=decodes,
        kv_tokens=decodes * context,
        max_batch_size=64,
        running_count=decodes,
        waiting_count=0,
    )


def measured() -> Measured:
    found = Measured()
    for prefill in (0, 32, 128, 512, 2048):
        for decodes in (0, 1, 4, 16, 64):
            for context in (64, 1024):
                if prefill or decodes:
                    found.add([step(prefill, decodes, context, noise) for noise in (0.99, 1.0, 5.0)])
    return found


def assert_close(found: StepTimes, *names: str) -> None:
    for kind in ("prefill", "decode", "mixed"):
        form, expected = getattr(found, kind), getattr(TIMES, kind)
        for name in names:
            assert getattr(form, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-12)


def test_the_fit_finds_what_was_there_behind_stalls() -> None:
    found = measured()
    times = found.times()
    assert_close(times, "overhead_s", "prefill_s", "decode_s", "kv_s")
    assert found.explained_fraction(times) > 0.999


def test_the_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    write_profile(path, TIMES, (64, 256, 1024), model="m", gpu="g")
    known = SchedulerSettings(profile=path).known_step_times()
    assert WorkSection(profile=path).build() == known
    assert known is not None
    assert_close(known, "overhead_s", "prefill_s", "decode_s", "kv_s", "interference_s")


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read profile"):
        SchedulerSettings(profile=tmp_path / "none.csv").known_step_times()


def test_a_profile_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "compressed.csv"
    path.write_bytes(gzip.compress(b"source"))
    for read in (SchedulerSettings(profile=path).known_step_times, lambda: calibrated(path)):
        with pytest.raises(ConfigError, match="cannot read profile .*compressed.csv"):
            read()


def test_the_words_say_whether_exclusive_batching_can_pay() -> None:
    assert "can pay here" in in_words(TIMES, 0.99, slots=64)[-1]
    alike = StepTimes(prefill=TIMES.prefill, decode=TIMES.decode, mixed=TIMES.decode)
    free = StepTimes(
        prefill=TIMES.prefill,
        decode=TIMES.decode,
        mixed=StepCoefficients(overhead_s=0.006, prefill_s=2e-5, decode_s=4e-5, kv_s=2e-8),
    )
    assert exclusive_gain(alike, 64) < exclusive_gain(TIMES, 64)
    assert "cannot pay here" in in_words(free, 0.99, slots=16)[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "3"], "--steps must be at least 4, got 3"),
        (["--seconds", "0"], "--seconds must be positive, got 0.0"),
        (["--seconds", "nan"], "--seconds must be positive, got nan"),
        (["--error", "-0.1"], "--error must not be negative, got -0.1"),
        (["-o", "/no/such/folder/mine.csv"], "no folder /no/such/folder for mine.csv"),
        (["--plot", "/no/such/folder/fit.png"], "no folder /no/such/folder for fit.png"),
    ],
)
def test_wrong_options_are_named_before_an_engine_starts(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_CALIBRATE_READY", "1")  # or what passes the check would take this process's place
    given = parser().parse_args(["calibrate", *options])
    with pytest.raises(ConfigError, match=re.escape(message)):
        given.run(given)


def command(*options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("sluice")), "calibrate", *options]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_measures_the_demo_model_writes_as_it_goes_and_says_what_it_found(tmp_path: Path) -> None:
    profile, picture = tmp_path / "mine.csv", tmp_path / "fit.png"
    options = ["--steps", "4", "--error", "0", "--most-batch", "4", "-o", str(profile), "--plot", str(picture)]
    # No longer contexts: the least that can be fitted takes a while.
    asked = command(*options, "--", "--max-model-len", "1024")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        lines = (line for line in process.stderr if "batches measured" in line)
        told = [next(lines) for _ in range(4)]  # prompts alone, and the least for a fit
        first = calibrated(profile)
        told += lines
        words = process.stdout.read()
    assert process.returncode == 0
    assert [int(line.split("] ")[1].split()[0]) for line in told] == [1, 2, 3, 4, 5]
    assert all(re.search(r"at most \d+ s left$", line) for line in told)
    assert "exclusive against mixed batching" in words
    assert f"profile: {profile}" in words
    assert picture.read_bytes().startswith(b"\x89PNG")
    for times in (first, calibrated(profile)):
        assert times.step_s(prefill_tokens=128) > 0.0 and times.step_s(decode_requests=4, kv_tokens=1024) > 0.0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_seconds_are_enough_for_a_profile(tmp_path: Path) -> None:
    profile = tmp_path / "mine.csv"
    asked = command("--seconds", "30", "--error", "0", "-o", str(profile))
    done = subprocess.run(asked, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    took_s = [int(found) for found in re.findall(r"^\[ *(\d+) s\] \d+ of", done.stderr, re.MULTILINE)]
    assert took_s and max(took_s) <= 30
    assert calibrated(profile).step_s(decode_requests=4, kv_tokens=1024) > 0.0


def test_it_measures_what_would_be_served() -> None:
    name, args = _of_vllm("demo", ["--max-num-seqs", "8"], gpu=False)
    assert Path(name).is_dir()
    assert [*DEMO_ARGS, "--max-num-seqs", "8"] == [arg for arg in args if arg not in ("--dtype", cpu_dtype())]
    assert _of_vllm("m", ["--seed", "1"], gpu=True) == ("m", ["--seed", "1"])
    assert _of_vllm("m", ["--seed", "1"], gpu=False)[1] == ("--seed", "1", "--gpu-memory-utilization", "0.6")
