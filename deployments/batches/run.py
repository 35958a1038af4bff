"""One batch that runs: its input line by line, and its results since the last segment.

It holds one bit for each line in memory, and no more lines and results than the bounds here.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from deployments.batches.files import Files, derived_id
from deployments.batches.input import Input, InputLostError
from deployments.batches.lines import MAX_LINE_BYTES, Line, LineError, Validation, validated
from deployments.batches.results import unanswered
from deployments.batches.retried import Retried
from deployments.batches.state import (
    Batches,
    BatchRecord,
    FencedError,
    Progress,
    Result,
    Status,
    Tokens,
    bytes_to_write,
)
from policies.batches.estimate import expected_end_s
from policies.batches.turns import Waiting

RESULTS_BYTES = 8 << 20  # with as many that are in no segment yet, nothing more is sent


class BatchRun:
    """Build it with `opened`. One runner at a time may run a batch; others stop at their next segment.

    Attributes:
        progress: with what has been answered since the last segment.
        folder: makes its calls of the folder.
        wake: set when there is something to do before the next segment is due.
    """

    def __init__(self, record: BatchRecord, batches: Batches, files: Files) -> None:
        self.record, self.wake, self.progress = record, asyncio.Event(), Progress()
        self.folder = Retried(record.id)
        self._files, self._batches, self._log = files, batches, batches.log(record)
        self._log_bytes, self._reserved = 0, bytes_to_write(record)
        self._results: list[Result] = []
        self._results_bytes, self._has_room = 0, asyncio.Event()
        self._writing: asyncio.Task[None] | None = None  # the latest segment
        self._window: deque[Line] = deque()
        self._answered: deque[tuple[float, int]] = deque(maxlen=120)  # of ten minutes by default: the end's estimate

    @classmethod
    async def opened(cls, record: BatchRecord, batches: Batches, files: Files) -> "BatchRun":
        run = cls(record, batches, files)
        await run.folder(run._recover)
        return run

    def _recover(self) -> None:
        self.progress, segments = self._log.read()
        self._begin()
        if self.progress.status not in ("in_progress", "finalizing"):
            return
        completed = failed = 0  # by what is there: segments may have gone
        for segment in segments:
            failed += len(segment.errors)
            completed += len(segment.numbers) - len(segment.errors)
            for number in segment.numbers:
                self._mark(number)
        self.progress = replace(self.progress, completed=completed, failed=failed)
        self._log_bytes = self._log.size_bytes()

    def _begin(self) -> None:
        self._is_done = bytearray(self.progress.last // 8 + 1)
        self._input = self._unanswered()
        self._has_room.set()

    def _mark(self, number: int) -> None:
        self._is_done[number // 8] |= 1 << number % 8

    def _has_result(self, number: int) -> bool:
        return bool(self._is_done[number // 8] >> number % 8 & 1)

    def _unanswered(self) -> Input:
        return Input(self._lines, self.record.endpoint, self.progress.last, self._has_result)

    def _lines(self) -> Iterator[bytes]:
        return self._files.lines(self.record.owner, self.record.input_file_id, MAX_LINE_BYTES)

    @property
    def waiting(self) -> Waiting:
        record = self.record
        return Waiting(batch_id=record.id, key=record.key or "", expires_at_s=record.expires_at)

    @property
    def left_s(self) -> float:
        """Seconds that are left of its window."""
        return max(0.0, self.record.expires_at - self._batches.now_s())

    @property
    def is_expected_late(self) -> bool:
        """At its pace it ends after its window; one whose pace is unknown is late once that is over."""
        return max(self.progress.expected_end or 0, self._batches.now_s()) > self.record.expires_at

    @property
    def model(self) -> str:
        assert self.progress.model is not None, "it has been validated"
        return self.progress.model

    def shown(self) -> dict[str, Any]:
        """Its present state, for the status page. Times in Unix seconds."""
        record, progress = self.record, self.progress
        return {
            "id": record.id,
            "model": progress.model,
            "endpoint": record.endpoint,
            "status": progress.status,
            "total": progress.total,
            "completed": progress.completed,
            "failed": progress.failed,
            "expected_end": progress.expected_end,
            "completion_window": record.completion_window,
            "expires_at": record.expires_at,
            "trouble": self.folder.trouble,
        }

    async def validate(self, models: Collection[str], max_lines: int) -> None:
        """Its status is in_progress or failed afterwards. Raises FencedError: another runner runs it."""
        found = await self.folder(self._validated, models, max_lines)
        now = int(self._batches.now_s())
        if found.errors:
            errors = tuple(found.errors)
            await self._end(Progress(status="failed", model=found.model, errors=errors, ended_at=now))
        else:
            begun = Progress(status="in_progress", model=found.model, total=found.total, last=found.last)
            await self._append(replace(begun, in_progress_at=now))
            self._begin()

    def _validated(self, models: Collection[str], max_lines: int) -> Validation:
        try:
            return validated(self._lines(), self.record.endpoint, models, max_lines)
        except FileNotFoundError:
            return Validation(errors=[LineError("file_not_found", "the input file is not there")])

    @property
    def can_send(self) -> bool:
        """Whether there is room for another result, and the folder works."""
        return self._has_room.is_set() and self.folder.is_well.is_set()

    async def may_send(self) -> None:
        """Returns once it can."""
        while not self.can_send:
            await self._has_room.wait()
            await self.folder.is_well.wait()

    async def next_line(self) -> Line | None:
        """The next to be sent; None after the last, and where the rest of the input is lost: `finish` says so."""
        if not self._window:
            with suppress(InputLostError):
                self._window.extend(await self.folder(self._input.window))
        return self._window.popleft() if self._window else None

    def note(self, result: Result, tokens: Tokens) -> None:
        """Add a result, which comes into the next segment."""
        self._add(result)
        self.progress = replace(self.progress, tokens=self.progress.tokens + tokens)

    def _add(self, result: Result) -> None:
        self._mark(result.number)
        self._results.append(result)
        self._results_bytes += len(result.line)
        progress = self.progress
        self.progress = replace(
            progress, completed=progress.completed + (not result.is_error), failed=progress.failed + result.is_error
        )
        if self._results_bytes >= RESULTS_BYTES:
            self._has_room.clear()
            self.wake.set()

    async def flush(self) -> None:
        """Write a segment of the results since the last one, if there are any.

        Not to be called while another call runs, nor to be cancelled if the run goes on.

        Raises:
            FencedError: another runner runs it.
        """
        if self._results:
            now, progress = self._batches.now_s(), self.progress
            self._answered.append((now, progress.total - progress.remaining))
            end_s = expected_end_s(self._answered, progress.total)
            await self._append(replace(progress, expected_end=None if end_s is None else int(end_s)))

    async def flush_last(self) -> None:
        """As `flush`, after the write that goes on, if that was cancelled, with its results."""
        if self._writing is not None:
            await self._writing
        await self.flush()

    async def _append(self, progress: Progress) -> None:
        """Write a segment with all results so far; those that come meanwhile belong to the next one."""
        self._writing = asyncio.create_task(self._write(progress))
        await asyncio.shield(self._writing)

    async def _write(self, progress: Progress) -> None:
        results, self._results = self._results, []
        self._log_bytes += await self.folder(self._log.append, progress, results)
        now = self.progress
        self.progress = replace(progress, completed=now.completed, failed=now.failed, tokens=now.tokens)
        self._results_bytes -= sum(len(each.line) for each in results)
        if self._results_bytes < RESULTS_BYTES:
            self._has_room.set()

    async def finish(self, ending: Status) -> None:
        """Nothing more is sent. Each request without an answer gets a line in the errors, then both files are written.

        If an earlier call was interrupted, this one goes on with the status that that call was given.

        Raises:
            FencedError: another runner runs it.
        """
        if self.progress.status == "in_progress":
            await self._give_up(ending)
        files = await self.folder(self._write_files)
        progress = self.progress
        assert progress.ending is not None, "what is finalizing knows what it becomes"
        ended = replace(progress, status=progress.ending, ended_at=int(self._batches.now_s()), **files)
        if lost := progress.remaining:
            why = f"{lost} requests have neither an answer nor an error: the folder has lost their lines"
            errors = (*progress.errors, LineError("lines_lost", why))
            ended = replace(ended, errors=errors, status="failed" if ended.status == "completed" else ended.status)
        await self._end(ended)

    async def end_unread(self, ending: Status) -> None:
        """It was cancelled, or its window was over, before anyone could say whether it is right."""
        error = LineError("not_begun", "no router told which models there are: nothing was read, and nothing sent")
        await self._end(Progress(status=ending, errors=(error,), ended_at=int(self._batches.now_s())))

    async def _end(self, progress: Progress) -> None:
        await self.folder(self._log.end, progress)
        self.progress = progress

    async def has_room(self) -> bool:
        """Whether its owner may store what it has written and more. If not, `errors` say so."""
        progress = self.progress
        needs = bytes_to_write(self.record, progress.remaining / max(1, progress.total), self._log_bytes)
        if needs > self._reserved:
            self._reserved = needs
            if not await self.folder(self._batches.reserve, self.record, needs) and progress.remaining:
                why = "its answers exceed what its key may store (batches.max_stored_bytes): delete files, ask again"
                self.progress = replace(progress, errors=(*progress.errors, LineError("no_room", why)))
                return False
        return True

    async def _give_up(self, ending: Status) -> None:
        """The last segment closes the log for results."""
        if self.progress.remaining:
            if ending == "completed":  # nothing was left to send: the input was not whole
                ending = "failed"
            with suppress(InputLostError):  # what is left is lost
                await self._give_up_lines(ending)
        closed = replace(self.progress, status="finalizing", ending=ending, expected_end=None)
        await self._append(replace(closed, finalizing_at=int(self._batches.now_s())))

    async def _give_up_lines(self, ending: Status) -> None:
        """Each line without an answer gets an error. Raises InputLostError."""
        unanswered_lines = self._unanswered()
        while lines := await self.folder(unanswered_lines.window):
            for line in lines:
                self._add(unanswered(line.number, line.custom_id, ending))
            await self._append(self.progress)

    def _write_files(self) -> dict[str, Any]:
        """Their ids, None for one that would be empty. Raises FencedError."""
        progress = self.progress
        return {
            "output_file_id": self._write_file("output", progress.completed, errors=False),
            "error_file_id": self._write_file("error", progress.failed, errors=True),
        }

    def _write_file(self, kind: str, count: int, *, errors: bool) -> str | None:
        """With an id that follows from the batch's: written twice, it is the same file."""
        if not count:
            return None
        record, lines = self.record, _counted(self._log.lines(errors=errors), count)
        identity = derived_id("file-", record.id, kind)
        name = f"{record.id}_{kind}.jsonl"
        return self._files.add(record.owner, name, "batch_output", lines, identity, record.output_keep_s).id


def _counted(lines: Iterator[bytes], count: int) -> Iterator[bytes]:
    """Raises FencedError where there are fewer: the log has gone, as it does once the batch has ended."""
    for line in lines:
        count -= 1
        yield line
    if count:
        raise FencedError(f"{count} results are no longer in the log")
