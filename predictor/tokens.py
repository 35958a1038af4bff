"""From a prompt to the token ids that the encoder reads: at most max_tokens, the head and the tail of a long prompt.

What is asked stands at a prompt's start or at its end; the middle of a long one is mostly pasted material. The first
token (the encoder's own, such as [CLS]) stays first and its last token stays last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from policies.errors import ConfigError

MAX_CHARS_PER_TOKEN = 32  # a token is rarely longer; text beyond that many is not even looked at


class PromptTokenizer:
    """The tokenizer of a base encoder's folder (its tokenizer.json)."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        """Raises ConfigError when the folder has no tokenizer.json."""
        from tokenizers import Tokenizer  # only now: a router without this predictor need not have the package

        if max_tokens < 2:
            raise ConfigError(f"max_tokens must be at least 2, got {max_tokens}")
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} has no tokenizer.json: a folder in Hugging Face's format is needed")
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.max_tokens = max_tokens

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Ids of each prompt, from 1 to max_tokens of them."""
        encoded = self._tokenizer.encode_batch_fast([self._ends(prompt) for prompt in prompts])
        return [head_and_tail(cast(list[int], one.ids), self.max_tokens) for one in encoded]

    def _ends(self, prompt: str) -> str:
        """The characters that can matter: tokenizing a hundred pages to throw most away takes longer than the model."""
        chars = self.max_tokens * MAX_CHARS_PER_TOKEN
        return prompt if len(prompt) <= 2 * chars else f"{prompt[:chars]} {prompt[-chars:]}"


def head_and_tail(token_ids: list[int], max_tokens: int) -> list[int]:
    """The first half and the last half of what is allowed; the head has the odd one."""
    if len(token_ids) <= max_tokens:
        return token_ids
    tail = max_tokens // 2
    return token_ids[: max_tokens - tail] + token_ids[len(token_ids) - tail :]
