"""`sluice prepack`: the prompts of a file, packed as a whole into rows for an offline prefill.

Source: Zhao et al., "Prepacking" (paper 004), section 4.6: the set is packed first and batches are made of its rows, in
comparison with batches of the prompts as they come and in order of length. How prompts are laid out is decided by
`policies.gang.prefill`, as in the Transformers engine, with the whole file for its batch.

Texts are read once and never held. In memory are a few hundred bytes of each prompt; its token ids are in a temporary
file.
"""

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, get_args

import numpy as np
from tqdm import tqdm

from deployments.config.model import DEMO, DEMO_MODEL
from policies.errors import ConfigError, InputError
from policies.gang.packing import Packing
from policies.gang.prefill import PrefillConfig, PrefillMode, PrefillPass, prefill_passes
from predictor.samples import open_text

_AT_ONCE = 512  # prompts that the tokenizer is given together
_UNBOUNDED = 1 << 40
_LAYOUTS: Mapping[PrefillMode, str] = {
    "padded": "padded, as they come",
    "length_ordered": "padded, by length",
    "prepacked": "packed",
}
_OTHERS = tuple(mode for mode in _LAYOUTS if mode != "prepacked")
_EPILOG = """\
examples:
  sluice prepack prompts.jsonl                                   what packing would spare, by the demo model's tokenizer
  sluice prepack prompts.txt --tokenizer Qwen/Qwen3-8B -o rows.jsonl
  sluice prepack prompts.jsonl.gz --key text --max-tokens 2048 --pass-tokens 16384
  sluice prepack prompts.jsonl --run ./my-model                  read all prompts in each of the three ways, timed

FILE is JSON Lines (.jsonl, .ndjson) with a text under "prompt" (--key names another), or any other text with a prompt a
line; .gz of either. Rows are as long as the longest prompt, or --row-tokens; passes are as many rows as --pass-tokens
allows. A kernel that pads computes every token of a pass, and under a dense mask attention between all those of a row:
a few very long prompts make all rows long and attention dear. Cut them (--max-tokens), or pack them by themselves. A
kernel with variable-length attention, as vLLM's, pads nothing and gains nothing.

-o writes JSON Lines: first {"prompts", "rows", "passes", "row_tokens", "packing", "tokenizer"}, then a line a row:
  {"pass": 0, "prompts": [17, 4], "starts": [0, 310], "token_ids": [...]}
Prompts are counted from 0 as in FILE. One reaches from its start to the next one's, or to the row's end; at its start
positions begin with 0, and its tokens attend to no other prompt's. The rows of a pass are padded to the longest."""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command; what runs it is its default `run`."""
    command = commands.add_parser(
        "prepack",
        help="pack a file of prompts into rows for an offline prefill",
        description="Pack all prompts of a file into few rows, and say what that spares a prefill that pads.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("file", type=Path, metavar="FILE", help="prompts: JSON Lines, or one a line")
    command.add_argument("--key", default="prompt", help="where JSON Lines hold the text (default: %(default)s)")
    command.add_argument("--tokenizer", help="local folder or hub name (default: that of --run, else the demo model's)")
    command.add_argument("--max-tokens", type=count, help="cut longer prompts at so many tokens (default: keep all)")
    command.add_argument("--row-tokens", type=count, help="least tokens of a row (default: the longest prompt)")
    command.add_argument(
        "--pass-tokens", type=count, default=8192, help="most of a forward pass, padding too (default: %(default)s)"
    )
    command.add_argument(
        "--packing", choices=get_args(Packing), default="first_fit", help="which row a prompt goes to (%(default)s)"
    )
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the rows here, as JSON Lines")
    command.add_argument("--run", dest="model", metavar="MODEL", help="prefill all of it three ways with this model")
    command.set_defaults(run=run)


def count(text: str) -> int:
    """argparse shows this name where it is no number of at least 1."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def run(options: argparse.Namespace) -> None:
    """Raises SluiceError when the file, the tokenizer or the model cannot be used."""
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"there is no folder {options.output.parent} to write {options.output.name} to")
    name = options.tokenizer or options.model or DEMO
    tokenizer = _tokenizer(_folder(name))
    with Prompts() as prompts:
        texts = read_texts(options.file, options.key)
        with tqdm(unit="prompt", disable=None) as bar:
            while some := list(islice(texts, _AT_ONCE)):
                prompts.add(tokenizer(some, verbose=False)["input_ids"], options.max_tokens)
                bar.update(len(some))
        if not len(prompts):
            raise InputError(f"{options.file} holds no prompts")
        layouts = {mode: prefill_passes(prompts.lengths, layout_config(mode, options)) for mode in _LAYOUTS}
        times_s = _timed(prompts, layouts, options) if options.model is not None else {}
        costs = {mode: Cost.of(passes, times_s.get(mode)) for mode, passes in layouts.items()}
        print("\n".join(summary(prompts.lengths, costs)))
        if options.output is not None:
            rows = _write(options.output, prompts, layouts["prepacked"], options.packing, name)
            print(f"{options.output}: {rows} rows")


def layout_config(mode: PrefillMode, options: argparse.Namespace) -> PrefillConfig:
    return PrefillConfig(
        mode=mode,
        max_pass_tokens=options.pass_tokens,
        row_tokens=options.row_tokens,
        packing=options.packing,
    )


def read_texts(path: Path, key: str) -> Iterator[str]:
    """Of JSON Lines by their key, of other files line by line; blank lines are none.

    Raises:
        InputError: the file cannot be read, or a line holds no text; names file and line.
    """
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, key, f"{path}:{number}") if is_json else line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _text_of(line: str, key: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is no JSON: {error}; files with a prompt a line must not end in .jsonl") from error
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(f"{place} holds no text under {key!r}, it has {has or 'nothing'}: name its key with --key")
    return text


def _folder(name: str) -> str:
    return str(DEMO_MODEL) if name == DEMO else name


def _tokenizer(name: str) -> Any:
    """Raises ConfigError when Transformers cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"Transformers cannot load the tokenizer of {name}: {error}") from error


class Prompts:
    """Token ids of prompts in a temporary file, and in memory where each begins.

    Attributes:
        lengths: tokens of each.
        highest_id: of all tokens.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.highest_id = 0
        self._starts = array("q")
        self._tokens = 0
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, token_ids: Sequence[Sequence[int]], most: int | None) -> None:
        """Further prompts, cut at so many tokens.

        Raises:
            InputError: one has no tokens; it is counted from 1.
        """
        for ids in token_ids:
            kept = np.asarray(ids[:most], dtype=np.uint32)
            if not len(kept):
                raise InputError(f"prompt {len(self) + 1} has no tokens")
            self._starts.append(self._tokens)
            self.lengths.append(len(kept))
            self._tokens += len(kept)
            self.highest_id = max(self.highest_id, int(kept.max()))
            self._file.write(kept.tobytes())

    def token_ids(self, index: int) -> list[int]:
        self._file.seek(4 * self._starts[index])
        kept: list[int] = np.frombuffer(self._file.read(4 * self.lengths[index]), dtype=np.uint32).tolist()
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a layout costs a kernel that pads.

    Attributes:
        tokens: computed, padding included.
        attention: pairs of tokens under a dense mask, rows * capacity^2.
        seconds: None where it was not run.
    """

    passes: int
    rows: int
    tokens: int
    attention: int
    seconds: float | None

    @classmethod
    def of(cls, passes: Sequence[PrefillPass], seconds: float | None) -> Self:
        layouts = [each.layout for each in passes]
        return cls(
            passes=len(passes),
            rows=sum(layout.row_count for layout in layouts),
            tokens=sum(layout.places for layout in layouts),
            attention=sum(layout.places * layout.capacity for layout in layouts),
            seconds=seconds,
        )

    def cells(self, tokens: int) -> tuple[str, ...]:
        """Of a table; ``tokens`` are those of the prompts."""
        seconds = "" if self.seconds is None else f"{self.seconds:.2f}"
        padding = f"{1.0 - tokens / self.tokens:.1%}"
        return str(self.passes), str(self.rows), str(self.tokens), padding, f"{self.attention:.3g}", seconds

    def spared(self, other: "Cost") -> str:
        """Against another layout, in words."""
        shares = [f"{1.0 - self.tokens / other.tokens:.1%} of the tokens"]
        shares.append(f"{1.0 - self.attention / other.attention:.1%} of the attention")
        if self.seconds is not None and other.seconds:
            shares.append(f"{1.0 - self.seconds / other.seconds:.1%} of the seconds")
        return ", ".join(shares)


def summary(lengths: Sequence[int], costs: Mapping[PrefillMode, Cost]) -> list[str]:
    """Lines for a reader."""
    tokens, packed = sum(lengths), costs["prepacked"]
    spread = f"{min(lengths)} to {max(lengths)}, {tokens / len(lengths):.1f} on average"
    heading = ("passes", "rows", "tokens computed", "padding", "attention", "" if packed.seconds is None else "seconds")
    return [
        f"{len(lengths)} prompts, {tokens} tokens: {spread}",
        _line("", heading),
        *(_line(_LAYOUTS[mode], cost.cells(tokens)) for mode, cost in costs.items()),
        *(f"packed spares, against {_LAYOUTS[mode]}: {packed.spared(costs[mode])}" for mode in _OTHERS),
    ]


def _line(layout: str, cells: Sequence[str]) -> str:
    widths = (8, 9, 17, 9, 11, 10)
    return f"{layout:<21}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _write(path: Path, prompts: Prompts, passes: Sequence[PrefillPass], packing: Packing, tokenizer: str) -> int:
    """The packed rows; returns their number."""
    rows = sum(each.layout.row_count for each in passes)
    head = {
        "prompts": len(prompts),
        "rows": rows,
        "passes": len(passes),
        "row_tokens": max(each.layout.capacity for each in passes),
        "packing": packing,
        "tokenizer": tokenizer,
    }
    with path.open("w", encoding="utf-8") as file, tqdm(total=rows, unit="row", disable=None) as bar:
        file.write(json.dumps(head) + "\n")
        for number, each in enumerate(passes):
            for members in _rows_of(each):
                starts = np.cumsum([0, *(prompts.lengths[index] for index in members[:-1])]).tolist()
                token_ids = [token_id for index in members for token_id in prompts.token_ids(index)]
                row = {"pass": number, "prompts": members, "starts": starts, "token_ids": token_ids}
                file.write(json.dumps(row) + "\n")
                bar.update()
    return rows


def _rows_of(each: PrefillPass) -> list[list[int]]:
    """Prompts of every row of a pass, in their order there."""
    rows: list[list[int]] = [[] for _ in range(each.layout.row_count)]
    for index, span in sorted(zip(each.prompts, each.layout.spans, strict=True), key=lambda pair: pair[1].start):
        rows[span.row].append(index)
    return rows


def _timed(
    prompts: Prompts, layouts: Mapping[PrefillMode, Sequence[PrefillPass]], options: argparse.Namespace
) -> dict[PrefillMode, float]:
    """Seconds of every layout until all prompts have their first token's logits, and caches to go on with.

    Raises:
        ConfigError: the model cannot be loaded, or cannot take these prompts.
    """
    from deployments.engines.transformers.model import GangModel, load

    model = load(_folder(options.model))
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(prompts.lengths) > most:
        raise ConfigError(f"{options.model} has {most} positions: cut the prompts with --max-tokens {most}")
    longest_row = max(each.layout.capacity for each in layouts["prepacked"])
    models = {
        mode: GangModel(
            model,
            PrefillConfig(
                mode=mode,
                max_pass_tokens=_UNBOUNDED,  # a pass is a batch of the model's: it is laid out as it was here
                row_tokens=max(longest_row, options.row_tokens or 0),
                packing=options.packing,
            ),
        )
        for mode in layouts
    }
    if prompts.highest_id >= (known := models["padded"].vocab_size):
        raise ConfigError(f"{options.model} knows {known} tokens, and the tokenizer has more: leave out --tokenizer")
    times_s = dict.fromkeys(layouts, 0.0)
    with tqdm(total=3 * len(prompts), unit="prompt", disable=None) as bar:
        for mode, passes in layouts.items():
            models[mode].prefill([prompts.token_ids(index) for index in passes[0].prompts])  # memory, kernels
            for each in passes:
                token_ids = [prompts.token_ids(index) for index in each.prompts]
                began_s = _now_s(models[mode].device)
                models[mode].prefill(token_ids)
                times_s[mode] += _now_s(models[mode].device) - began_s
                bar.update(len(token_ids))
    return times_s


def _now_s(device: Any) -> float:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
