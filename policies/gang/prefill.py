"""How the prompts of a gang batch go through the model: which share a forward pass, and which share a row of one.

Source: Zhao et al., "Prepacking" (paper 004): its method, and the two that it is compared with.

- `padded`: every prompt has a row of its own, as long as the longest.
- `length_ordered`: as padded, but prompts of like length share a pass: within a factor of two, so that less than half
  of a pass is padding. (The paper sorts a whole data set and cuts it into batches; an engine sees only its batch.)
- `prepacked`: short prompts share rows, which are as long as the longest prompt unless row_tokens says more. Where it
  pays, requests share rows of the cache in decode steps as well (section 4.8).

A pass holds at most max_pass_tokens, padding included, as far as one row allows: that bounds its activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from policies.checks import require_at_least, require_one_of
from policies.errors import ConfigError
from policies.gang.packing import PACKERS, PackedBatch, Packing

PrefillMode = Literal["padded", "prepacked", "length_ordered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """How prompts are laid out.

    Attributes:
        max_pass_tokens: of a forward pass, padding included.
        row_tokens: least tokens of a packed row; None is the longest prompt. With max_pass_tokens every
            pass of a `prepacked` batch is a single row without padding.
        packing: what fills the rows of a `prepacked` batch, while requests share rows of the cache as well.
        pack_decode_from: requests of a `prepacked` batch share rows while they generate as well when the saving is so
            large (`decode_layout`); infinite for never.

    Raises:
        ConfigError: the mode or the packing is unknown, or a number below 1.
    """

    mode: PrefillMode = "prepacked"
    max_pass_tokens: int = 8192
    row_tokens: int | None = None
    packing: Packing = "first_fit"
    pack_decode_from: float = 1.5

    def __post_init__(self) -> None:
        require_one_of(get_args(PrefillMode), self, "mode")
        require_one_of(get_args(Packing), self, "packing")
        require_at_least(1, self, "max_pass_tokens", "row_tokens")
        if not self.pack_decode_from >= 1.0:
            raise ConfigError(f"pack_decode_from must be at least 1, got {self.pack_decode_from}")

    @property
    def packs_decode(self) -> bool:
        """Requests may share rows while they generate."""
        return self.mode == "prepacked" and isfinite(self.pack_decode_from)


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """One forward pass.

    Attributes:
        prompts: indices of its prompts; layout.spans is in the same order.
        layout: where each lies.
    """

    prompts: tuple[int, ...]
    layout: PackedBatch

    @property
    def is_packed(self) -> bool:
        """Some row holds more than one prompt, so that the model must be told which tokens belong together."""
        return self.layout.row_count < len(self.prompts)


def prefill_passes(lengths: Sequence[int], config: PrefillConfig) -> list[PrefillPass]:
    """Every prompt once. Lengths are tokens.

    Raises:
        InputError: a length is negative.
    """
    if config.mode == "prepacked":
        capacity = max(*lengths, config.row_tokens or 0) if lengths else 0
        rows = PACKERS[config.packing](lengths, capacity)
    elif config.mode == "length_ordered":
        rows = [[index] for index in sorted(range(len(lengths)), key=lambda index: -lengths[index])]
    else:
        rows = [[index] for index in range(len(lengths))]
    return [_pass(group, lengths) for group in _groups(rows, lengths, config)]


def _groups(rows: Sequence[list[int]], lengths: Sequence[int], config: PrefillConfig) -> list[list[list[int]]]:
    """Cut into passes by tokens, and if ordered where prompts are less than half of the pass's longest."""
    groups: list[list[list[int]]] = []
    longest = 0
    for row in rows:
        fill = sum(lengths[index] for index in row)
        would_be = max(longest, fill)
        is_full = bool(groups) and (len(groups[-1]) + 1) * would_be > config.max_pass_tokens
        is_unlike = config.mode == "length_ordered" and 2 * fill < longest
        if not groups or is_full or is_unlike:
            groups.append([])
            would_be = fill
        groups[-1].append(row)
        longest = would_be
    return groups


def _pass(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> PrefillPass:
    prompts = tuple(index for row in rows for index in row)
    numbers = iter(range(len(prompts)))
    local = [[next(numbers) for _ in row] for row in rows]
    own = [lengths[index] for index in prompts]
    capacity = max(sum(own[number] for number in row) for row in local)
    return PrefillPass(prompts, PackedBatch.from_rows(local, own, capacity))


def decode_layout(lengths: Sequence[int], room: int, config: PrefillConfig) -> PackedBatch | None:
    """Rows for requests that share them in decode steps, or None where each is better off with a row of its own.

    Attention reads fewer places of the cache, but a step computes as many tokens of every row as the fullest row has
    requests. What decides is the one ratio over the other,

        (padded places / packed places) / (packed tokens / requests) >= pack_decode_from.

    Args:
        lengths: tokens held of each request.
        room: tokens to come that each span has room for.

    Raises:
        InputError: a length is negative.
    """
    if not config.packs_decode or len(lengths) < 2:
        return None
    layout = PackedBatch.of([length + room for length in lengths], packing=config.packing)
    fewer_places = len(lengths) / layout.row_count
    more_tokens = layout.row_count * layout.most_in_a_row / len(lengths)
    pays = fewer_places > 1.0 and fewer_places >= config.pack_decode_from * more_tokens
    return layout if pays else None
