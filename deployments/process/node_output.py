"""Standard output of the process that started Ray on this node: in a pod, what `kubectl logs` shows.

Ray gives each of its workers a file as standard output. But the raylet, which starts them, is a child of `ray start
--block`, or of `sluice serve`, and the system lets a process of the same user open that one's standard output.
Container runtimes give theirs to the user of the container (runc: fixStdioPermissions).
"""

import atexit
import errno
import fcntl
import logging
import os
import threading
from collections import deque

import psutil

logger = logging.getLogger(__name__)

RAYLET_ENV = "RAY_RAYLET_PID"  # Ray sets it in each worker
MOST_WAITING_BYTES = 4 << 20  # some ten thousand lines of requests
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_node_output() -> int:
    """A new file descriptor, so that other processes' way of writing to the same output is not changed.

    Raises:
        OSError: no raylet has started this process, or that output is another user's, a socket, or /dev/null.
    """
    try:
        node = psutil.Process(int(os.environ[RAYLET_ENV])).ppid()
    except (KeyError, psutil.Error) as error:
        raise OSError(f"no raylet of this process: {error!r}") from error
    path = f"/proc/{node}/fd/1"
    # A named pipe that nobody reads would not open, and a terminal become this process's own.
    output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    if os.fstat(output).st_rdev == os.stat(os.devnull).st_rdev:
        os.close(output)
        raise OSError(f"{path} is {os.devnull}")
    os.set_blocking(output, True)
    return output


class NodeOutput:
    """Writes whole lines in a thread of its own: code that logs never waits for a reader that stands still.

    Beyond MOST_WAITING_BYTES and on a full disk lines are left out; later a line says how many.
    """

    def __init__(self, output: int) -> None:
        """Args:
        output: a file descriptor that waits for its reader.
        """
        self._output = output
        self._start()
        os.register_at_fork(after_in_child=self._start)
        atexit.register(self._end)

    def _start(self) -> None:
        self._changed = threading.Condition()
        self._waiting, self._waiting_bytes, self._left_out = deque[bytes](), 0, 0
        self._is_broken = False
        threading.Thread(target=self._write_all, name="node output", daemon=True).start()

    def write(self, line: str) -> None:
        encoded = f"{line}\n".encode(errors="replace")
        with self._changed:
            if self._is_broken or self._waiting_bytes + len(encoded) > MOST_WAITING_BYTES:
                self._left_out += 1
                return
            self._waiting.append(encoded)
            self._waiting_bytes += len(encoded)
            self._changed.notify_all()

    def _write_all(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    line = self._waiting[0]
                is_written = self._is_written(line)
                with self._changed:
                    self._waiting_bytes -= len(self._waiting.popleft())
                    self._left_out += not is_written
                    left_out, self._left_out = (self._left_out, 0) if is_written else (0, self._left_out)
                    self._changed.notify_all()
                if left_out:
                    logger.warning(
                        "%d lines are missing in standard output, which took no more: see Ray's log", left_out
                    )
        except OSError as error:
            with self._changed:
                self._is_broken = True
                self._waiting.clear()
                self._changed.notify_all()
            logger.warning("standard output takes no more lines, see Ray's log: %s", error)

    def _is_written(self, line: bytes) -> bool:
        """False on a full disk. Raises OSError: nothing can be written any more."""
        try:
            self._write_whole(line)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        return True

    def _write_whole(self, line: bytes) -> None:
        """A pipe takes 4096 bytes at once, and a longer line in pieces: other processes of ours wait meanwhile."""
        fcntl.flock(self._output, fcntl.LOCK_EX)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._output, rest) :]
        finally:
            fcntl.flock(self._output, fcntl.LOCK_UN)

    def _end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, 1.0)
