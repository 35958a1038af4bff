"""Our code uses names of vLLM that are not public. A version that has moved one shows here, before an engine starts."""

import pytest

from tests.vllm_names import Sources, gone, used

# In a vLLM whose sources are changed like this ...
MOVED = {
    "vllm/entrypoints/serve/utils/api_utils.py": ("def process_lora_modules", "def moved"),
    "vllm/v1/core/sched/scheduler.py": ("_inflight_prefills", "moved"),
    "vllm/v1/engine/async_llm.py": ("def _add_request", "def moved"),
    "vllm/sampling_params.py": ("repetition_detection", "moved"),
    "vllm/v1/outputs.py": ("sampled_token_ranks", "moved"),
    "vllm/envs.py": ("VLLM_TARGET_DEVICE", "MOVED"),
    "vllm/renderers/base.py": ("_tokenize_prompt_async", "moved"),
}
# ... these are missed: an import, an attribute of `self`, an overridden method, a word in a string, an argument, a
# variable of the environment, a method that is replaced.
MISSED = {
    "vllm.entrypoints.serve.utils.api_utils.process_lora_modules",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler._inflight_prefills",
    "vllm.v1.engine.async_llm.AsyncLLM._add_request",
    "vllm.sampling_params.SamplingParams.repetition_detection",
    "vllm.v1.outputs.LogprobsLists.sampled_token_ranks=",
    "vllm.envs.VLLM_TARGET_DEVICE",
    "vllm.renderers.base.BaseRenderer._tokenize_prompt_async",
}


def test_the_installed_vllm_has_every_name_that_the_code_uses() -> None:
    assert gone(Sources.installed()) == []


def test_a_name_that_vllm_has_moved_is_told() -> None:
    installed = Sources.installed()

    def read(path: str) -> str | None:
        text = installed.read(path)
        return text.replace(*MOVED[path]) if text is not None and path in MOVED else text

    missed = {line.split(" (")[0] for line in gone(Sources(read))}
    assert missed >= MISSED


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("from vllm.a import b\nb(c=1)", {"vllm.a.b", "vllm.a.b.c="}),
        ("from vllm.a import B\ndef f(b: B | None):\n    x = b.y\n    return x.z", {"vllm.a.B.y", "vllm.a.B.y.z"}),
        (
            "from vllm.a import B\nclass C(B):\n    def own(self): self.own(self.its)\n    def f(self): super().f()",
            {"vllm.a.B.its", "vllm.a.B.f"},
        ),
        (
            "from vllm.a import B\nclass C:\n    def __init__(self, b: B): self.b = b\n    def f(self): self.b.x",
            {"vllm.a.B.x"},
        ),
        ("try:\n    from vllm.a import b\nexcept ImportError:\n    from vllm.c import b", {"vllm.a.b | vllm.c.b"}),
        ("import vllm\nvllm.__version__", {"vllm.__version__"}),
    ],
)
def test_uses_are_read_off_the_syntax_tree(text: str, paths: set[str]) -> None:
    found = {use.path for use in used({"ours.py": text})}
    assert found - {"vllm", "vllm.a.B"} >= paths
    assert not any("own" in path for path in found)
