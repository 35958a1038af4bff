"""Tells what `sluice serve` does until it is ready: its own steps, and those of its processes (`process/stages.py`)."""

import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Self, TextIO

STILL_S = 20.0  # a stage that takes longer says so, and again: a start beside other work may take minutes


class Stages:
    """For the time of a block: on a terminal one line that counts the seconds, elsewhere a line for each stage."""

    def __init__(self, output: TextIO | None = None) -> None:
        """Args:
        output: standard error where None.
        """
        self._output = sys.stderr if output is None else output
        self._is_terminal = self._output.isatty()
        self._began_s = self._stage_began_s = self._said_s = time.monotonic()
        self._what, self._is_drawn = "", False
        self._file: Path | None = None
        self._told: TextIO | None = None
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._lock, self._is_over = threading.RLock(), threading.Event()
        self._looking = threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Self:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, what: str) -> None:
        """The stage before this one is over."""
        with self._lock:
            self._what = what
            self._stage_began_s = self._said_s = time.monotonic()
            if self._is_terminal:
                self._draw()
            else:
                self._write(f"{self._elapsed()}  {what}\n")

    def say(self, line: str) -> None:
        """A line that stays on the terminal."""
        with self._lock:
            self._clear()
            self._write(f"{line}\n")

    def follow(self, file: Path) -> None:
        """Show as well the stages that other processes write to this file from now on."""
        file.touch(mode=0o600)
        with self._lock:
            self._file, self._told = file, file.open()

    def end(self) -> None:
        """Show all that was told by now, and nothing after it. Later calls do nothing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._looking.join()
        with self._lock:
            self._look()
            self._clear()
            if self._file is not None and self._told is not None:
                self._told.close()
                self._file.unlink()

    def _look_again(self) -> None:
        while not self._is_over.wait(0.2):
            with self._lock:
                self._look()
                if self._what:
                    self._say_that_it_goes_on()

    def _say_that_it_goes_on(self) -> None:
        if self._is_terminal:
            self._draw()
        elif time.monotonic() - self._said_s >= STILL_S:
            self._said_s = time.monotonic()
            self._write(f"{self._elapsed()}  {self._still()}\n")

    def _still(self) -> str:
        """The stage; once it takes long, with its seconds and the load of the machine."""
        in_stage_s = time.monotonic() - self._stage_began_s
        if in_stage_s < STILL_S:
            return self._what
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        of_machine = f"the machine has a load of {load:.0f} on {cores} core{'s' * (cores > 1)}"
        return f"still {self._what} ({in_stage_s:.0f} s; {of_machine})"

    def _look(self) -> None:
        while self._told is not None and (line := self._told.readline()):
            self.begin(self._of_others(line))

    def _of_others(self, line: str) -> str:
        """The stage of another process; those of one kind are numbered in the order in which they come."""
        pid, who, what = line.rstrip("\n").split("\t")
        if not who:
            return what
        numbers = self._numbers[who]
        return f"{who} {numbers.setdefault(pid, len(numbers) + 1)}: {what}"

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began_s:6.1f} s"

    def _draw(self) -> None:
        self._is_drawn = True
        columns = os.get_terminal_size(self._output.fileno()).columns  # a line of two rows would leave the first behind
        self._write(f"\r\x1b[K{f'{self._elapsed()}  {self._still()}'[: columns - 1 if columns else None]}")

    def _clear(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
