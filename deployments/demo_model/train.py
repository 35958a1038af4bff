"""Trains the demo model: a chat model of five million parameters that ends its answers by itself.

Its answers are mostly wrong; their lengths are what it is for. Serving, binning and length prediction need answers that
end at a token of the model's own choice, at lengths that depend on the prompt, on a machine without a GPU.

Two stages: ordinary training on dialogues, then unlearning of loops. At the end the folder holds weights, tokenizer,
configuration and a card with what was measured.
"""

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from deployments.demo_model.answers import MAX_ANSWER_TOKENS, answer
from deployments.demo_model.card import TrainingRecord, render
from deployments.demo_model.dialogues import (
    Example,
    Row,
    documents,
    encode_dialogue,
    pack,
    read_examples,
    train_tokenizer,
)
from deployments.demo_model.loops import unlearn_loops
from deployments.demo_model.training import ROW_TOKENS, ROWS_PER_STEP, Training, fit, mean_answer_loss, new_model

LOOP_RATE_FRACTION = 0.3
MEASURED_ANSWERS = 200


def write_files(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, out: Path) -> None:
    """Moves finished files into place one by one, so that `out` can be loaded at every moment."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (Path(scratch) / "README.md").write_text(card, encoding="utf-8")
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            path.replace(out / path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that is read and derived before training."""

    train: list[Example]
    test: list[Example]
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def read(cls, data: Path) -> Self:
        train = read_examples(data, "train")
        return cls(train=train, test=read_examples(data, "test"), tokenizer=train_tokenizer(train))

    def dialogues(self, examples: Sequence[Example]) -> list[Row]:
        return [encode_dialogue(self.tokenizer, [example]) for example in examples]

    def rows(self, seed: int) -> Iterator[Row]:
        return pack(documents(self.tokenizer, self.train, random.Random(seed)), ROW_TOKENS)


def fitted(material: Material, args: argparse.Namespace) -> Training:
    torch.manual_seed(args.seed)
    training = Training(new_model(material.tokenizer), args.steps)
    if args.checkpoint and args.checkpoint.exists():
        training.load(args.checkpoint)
    fit(training, material.rows(args.seed), args.checkpoint)
    return training


def without_loops(model: Qwen3ForCausalLM, material: Material, args: argparse.Namespace) -> Training:
    training = Training(model, args.loop_steps, rate_fraction=LOOP_RATE_FRACTION)
    finished = args.checkpoint and args.checkpoint.with_suffix(".loops")
    if finished and finished.exists():
        training.load(finished)
        return training
    seed = args.seed + 1
    unlearn_loops(training, material.tokenizer, material.train, material.rows(seed), random.Random(seed))
    if finished:
        training.save(finished)
    return training


def measured(stages: Sequence[Training], material: Material, args: argparse.Namespace) -> TrainingRecord:
    model = stages[-1].model.to(torch.bfloat16)
    train, test = material.dialogues(material.train), material.dialogues(material.test)
    answer_tokens = sum(weight == 1.0 for dialogue in train for weight in dialogue.weights)
    return TrainingRecord(
        parameters=model.num_parameters(),
        train_examples=Counter(example.text_set for example in material.train),
        test_examples=Counter(example.text_set for example in material.test),
        prompt_tokens=sum(len(dialogue) for dialogue in train) - answer_tokens,
        answer_tokens=answer_tokens,
        steps=args.steps,
        loop_steps=args.loop_steps,
        step_tokens=ROW_TOKENS * ROWS_PER_STEP,
        row_tokens=ROW_TOKENS,
        elapsed_s=tuple(stage.elapsed_s for stage in stages),
        threads=args.threads,
        seed=args.seed,
        train_loss=mean_answer_loss(model, train[:: len(train) // len(test)]),
        test_loss=mean_answer_loss(model, test),
    )


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    material = Material.read(args.data)
    first = fitted(material, args)
    second = without_loops(first.model, material, args)
    record = measured((first, second), material, args)
    prompts = random.Random(args.seed).sample(material.test, MEASURED_ANSWERS)
    answers = answer(second.model, material.tokenizer, prompts, MAX_ANSWER_TOKENS)
    write_files(second.model, material.tokenizer, render(record, answers), args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deployments.demo_model.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME_train.jsonl.gz, NAME_test.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer, configuration and card")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps of 2048 tokens (default: %(default)s)")
    parser.add_argument("--loop-steps", type=int, default=120, help="steps against loops (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and the measured prompts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="file to save progress to, and to go on from if it exists")
    return parser.parse_args()


if __name__ == "__main__":
    main()
