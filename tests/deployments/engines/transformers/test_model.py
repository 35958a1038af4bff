"""A gang's logits against those of each request alone, for tiny random models of the architectures that differ."""

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    modeling_flash_attention_utils,
)

from deployments.engines.transformers import model as gang_model
from deployments.engines.transformers.cache import RowsCache
from deployments.engines.transformers.model import GangCache, GangModel, load
from deployments.engines.transformers.packed_cache import PackedCache
from policies.errors import ConfigError
from policies.gang.packing import Packing
from policies.gang.prefill import PrefillConfig, PrefillMode
from tests.deployments import flash_reference, tiny_models

pytestmark = pytest.mark.slow

STEPS = 5
CONTEXT = 48
OWN = {"num_hidden_layers": 3, "max_position_embeddings": CONTEXT}
UNGROUPED, GROUPED = {**tiny_models.SIZES, **OWN}, {**tiny_models.GROUPED, **OWN}
# A window of 6 that prompts exceed; one Qwen3 has both kinds of layers.
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "qwen3-both-kinds": lambda: Qwen3ForCausalLM(
        Qwen3Config(**GROUPED, head_dim=16, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, head_dim=8, sliding_window=6)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**UNGROUPED)),
}
# One token, and one that leaves just the room for the steps.
LENGTHS = (9, 1, 17, CONTEXT - STEPS, 3, 2, 5, 1)
FLASH = "flash_attention_2"

Kernel = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(tiny_models.VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.inference_mode()
def alone(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The library's own logits after the last of these tokens, by PyTorch's attention and without any cache of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.config, "_attn_implementation", "sdpa")
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    return logits


def assert_alone(model: Any, asked: list[list[int]], logits: torch.Tensor) -> None:
    expected = torch.stack([alone(model, token_ids) for token_ids in asked])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def go_on(gang: GangModel, asked: list[list[int]], logits: torch.Tensor, held: GangCache) -> tuple[torch.Tensor, Any]:
    """One more token for each, which is added to what it has; returns the logits after that, and what is held."""
    following = logits.argmax(dim=-1)
    for token_ids, token_id in zip(asked, following.tolist(), strict=True):
        token_ids.append(token_id)
    return gang.decode(following, held)


@pytest.fixture
def shapes(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shape of every pass's input."""
    seen: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *call: seen.append(tuple(call[1][0].shape)))
    yield seen
    hook.remove()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], None]:
    """Puts kernels in the place where the library loads FlashAttention's; all around them stays its own."""

    library = modeling_flash_attention_utils

    def install(varlen: Kernel) -> None:
        functions = (flash_reference.flash_attn_func, varlen, None, library._pad_input, library._unpad_input)
        monkeypatch.setattr(library, "_lazy_imports", lambda *_, **__: functions)
        monkeypatch.setattr(library, "_loaded_implementation", None)

    install(flash_reference.flash_attn_varlen_func)
    return install


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("mode", ["padded", "prepacked", "length_ordered"])
@pytest.mark.parametrize(("attention", "max_pass_tokens"), [("sdpa", 8192), ("sdpa", 60), (FLASH, 60)])
def test_logits_are_those_of_each_request_alone(
    model: Any, mode: PrefillMode, attention: str, max_pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "_attn_implementation", attention)
    gang = GangModel(model, PrefillConfig(mode=mode, max_pass_tokens=max_pass_tokens))
    asked = prompts()
    logits, held = gang.prefill(asked)
    for step in range(STEPS):
        assert_alone(model, asked, logits)
        logits, held = go_on(gang, asked, logits, held)
        if step == 1:  # the longest leaves, so that columns go as well
            kept = [0, 1, 2, 4, 6]
            held = gang.keep(held, kept)
            asked, logits = [asked[index] for index in kept], logits[kept]
            assert isinstance(held, RowsCache) and held.columns == max(map(len, asked))


@pytest.mark.parametrize(
    ("attention", "packing"), [("sdpa", "first_fit"), ("sdpa", "best_fit"), ("eager", "first_fit")]
)
def test_requests_that_share_rows_while_they_generate_have_the_same_logits(
    model: Any, attention: str, packing: Packing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two steps, so that the batch is laid out anew as well; at the end one request is alone."""
    monkeypatch.setattr(gang_model, "PACKED_ROOM", 2)
    monkeypatch.setattr(model.config, "_attn_implementation", attention)
    gang = GangModel(model, PrefillConfig(packing=packing, pack_decode_from=1.0))
    asked = prompts()
    logits, held = gang.prefill(asked)
    for kept in (range(8), range(8), range(8), [0, 1, 3, 4, 6], [3]):
        logits, asked, held = logits[list(kept)], [asked[index] for index in kept], gang.keep(held, list(kept))
        assert isinstance(held, PackedCache if len(asked) > 1 else RowsCache)
        logits, held = go_on(gang, asked, logits, held)
        assert_alone(model, asked, logits)


@pytest.mark.parametrize("row_tokens", [None, 200])
def test_more_than_one_prompt_shares_a_row(model: Any, shapes: list[tuple[int, ...]], row_tokens: int | None) -> None:
    """Else the equality above would show nothing."""
    gang = GangModel(model, PrefillConfig(row_tokens=row_tokens))
    shapes.clear()
    logits, _ = gang.prefill(prompts())
    assert shapes == ([(2, max(LENGTHS))] if row_tokens is None else [(1, sum(LENGTHS))])
    assert_alone(model, prompts(), logits)


@pytest.mark.usefixtures("flash")
def test_with_flash_attention_a_pass_is_one_row_whose_prompts_do_not_see_each_other(
    model: Any, shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "_attn_implementation", FLASH)
    gang, asked = GangModel(model, PrefillConfig()), prompts()
    shapes.clear()
    before, _ = gang.prefill(asked)
    asked[2] = [(token_id + 1) % tiny_models.VOCABULARY for token_id in asked[2]]
    after, _ = gang.prefill(asked)
    assert shapes == [(1, sum(LENGTHS))] * 2
    changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert changed == [index == 2 for index in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("mode", "ways_out"),
    [("padded", "flash_attention: false"), ("prepacked", "flash_attention: false or engine.gang.prefill: padded")],
)
def test_a_kernel_that_pays_no_heed_to_lengths_is_refused_with_the_ways_out(
    mode: PrefillMode, ways_out: str, flash: Callable[[Kernel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @wraps(flash_reference.flash_attn_varlen_func)
    def mixing(*states: torch.Tensor, softmax_scale: float, causal: bool, **_: Any) -> torch.Tensor:
        whole = [each[None] for each in states]
        return flash_reference.flash_attn_func(*whole, softmax_scale=softmax_scale, causal=causal)[0]

    flash(mixing)
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    model.config._attn_implementation = FLASH
    with pytest.raises(ConfigError, match="differ by") as caught:
        GangModel(model, PrefillConfig(mode=mode))
    assert str(caught.value).endswith(f"try engine.gang.{ways_out}")


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("dtype", "wanted", "supported", "attention"),
    [
        ("bfloat16", True, True, FLASH),
        ("bfloat16", True, False, "sdpa"),
        ("bfloat16", False, True, "sdpa"),
        ("float32", True, True, "sdpa"),
    ],
)
def test_flash_attention_is_asked_for_where_it_is_present_and_the_model_can(
    dtype: str, wanted: bool, supported: bool, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gang_model.FLASH_ATTENTIONS, FLASH, lambda: True)
    compatibility = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(compatibility, "general_availability_check", lambda: True)
    monkeypatch.setitem(compatibility, "supported_devices", ((lambda: True, "any"),))
    monkeypatch.setattr(LlamaForCausalLM, "_supports_flash_attn", supported)
    tiny_models.tiny_llama().save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype, flash_attention=wanted)
    assert model.config._attn_implementation == attention
    GangModel(model, PrefillConfig())  # 16 bits stay far below what the check allows


def test_a_long_generation_outgrows_the_room_that_was_kept_ahead() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "max_position_embeddings": 256})).eval()
    gang = GangModel(model, PrefillConfig())
    asked = [[1, 2, 3], [4]]
    logits, held = gang.prefill(asked)
    for _ in range(150):
        logits, held = go_on(gang, asked, logits, held)
    assert_alone(model, asked, logits)


@pytest.mark.parametrize("mode", ["padded", "prepacked"])
def test_a_model_whose_state_runs_through_its_row_is_refused_with_the_way_out(mode: PrefillMode) -> None:
    torch.manual_seed(0)
    recurrent = MambaForCausalLM(
        MambaConfig(vocab_size=tiny_models.VOCABULARY, hidden_size=32, num_hidden_layers=2)
    ).eval()
    with pytest.raises(ConfigError, match="MambaForCausalLM") as caught:
        GangModel(recurrent, PrefillConfig(mode=mode))
    assert ("padded" in str(caught.value)) and (("try" in str(caught.value)) == (mode == "prepacked"))


def test_a_model_that_mixes_prompts_is_found_out() -> None:
    """One that pays no heed to its mask."""
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    blind = model.model.forward
    model.model.forward = lambda **inputs: blind(**{**inputs, "attention_mask": None})
    with pytest.raises(ConfigError, match="differ by"):
        GangModel(model, PrefillConfig())
