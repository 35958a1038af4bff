"""The command `sluice`."""

import argparse
import asyncio
import importlib.metadata
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.command import batch as batch_command
from deployments.command import calibrate, one_machine
from deployments.command import config as config_command
from deployments.command import env as env_command
from deployments.command import explain as explain_command
from deployments.command import keys as keys_command
from deployments.command import status as status_command
from deployments.command import usage as usage_command
from deployments.command.args_check import check_args
from deployments.command.claims import port_number
from deployments.command.settings import PRESETS, of_one_machine, of_preset, section, sharing_memory, with_defaults
from deployments.command.stages import Stages
from deployments.config.application import AppConfig, checked
from deployments.http.style import STYLE
from deployments.process.vllm_env import check_build
from policies.errors import ConfigError, SluiceError
from predictor.commands import register as register_predictor
from router.redis_store import check_access
from simulator import commands as simulator_commands

_EPILOG = """\
examples:
  sluice serve                                    the demo model, no GPU needed
  sluice serve Qwen/Qwen3-8B --num-gpus 1 --engine-replicas 2
  sluice serve ./my-model -- --max-model-len 8192 --max-num-seqs 128
  sluice serve --config sluice.yaml --port 9000
  sluice serve Qwen/Qwen3-8B --engine-url http://10.0.0.7:8000 --engine-url http://10.0.0.8:8000
  sluice serve --preset papers                    the system as the five papers describe it (docs/concepts/papers.md)

A Redis that runs already is named by SLUICE_REDIS_URL in the environment, or by redis_url in the file; without one, an
embedded Redis starts. Arguments after "--" go to vLLM as they are: `vllm serve --help=all` lists them.
To serve on a Ray cluster of your own, use `sluice env` and `serve deploy` (see docs/start/install.md)."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="sluice", description="Length-aware LLM serving on Ray Serve and vLLM.")
    root.add_argument("--version", action="version", version=importlib.metadata.version("sluice-serve"))
    commands = root.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Start routers, engine replicas and all that they need on this machine, and serve the OpenAI API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [MODEL] [options] [-- VLLM_ARGS ...]",
    )
    serving.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="local folder or hub name (default: the demo model that comes with Sluice)",
    )
    serving.add_argument("--model", dest="model_option", metavar="MODEL", help="the same as an option")
    serving.add_argument("--served-model-name", help="the name that clients use (default: MODEL)")
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to serve on, of IPv4 or IPv6 (default: %(default)s)"
    )
    serving.add_argument("--port", type=port_number, default=8000, help="port to serve on (default: %(default)s)")
    serving.add_argument("--engine-replicas", type=int, help="engines to run (default: 2 on CPUs, 1 on GPUs)")
    serving.add_argument("--router-replicas", type=int, help="front ends to run (default: 1)")
    serving.add_argument(
        "--engine",
        choices=("vllm", "transformers"),
        help="what runs the model (default: vllm); see docs/guides/transformers.md",
    )
    serving.add_argument(
        "--engine-url",
        action="append",
        metavar="URL",
        help="an OpenAI-compatible server that runs MODEL already, in the place of engines; again for each further one "
        "(docs/guides/any-server.md)",
    )
    serving.add_argument("--num-gpus", type=float, help="GPUs for each engine (default: 0, the CPU build)")
    serving.add_argument("--batch-folder", type=Path, help="folder for files and batches (default: no Batch API)")
    settings = serving.add_mutually_exclusive_group()
    settings.add_argument(
        "--config", type=Path, help="YAML file of the application's settings; options here go before it"
    )
    settings.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="a whole system in its place: papers is the one that the five papers describe; options here go before it",
    )
    serving.set_defaults(run=run_serve)
    calibrate.register(commands)
    env_command.register(commands)
    config_command.register(commands)
    keys_command.register(commands)
    batch_command.register(commands)
    status_command.register(commands)
    explain_command.register(commands)
    usage_command.register(commands)
    register_predictor(commands)
    simulator_commands.register(commands, STYLE)
    return root


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments after "--" go to vLLM as they are if the command has an engine, and to Ray if it makes a unit for it.

    `command_line` is the whole command.

    Raises:
        SystemExit: after usage and what is wrong.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    root, ours, others = parser(), argv[:at], argv[at + 1 :]
    options, unknown = root.parse_known_args(ours)
    has_engine, has_ray = options.command in ("serve", "calibrate"), options.command == "env" and options.unit
    if unknown:
        hint = f"; {_behind_dashes(ours, unknown, others)}" if has_engine else ""
        root.error(f"unrecognized arguments: {shlex.join(unknown)}{hint}")
    if others and not (has_engine or has_ray):
        root.error(f"sluice {options.command} has no engine that could take what follows --: {shlex.join(others)}")
    options.vllm_args, options.ray_start = list(others) if has_engine else [], list(others) if has_ray else []
    options.command_line = shlex.join(("sluice", *argv))
    return options


def _behind_dashes(ours: Sequence[str], unknown: Sequence[str], vllm_args: Sequence[str]) -> str:
    """The command with vLLM's options where they belong, each with a value that seems to be its own."""
    known, moved = list[str](), list[str]()
    for before, arg in zip(["", *ours], ours, strict=False):
        is_value = before in unknown and before.startswith("-") and "=" not in before and not arg.startswith("-")
        (moved if arg in unknown or is_value else known).append(arg)
    return f"those for vLLM follow two dashes: sluice {shlex.join(known)} -- {shlex.join([*moved, *vllm_args])}"


def _model(options: argparse.Namespace) -> str | None:
    """Raises ConfigError where two are named."""
    if options.model and options.model_option and options.model != options.model_option:
        raise ConfigError(f"one model is served here, not {options.model} and {options.model_option}: see more_models")
    model: str | None = options.model or options.model_option
    return model


def app_config(options: argparse.Namespace) -> AppConfig:
    """From the file or the preset, if there is one, and the options.

    Raises:
        ConfigError: naming each wrong setting by its path.
    """
    settings = of_preset(options.preset) if options.preset else {}
    if options.config:
        settings = of_one_machine(options.config)
    for path, value in {
        "model": _model(options),
        "served_model_name": options.served_model_name,
        "engine.kind": options.engine or ("openai" if options.engine_url else None),
        "engine.openai.urls": options.engine_url,
        "engine.replicas": options.engine_replicas,
        "engine.num_gpus": options.num_gpus,
        "router.replicas": options.router_replicas,
        "batches.folder": options.batch_folder and str(options.batch_folder.absolute()),
        "vllm_args": options.vllm_args or None,
    }.items():
        if value is not None:
            *sections, name = path.split(".")
            target = settings
            for each in sections:
                target = section(target, each)
            target[name] = value
    return checked(with_defaults(settings))


def run_serve(options: argparse.Namespace) -> None:
    with Stages() as stages:
        stages.begin("checking the configuration")
        given = app_config(options)
        check_builds(given)
        check_redis(given)
        run_dir = one_machine.prepare(options.host, options.port)
        stages.say(f"logs: {run_dir}/ray/session_latest/logs")
        if any(each.vllm_args for each in given.each_model()):
            stages.begin("checking the arguments for vLLM")
            for line in check_args(given.each_model()):
                stages.say(line)
        config = sharing_memory(given)
        with one_machine.running(config, run_dir, options.host, options.port, stages) as address:
            stages.end()
            _say_how_to_use_it(address, config.public_name)
            one_machine.wait_for_signal()
            one_machine.say("stopping ...")


def _say_how_to_use_it(address: str, model: str) -> None:
    print(f"Sluice is ready: {address}")
    print(f"page: {here(address)}/")
    print(f"model: {model}")
    print(f"try: {example(address, model)}", flush=True)


def check_builds(config: AppConfig) -> None:
    """Before anything starts: a replica would say the same a minute later. Raises ConfigError."""
    for each in config.each_model():
        if each.engine.kind == "vllm":
            check_build(each.engine.num_gpus)


def check_redis(config: AppConfig) -> None:
    """Before anything starts, where one is named. Raises ConfigError, and StateStoreAccessError where it refuses us."""
    if (url := config.named_redis()) is not None:
        asyncio.run(check_access(url, config.redis_ca_certs))


def here(address: str) -> str:
    """The address as this machine reaches it, even if it stands for all addresses of this machine."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def example(address: str, model: str) -> str:
    """A curl line that works when pasted."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Name three rivers."}]})
    return f"curl {here(address)}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes to at its end
        sys.exit(128 + signal.SIGPIPE)
    except SluiceError as error:
        sys.exit(f"sluice: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
