"""Tool calls of known lengths that only the model knows, and what bench.completion makes of runs."""

import json

import pytest
from vllm import LLM, SamplingParams

from bench.completion import (
    LONG,
    SHORT,
    SHORT_SHARE,
    SLO_CLASS,
    TOLD,
    WITHOUT,
    Measured,
    as_markdown,
    draw_tool_calls,
)
from bench.deployments.told_lengths import ANSWER_TOKENS
from bench.in_time import PLAIN, Run
from bench.model_kinds import DEMO_MODEL
from bench.open_loop import Targets

ANSWERS = {SHORT: 24, LONG: 480}


def test_the_same_seed_gives_the_same_tool_calls() -> None:
    assert draw_tool_calls(50, 5.0, ANSWERS, 12, seed=1) == draw_tool_calls(50, 5.0, ANSWERS, 12, seed=1)
    assert draw_tool_calls(50, 5.0, ANSWERS, 12, seed=1) != draw_tool_calls(50, 5.0, ANSWERS, 12, seed=2)


def test_answers_are_as_long_as_their_kind_and_the_prompt_asks_for_that() -> None:
    drawn = draw_tool_calls(4000, 5.0, ANSWERS, 12, seed=0)
    assert sum(each.kind == SHORT for each in drawn) / len(drawn) == pytest.approx(SHORT_SHARE, abs=0.02)
    for kind, mean in ANSWERS.items():
        tokens = [each.answer_tokens for each in drawn if each.kind == kind]
        assert sum(tokens) / len(tokens) == pytest.approx(mean, rel=0.05)
    asked = {kind: {each.prompt.partition("\n")[0] for each in drawn if each.kind == kind} for kind in ANSWERS}
    assert not asked[SHORT] & asked[LONG]


def test_a_request_tells_its_length_to_the_model_alone() -> None:
    short, long = (
        next(each for each in draw_tool_calls(200, 5.0, ANSWERS, 12, seed=3) if each.kind == kind) for kind in ANSWERS
    )
    bodies = [json.loads(each.body("m")) for each in (short, long)]
    assert [body.pop("vllm_xargs") for body in bodies] == [
        {ANSWER_TOKENS: short.answer_tokens},
        {ANSWER_TOKENS: long.answer_tokens},
    ]
    for body in bodies:
        body.pop("prompt")
    assert bodies[0] == bodies[1]


@pytest.mark.long
def test_a_model_that_is_told_its_lengths_makes_them() -> None:
    told = (1, 2, 7, 40)
    processor = TOLD.partition("=")[2]
    engine = LLM(
        str(DEMO_MODEL), logits_processors=[processor], enforce_eager=True, max_model_len=512, dtype="float32",
        kv_cache_memory_bytes=1 << 27, max_num_seqs=8,
    )  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=200, extra_args={ANSWER_TOKENS: tokens}) for tokens in told]
    outputs = [each.outputs[0] for each in engine.generate(["Name three rivers."] * len(told), params)]
    assert [len(each.token_ids) for each in outputs] == list(told)
    assert {each.finish_reason for each in outputs} == {"stop"}


def test_the_page_names_target_kinds_and_how_many_routers_believed() -> None:
    runs = [
        Run(system=name, load=1.5, in_time=share, by_kind={LONG: 0.1, SHORT: share}, unanswered=0.0, errors={})
        for name, share in ((PLAIN, 0.4), (WITHOUT, 0.6))
    ]
    page = as_markdown(
        Measured(
            model="m",
            engine_arguments=("--x",),
            answers=ANSWERS,
            prompt_tokens=200,
            requests=300,
            targets={SLO_CLASS: Targets(e2e_s=3.9)},
            capacity=4.0,
            cap=1000,
            believed=0.5,
            runs=tuple(runs),
        )
    )
    assert "Target: agents: last one within 3.9 s" in page
    assert "50% went by the predictor" in page
    (row,) = (line for line in page.splitlines() if WITHOUT in line)
    assert [cell.strip() for cell in row.split("|")][3:7] == [
        "0.600 [0.600, 0.600]",
        "+0.200 [+0.200, +0.200]",
        "0.100",
        "0.600",
    ]
