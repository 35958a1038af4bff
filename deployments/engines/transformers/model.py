"""A causal language model of Transformers that takes its requests in gangs: one prefill, then steps of one token each.

Prefill by `policies.gang.prefill`: where prompts share a row (prepacking, paper 004), a 4-D mask keeps them apart and
their positions restart; sliding windows act within a prompt. Padding stands behind a prompt, where causal attention
never looks, so rows of single prompts need no mask of ours. Only each prompt's last token goes through the output
layer.

FlashAttention's kernels take no such mask. With them a packed pass is a single row, whose prompts are told apart by
their lengths, and in decode steps each request has a row of its own under the library's padding mask.

Whether a model keeps its prompts apart is found out when it is loaded: too many architectures exist to tell by name.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from sys import maxsize
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available
from transformers.utils.generic import is_flash_attention_requested

from deployments.engines.transformers.cache import Place, RowsCache
from deployments.engines.transformers.packed_cache import PackedCache
from policies.errors import ConfigError
from policies.gang.packing import PackedBatch
from policies.gang.prefill import PrefillConfig, PrefillPass, decode_layout, prefill_passes

logger = logging.getLogger(__name__)

# Prompts of the check at the start, and by how much of the logits' spread those of a batch may differ from those of the
# same prompt alone: 16-bit rounding stays ten times below, a prompt that sees its neighbour lies far above.
CHECK_LENGTHS = (7, 1, 4, 2)
CHECK_TOLERANCE = 0.1
KINDS = {"full_attention", "sliding_attention"}
PACKED_ROOM = 32  # steps of packed decode between two layouts
# The newest first, as the library itself prefers them; present means that the accelerator is one for it, too.
FLASH_ATTENTIONS = {
    "flash_attention_4": is_flash_attn_4_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_2": is_flash_attn_2_available,
}
FLASH_DTYPES = (torch.float16, torch.bfloat16)

GangCache = RowsCache | PackedCache


def load(
    model: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    flash_attention: bool = False,
) -> Any:
    """A model on the accelerator that PyTorch finds, or the CPU.

    Args:
        flash_attention: where it is installed and the model can; else, and without, the library's choice (SDPA).

    Raises:
        ConfigError: Transformers cannot load it.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"Transformers cannot load {model} as a causal language model: {error}") from error
    loaded = loaded.to(device).eval()
    if flash_attention and loaded.dtype in FLASH_DTYPES:
        _ask_for_flash(loaded)
    return loaded


def _ask_for_flash(model: PreTrainedModel) -> None:
    name = next((name for name, is_present in FLASH_ATTENTIONS.items() if is_present()), None)
    if name is None:
        return
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        logger.info("%s runs without FlashAttention: %s", type(model).__name__, error)


class GangModel:
    """`prefill` a batch, then `decode` it step by step. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, config: PrefillConfig) -> None:
        """Raises ConfigError when the model does not keep the requests of a batch apart."""
        text = model.config.get_text_config()
        self._is_flash = is_flash_attention_requested(text)
        if self._is_flash:
            config = replace(config, row_tokens=config.max_pass_tokens, pack_decode_from=inf)
        self._model, self._config = model, config
        self._windows = _windows(text)
        # Beyond it are only rows that ended in a batch that does not shrink; a table of positions ends there.
        self._last_position = (getattr(text, "max_position_embeddings", None) or maxsize) - 1
        if config.mode == "prepacked" and (strange := self._windows.keys() - KINDS):
            raise ConfigError(self._no_batches(f"its layers of kind {sorted(strange)} have no mask for it"))
        self.vocab_size = int(text.vocab_size)
        self.cache_bytes_per_token = self._check()

    @property
    def device(self) -> torch.device:
        return self._model.device

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, GangCache]:
        """The logits after each prompt, shape (prompts, vocabulary), and the cache to go on with.

        Prompts have at least one token each.
        """
        lengths = [len(prompt) for prompt in prompts]
        passes = prefill_passes(lengths, self._config)
        order = np.argsort([index for each in passes for index in each.prompts])
        with torch.inference_mode():
            logits, caches = zip(*(self._prefill_pass(each, prompts) for each in passes), strict=True)
            return torch.cat(logits)[order], self._laid_out(_places(passes, caches), lengths)

    def _prefill_pass(self, each: PrefillPass, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, DynamicCache]:
        layout, cache = each.layout, DynamicCache()
        last = torch.tensor([(span.row, span.stop - 1) for span in layout.spans], device=self.device)
        positions = layout.positions() if each.is_packed else np.arange(layout.capacity)[None]
        with self._only_at(last[:, 0], last[:, 1]):
            logits = self._model(
                input_ids=self._on_device(layout.pack([prompts[index] for index in each.prompts], padding=0)),
                position_ids=self._on_device(positions).expand(layout.row_count, -1),
                past_key_values=cache,
                use_cache=True,
                **self._boundaries(each),
            ).logits
        return logits[0], cache

    def decode(self, token_ids: torch.Tensor, held: GangCache) -> tuple[torch.Tensor, GangCache]:
        """The logits after one more token of every request, and the cache to go on with.

        Shapes (requests,) to (requests, vocabulary). `held` is used up.
        """
        with torch.inference_mode():
            if isinstance(held, PackedCache) and not held.room:
                held = self._laid_out(held.places(), held.lengths.tolist())
            if isinstance(held, PackedCache):
                logits = self._decode_packed(token_ids, held)
            else:
                logits = self._decode_rows(token_ids, held)
            held.grown()
        return logits, held

    def keep(self, held: GangCache, requests: Sequence[int]) -> GangCache:
        """The cache without all other requests. `held` is used up."""
        with torch.inference_mode():
            lengths = held.lengths[torch.tensor(requests, device=self.device)].tolist()
            if isinstance(held, RowsCache) and decode_layout(lengths, PACKED_ROOM, self._config) is None:
                held.keep(requests)
                return held
            places = held.places()
            return self._laid_out([places[index] for index in requests], lengths)

    def _laid_out(self, places: Sequence[Place], lengths: Sequence[int]) -> GangCache:
        layout = decode_layout(lengths, PACKED_ROOM, self._config)
        return PackedCache.of(places, layout, PACKED_ROOM) if layout else RowsCache.of(places, lengths)

    def _decode_rows(self, token_ids: torch.Tensor, rows: RowsCache) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=token_ids[:, None],
            position_ids=self._positions(rows)[:, None],
            attention_mask=rows.mask(),
            past_key_values=rows.cache,
            use_cache=True,
        ).logits[:, -1]
        return logits

    def _decode_packed(self, token_ids: torch.Tensor, packed: PackedCache) -> torch.Tensor:
        with self._only_at(packed.rows, packed.slots):
            logits: torch.Tensor = self._model(
                input_ids=packed.spread(token_ids),
                position_ids=packed.spread(self._positions(packed)),
                attention_mask=self._masks(packed.mask),
                past_key_values=packed.cache,
                use_cache=True,
            ).logits[0]
        return logits

    def _positions(self, held: GangCache) -> torch.Tensor:
        """Position of each request's next token, shape (requests,)."""
        return held.lengths.clamp(max=self._last_position)

    def _on_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _boundaries(self, each: PrefillPass) -> dict[str, Any]:
        """What keeps the prompts of a pass apart, as the model's own arguments."""
        if not each.is_packed:
            return {"attention_mask": None}
        if self._is_flash:
            return self._sequence_lengths(each.layout)
        return {"attention_mask": self._masks(partial(self._prefill_mask, each.layout))}

    def _sequence_lengths(self, row: PackedBatch) -> dict[str, Any]:
        """For flash attention's variable-length kernels. The layout is a single row."""
        bounds = torch.tensor([0, *(span.stop for span in row.spans)], dtype=torch.int32, device=self.device)
        longest = max(span.stop - span.start for span in row.spans)
        return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}

    def _prefill_mask(self, layout: PackedBatch, window: int | None) -> torch.Tensor:
        return self._on_device(layout.attention_mask(window))[:, None]

    def _masks(self, mask_of: Callable[[int | None], torch.Tensor]) -> Any:
        """A mask, or one for each kind of layer where a model has several, from what makes one for a sliding window."""
        masks = {kind: self._as_asked(mask_of(window)) for kind, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_asked(self, mask: torch.Tensor) -> torch.Tensor:
        if self._model.config._attn_implementation != "eager":
            return mask
        zero = torch.zeros((), dtype=self._model.dtype, device=self.device)
        return torch.where(mask, zero, torch.finfo(self._model.dtype).min)

    @contextmanager
    def _only_at(self, rows: torch.Tensor, columns: torch.Tensor) -> Iterator[None]:
        """The output layer sees these tokens alone, as one row: at a large vocabulary it is most of the memory."""
        head = self._model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(self._model).__name__} has no output layer: it is no causal language model")
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns][None],))
        try:
            yield
        finally:
            hook.remove()

    def _check(self) -> float:
        """Bytes of cache for each token. Raises ConfigError when a batch's logits are not those of its requests."""
        generator = np.random.default_rng(0)
        prompts = [generator.integers(self.vocab_size, size=length).tolist() for length in CHECK_LENGTHS]
        try:
            (together, held), alone = self._two_steps(prompts), [self._two_steps([prompt])[0] for prompt in prompts]
        except ConfigError:
            raise
        except Exception as error:  # of whatever kind: it is the model's own code
            raise ConfigError(self._no_batches(f"{type(error).__name__}: {error}")) from error
        expected = torch.cat(alone, dim=1)
        error_share = float((together - expected).abs().amax() / expected.std())
        if not error_share < CHECK_TOLERANCE:
            raise ConfigError(self._no_batches(f"logits differ by {error_share:.2f} of their spread"))
        layers = held.cache.layers
        kept = (tensor for layer in layers for tensor in (layer.keys, layer.values))
        return float(sum(tensor.element_size() * tensor.shape[1] * tensor.shape[3] for tensor in kept))

    def _two_steps(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, GangCache]:
        """Logits after each prompt and one more token, float32, shape (2, prompts, vocabulary).

        If steps may be packed, this one is, in a single row.
        """
        first, held = self.prefill(prompts)
        if self._config.packs_decode:
            spans = [len(prompt) + 1 for prompt in prompts]
            held = PackedCache.of(held.places(), PackedBatch.of(spans, sum(spans)), room=1)
        second, held = self.decode(torch.tensor([prompt[0] for prompt in prompts], device=self.device), held)
        return torch.stack((first, second)).float(), held

    def _no_batches(self, why: str) -> str:
        ways_out = ["engine.gang.flash_attention: false"] if self._is_flash else []
        if self._config.mode == "prepacked":
            ways_out.append("engine.gang.prefill: padded")
        instead = f"; try {' or '.join(ways_out)}" if ways_out else ""
        name = type(self._model).__name__
        return f"{name} does not keep the requests of a {self._config.mode} batch apart ({why}){instead}"


def _places(passes: Sequence[PrefillPass], caches: Sequence[DynamicCache]) -> list[Place]:
    """Places of all prompts, in the batch's order."""
    places = {
        prompt: Place(cache, span.row, span.start)
        for each, cache in zip(passes, caches, strict=True)
        for prompt, span in zip(each.prompts, each.layout.spans, strict=True)
    }
    return [places[prompt] for prompt in range(len(places))]


def _windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers, each with its sliding window or None."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention" if window else "full_attention",))
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
