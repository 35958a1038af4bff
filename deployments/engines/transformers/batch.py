"""The life of a gang batch: prefill, then one token for every row at each step, until the last row has ended.

Source: paper 000's system model (a batch runs until its longest request ends) with what 004 adds at its start. Rows
that end leave the batch if it shrinks; in a static gang they are computed to its end and their tokens dropped.
Cancelled rows end like any other, at the next step.

When memory runs out the batch is cut in two and each half goes on from its own tokens: what was computed is computed
again, what was sent stays. A request that does not fit by itself fails.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from deployments.engines.base import RowOutput
from deployments.engines.transformers.model import GangModel
from deployments.engines.transformers.sampling import Choice, RowSampling, choose

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Row:
    """One request.

    Attributes:
        token_ids: its prompt, then what was generated.
        stop_token_ids: they end the answer and are told as its reason; eos_token_id ends it without.
        max_tokens: of the answer.
    """

    request_id: str
    token_ids: list[int]
    prompt_tokens: int
    max_tokens: int
    sampling: RowSampling
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    bin_index: int | None = None
    ended: bool = False

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass(slots=True)
class GangCounts:
    """Since the start.

    Attributes:
        row_steps: rows computed in decode steps; wasted_row_steps of them belonged to requests that had ended.
        splits: times that memory ran out.
    """

    batches: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    wasted_row_steps: int = 0
    splits: int = 0
    finished: int = 0


@dataclass(slots=True, kw_only=True)
class GangRunner:
    """Runs one batch after the other.

    Attributes:
        max_model_len: most tokens of prompt and answer together.
        shrink: rows leave as they end.
        emit: takes the outputs of each step.
        is_cancelled: no client waits for this request any more.
    """

    model: GangModel
    max_model_len: int
    shrink: bool
    emit: Callable[[list[RowOutput]], None]
    is_cancelled: Callable[[str], bool]
    counts: GangCounts = field(default_factory=GangCounts)

    def run(self, rows: Sequence[Row]) -> None:
        """Runs until every row has ended. What the model raises is passed on, but for a lack of memory."""
        parts = [list(rows)] if rows else []
        self.counts.batches += len(parts)
        while parts:
            part = self._living(parts.pop())
            if part and self._runs_out_of_memory(part):
                parts += self._cut(self._living(part))

    def _runs_out_of_memory(self, rows: list[Row]) -> bool:
        """Runs them to their end, or until there is no memory; then it has let go of all that it held."""
        try:
            self._generate(rows)
        except (MemoryError, torch.OutOfMemoryError) as error:
            logger.warning("no memory for a batch of %d: %s", len(rows), error)
            return True
        except RuntimeError as error:  # how PyTorch's allocator for CPUs says it
            if "not enough memory" not in str(error) and "can't allocate memory" not in str(error):
                raise
            logger.warning("no memory for a batch of %d: %s", len(rows), error)
            return True
        return False

    def _cut(self, rows: list[Row]) -> list[list[Row]]:
        """What is to run, last first."""
        self.counts.splits += 1
        if self.model.device.type != "cpu":
            torch.accelerator.empty_cache()
        if len(rows) == 1:
            self._fail(rows[0])
            return []
        half = (len(rows) + 1) // 2
        return [rows[half:], rows[:half]]

    def _fail(self, row: Row) -> None:
        logger.error("request %s does not fit into memory by itself", row.request_id)
        row.ended = True
        self.emit([RowOutput(row.request_id, [], finish="error")])

    def _living(self, rows: Iterable[Row]) -> list[Row]:
        for row in (living := [row for row in rows if not row.ended]):
            row.ended = self.is_cancelled(row.request_id)
        return [row for row in living if not row.ended]

    def _generate(self, rows: list[Row]) -> None:
        logits, cache = self.model.prefill([row.token_ids for row in rows])
        while True:
            self._take_tokens(rows, logits)
            kept = [index for index, row in enumerate(rows) if not row.ended]
            if not kept:
                return
            if self.shrink and len(kept) < len(rows):
                rows = [rows[index] for index in kept]
                cache = self.model.keep(cache, kept)
            following = torch.tensor([row.token_ids[-1] for row in rows], device=self.model.device)
            logits, cache = self.model.decode(following, cache)
            self.counts.decode_steps += 1
            self.counts.row_steps += len(rows)
            self.counts.wasted_row_steps += sum(row.ended for row in rows)

    def _take_tokens(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """One token for each row that lives, told at once."""
        self._living(rows)
        living = [index for index, row in enumerate(rows) if not row.ended]
        if not living:
            return
        mine = [rows[index] for index in living]
        wanted = logits if len(living) == len(rows) else logits[living]
        choices = choose(wanted, [row.sampling for row in mine], [row.token_ids for row in mine])
        self.emit([self._take(row, choice) for row, choice in zip(mine, choices, strict=True)])

    def _take(self, row: Row, choice: Choice) -> RowOutput:
        row.token_ids.append(choice.token_id)
        finish, stop_reason = self._finish(row)
        row.ended = finish is not None
        self.counts.finished += row.ended
        return RowOutput(row.request_id, [choice.token_id], choice.logprobs, finish, stop_reason)

    def _finish(self, row: Row) -> tuple[str | None, int | None]:
        """As vLLM's check_stop does: the end token, then other stop tokens, then the lengths."""
        last = row.token_ids[-1]
        if last == row.eos_token_id:
            return "stop", None
        if last in row.stop_token_ids:
            return "stop", last
        if row.output_tokens >= row.max_tokens or len(row.token_ids) >= self.max_model_len:
            return "length", None
        return None, None
