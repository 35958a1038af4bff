"""How much of a prompt a prefix cache has, where kinds of layers look at different parts of it.

Every group of layers keeps blocks of its own: those with full attention all blocks of a prompt, those with a window or
with chunks only the last ones. The hit ends where every group has what it needs: each either accepts a length or
lowers it, until all accept. This is the rule of vLLM (0.32, `HybridKVCacheCoordinator.find_longest_cache_hit`).
Lengths are counted in the blocks that are hashed; the blocks of a group may be longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Groups of like layers, with full attention unless they have a window or chunks.

    Attributes:
        ids: of the groups: a block is there when all of them have it.
        scale: hashed blocks in one of theirs.
        window: how many of theirs in a row a hit must end with.
        chunk: hashed blocks of a chunk, beyond whose start these layers do not look back.
    """

    ids: tuple[int, ...] = (0,)
    scale: int = 1
    window: int | None = None
    chunk: int | None = None


class CachedPrompt(Protocol):
    """What one cache has of one prompt, in blocks of a group."""

    def has(self, group: LayerGroup, block: int) -> bool:
        """Whether it has this block, counted from 0."""

    def leading(self, group: LayerGroup, most: int) -> int:
        """How many of the first `most` blocks it has without a gap."""


def longest_hit(groups: Sequence[LayerGroup], cached: CachedPrompt, most: int, aligned: int = 1) -> int:
    """Blocks of a prompt that need not be computed.

    Args:
        groups: those with full attention first, for they lower the length at once.
        most: blocks that may be hit.
        aligned: hits are a multiple of so many.
    """
    while (lowered := _lowered(groups, cached, most, aligned)) < most:
        most = lowered
    return most


def _lowered(groups: Sequence[LayerGroup], cached: CachedPrompt, most: int, aligned: int) -> int:
    for group in groups:
        blocks = most // group.scale
        if group.window is not None:
            blocks = _in_window(group, group.window, cached, blocks, aligned)
        elif group.chunk is not None:
            blocks = _in_chunk(group, group.chunk, cached, most)
        else:
            blocks = cached.leading(group, blocks)
        most = blocks * group.scale
        most -= most % aligned
    return most


def _in_window(group: LayerGroup, window: int, cached: CachedPrompt, most: int, aligned: int) -> int:
    """Up to the last `window` blocks in a row; without so many, those from the first on."""
    in_a_row = 0
    for block in range(most - 1, -1, -1):
        if not cached.has(group, block):
            in_a_row = 0
        elif in_a_row or (block + 1) * group.scale % aligned == 0:
            in_a_row += 1
            if in_a_row >= window:
                return block + in_a_row
    return in_a_row


def _in_chunk(group: LayerGroup, chunk: int, cached: CachedPrompt, most: int) -> int:
    """Chunks before the one of the next token need nothing; of that one its first blocks without a gap."""
    start, end = most // chunk * chunk // group.scale, most // group.scale
    for block in range(start, end):
        if not cached.has(group, block):
            return block
    return end
