"""Trains the demo model: a chat model of five million parameters that ends its answers by itself.

Its answers are mostly wrong; their lengths are what it is for. Serving, binning and length prediction need answers that
end at a token of the model's own choice, at lengths that depend on the prompt, on a machine without a GPU.

Two stages: ordinary training on dialogues, then unlearning of loops. At the end the folder holds weights, tokenizer and
configuration, and the figures of the model's card (deployments/demo_model/README.md) are printed as JSON.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo_model.answers import answer, summary
from tools.demo_model.dialogues import (
    TEXT_SETS,
    Example,
    Row,
    documents,
    encode_dialogue,
    pack,
    read_examples,
    train_tokenizer,
)
from tools.demo_model.loops import unlearn_loops
from tools.demo_model.training import ROW_TOKENS, Training, fit, mean_answer_loss, new_model


def write_files(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Moves finished files into place one by one, so that `out` can be loaded at every moment."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
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


def trained(material: Material, args: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(args.seed)
    training = Training(new_model(material.tokenizer), args.steps)
    fit(training, material.rows(args.seed))
    training = Training(training.model, args.loop_steps, rate_fraction=0.3)
    seed = args.seed + 1
    unlearn_loops(training, material.tokenizer, material.train, material.rows(seed), random.Random(seed))
    return training.model.to(torch.bfloat16)


def measured(model: Qwen3ForCausalLM, material: Material, seed: int) -> dict[str, Any]:
    train, test = material.dialogues(material.train), material.dialogues(material.test)
    answer_tokens = sum(weight == 1.0 for dialogue in train for weight in dialogue.weights)
    prompts = random.Random(seed).sample(material.test, 200)
    answers = answer(model, material.tokenizer, prompts, max_tokens=400)
    return {
        "parameters": model.num_parameters(),
        "train_examples": Counter(example.text_set for example in material.train),
        "test_examples": Counter(example.text_set for example in material.test),
        "prompt_tokens": sum(len(dialogue) for dialogue in train) - answer_tokens,
        "answer_tokens": answer_tokens,
        "train_loss": mean_answer_loss(model, train[:: len(train) // len(test)]),
        "test_loss": mean_answer_loss(model, test),
        "answers": {"all": summary(answers)}
        | {name: summary([one for one in answers if one.example.text_set == name]) for name in TEXT_SETS},
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    material = Material.read(args.data)
    model = trained(material, args)
    write_files(model, material.tokenizer, args.out)
    print(json.dumps(measured(model, material, args.seed), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME_train.jsonl.gz, NAME_test.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, tokenizer and configuration")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps of 2048 tokens (default: %(default)s)")
    parser.add_argument("--loop-steps", type=int, default=120, help="steps against loops (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and the measured prompts")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
