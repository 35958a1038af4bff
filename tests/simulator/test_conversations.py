"""Sessions that go on a while after each answer."""

from simulator.cluster import ClusterConfig
from simulator.conversations import Turn, run_conversations
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target
from simulator.reproduce.beyond import growing


def _turn(prompt_tokens: int, reusable_tokens: int, pause_s: float) -> Turn:
    return Turn(prompt_tokens=prompt_tokens, reusable_tokens=reusable_tokens, output_tokens=4, pause_s=pause_s)


def _config(ttft_s: float, cache_tokens: int = 400_000) -> ClusterConfig:
    engine = EngineConfig(total_blocks=cache_tokens // 16)
    return system("sluice", engine_profile("Llama-3.1-8B@h100_sxm"), engine, 2, {"*": Target(ttft_s=ttft_s, tpot_s=1)})


def test_the_next_request_comes_its_pause_after_the_answer() -> None:
    served = run_conversations(_config(5.0), [[_turn(5000, 0, 1.0), _turn(6000, 5000, 2.0)], [_turn(100, 0, 3.0)]])
    first, second, other = served.requests
    assert (first.arrival_s, other.arrival_s) == (1.0, 3.0)
    assert first.finished_s is not None and second.arrival_s == first.finished_s + 2.0
    assert second.cached_tokens == 4992 and second.promised_ttft_s == 5.0
    assert served.makespan_s == max(each.finished_s or 0.0 for each in served.requests)


def test_sessions_grow() -> None:
    first, *_ = growing(3)
    assert [turn.reusable_tokens for turn in first] == [0, *(turn.prompt_tokens for turn in first[:-1])]


def test_late_sessions_find_most_of_their_prompts() -> None:
    """Nothing can be in time."""
    served = run_conversations(_config(0.01), growing(40))
    hits = sum(each.cached_tokens for each in served.requests) / sum(each.reusable_tokens for each in served.requests)
    assert hits > 0.6
