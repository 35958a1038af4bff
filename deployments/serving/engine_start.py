"""From an engine's settings to an engine that can serve, within the time that it has for that."""

import asyncio
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray._private.worker import global_worker

from deployments.config.application import AppConfig
from deployments.config.engine import Role
from deployments.config.scheduler import SchedulerSettings
from deployments.process.heavy_imports import heavy_imports
from deployments.process.logs import last_error, last_line
from deployments.process.stages import note_stage
from deployments.process.vllm_env import check_build
from policies.errors import ConfigError, EngineStartError

ENGINE = "engine"  # among what is told of a start


async def started_engines(config: AppConfig, role: Role) -> list[Any]:
    """The engine of a replica, or all ranks of a data-parallel one: loaded, asked once what they admit, with their
    adapters.

    Where one does not come so far no process is left.

    Raises:
        EngineStartError: it did not start, or not within `engine.start_timeout_s`, or does not take its adapters.
        ConfigError: its settings are wrong.
    """
    try:
        async with asyncio.timeout(config.engine.start_timeout_s) as limit:
            engines = await _build(config, role)
            await _make_ready(engines, config.scheduler_settings(role))
            return engines
    except asyncio.CancelledError:
        _kill_engine_cores()
        raise
    except TimeoutError as error:
        if not limit.expired():  # the engine's own, of something else
            raise
        _kill_engine_cores()
        raise EngineStartError(await _too_late(config)) from error


async def _build(config: AppConfig, role: Role) -> list[Any]:
    if config.engine.kind == "openai":
        return [await _server_of_others(config)]
    note_stage("loading the model", ENGINE)
    argv = config.engine_argv(role)
    if config.engine.kind == "vllm":
        check_build(config.engine.num_gpus)
        return await _vllm(argv, config.gang.batch_size if config.gang else None, config.ranks)
    with heavy_imports():
        from deployments.engines.transformers.engine import TransformersEngine
        from deployments.engines.vllm.args import parse_vllm_args

    args, loop = parse_vllm_args(argv), asyncio.get_running_loop()
    return [await asyncio.to_thread(TransformersEngine, args, config.engine.gang, loop)]


async def _server_of_others(config: AppConfig) -> Any:
    from deployments.engines.openai.engine import OpenAiEngine

    section = config.engine.openai
    key = None if section.key_file is None else await asyncio.to_thread(_key_in, Path(section.key_file))
    return await OpenAiEngine.connected(section, config.model, key, lambda what: note_stage(what, ENGINE))


def _key_in(file: Path) -> str:
    """Raises ConfigError."""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.openai.key_file {file} cannot be read: {error}") from error
    if not key or any(each.isspace() for each in key):
        raise ConfigError(f"engine.openai.key_file {file} must hold one key and nothing else")
    return key


async def _vllm(argv: list[str], batch_size: int | None, ranks: int) -> list[Any]:
    from deployments.engines.vllm.ranks import started_ranks

    try:
        return list(await asyncio.to_thread(started_ranks, argv, batch_size, ranks))
    except RuntimeError as error:  # it says "see above", and above is the log of this process
        why = await asyncio.to_thread(last_error, Path(global_worker.get_err_file_path()))
        raise EngineStartError(f"the engine did not start: {why or error}") from error


async def _make_ready(engines: Sequence[Any], scheduler: SchedulerSettings | None) -> None:
    """An answer may never come where an engine hangs; the caller's deadline is for that."""
    try:
        await asyncio.gather(*(_made_ready(engine, scheduler) for engine in engines))
    except Exception as error:  # of any kind: no router will hear of these engines, so nothing else would end them
        for engine in engines:
            await asyncio.to_thread(engine.shutdown)
        raise EngineStartError(
            f"the engine has loaded, but cannot serve: {str(error) or type(error).__name__}"
        ) from error


async def _made_ready(engine: Any, scheduler: SchedulerSettings | None) -> None:
    await engine.status()  # from now on it knows what it would admit
    await engine.load_adapters()
    if scheduler is not None and scheduler.measures:
        note_stage("measuring what steps cost", ENGINE)
        await engine.measure(scheduler.measure_s)


def _kill_engine_cores() -> None:
    """A thread that nothing else ends waits for them without end."""
    for engine_core in multiprocessing.active_children():
        engine_core.kill()


async def _too_late(config: AppConfig) -> str:
    logs = [Path(path) for path in (global_worker.get_out_file_path(), global_worker.get_err_file_path())]
    return (
        f"the engine did not start within {config.engine.start_timeout_s:g} s (engine.start_timeout_s); "
        f"its log ends with: {await asyncio.to_thread(last_line, logs)}"
    )
