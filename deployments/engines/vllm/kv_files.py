"""KV caches through files: the connector that needs nothing but a folder that both replicas see.

After vLLM's ExampleConnector, which is for debugging: it finds files by a hash of the prompt, whoever wrote them and
however far, reads missing ones into an exception that ends the engine, cannot store prompts longer than one step, and
deletes nothing. Here a prefill writes one file when its prompt is complete, over however many steps, and hands its name
on; it appears under that name whole or not at all; what cannot be read is computed again; its reader deletes it.
The folder is bounded: beyond max_bytes nothing is written, and what was not fetched goes after keep_s.

Reading and writing happen between two steps of the engine, so it pauses for them. NIXL does not.
"""

import logging
import os
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from policies.errors import ConfigError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}")
_SUFFIX, _PART_SUFFIX = ".safetensors", ".part"


@dataclass(frozen=True, slots=True)
class _Move:
    """A file, and the blocks that it holds or fills: those of a prompt from `first` on."""

    name: str
    block_ids: list[int]
    first: int = 0
    request_id: str = ""


@dataclass
class _Moves(KVConnectorMetadata):
    """What one step reads before it and writes after it."""

    loads: list[_Move] = field(default_factory=list)
    stores: list[_Move] = field(default_factory=list)


class TransferStats(KVConnectorStats):
    """Under the names that vLLM's NIXL connector uses."""

    def reset(self) -> None:
        names = ("transfer_duration", "bytes_transferred", "num_failed_transfers")
        self.data: dict[str, list[float]] = {name: [] for name in names}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: sum(values) for name, values in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Folder:
    """The files, by name. What else lies in the folder is somebody else's: it is neither counted nor deleted."""

    def __init__(self, path: Path, *, max_bytes: int, keep_s: float) -> None:
        """Raises ConfigError when it cannot be used, or belongs to somebody else."""
        self.path, self._max_bytes, self._keep_s = path, max_bytes, keep_s
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"engine.prefill.folder {path}: {error}") from error
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise ConfigError(f"engine.prefill.folder {path} belongs to somebody else: choose another one")

    def file(self, name: str) -> Path:
        return self.path / (name + _SUFFIX)

    def write(self, name: str, tensors: dict[str, torch.Tensor]) -> int | None:
        """Bytes written; None where there is no room."""
        size: int = sum(tensor.nbytes for tensor in tensors.values())
        if self.sweep() + size > self._max_bytes:
            return None
        part = self.path / (name + _PART_SUFFIX)
        try:
            # Not `save_file`, which writes under a name of its own that no sweep knows, and has errors of its own.
            part.write_bytes(save(tensors))
            part.rename(self.file(name))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Once: it is gone after that. Raises OSError or SafetensorError."""
        try:
            return load_file(self.file(name))
        finally:
            self.delete(name)

    def delete(self, name: str) -> None:
        _delete(self.file(name))

    def sweep(self) -> int:
        """Delete what was not fetched in time; returns the bytes that are left."""
        oldest_s = time.time() - self._keep_s
        return sum(_left_of(path, oldest_s) for path in self.path.iterdir() if _is_ours(path))


def _is_ours(path: Path) -> bool:
    return path.suffix in (_SUFFIX, _PART_SUFFIX) and _NAME.fullmatch(path.stem) is not None


def _left_of(path: Path, oldest_s: float) -> int:
    """Bytes of a file, which is deleted if it is older than that."""
    try:
        found = path.stat()
    except FileNotFoundError:  # fetched by another replica between the two looks
        return 0
    if found.st_mtime >= oldest_s:
        return found.st_size
    return 0 if _delete(path) else found.st_size


def _delete(path: Path) -> bool:
    """Whether it is gone. A failure ends no engine, in whose steps this happens: the next sweep tries again."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("KV cache %s cannot be deleted: %s", path, error)
        return False
    return True


class FileConnector(KVConnectorBase_V1):
    """vLLM makes one in its scheduler and one in its worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Folder(Path(extra["folder"]), max_bytes=extra["max_bytes"], keep_s=extra["keep_s"])
        self._block_size: int = vllm_config.cache_config.block_size
        self._blocks: int = kv_cache_config.num_blocks
        self._stats = TransferStats()
        self._stats.reset()
        # The scheduler's
        self._manager: Any = None
        self._to_store: dict[str, Any] = {}  # requests by id
        self._stored: dict[str, str] = {}  # names by id
        self._to_load: dict[str, tuple[str, int]] = {}  # by id: name, and the tokens that are there without it
        # The worker's
        self._caches: dict[str, torch.Tensor] = {}
        self._results = KVConnectorTransferResults()

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._to_store[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """As if it arrived between two steps, which is where vLLM knows how to go on when it does not."""
        if self._offered(request) is None:
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = self._offered(request)
        if name is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False  # once: after a preemption it is gone
        if num_external_tokens:
            self._to_load[request.request_id] = name, request.num_prompt_tokens - num_external_tokens
        else:
            self._folder.delete(name)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads = [self._load(request_id, *found) for request_id, found in self._to_load.items()]
        self._to_load.clear()
        ending = [
            request
            for request_id, request in self._to_store.items()
            if request.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(request_id, 0)
            >= request.num_prompt_tokens
        ]
        return _Moves(loads, [self._store(request) for request in ending])

    def _load(self, request_id: str, name: str, known_tokens: int) -> _Move:
        first = known_tokens // self._block_size
        return _Move(name, self._block_ids(request_id)[first:], first, request_id)

    def _store(self, request: Any) -> _Move:
        request_id = request.request_id
        del self._to_store[request_id]
        self._stored[request_id] = name = uuid.uuid4().hex
        blocks = -(-request.num_prompt_tokens // self._block_size)
        return _Move(name, self._block_ids(request_id)[:blocks])

    def _block_ids(self, request_id: str) -> list[int]:
        return list(self._manager.get_block_ids(request_id)[0])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free at once: their contents are in the file, or are not wanted."""
        self._to_store.pop(request.request_id, None)
        if (name := self._offered(request)) is not None:
            self._folder.delete(name)
        if (name := self._stored.pop(request.request_id, None)) is None:
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "file": name}

    @staticmethod
    def _offered(request: Any) -> str | None:
        """The file that a request comes with, until it has been asked for."""
        params = request.kv_transfer_params or {}
        name = params.get("file")
        wanted = params.get("do_remote_prefill") and isinstance(name, str) and _NAME.fullmatch(name)
        return name if wanted else None

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for layer, cache in kv_caches.items():
            if not isinstance(cache, torch.Tensor) or cache.shape[0] != self._blocks:
                raise ConfigError(
                    f"the file connector needs caches of shape (blocks, ...), {layer} is otherwise: "
                    "set engine.prefill.connector: nixl"
                )
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for move in self._moves().loads:
            began_s = time.perf_counter()
            try:
                size = self._fill(move)
            except (OSError, SafetensorError, KeyError, RuntimeError) as error:
                logger.warning("KV cache %s cannot be read, computing it: %r", move.name, error)
                self._results.failed_recving.add(move.request_id)
                self._stats.data["num_failed_transfers"].append(1)
            else:
                self._note(began_s, size)
            self._results.finished_recving.add(move.request_id)

    def _fill(self, move: _Move) -> int:
        tensors = self._folder.read(move.name)
        for layer, cache in self._caches.items():
            blocks = tensors[layer][move.first : move.first + len(move.block_ids)]
            cache[move.block_ids] = blocks.to(cache.device)
        return sum(tensor.nbytes for tensor in tensors.values())

    def wait_for_save(self) -> None:
        for move in self._moves().stores:
            began_s = time.perf_counter()
            tensors = {layer: cache[move.block_ids].cpu().contiguous() for layer, cache in self._caches.items()}
            try:
                size = self._folder.write(move.name, tensors)
            except OSError as error:
                logger.warning("KV cache cannot be written: %r", error)
                size = None
            if size is None:
                self._stats.data["num_failed_transfers"].append(1)
            else:
                self._note(began_s, size)

    def _moves(self) -> _Moves:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Moves)
        return metadata

    def _note(self, began_s: float, size: int) -> None:
        self._stats.data["transfer_duration"].append(time.perf_counter() - began_s)
        self._stats.data["bytes_transferred"].append(size)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are read before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are written after the step."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._stats.is_empty():
            return None
        told = TransferStats(self._stats.data)
        self._stats.reset()
        return told
