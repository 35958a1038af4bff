"""Prepacked inference: prompts of different lengths share rows, so that an encoder computes next to no padding.

Source: "Prepacking" (paper 004), sections 3.1 and 3.2, for an encoder: attention inside a prompt looks both ways, and
what is wanted is one vector for each prompt. The layout (first-fit decreasing, rows as long as the longest prompt,
positions that restart, padding that sees itself) is `policies.gang.packing`; here it becomes tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from policies.errors import InputError
from policies.gang.packing import PackedBatch


@dataclass(frozen=True, slots=True, eq=False)
class PackedTokens:
    """A packed batch of n prompts in R rows of C tokens, on one device.

    Attributes:
        token_ids, positions: int64, shape (R, C).
        mask: bool, shape (R, 1, C, C); True where a token sees another.
        owners: int64, shape (R*C,); the prompt of each place, counted from 1; 0 is padding.
        first: int64, shape (n,); place of each prompt's first token among the R*C.
        lengths: float32, shape (n,); tokens of each prompt.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    owners: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor

    def to(self, device: str) -> "PackedTokens":
        fields = (self.token_ids, self.positions, self.mask, self.owners, self.first, self.lengths)
        return PackedTokens(*(field.to(device) for field in fields))


def pack_tokens(prompts: Sequence[Sequence[int]], padding_id: int, first_position: int = 0) -> PackedTokens:
    """Lay out prompts of at least one token each.

    Raises:
        InputError: there is no prompt, or one is empty.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise InputError("a batch needs prompts of at least one token each")
    batch = PackedBatch.of(lengths)
    return PackedTokens(
        token_ids=torch.from_numpy(batch.pack(prompts, padding_id)),
        positions=torch.from_numpy(batch.positions() + first_position),
        mask=torch.from_numpy(batch.attention_mask(causal=False))[:, None],
        owners=torch.from_numpy(batch.segments().ravel()),
        first=torch.tensor([span.row * batch.capacity + span.start for span in batch.spans]),
        lengths=torch.tensor(lengths, dtype=torch.float32),
    )


def first_and_mean(hidden: torch.Tensor, batch: PackedTokens) -> torch.Tensor:
    """Each prompt's first vector and its mean vector, side by side: (R, C, width) to (n, 2 * width)."""
    places = hidden.flatten(0, 1)
    sums = places.new_zeros(len(batch.first) + 1, places.shape[1]).index_add(0, batch.owners, places)
    return torch.cat((places[batch.first], sums[1:] / batch.lengths[:, None]), dim=1)


def token_batches(lengths: Sequence[int], max_batch_tokens: int) -> list[list[int]]:
    """Indices of prompts of like length, at most max_batch_tokens in a batch as far as one prompt allows."""
    batches: list[list[int]] = []
    used_tokens = max_batch_tokens
    for index in np.argsort(lengths, kind="stable")[::-1].tolist():
        if used_tokens + lengths[index] > max_batch_tokens:
            batches.append([])
            used_tokens = 0
        batches[-1].append(index)
        used_tokens += lengths[index]
    return batches
