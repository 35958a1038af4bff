"""A folder for files and batches, on a disk or in any store that fsspec knows.

What is written is there whole or not at all. All calls block: run them in threads.
"""

import io
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from policies.errors import ConfigError

CLOCK_GOOD_S = 600.0  # in which two clocks drift apart by some ten milliseconds
CHUNK_BYTES = 1 << 20  # read or written at once
_AHEAD_BYTES = 4 << 20  # that a file of an object store reads ahead, and keeps while it is open: 50 MB with s3fs
_PART = ".part"


class Storage:
    """Paths are relative to its folder, with slashes.

    Raises:
        ConfigError: fsspec does not know the URL, lacks the package for it, or the package does not take it.

    Each of its methods raises OSError where the folder cannot be used.
    """

    def __init__(self, url: str) -> None:
        try:
            # Other processes write here too: a listing that was kept would not show what they did.
            self._fs: Any
            self._fs, self._root = url_to_fs(url, use_listings_cache=False)
        except Exception as error:  # of its package, of any kind
            raise ConfigError(f"batches.folder cannot be used: {type(error).__name__}: {error}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._ahead_s, self._look_again_s = 0.0, -math.inf

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def now_s(self) -> float:
        """Unix seconds by the clock of what keeps the folder, as `set_clock` found it last; before that by our own.

        Routers and runners have clocks of their own: the end of a batch's window is set by one and judged by another.
        """
        return time.time() + self._ahead_s

    def set_clock(self) -> None:
        """Look at that clock again, by the time of a file that is written for it. Stores tell it in whole seconds, and
        one that tells none (by fsspec's `modified`) is taken to go by ours."""
        if time.monotonic() < self._look_again_s:
            return
        path, asked_s = f"clock.{secrets.token_hex(8)}", time.time()
        self.create(path, b"")
        answered_s = time.time()
        try:
            with suppress(NotImplementedError):
                self._ahead_s = self._time_of(path) - (asked_s + answered_s) / 2
        finally:
            self.remove(path)
        self._look_again_s = time.monotonic() + CLOCK_GOOD_S

    def _time_of(self, path: str) -> float:
        """Raises NotImplementedError: the store does not tell."""
        try:
            with _as_os_error():
                modified: datetime = self._fs.modified(self._path(path))
        except OSError as error:
            if isinstance(error.__cause__, NotImplementedError):
                raise error.__cause__ from None
            raise
        return (modified if modified.tzinfo else modified.replace(tzinfo=UTC)).timestamp()

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        with _as_os_error():
            content: bytes = self._fs.cat_file(self._path(path))
        return content

    def exists(self, path: str) -> bool:
        with _as_os_error():
            return bool(self._fs.isfile(self._path(path)))

    def chunks(self, path: str, start: int = 0) -> Iterator[bytes]:
        """From a byte on, CHUNK_BYTES at most at a time. Raises FileNotFoundError."""
        with _as_os_error(), self._opened(path) as file:
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def lines(self, path: str, max_bytes: int) -> Iterator[bytes]:
        """The lines with their ends. Of a longer line come max_bytes + 1 bytes, and the rest is left out.

        Raises:
            FileNotFoundError: there is no such file.
        """
        # Files of object stores read whole lines only, however long.
        with _as_os_error(), self._opened(path) as raw, io.BufferedReader(raw, CHUNK_BYTES) as file:
            while line := file.readline(max_bytes + 1):
                yield line
                while len(line) > max_bytes and not line.endswith(b"\n"):
                    if not (rest := file.readline(CHUNK_BYTES)) or rest.endswith(b"\n"):
                        break

    def _opened(self, path: str) -> Any:
        return self._fs.open(self._path(path), "rb", block_size=_AHEAD_BYTES)

    def create(self, path: str, content: bytes) -> bool:
        """False, and nothing is written, where there is something already: of several that try, one succeeds."""
        target = self._path(path)
        try:
            if not self._is_local:
                with _as_os_error():
                    self._fs.pipe_file(target, content, mode="create")
                return True
            with self._part(target, [content]) as part:
                os.link(part, target)  # unlike a rename it replaces nothing
        except FileExistsError:
            return False
        return True

    def write(self, path: str, chunks: Iterable[bytes]) -> int:
        """Replaces what is there. Returns the size in bytes."""
        target = self._path(path)
        if self._is_local:
            with self._part(target, chunks) as part:
                os.replace(part, target)
            return os.path.getsize(target)
        with _as_os_error():
            file = self._fs.open(target, "wb")
        try:
            for chunk in chunks:  # whose own errors are not the folder's
                with _as_os_error():
                    file.write(chunk)
        except BaseException:
            with _as_os_error():
                _give_up(file)
            raise
        with _as_os_error():
            file.close()
        with _as_os_error():
            return int(self._fs.size(target))

    @contextmanager
    def _part(self, target: str, chunks: Iterable[bytes]) -> Iterator[str]:
        """A whole file beside the target, on the disk; gone at the end of the block."""
        _make_own(os.path.dirname(target))
        part = f"{target}.{secrets.token_hex(8)}{_PART}"
        try:
            with open(part, "xb", opener=_own) as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            yield part
        finally:
            with suppress(FileNotFoundError):  # it has become the target
                os.remove(part)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if there is no folder."""
        try:
            with _as_os_error():
                found = self._fs.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (str(each).rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if name and not name.endswith(_PART))

    def size_of_folder(self, folder: str) -> int:
        """Bytes of all files in it and below."""
        try:
            with _as_os_error():
                return int(self._fs.du(self._path(folder)))
        except FileNotFoundError:
            return 0

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it; nothing where there is none."""
        with suppress(FileNotFoundError), _as_os_error():
            self._fs.rm(self._path(path), recursive=True)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Packages for stores have errors of their own: adlfs fails with a bare RuntimeError where two write one blob."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _give_up(file: Any) -> None:
    """Leaves nothing of it: a file of an object store that is closed, or collected, writes what it has as the whole."""
    if isinstance(file, AbstractBufferedFile):
        try:
            file.discard()
        finally:
            file.closed = True


def _own(path: str, flags: int) -> int:
    """Opens a file that nobody else reads: it has prompts and answers in clear text."""
    return os.open(path, flags, 0o600)


def _make_own(folder: str) -> None:
    """Makes what is missing of it, as `_own`; `os.makedirs` would leave the folders above it open."""
    if not os.path.isdir(folder):
        _make_own(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
