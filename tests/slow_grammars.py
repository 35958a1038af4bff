"""The process that compiles grammars, with inputs in the place of those that no compiler comes to an end with:
`python -m tests.slow_grammars FD`."""

import time
from typing import Any

import torch

from deployments.engines.vllm import grammar_child
from deployments.engines.vllm.grammars import Compiled

COMPUTES, SLEEPS, NOTHING = "computes", "sleeps", "nothing"  # how a regular expression that is one of them begins


class Nothing:
    """A grammar, and the backend that makes it, which allow no token."""

    def compile_grammar(self, *_: object) -> "Nothing":
        return self

    def allocate_token_bitmask(self, number: int) -> torch.Tensor:
        return torch.zeros(number, 1, dtype=torch.int32)

    def fill_bitmask(self, mask: torch.Tensor, number: int) -> None:
        """It is empty already."""


class Compiler(grammar_child.Compiler):
    def compile(self, fields: dict[str, Any]) -> Compiled:
        regex = fields.get("regex") or ""
        if regex.startswith(SLEEPS):
            time.sleep(600)
        while regex.startswith(COMPUTES):
            pass
        self._is_nothing = regex.startswith(NOTHING)
        return super().compile(fields)

    def _backend(self, name: str) -> Any:
        return Nothing() if self._is_nothing else super()._backend(name)


if __name__ == "__main__":
    grammar_child.Compiler = Compiler  # type: ignore[misc]
    grammar_child.main()
