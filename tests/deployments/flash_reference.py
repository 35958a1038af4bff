"""FlashAttention's two functions by their documented protocol, slowly and on any device.

Source of the protocol: signatures and docstrings of flash_attn/flash_attn_interface.py (Dao-AILab/flash-attention).
Arguments that the library does not pass are not there.
"""

from collections.abc import Sequence

import torch

Window = tuple[int, int]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """Shapes (batch, tokens, heads, width), fewer heads in k and v if grouped; the result is like q."""
    assert dropout_p == 0.0
    return torch.stack([_attend(*each, softmax_scale, causal, window_size) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """Shapes (tokens of all sequences, heads, width); the result is like q."""
    assert dropout_p == 0.0
    sequences = zip(
        _sequences(q, cu_seqlens_q, max_seqlen_q),
        _sequences(k, cu_seqlens_k, max_seqlen_k),
        _sequences(v, cu_seqlens_k, max_seqlen_k),
        strict=True,
    )
    return torch.cat([_attend(*each, softmax_scale, causal, window_size) for each in sequences])


def _sequences(tokens: torch.Tensor, bounds: torch.Tensor, longest: int) -> Sequence[torch.Tensor]:
    """What a kernel would read past, or leave out, without a word is an error here."""
    lengths = bounds.diff()
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(tokens)
    assert isinstance(longest, int) and lengths.min() > 0 and lengths.max() <= longest
    return tokens.split(lengths.tolist())


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool, window: Window
) -> torch.Tensor:
    """Shapes (tokens, heads, width). The last query stands at the last key; a side of the window below 0 is open."""
    before, behind = window[0], 0 if causal else window[1]
    keys, values = (held.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for held in (k, v))
    distance = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if before >= 0:
        seen &= distance <= before
    if behind >= 0:
        seen &= distance >= -behind
    scores = torch.einsum("qhw,khw->hqk", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).nan_to_num()  # nothing to see makes zeros
    return torch.einsum("hqk,khw->qhw", weights, values).to(q.dtype)
