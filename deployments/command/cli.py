"""The command `sluice`."""

import argparse
import asyncio
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.command import calibrate, one_machine
from deployments.command import env as env_command
from deployments.command import keys as keys_command
from deployments.command.args_check import checking
from deployments.config.application import DEMO, AppConfig
from deployments.process.environment import check_build
from policies.errors import ConfigError, SluiceError
from predictor.commands import register as register_predictor
from router.redis_store import check_access
from simulator import commands as simulator_commands

DRAIN_TIMEOUT_S = 5.0

_EPILOG = """\
examples:
  sluice serve                                    the demo model, no GPU needed
  sluice serve --model Qwen/Qwen3-8B --num-gpus 1 --engine-replicas 2
  sluice serve --model ./my-model -- --max-model-len 8192 --max-num-seqs 128
  sluice serve --config sluice.yaml --port 9000

A Redis that runs already is named by SLUICE_REDIS_URL in the environment, or by redis_url in the file; without one, an
embedded Redis starts. Arguments after "--" go to vLLM as they are: `vllm serve --help=all` lists them.
To serve on a Ray cluster of your own, use `sluice env` and `serve deploy` (see docs/install.md)."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="sluice", description="Length-aware LLM serving on Ray Serve and vLLM.")
    root.add_argument("--version", action="version", version=importlib.metadata.version("sluice-serve"))
    commands = root.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Start routers, engine replicas and whatever they need on this machine, and serve the OpenAI API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serving.add_argument("--model", help="local folder or hub name (default: the demo model that comes with Sluice)")
    serving.add_argument("--served-model-name", help="the name that clients use (default: --model)")
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to serve on, of IPv4 or IPv6 (default: %(default)s)"
    )
    serving.add_argument(
        "--port", type=one_machine.port_number, default=8000, help="port to serve on (default: %(default)s)"
    )
    serving.add_argument("--engine-replicas", type=int, help="engines to run (default: 2 on CPUs, 1 on GPUs)")
    serving.add_argument("--router-replicas", type=int, help="front ends to run (default: 1)")
    serving.add_argument(
        "--engine",
        choices=("vllm", "transformers"),
        help="what runs the model (default: vllm); see docs/transformers.md",
    )
    serving.add_argument("--num-gpus", type=float, help="GPUs for each engine (default: 0, the CPU build)")
    serving.add_argument(
        "--config", type=Path, help="YAML file of the application's settings; options here go before it"
    )
    serving.add_argument("vllm_args", nargs="*", metavar="-- VLLM_ARGS", help="further arguments for vLLM")
    serving.set_defaults(run=run_serve)
    calibrate.register(commands)
    env_command.register(commands)
    keys_command.register(commands)
    register_predictor(commands)
    simulator_commands.register(commands)
    return root


def app_config(options: argparse.Namespace) -> AppConfig:
    """From the file, if there is one, and the options.

    Raises:
        ConfigError: naming each wrong setting by its path.
    """
    settings = _read(options.config) if options.config else {}
    engine, router = _section(settings, "engine"), _section(settings, "router")
    for path, value in {
        "model": options.model,
        "served_model_name": options.served_model_name,
        "engine.kind": options.engine,
        "engine.replicas": options.engine_replicas,
        "engine.num_gpus": options.num_gpus,
        "router.replicas": options.router_replicas,
        "vllm_args": options.vllm_args or None,
    }.items():
        if value is not None:
            _set(settings, path, value)
    settings.setdefault("model", DEMO)
    settings["vllm_args"] = settings.get("vllm_args") or []  # left empty it is null
    engine.setdefault("replicas", 1 if engine.get("num_gpus") else 2)
    for each in (engine, *_engines_of_more_models(settings)):
        each.setdefault("drain_timeout_s", DRAIN_TIMEOUT_S)
        each.setdefault("num_cpus", 0)  # one machine is what it is: Ray need not count its cores
    for section in (router, _section(settings, "predictor")):
        section.setdefault("num_cpus", 0)
    return _sharing_memory(checked(settings))


def _sharing_memory(config: AppConfig) -> AppConfig:
    """Engines on this machine's processors get a part of its memory each."""
    engines = sum(each.engine_replicas for each in config.each_model() if each.engine.num_gpus == 0)
    more = tuple(each.sharing_memory(engines) for each in config.more_models)
    return config.sharing_memory(engines).model_copy(update={"more_models": more})


def _engines_of_more_models(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Their sections, made where they are missing; what is no model is left for the check."""
    more = settings.get("more_models")
    return [_section(each, "engine") for each in more if isinstance(each, dict)] if isinstance(more, list) else []


def checked(settings: dict[str, Any]) -> AppConfig:
    """Raises ConfigError naming each wrong setting by its path, without its value where that may be a secret."""
    try:
        return AppConfig.model_validate(settings)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(["wrong settings:", *lines])) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, as under `args` in deployments/configs/local.yaml")
    if "applications" in settings:
        raise ConfigError(f"{path} is for `serve deploy`: give `sluice serve` a file of what stands under `args` in it")
    return settings


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the file; one that was left empty is there all the same."""
    section = settings[name] = settings.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must hold a mapping of settings, got {section!r}")
    return section


def _set(settings: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[name] = value


def run_serve(options: argparse.Namespace) -> None:
    config = app_config(options)
    check_builds(config)
    check_redis(config)
    run_dir = one_machine.prepare(options.host, options.port)
    with (
        checking(config.vllm_argv()) if options.vllm_args else nullcontext() as checked_args,
        one_machine.running(config, run_dir, options.host, options.port, checked_args) as address,
    ):
        model = config.public_name
        print(f"Sluice is ready: {address}")
        print(f"model: {model}")
        print(f"try: {example(address, model)}", flush=True)
        one_machine.wait_for_signal()
        one_machine.say("stopping ...")


def check_builds(config: AppConfig) -> None:
    """Before anything starts: a replica would say the same a minute later. Raises ConfigError."""
    for each in config.each_model():
        if each.engine.kind == "vllm":
            check_build(each.engine.num_gpus)


def check_redis(config: AppConfig) -> None:
    """Before anything starts, where one is named. Raises ConfigError, and StateStoreAccessError where it refuses us."""
    if (url := config.named_redis()) is not None:
        asyncio.run(check_access(url, config.redis_ca_certs))


def example(address: str, model: str) -> str:
    """A curl line that works when pasted."""
    address = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Name three rivers."}]})
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    try:
        options.run(options)
    except SluiceError as error:
        sys.exit(f"sluice: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
