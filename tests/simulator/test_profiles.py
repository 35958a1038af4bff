"""Reading step-time profiles. The rows are derived from AIConfigurator's kernel tables (Apache-2.0)."""

import gzip
from pathlib import Path

import pytest

from policies.engine.step_time import StepTimeConfig, StepTimeModel
from policies.errors import ConfigError, InputError
from policies.profile import step_times
from simulator.profiles import read_profile

HEADER = "source,model,gpu,tp,prefill_range,alpha_p_ms,beta_p_ms_per_token,decode_range,alpha_d_ms,beta_d_ms_per_seq"
ROWS = """\
derived,Llama-3.1-8B,h100_sxm,1,256..4096 tokens,0.70293,0.019075,16..1024 seqs at context 128,5.32808,0.0213832
derived,Llama-3.1-8B,h100_sxm,1,256..4096 tokens,0.70293,0.019075,16..1024 seqs at context 512,5.41021,0.0376175
derived,Llama-3.1-8B,h100_sxm,1,256..4096 tokens,0.70293,0.019075,16..1024 seqs at context 1024,5.37062,0.0579431
derived,Llama-3.1-8B,h100_sxm,1,256..4096 tokens,0.70293,0.019075,16..1024 seqs at context 4096,5.27785,0.184929
measured,bloom-176b,a100-80gb,8,128..4096 tokens,-3.71877,0.316559,1..32 seqs at context 512..640,48.7318,0.524472"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}\n{ROWS}\n".encode()))
    return path


def test_a_decode_step_costs_more_the_longer_its_contexts_are(profile: Path) -> None:
    times = step_times(read_profile(profile), model="Llama-3.1-8B", gpu="h100_sxm")
    for context, per_request_ms in ((128, 0.0213832), (512, 0.0376175), (1024, 0.0579431), (4096, 0.184929)):
        expected_s = 5.35e-3 + 256 * per_request_ms * 1e-3
        assert times.step_s(decode_requests=256, kv_tokens=256 * context) == pytest.approx(expected_s, rel=0.03)


def test_prefill_keeps_its_line(profile: Path) -> None:
    times = step_times(read_profile(profile), model="Llama-3.1-8B", gpu="h100_sxm")
    assert times.step_s(prefill_tokens=2048) == pytest.approx(0.70293e-3 + 2048 * 19.075e-6)


def test_an_overhead_below_zero_becomes_none(profile: Path) -> None:
    times = step_times(read_profile(profile), model="bloom-176b", gpu="a100-80gb", tensor_parallel=8)
    assert times.prefill.overhead_s == 0.0
    assert times.decode.kv_s == 0.0
    assert times.decode.decode_s == pytest.approx(0.524472e-3)


def test_a_plain_file_reads_as_a_gzipped_one(profile: Path, tmp_path: Path) -> None:
    plain = tmp_path / "profile.csv"
    plain.write_text(f"{HEADER}\n{ROWS}\n")
    assert read_profile(plain) == read_profile(profile)


def test_a_profile_serves_as_the_prior_of_the_online_model(profile: Path) -> None:
    times = step_times(read_profile(profile), model="Llama-3.1-8B", gpu="h100_sxm")
    assert StepTimeModel(StepTimeConfig(prior=times)).times() == times


def test_an_unknown_engine_is_refused_with_those_that_are_known(profile: Path) -> None:
    with pytest.raises(ConfigError, match="bloom-176b"):
        step_times(read_profile(profile), model="Llama-3.1-8B", gpu="h200")


def test_one_source_must_be_named_where_there_are_two(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(f"{HEADER}\n{ROWS}\n{ROWS.splitlines()[0].replace('derived', 'measured')}\n")
    with pytest.raises(ConfigError, match="measured"):
        step_times(read_profile(path), model="Llama-3.1-8B", gpu="h100_sxm")
    times = step_times(read_profile(path), model="Llama-3.1-8B", gpu="h100_sxm", source="derived")
    assert times.decode.kv_s > 0


@pytest.mark.parametrize("row", ["x,y,z,1,p,not a number,1,at context 1,1,1", "x,y,z,1"])
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(f"{HEADER}\n{ROWS}\n{row}\n")
    with pytest.raises(InputError, match="line 7"):
        read_profile(path)
