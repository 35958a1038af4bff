"""`sluice predictor train | eval | export`."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.errors import ConfigError, InputError

if TYPE_CHECKING:
    from predictor.training import TrainingConfig

_TRAIN_EPILOG = """\
examples:
  sluice predictor train --data traffic.jsonl --out my-predictor
  sluice predictor train --data a_train.jsonl.gz b_train.jsonl.gz --layers 4 --dtype bfloat16 --out my-predictor
  sluice predictor train --data traffic.jsonl --loss l1 --base ./bert-base-uncased --adapter-rank 0 --out plain

Input is JSON Lines (also .gz), one answer a line: {"prompt": "...", "output_tokens": 210, "model": "..."}; output_chars
may stand for output_tokens, and max_tokens or finish_reason tells answers that were cut. An interrupted run goes on
when the same command is given again. --adapter-rank 0 trains the linear layer alone: minutes on a CPU."""

_EVAL_EPILOG = """\
examples:
  sluice predictor eval --data traffic_test.jsonl
  sluice predictor eval --data gsm8k_human_test.jsonl.gz --learn-from gsm8k_human_train.jsonl.gz --json
  sluice predictor eval --checkpoint my-predictor --data test.jsonl --learn-from train.jsonl --figure confusion.png

--learn-from gives answers that each model and set's calibration curve (and the histograms it is compared with) may
learn from first, as they would online. Without it the shipped curve is judged. A set is a file, named without _train or
_test at the end; a model with no answers of the same set learns from its answers in all files. Rows without "model" are
of one model.

Brackets are 95 % ranges: what other prompts of the same kind could have given (bootstrap by prompt)."""

_EXPORT_EPILOG = """\
example:
  sluice predictor export --log router.log --prompts prompts.jsonl --out traffic.jsonl

Sluice logs each request's id and length, never its text. --prompts holds what you kept yourself, a line a request:
{"request_id": "<X-Request-Id of the response>", "prompt": "...", "model": "..."}."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `predictor` to the command line; the chosen function stands in the options as `run`."""
    predictor = commands.add_parser("predictor", help="train, judge and feed the predictor of output lengths")
    verbs = predictor.add_subparsers(dest="verb", required=True)
    _add_train(_verb(verbs, "train", "train a predictor on prompts and lengths", _TRAIN_EPILOG))
    _add_eval(_verb(verbs, "eval", "judge a predictor beside its baselines", _EVAL_EPILOG))
    _add_export(_verb(verbs, "export", "join the request log with prompts to training data", _EXPORT_EPILOG))


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    return verbs.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_train(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE")
    verb.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the state of the run")
    verb.add_argument("--base", help="folder or name of a BERT-family encoder (default: the packaged MiniLM-L6)")
    verb.add_argument("--layers", type=int, help="keep this many layers of the base (default: all)")
    verb.add_argument("--loss", choices=("log_l1", "l1"), help="L1 on log lengths, or paper 000's plain L1")
    verb.add_argument("--adapter-rank", type=int, help="rank of the adapter (default: 16)")
    verb.add_argument("--max-tokens", type=int, help="longer prompts keep head and tail (default: 128)")
    verb.add_argument("--epochs", type=int, help="at most (default: 3)")
    verb.add_argument("--seed", type=int)
    verb.add_argument("--device", help="cpu (default) or cuda")
    verb.add_argument("--dtype", choices=("float32", "bfloat16"), help="what the base computes in (default: float32)")
    verb.set_defaults(run=train)


def _add_eval(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="answers to judge on")
    verb.add_argument("--checkpoint", type=Path, help="folder that `train` wrote (default: the one that comes along)")
    verb.add_argument("--learn-from", type=Path, nargs="+", default=[], metavar="FILE")
    verb.add_argument("--learn-requests", type=int, default=300, help="of each model and set (default: %(default)s)")
    verb.add_argument("--figure", type=Path, help="draw the checkpoint's confusion matrices here (PNG or SVG)")
    verb.add_argument("--json", action="store_true", help="print JSON in place of a table")
    verb.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    verb.set_defaults(run=evaluate)


def _add_export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--log", type=Path, nargs="+", required=True, metavar="FILE", help="logs of routers")
    verb.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    verb.add_argument("--out", type=Path, required=True, metavar="FILE")
    verb.set_defaults(run=export)


def training_config(options: argparse.Namespace) -> "TrainingConfig":
    """What was named; the rest as it stands in TrainingConfig. Raises ConfigError."""
    from predictor.training import TrainingConfig

    named: dict[str, Any] = {
        field.name: getattr(options, field.name)
        for field in fields(TrainingConfig)
        if getattr(options, field.name, None) is not None
    }
    return TrainingConfig(**named)


def train(options: argparse.Namespace) -> None:
    """Raises SluiceError when data or settings are wrong."""
    _require_extra()
    from predictor import checkpoint
    from predictor.samples import read_samples
    from predictor.training import Training

    samples = read_samples(options.data)
    training = Training(samples, training_config(options))
    options.out.mkdir(parents=True, exist_ok=True)
    training.run(options.out)
    checkpoint.save(options.out, training.weights, training.checkpoint_config(), training.curve())
    print(f"{options.out}: {training.summary()}")


def evaluate(options: argparse.Namespace) -> None:
    """Raises SluiceError when data or checkpoint are wrong."""
    _require_extra()
    from predictor import evaluation
    from predictor.calibration import DAY_0
    from predictor.checkpoint import Ranker
    from predictor.samples import read_samples

    ranker = Ranker.load(options.checkpoint or DAY_0, dtype=options.dtype)
    judged = read_samples(options.data)
    learn = read_samples(options.learn_from) if options.learn_from else []
    for remark in evaluation.remarks(judged, learn):
        print(remark, file=sys.stderr)
    found = evaluation.evaluate(judged, learn, ranker.scores, ranker.curve, options.learn_requests)
    if options.figure:
        from predictor.plots import draw_confusion

        draw_confusion(found["mixed"]["checkpoint"], "Length predictor", options.figure)
    if options.json:
        print(json.dumps(evaluation.report(found), indent=2))
    else:
        print(evaluation.as_table(found))


def export(options: argparse.Namespace) -> None:
    """Raises InputError when a file cannot be read, or no request is in both."""
    from predictor import request_log

    if not options.out.parent.is_dir():
        raise InputError(f"there is no folder {options.out.parent} to write {options.out.name} to")
    count = request_log.export(options.log, options.prompts, options.out)
    if not count:
        raise InputError(f"no request of {options.prompts} is in the log: are they kept under X-Request-Id?")
    print(f"{options.out}: {count} answers", file=sys.stderr)


def _require_extra() -> None:
    """Raises ConfigError when the packages for the learned predictor are missing."""
    try:
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'sluice-serve[predictor]'") from error
