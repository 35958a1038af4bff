import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.errors import ConfigError, InputError
from predictor import checkpoint
from predictor.checkpoint import Ranker
from predictor.evaluation import evaluate, metrics
from predictor.samples import Sample, split_by_prompt
from predictor.training import STATE_FILE, Training, TrainingConfig

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds

HEAD_ONLY: dict[str, Any] = {"layers": 1, "adapter_rank": 0, "epochs": 12, "patience": 12, "head_learning_rate": 3e-3}


def trained(samples: list[Sample], folder: Path, **settings: Any) -> Ranker:
    folder.mkdir(exist_ok=True)
    training = Training(samples, TrainingConfig(**settings))
    training.run(folder)
    checkpoint.save(folder, training.weights, training.checkpoint_config(), training.curve())
    return Ranker.load(folder)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["log_l1", "l1"])
def test_500_real_rows_beat_the_histogram_on_prompts_never_seen(
    real_samples: list[Sample], tmp_path: Path, loss: str
) -> None:
    # One model and class, as far as the router knows: what differs is the prompt.
    mixed = [
        Sample(prompt=s.prompt, output_tokens=s.output_tokens, model="", source="", is_cut=s.is_cut)
        for s in real_samples
    ]
    learn, judged = split_by_prompt(mixed, 0.2, seed=3)
    learn = learn[:500]
    ranker = trained(learn, tmp_path / loss, loss=loss, tokens_per_step=1024, **HEAD_ONLY)
    found = evaluate(judged, learn, ranker.scores, ranker.curve, learn_requests=500)["mixed"]
    ours, histogram = metrics(found["checkpoint"]), metrics(found["histogram"])
    assert ours["mean_absolute_log_error"] < 0.9 * histogram["mean_absolute_log_error"]
    assert ours["accuracy_2"] > histogram["accuracy_2"] + 0.1
    assert ours["accuracy_4"] > histogram["accuracy_4"] + 0.1
    assert ours["rank_correlation"] > 0.4


def test_an_adapter_learns_and_a_checkpoint_keeps_what_it_learnt(real_samples: list[Sample], tmp_path: Path) -> None:
    samples = real_samples[:60]
    training = Training(samples, TrainingConfig(layers=1, adapter_rank=4, epochs=2, tokens_per_step=512))
    before = training.held_loss()
    training.run(tmp_path)
    assert training.losses[-1] < before
    assert any(weight.abs().max() > 0 for name, weight in training.weights.items() if name.startswith("up."))
    checkpoint.save(tmp_path, training.weights, training.checkpoint_config(), training.curve())
    ranker = Ranker.load(tmp_path)
    prompts = ranker.tokenizer.encode([sample.prompt for sample in samples])
    outputs = ranker.outputs(prompts)
    assert outputs.shape == (60, 1)
    one_by_one = np.concatenate([ranker.outputs([prompt]) for prompt in prompts])
    np.testing.assert_allclose(outputs, one_by_one, atol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"calibration.json", "config.json", "model.safetensors"}


def test_the_same_seed_gives_the_same_weights(real_samples: list[Sample], tmp_path: Path) -> None:
    config = TrainingConfig(layers=1, adapter_rank=2, epochs=1, tokens_per_step=512)
    first, second = Training(real_samples[:40], config), Training(real_samples[:40], config)
    first.run(tmp_path)
    second.run(tmp_path)
    for name, weight in first.weights.items():
        torch.testing.assert_close(weight, second.weights[name])


class Stopped(Exception):
    """The power went."""


class StoppedTraining(Training):
    """Goes down right after its first epoch was saved."""

    def _save(self, state: dict[str, Any], optimizer: Any, out: Path) -> None:
        super()._save(state, optimizer, out)
        raise Stopped


@pytest.mark.long
def test_an_interrupted_run_goes_on_to_the_same_end(real_samples: list[Sample], tmp_path: Path) -> None:
    config = TrainingConfig(layers=1, adapter_rank=2, epochs=2, tokens_per_step=512)
    whole, broken = Training(real_samples[:40], config), StoppedTraining(real_samples[:40], config)
    whole.run(tmp_path)
    with pytest.raises(Stopped):
        broken.run(tmp_path)
    assert (tmp_path / STATE_FILE).exists()
    resumed = Training(real_samples[:40], config)
    resumed.run(tmp_path)
    assert len(resumed.losses) == 2
    for name, weight in whole.weights.items():
        torch.testing.assert_close(weight, resumed.weights[name])
    assert not (tmp_path / STATE_FILE).exists()


def test_the_state_of_another_run_is_not_touched(real_samples: list[Sample], tmp_path: Path) -> None:
    config = TrainingConfig(layers=1, adapter_rank=0, epochs=1)
    with pytest.raises(Stopped):
        StoppedTraining(real_samples[:40], config).run(tmp_path)
    with pytest.raises(ConfigError, match="is of another run"):
        Training(real_samples[:41], config).run(tmp_path)
    with pytest.raises(ConfigError, match="is of another run"):
        Training([dataclasses.replace(real_samples[0], is_cut=True), *real_samples[1:40]], config).run(tmp_path)


def test_it_stops_when_nothing_improves(real_samples: list[Sample], tmp_path: Path) -> None:
    config = TrainingConfig(layers=1, adapter_rank=0, epochs=50, patience=2, head_learning_rate=1.0)
    training = Training(real_samples[:60], config)
    training.run(tmp_path)
    assert len(training.losses) < 50
    assert min(training.losses) not in training.losses[-2:]


def test_a_cut_answer_counts_only_while_the_prediction_is_shorter(real_samples: list[Sample], tmp_path: Path) -> None:
    def curve_of(is_cut: bool) -> float:
        samples = [
            Sample(
                prompt=s.prompt,
                output_tokens=50.0 if n % 2 else 400.0,
                model="",
                source="",
                is_cut=is_cut and n % 2 == 1,
            )
            for n, s in enumerate(real_samples[:60])
        ]
        ranker = trained(samples, tmp_path / str(is_cut), layers=1, adapter_rank=0, epochs=8, patience=8)
        return float(np.median(ranker.scores([s.prompt for s in samples])))

    assert curve_of(is_cut=True) > curve_of(is_cut=False)


def test_too_few_samples_are_refused(real_samples: list[Sample]) -> None:
    with pytest.raises(InputError, match="1 samples are too few"):
        Training(real_samples[:1], TrainingConfig(layers=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "l2"}, "loss must be one of log_l1, l1"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"epochs": 0}, "epochs"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(**settings)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no predictor checkpoint"):
        Ranker.load(tmp_path)
