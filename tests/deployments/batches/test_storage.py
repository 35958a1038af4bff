"""The folder of batches, on a disk and in a store of objects."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from deployments.batches.storage import Storage
from policies.errors import ConfigError


class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
    most_at_once = 0

    def _fetch_range(self, start: int, end: int) -> bytes:
        RangeFile.most_at_once = max(self.most_at_once, end - start)
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


class RangeFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Reads by ranges, as s3fs, gcsfs and adlfs do, whose files lack some of what files in memory can do."""

    protocol = "ranges"
    store: dict[str, Any] = {}  # of the class, as that of its parent

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        return RangeFile(self, path, mode, options.get("block_size") or 50 << 20)  # as s3fs


class RefusingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Its package takes no option of ours, as paramiko."""

    protocol = "refusing"

    def __init__(self, *, host: str) -> None:
        super().__init__()


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Fails as adlfs does where two write one blob."""

    protocol = "failing"

    def __getattribute__(self, name: str) -> Any:
        if name in ("pipe_file", "cat_file", "_open", "ls", "isfile", "du", "rm"):
            raise RuntimeError("Failed to upload block: InvalidBlobOrBlock!")
        return super().__getattribute__(name)


fsspec.register_implementation("refusing", RefusingFileSystem, clobber=True)
fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
fsspec.register_implementation("ranges", RangeFileSystem, clobber=True)


@pytest.fixture(params=["disk", "memory", "ranges"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(str(tmp_path) if request.param == "disk" else f"{request.param}://{uuid4().hex}")


def test_what_is_there_is_not_replaced_by_who_creates(storage: Storage) -> None:
    assert storage.create("a/b", b"first")
    assert not storage.create("a/b", b"second")
    assert storage.read("a/b") == b"first"


def test_what_is_written_replaces_what_was_there(storage: Storage) -> None:
    storage.write("a/b", [b"first"])
    assert storage.write("a/b", [b"sec", b"ond"]) == 6
    assert b"".join(storage.chunks("a/b")) == b"second"


def test_of_many_who_create_at_once_one_succeeds(tmp_path: Path) -> None:
    storage, together, won = Storage(str(tmp_path)), threading.Barrier(8), []

    def create(number: int) -> None:
        together.wait()
        if storage.create("log/0", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.read("log/0") == str(won[0]).encode()
    assert len(won) == 1


def test_a_file_that_was_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))

    def breaks() -> object:
        yield b"half"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        storage.write("a/b", breaks())  # type: ignore[arg-type]
    assert storage.names("a") == []
    assert list(Path(tmp_path, "a").iterdir()) == []


def test_an_error_of_what_is_written_is_not_one_of_the_folder(storage: Storage) -> None:
    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        storage.write("a/b", breaks())


class UploadingFile(AbstractBufferedFile):  # type: ignore[misc]
    """Writes pieces that become an object at its end, as those of s3fs and gcsfs do."""

    def _initiate_upload(self) -> None:
        self.pieces: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.pieces.append(self.buffer.getvalue())
        if final:
            MemoryFileSystem._open(self.fs, self.path, "wb").write(b"".join(self.pieces))
        return True

    def discard(self) -> None:
        self.pieces = []


class UploadingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "uploading"
    store: dict[str, Any] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return UploadingFile(self, path, mode) if mode == "wb" else super()._open(path, mode, **options)


fsspec.register_implementation("uploading", UploadingFileSystem, clobber=True)


def test_of_a_large_object_little_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(f"ranges://{uuid4().hex}")
    monkeypatch.setattr(RangeFile, "most_at_once", 0)
    storage.write("a", [b"x" * (1 << 20) + b"\n"] * 16)
    assert sum(map(len, storage.chunks("a"))) == sum(map(len, storage.lines("a", 2 << 20))) == 16 * ((1 << 20) + 1)
    assert RangeFile.most_at_once <= 6 << 20


def test_half_of_an_object_is_never_there() -> None:
    storage = Storage(f"uploading://{uuid4().hex}")

    def breaks() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no input any more")

    with pytest.raises(OSError, match="no input"):
        storage.write("a/b", breaks())
    gc.collect()
    assert not storage.exists("a/b")
    assert storage.write("a/b", [b"who", b"le"]) == 5
    assert storage.read("a/b") == b"whole"


def test_nobody_else_reads_what_is_written_on_a_disk(tmp_path: Path) -> None:
    storage, before = Storage(str(tmp_path / "batches")), os.umask(0)
    try:
        storage.write("a/b/written", [b"x"])
        storage.create("a/c/created", b"x")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"batches": 0o700, "a": 0o700, "b": 0o700, "c": 0o700, "written": 0o600, "created": 0o600}


def test_names_are_sorted_and_there_are_none_in_no_folder(storage: Storage) -> None:
    assert storage.names("a") == []
    for name in ("c", "b"):
        storage.create(f"a/{name}", b"")
    assert storage.names("a") == ["b", "c"]


def test_a_line_that_is_too_long_ends_where_the_bound_is_and_the_next_is_whole(storage: Storage) -> None:
    storage.write("a", [b"x" * 3_000_000, b"\nshort\nlast"])
    assert list(storage.lines("a", 10)) == [b"x" * 11, b"short\n", b"last"]


def test_a_folder_is_removed_with_what_is_in_it_and_what_is_not_there_is_no_matter(storage: Storage) -> None:
    storage.create("a/b/c", b"12345")
    assert storage.size_of_folder("a") == 5
    storage.remove("a")
    storage.remove("a")
    assert storage.names("a/b") == []
    assert storage.size_of_folder("a") == 0


def test_whatever_a_store_raises_is_an_error_of_input_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(f"ranges://{uuid4().hex}")
    storage.write("a/b", [b"x"])

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no endpoint")

    for name in ("_open", "pipe_file", "cat_file", "info", "ls", "rm"):
        monkeypatch.setattr(RangeFileSystem, name, fails)
    for call in (
        lambda: storage.read("a/b"),
        lambda: storage.create("a/c", b"x"),
        lambda: storage.write("a/b", [b"x"]),
        lambda: list(storage.chunks("a/b")),
        lambda: list(storage.lines("a/b", 9)),
        lambda: storage.names("a"),
        lambda: storage.remove("a"),
    ):
        with pytest.raises(OSError, match="no endpoint"):
            call()


def test_a_url_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"batches\.folder"):
        Storage("nosuch://bucket")
    with pytest.raises(ConfigError, match=r"batches\.folder cannot be used: TypeError"):
        Storage("refusing://bucket")


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.create("a", b""),
        lambda storage: storage.write("a", [b""]),
        lambda storage: storage.read("a"),
        lambda storage: storage.exists("a"),
        lambda storage: list(storage.chunks("a")),
        lambda storage: list(storage.lines("a", 9)),
        lambda storage: storage.names("a"),
        lambda storage: storage.size_of_folder("a"),
        lambda storage: storage.remove("a"),
    ],
    ids=["create", "write", "read", "exists", "chunks", "lines", "names", "size", "remove"],
)
def test_whatever_the_package_of_a_store_raises_is_an_os_error(call: Callable[[Storage], object]) -> None:
    with pytest.raises(OSError, match="RuntimeError: Failed to upload block"):
        call(Storage("failing://bucket"))
