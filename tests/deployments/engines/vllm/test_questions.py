"""What a learned predictor is asked about requests that come through vLLM's own renderer."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import RoutedEngineCore, note_chats, prompt_text
from router.timing import HttpContext, current

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

INSTRUCTIONS = {"role": "system", "content": "You are a careful guide to rivers. " * 40}


@pytest.fixture(scope="module")
def renderer() -> Any:
    """vLLM's own, with the demo model's tokenizer and chat template."""
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS])
    made = renderer_from_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    note_chats(made)
    return made


async def rendered(renderer: Any, *conversations: list[dict[str, str]], tokenize: bool = False) -> list[str | None]:
    params = ChatCompletionRequest(messages=conversations[0]).build_chat_params(None, "auto")
    _, prompts = await renderer.render_chat_async(conversations, params.with_defaults({"tokenize": tokenize}))
    return [prompt.get("prompt") for prompt in prompts]


async def test_chats_are_known_by_the_text_that_the_template_makes_of_them(renderer: Any) -> None:
    context = HttpContext(time.monotonic(), "standard")
    current.set(context)
    brief, guided = await rendered(
        renderer,
        [{"role": "user", "content": "Name a river."}],
        [INSTRUCTIONS, {"role": "user", "content": "Describe a river."}],
    )
    assert [context.asked[text].prompt for text in (brief, guided)] == ["Name a river.", "Describe a river."]
    assert context.asked[brief].system_prompt == ""
    assert len(context.asked[guided].system_prompt) == 16


@pytest.mark.parametrize("tokenize", [False, True])
async def test_the_question_has_the_users_words_and_a_plain_prompt_is_its_own_question(
    renderer: Any, tokenize: bool
) -> None:
    context = HttpContext(time.monotonic(), "standard")
    current.set(context)
    core = RoutedEngineCore(routed=None, model="m")  # type: ignore[arg-type]
    request: Any = SimpleNamespace(sampling_params=SimpleNamespace(max_tokens=9), lora_request=None)
    (text,) = await rendered(renderer, [INSTRUCTIONS, {"role": "user", "content": "Name a river."}], tokenize=tokenize)
    for prompt, asked in ((text, "Name a river."), ("A story:", "A story:")):
        prompt_text.set(prompt)
        question = core._question(request, context)
        assert question is not None
        assert (question.prompt, question.max_output_tokens) == (asked, 9)
