from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel, RobertaConfig, RobertaModel

from policies.errors import ConfigError, InputError
from predictor.model import DEFAULT_BASE, Encoder, base_folder
from predictor.packed import pack_tokens, token_batches
from predictor.samples import Sample
from predictor.tokens import PromptTokenizer

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds


def one_by_one(encoder: Encoder, prompts: list[list[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([encoder.features(encoder.pack([prompt])) for prompt in prompts])


def plain(encoder: Encoder, prompt: list[int]) -> torch.Tensor:
    """First and mean vector as the library computes them, with nothing of ours."""
    with torch.inference_mode():
        hidden = encoder.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    return torch.cat((hidden[0], hidden.mean(0)))


def test_packed_real_prompts_equal_one_by_one_and_the_library(real_samples: list[Sample]) -> None:
    encoder = Encoder(base_folder(DEFAULT_BASE))
    prompts = PromptTokenizer(base_folder(DEFAULT_BASE), 128).encode([s.prompt for s in real_samples[::10]])
    assert len({len(prompt) for prompt in prompts}) > 20
    with torch.inference_mode():
        packed = encoder.features(encoder.pack(prompts))
    assert len(encoder.pack(prompts).token_ids) < len(prompts)
    torch.testing.assert_close(packed, one_by_one(encoder, prompts), atol=1e-4, rtol=0.0)
    for row in range(0, len(prompts), 5):
        torch.testing.assert_close(packed[row, :-1], plain(encoder, prompts[row]), atol=1e-4, rtol=0.0)


def test_encoders_whose_positions_start_behind_the_padding_id_pack_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    RobertaModel(RobertaConfig(vocab_size=100, max_position_embeddings=66, **sizes)).save_pretrained(tmp_path)
    encoder = Encoder(tmp_path)
    assert encoder.max_tokens == 64
    prompts = [[0, *range(5, 5 + length), 2] for length in (1, 30, 4, 17, 0, 9)]
    with torch.inference_mode():
        packed = encoder.features(encoder.pack(prompts))
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(packed[row, :-1], plain(encoder, prompt), atol=1e-4, rtol=0.0)


def test_an_encoder_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    DistilBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'distilbert' cannot be packed here; these can: bert"):
        Encoder(tmp_path)


def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers must be 1 to 6, got 7"):
        Encoder(base_folder(DEFAULT_BASE), layers=7)


def test_a_base_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'no/such-model' is neither a folder nor a model on the hub"):
        base_folder("no/such-model")


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="at least one token"):
        pack_tokens([[1], []], padding_id=0)
    with pytest.raises(InputError, match="at least one token"):
        pack_tokens([], padding_id=0)


def test_batches_hold_every_prompt_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 200).tolist()
    batches = token_batches(lengths, 256)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(sum(lengths[index] for index in batch) <= 256 for batch in batches)


def test_a_prompt_longer_than_the_budget_has_a_batch_of_its_own() -> None:
    assert token_batches([3, 300, 2], 10) == [[1], [0, 2]]
