"""What an upgrade of vLLM takes from our code is told before an engine starts."""

import pytest

from tests.vllm_names import Sources, changed, gone

# In a vLLM whose sources are changed like this ...
MOVED = {
    "vllm/entrypoints/serve/utils/api_utils.py": ("def process_lora_modules", "def moved"),
    "vllm/v1/core/sched/scheduler.py": ("_inflight_prefills", "moved"),
    "vllm/envs.py": ("VLLM_TARGET_DEVICE", "MOVED"),
    "vllm/renderers/base.py": ("_tokenize_prompt_async", "moved"),
    "vllm/v1/engine/async_llm.py": ("def add_request(", "def add_request(more, "),
}
# ... these are missed: an import, an attribute of `self`, a variable of the environment, a method that is replaced.
MISSED = {
    "vllm.entrypoints.serve.utils.api_utils.process_lora_modules",
    *("_inflight_prefills", "VLLM_TARGET_DEVICE", "_tokenize_prompt_async"),
}


@pytest.fixture(scope="module")
def moved() -> Sources:
    files = dict(Sources.installed().files)
    return Sources(files | {path: files[path].replace(*change) for path, change in MOVED.items()})


def test_names_that_vllm_has_moved_are_told_and_no_others(moved: Sources) -> None:
    assert {line.split(" (")[0] for line in gone(moved, Sources.installed())} == MISSED
    assert gone(Sources.installed(), Sources.installed()) == []


def test_functions_that_take_other_arguments_are_told(moved: Sources) -> None:
    (told,) = changed(moved, Sources.installed())
    assert told.startswith("vllm.v1.engine.async_llm.AsyncLLM.add_request\n") and "to   (more, " in told


def test_one_of_two_places_that_are_tried_is_enough() -> None:
    old, new = Sources({"vllm/a.py": "def b(): ..."}), Sources({"vllm/c.py": "def b(): ..."})
    tries = "try:\n    from vllm.a import b\nexcept ImportError:\n    from vllm.c import b"
    assert gone(new, old, {"ours.py": tries}) == []
    assert gone(new, old, {"ours.py": "from vllm.a import b"}) == ["vllm.a.b (ours.py)"]
