"""The model card that goes with a checkpoint."""

from collections import Counter
from collections.abc import Sequence

from predictor.samples import Sample
from predictor.training import TrainingConfig


def render(config: TrainingConfig, samples: Sequence[Sample], held_out_losses: Sequence[float], notes: str = "") -> str:
    """Markdown: what it is, what it learnt from, how, and how well it did on prompts held out."""
    sets = Counter(sample.source for sample in samples)
    prompts = len({sample.prompt for sample in samples})
    rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(sets.items()))
    losses = ", ".join(f"{loss:.4f}" for loss in held_out_losses)
    unit = "nats of log length" if config.loss == "log_l1" else "medians of the training lengths"
    depth = f"the first {config.layers} layers of " if config.layers else ""
    return f"""# Length predictor

Ranks prompts by how long a language model's answer will be; Sluice's online calibration turns ranks into tokens for the
model that is served. An adapter and one linear layer for {depth}`{config.base}`; not a model by itself.

## Learnt from

{len(samples)} answers to {prompts} prompts.

| set | answers |
|---|---|
{rows}

## How

Loss {config.loss}, adapter rank {config.adapter_rank}, prompts cut to {config.max_tokens} tokens (head and tail), seed
{config.seed}, {len(held_out_losses)} epochs. Loss on prompts held out, in {unit}: {losses}.

## Limits

It knows the kinds of prompts that it was trained on, mostly English. Scores mean nothing across checkpoints. Measure it
on your own traffic: `sluice predictor eval`.
{notes}"""
