"""KV caches through files: one real engine on the CPU, which leaves caches and begins with them, greedy, float32."""

import gc
import logging
import os
import random
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.engines.vllm.kv_files import Folder
from policies.errors import ConfigError
from tests.virtual_engine import MODEL

KEEP_S = 60.0
BUDGET_TOKENS = 128
BLOCK_TOKENS = 32


class Engine:
    """Answers one request after another."""

    def __init__(self, folder: Path) -> None:
        extra = {"folder": str(folder), "max_bytes": 64 << 20, "keep_s": KEEP_S}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(MODEL),
                dtype="float32",
                enforce_eager=True,
                disable_log_stats=True,
                max_model_len=1024,
                max_num_seqs=8,
                max_num_batched_tokens=BUDGET_TOKENS,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=32 << 20,
                enable_prefix_caching=False,
                scheduler_cls=SCHEDULER_CLASS,
                additional_config={"sluice": {"mode": "auto"}},
                kv_transfer_config={
                    "kv_connector": "FileConnector",
                    "kv_connector_module_path": "deployments.engines.vllm.kv_files",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra,
                },
            )
        )
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.blocks = self.free_blocks
        self._asked = 0

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def transfers(self) -> dict[str, Any]:
        return dict(self.scheduler.transfers.numbers())

    def add(self, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None = None) -> str:
        self._asked += 1
        extra = {"kv_transfer_params": dict(transfer)} if transfer else None
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, extra_args=extra)
        self.engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)
        return str(self._asked)

    def run(self) -> dict[str, Any]:
        ended = {}
        while self.engine.has_unfinished_requests():
            ended |= {output.request_id: output for output in self.engine.step() if output.finished}
        return ended

    def answer(self, prompt: list[int], max_tokens: int = 8, transfer: dict[str, Any] | None = None) -> list[int]:
        request_id = self.add(prompt, max_tokens, transfer)
        return list(self.run()[request_id].outputs[0].token_ids)

    def cache_of(self, prompt: list[int]) -> dict[str, Any]:
        request_id = self.add(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        cache: dict[str, Any] = self.run()[request_id].kv_transfer_params
        return cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """In this process, with one thread."""
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Engine(folder)
    yield made
    made.engine.engine_core.shutdown()
    gc.freeze()  # vLLM has thawed what was imported, and collections of later tests would look at all of it
    torch.set_num_threads(threads)
    if before is None:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def prompt(tokens: int, seed: int = 0) -> list[int]:
    chance = random.Random(1000 * seed + tokens)
    return [chance.randrange(10, 4000) for _ in range(tokens)]


pytestmark = pytest.mark.slow
LENGTHS = (2, 31, 32, 33, 64, 65, BUDGET_TOKENS, BUDGET_TOKENS + 1, 500)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_answers_from_a_cache_are_those_without_and_the_prompt_is_not_read_again(engine: Engine, tokens: int) -> None:
    asked = prompt(tokens)
    expected = engine.answer(asked)
    cache = engine.cache_of(asked)
    read: list[int] = []
    engine.scheduler.report()
    engine.scheduler.on_step = lambda result: read.append(result.prefill_tokens)
    assert engine.answer(asked, transfer=cache) == expected
    engine.scheduler.report()
    engine.scheduler.on_step = None
    assert sum(read) == 1
    assert engine.free_blocks == engine.blocks


def test_many_at_once_keep_their_caches_apart(engine: Engine) -> None:
    prompts = [prompt(40 + 17 * n) for n in range(8)]
    expected = [engine.answer(each) for each in prompts]
    caches = [engine.cache_of(each) for each in prompts]
    ids = [engine.add(each, 8, cache) for each, cache in zip(prompts, caches, strict=True)]
    ended = engine.run()
    assert [list(ended[request_id].outputs[0].token_ids) for request_id in ids] == expected


def test_a_cache_is_read_once_and_its_file_is_gone(engine: Engine, folder: Path) -> None:
    asked = prompt(100)
    expected, cache = engine.answer(asked), engine.cache_of(asked)
    assert len(list(folder.iterdir())) == 1
    assert engine.answer(asked, transfer=cache) == expected
    assert not list(folder.iterdir())
    failures = engine.transfers["kv_transfer_failures"]
    assert engine.answer(asked, transfer=cache) == expected  # it reads the prompt
    assert engine.transfers["kv_transfer_failures"] == failures + 1


def test_a_broken_file_costs_a_prefill_and_nothing_else(engine: Engine, folder: Path) -> None:
    asked = prompt(300)
    expected, cache = engine.answer(asked), engine.cache_of(asked)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert engine.answer(asked, transfer=cache) == expected
    assert engine.free_blocks == engine.blocks


def test_names_that_are_not_ours_are_not_opened(engine: Engine, tmp_path: Path) -> None:
    asked = prompt(50)
    expected = engine.answer(asked)
    for name in (f"../{tmp_path.name}/x", "/etc/passwd", 7, None):
        offered = {"do_remote_prefill": True, "do_remote_decode": False, "file": name}
        assert engine.answer(asked, transfer=offered) == expected


def test_aborted_requests_leave_neither_blocks_nor_files(engine: Engine, folder: Path) -> None:
    asked = prompt(500)
    cache = engine.cache_of(asked)
    offered = engine.add(asked, 8, cache)
    leaving = engine.add(prompt(501), 1, {"do_remote_decode": True, "do_remote_prefill": False})
    engine.engine.abort_request([offered, leaving])
    engine.run()
    assert not list(folder.iterdir())
    assert engine.free_blocks == engine.blocks


def tensors(size: int = 1000) -> dict[str, torch.Tensor]:
    return {"layer": torch.arange(size, dtype=torch.float32)}


def test_a_full_folder_takes_nothing(tmp_path: Path) -> None:
    small = Folder(tmp_path, max_bytes=5000, keep_s=60.0)
    assert small.write("a" * 32, tensors()) == 4000
    assert small.write("b" * 32, tensors()) is None
    assert torch.equal(small.read("a" * 32)["layer"], tensors()["layer"])
    assert small.write("b" * 32, tensors()) == 4000
    with pytest.raises(OSError, match="a{32}"):
        small.read("a" * 32)


def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path, max_bytes=1 << 20, keep_s=100.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.write("a" * 32, {"x": torch.zeros(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_fetched_goes(tmp_path: Path) -> None:
    kept = Folder(tmp_path, max_bytes=1 << 20, keep_s=30.0)
    kept.write("a" * 32, tensors())
    kept.write("b" * 32, tensors())
    long_ago = time.time() - 31
    os.utime(kept.file("a" * 32), (long_ago, long_ago))
    kept.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["b" * 32 + ".safetensors"]


def test_only_files_of_our_naming_are_deleted_or_counted(tmp_path: Path) -> None:
    strangers = [
        tmp_path / name for name in ("model.safetensors", ".bashrc", "a" * 32, "b" * 32 + ".bin", "notes.part")
    ]
    for path in strangers:
        path.write_bytes(bytes(1000))
    (tmp_path / "subfolder").mkdir()
    part = tmp_path / ("c" * 32 + ".part")
    part.touch()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    shared = Folder(tmp_path, max_bytes=5000, keep_s=30.0)
    assert shared.sweep() == 0
    assert set(tmp_path.iterdir()) == {*strangers, tmp_path / "subfolder"}
    assert shared.write("d" * 32, tensors()) == 4000


def test_what_cannot_be_deleted_takes_its_room_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stuck = tmp_path / ("a" * 32 + ".safetensors")
    stuck.mkdir()
    os.utime(stuck, (0, 0))
    kept = Folder(tmp_path, max_bytes=1 << 20, keep_s=30.0)
    assert kept.sweep() == stuck.stat().st_size
    assert str(stuck) in caplog.text
    kept.delete("a" * 32)  # the scheduler does, between two steps
    assert kept.write("b" * 32, tensors()) == 4000


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"engine\.prefill\.folder .*file"):
        Folder(tmp_path / "file", max_bytes=1, keep_s=1.0)
